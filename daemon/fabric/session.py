"""One session as the fabric sees it: identity, state, and the native endpoint behind it."""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from sealane._native import SessionEndpoint


class State(enum.Enum):
    """Where a session stands."""

    LISTENING = "listening"
    ESTABLISHING = "establishing"
    ESTABLISHED = "established"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What does not change during a session's life."""

    name: str
    """`sessions/{id}`, unique at this fabric."""
    display_name: str
    peer_node: str
    is_sender: bool
    unit_bytes: int
    rate_bits_per_second: int


class Session:
    """A session with its endpoint; watches the worker through the event loop."""

    def __init__(
        self,
        identity: Identity,
        endpoint: SessionEndpoint,
        *,
        on_closed: "Callable[[Session], None]",
    ) -> None:
        self.identity = identity
        self.state = State.ESTABLISHING
        self.close_reason = ""
        self._endpoint: SessionEndpoint | None = endpoint
        self._on_closed = on_closed
        self._last_statistics: dict[str, int] = {}
        self._settled = asyncio.Event()
        self._closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(endpoint.fileno(), self._observe)

    def statistics(self) -> dict[str, int]:
        """Return the counters, the last ones if the session is closed."""
        if self._endpoint is not None:
            self._last_statistics = self._endpoint.statistics()
        return self._last_statistics

    def take_job_descriptors(self) -> tuple[int, int, int, int] | None:
        """Give the four descriptors away, once; the caller closes them. None if closed."""
        return None if self._endpoint is None else self._endpoint.take_job_fds()

    async def wait_settled(self) -> None:
        """Wait until the session is established or closed."""
        await self._settled.wait()

    async def wait_closed(self) -> None:
        """Wait until the session is closed."""
        await self._closed.wait()

    def close(self, reason: str) -> None:
        """End the session; waits a turn of the worker's loop, no more."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._finish(reason)

    def _observe(self) -> None:
        if self._endpoint is None:
            return
        state, reason = self._endpoint.state()
        if state == "closed":
            self._finish(reason)
        elif state == "established":
            self.state = State.ESTABLISHED
            self._settled.set()

    def _finish(self, reason: str) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        asyncio.get_running_loop().remove_reader(endpoint.fileno())
        self._last_statistics = endpoint.statistics()
        endpoint.close()
        self.state = State.CLOSED
        self.close_reason = reason
        self._settled.set()
        self._closed.set()
        self._on_closed(self)
