"""Sessions that many peers open to one name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from sealane.client.session import Session
from sealane.errors import SessionError, UsageError

BACKLOG_MAX: Final = 64


class Listener:
    """Accepts one session after the other; each belongs to the caller, who closes it.

    `backlog` listeners wait at the fabric, so that as many peers can connect before the next
    `accept`.
    """

    def __init__(self, listen: Callable[[], Coroutine[Any, Any, Session]], backlog: int) -> None:
        self._listen = listen
        self._backlog = backlog
        self._waiting: set[asyncio.Task[Session]] = set()
        self._is_closed = False

    async def accept(self, *, timeout_seconds: float | None = None) -> Session:
        """Return the next session; close it when done.

        Raises SessionError `session.wait.timeout`, `session.listener.closed` after the end of the
        block, and what listening raises; after that another call listens again.
        """
        loop = asyncio.get_running_loop()
        give_up = None if timeout_seconds is None else loop.time() + timeout_seconds
        while True:
            self._refill()
            if self._is_closed:
                raise SessionError("session.listener.closed", "its block has ended")
            remaining = None if give_up is None else max(0.0, give_up - loop.time())
            done, _ = await asyncio.wait(
                self._waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise SessionError(
                    "session.wait.timeout", f"no peer opened a session in {timeout_seconds} s"
                )
            # Another call may have taken it meanwhile.
            for task in done & self._waiting:
                if not self._is_closed:
                    self._waiting.remove(task)
                    self._refill()
                    return task.result()

    def _refill(self) -> None:
        while len(self._waiting) < self._backlog and not self._is_closed:
            self._waiting.add(asyncio.ensure_future(self._listen()))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Listener"]:
        """Listen inside the block; sessions that nobody accepted are closed at its end."""
        self._refill()
        try:
            yield self
        finally:
            self._is_closed = True
            for task in self._waiting:
                # Also if this wait is cancelled.
                task.add_done_callback(_close)
                task.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)


def _close(ended: "asyncio.Task[Session]") -> None:
    """Close the session that nobody accepted, if it has come to be."""
    if not ended.cancelled() and ended.exception() is None:
        ended.result().close()


def check_backlog(backlog: int) -> None:
    """Raise UsageError `session.listener.backlog` for one out of range."""
    if not 1 <= backlog <= BACKLOG_MAX:
        raise UsageError("session.listener.backlog", f"{backlog}; allowed: 1 to {BACKLOG_MAX}")
