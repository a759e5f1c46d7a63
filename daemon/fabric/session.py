"""One session as the fabric sees it: identity, state, and the native endpoint behind it."""

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sealane._native import Permit, SessionEndpoint
from sealane.daemon.fabric.admission import Admission
from sealane.daemon.fabric.jobs import Job
from sealane.daemon.node.peers import PeerIncarnation
from sealane.errors import UnavailableError
from sealane.reasons import ReasonId
from sealane.transport.establish import SessionKeys

if TYPE_CHECKING:
    from sealane.daemon.fabric.plans import Outlook


class State(enum.Enum):
    """Where a session stands; it only ever goes on in this order, and may leave some out."""

    LISTENING = "listening"
    ESTABLISHING = "establishing"
    ESTABLISHED = "established"
    DRAINING = "draining"
    CLOSED = "closed"


OPEN = frozenset({State.ESTABLISHED, State.DRAINING})
"""The states in which its path is validated and messages pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What does not change while a session lives."""

    name: str
    """`sessions/{id}`, unique at this fabric."""
    display_name: str
    is_initiator: bool
    unit_bytes: int
    """Final once the session is established."""
    peer_node: str = ""
    """Empty while listening; then from the peer's certificate."""
    peer: PeerIncarnation | None = None
    """Which start of that node it is with; None while listening."""
    rate_bits_per_second: int = 0
    """Wire bits of either end; 0 while listening."""

    @property
    def side(self) -> str:
        """Which side of establishment this end is."""
        return "initiator" if self.is_initiator else "responder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What establishment gives the worker."""

    keys: SessionKeys
    units: tuple[int, ...]
    """Of which the largest that passes will be the session's, in bytes."""
    peer_addresses: tuple[str, ...]
    """Of each path, at most as many as the session has sockets."""
    connection_id_local: bytes
    connection_id_peer: bytes
    idle_timeout_seconds: float
    reordering_micros: int
    is_initiator: bool
    permit: Permit
    """Until when the peer may act: the worker ends the session with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """One path of a session: where it goes, what it is good for, what it has carried."""

    local_address: str
    peer_address: str
    state: str
    """`challenged`, `validated`, `silent` or `abandoned`."""
    statistics: dict[str, int]


class Session:
    """A session with its endpoint; watches the worker through the event loop."""

    def __init__(
        self,
        identity: Identity,
        endpoint: SessionEndpoint,
        *,
        job: Job,
        admission: Admission,
        on_closed: "Callable[[Session], None]",
    ) -> None:
        self.identity = identity
        self.job = job
        """Whose it is, and with whose end it ends."""
        self.admission = admission
        """Who may be at the other end."""
        self.state = State.ESTABLISHING if identity.is_initiator else State.LISTENING
        self.close_reason = ""
        self.data_addresses = tuple(endpoint.local_addresses)
        """host:port where its data packets arrive, of each path."""
        self.outlook: Outlook | None = None
        """What is thought of its path; None until it is established."""
        self._endpoint: SessionEndpoint | None = endpoint
        self._on_closed = on_closed
        self._last_statistics: dict[str, int] = {}
        self._last_paths: list[PathReport] = []
        self._is_begun = False
        self._permit: Permit | None = None
        """Held while the worker has it: nobody extends one that nobody holds."""
        self._changed = asyncio.Event()
        """Of the next state; each state has its own."""
        asyncio.get_running_loop().add_reader(endpoint.fileno(), self._observe)

    def begin(self, identity: Identity, start: Start) -> None:
        """Start the worker towards a peer; the keys are taken over."""
        if self._endpoint is None or self._is_begun:
            start.keys.wipe()
            raise UnavailableError(
                "session.begin.state", f"{self.identity.name} is {self.state.value}, not waiting"
            )
        try:
            self._endpoint.start(
                peer_addresses=list(start.peer_addresses),
                units=list(start.units),
                connection_id_local=int.from_bytes(start.connection_id_local, "big"),
                connection_id_peer=int.from_bytes(start.connection_id_peer, "big"),
                send_key=start.keys.send,
                receive_key=start.keys.receive,
                rate_bits_per_second=identity.rate_bits_per_second,
                idle_timeout_ns=round(start.idle_timeout_seconds * 1e9),
                reordering_ns=start.reordering_micros * 1000,
                initiator=start.is_initiator,
                permit=start.permit,
            )
        except OSError as error:
            # Some of it may be made: it is not tried again.
            self.close("session.endpoint.resources")
            raise UnavailableError(
                "session.endpoint.resources",
                f"no memory, thread or descriptor for {self.identity.name}: "
                f"{error.strerror or error}",
            ) from error
        finally:
            # The engine has wiped what it took over.
            start.keys.wipe()
        self.identity = identity
        self.data_addresses = tuple(self._endpoint.local_addresses)
        self._is_begun = True
        self._permit = start.permit
        self._become(State.ESTABLISHING)

    def statistics(self) -> dict[str, int]:
        """Return the counters, the last ones if the session is closed."""
        if self._endpoint is not None:
            self._last_statistics = self._endpoint.statistics()
        return self._last_statistics

    def paths(self) -> list[PathReport]:
        """Return what is known of each path, the last of it if the session is closed."""
        if self._endpoint is not None:
            self._last_paths = [PathReport(**path) for path in self._endpoint.paths()]
        return self._last_paths

    def install_plan(self, rows: list[tuple[int, int, int, int]]) -> None:
        """Put rows of (length_max, k, m, depth) in force; nothing if the session is closed."""
        if self._endpoint is not None:
            self._endpoint.install_plan(rows)

    def take_job_descriptors(self) -> tuple[int, int, int, int] | None:
        """Give the four descriptors away, once; the caller closes them. None if closed."""
        return None if self._endpoint is None else self._endpoint.take_job_fds()

    async def wait_begun(self) -> None:
        """Wait until a peer has opened the session, or it is closed."""
        await self._wait_for(frozenset(State) - {State.LISTENING})

    async def wait_settled(self) -> None:
        """Wait until the session is established or closed."""
        await self._wait_for(OPEN | {State.CLOSED})

    async def wait_closed(self) -> None:
        """Wait until the session is closed."""
        await self._wait_for(frozenset({State.CLOSED}))

    async def states(self) -> AsyncIterator[State]:
        """Yield the state, and each one that it comes to later; the last is `CLOSED`."""
        while True:
            changed, state = self._changed, self.state
            yield state
            if state is State.CLOSED:
                return
            await changed.wait()

    def drain(self) -> None:
        """Send nothing new at either end; the session closes when nothing is under way."""
        if self._endpoint is not None:
            self._endpoint.drain()

    def close(self, reason: ReasonId) -> None:
        """End the session; waits a turn of the worker's loop, no more.

        The job is told the reason id, too. If it had just ended by itself, that reason stays.
        """
        if self._endpoint is not None:
            self._endpoint.close(reason)
            _, why = self._endpoint.state()
            # A worker that did not start says nothing.
            self._finish(why or reason)

    async def _wait_for(self, states: frozenset[State]) -> None:
        while self.state not in states:
            await self._changed.wait()

    def _observe(self) -> None:
        if self._endpoint is None:
            return
        state, reason = self._endpoint.state()
        if state == "closed":
            self._finish(reason)
        elif state == "established":
            self.identity = replace(self.identity, unit_bytes=self._endpoint.unit_bytes)
            self._become(State.ESTABLISHED)
        elif state == "draining":
            self._become(State.DRAINING)

    def _become(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _finish(self, reason: str) -> None:
        # What it has last is kept.
        self.statistics()
        self.paths()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        asyncio.get_running_loop().remove_reader(endpoint.fileno())
        endpoint.close()
        self._permit = None
        self.close_reason = reason
        self._become(State.CLOSED)
        self._on_closed(self)
