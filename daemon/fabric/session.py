"""One session of the fabric: identity, state, and its native endpoint."""

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sealane._native import Permit, SessionEndpoint
from sealane.daemon.fabric.admission import Admission
from sealane.daemon.fabric.jobs import Job
from sealane.daemon.fabric.known_paths import PathKey, PathWindow
from sealane.daemon.fabric.steering import Steering
from sealane.daemon.node.peers import PeerIncarnation
from sealane.errors import UnavailableError
from sealane.reasons import ReasonId
from sealane.transport.establish import SessionKeys

if TYPE_CHECKING:
    from sealane.daemon.fabric.plans import Outlook


class State(enum.Enum):
    """State of a session; it only moves forward in this order, and may skip states."""

    LISTENING = "listening"
    ESTABLISHING = "establishing"
    ESTABLISHED = "established"
    DRAINING = "draining"
    CLOSED = "closed"


OPEN = frozenset({State.ESTABLISHED, State.DRAINING})
"""States in which the path is validated and messages are carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Properties that don't change during a session's life."""

    name: str
    """`sessions/{id}`, unique in this fabric."""
    display_name: str
    is_initiator: bool
    unit_bytes: int
    """Final once the session is established."""
    peer_node: str = ""
    """From the peer's certificate; empty while listening."""
    peer: PeerIncarnation | None = None
    """Incarnation of the peer; None while listening."""
    rate_bits_per_second: int = 0
    """Wire bits per second sent by each end; 0 while listening."""
    version: int = 0
    """Of its packets and frames; 0 while listening."""

    @property
    def side(self) -> str:
        """Side of establishment: initiator or responder."""
        return "initiator" if self.is_initiator else "responder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parameters that establishment gives to the worker."""

    version: int
    """Of packets and frames."""
    keys: SessionKeys
    units: tuple[int, ...]
    """Unit sizes in bytes; the session uses the largest one that passes the path."""
    peer_addresses: tuple[str, ...]
    """One per path, at most as many as the session has sockets."""
    connection_id_local: bytes
    connection_id_peer: bytes
    idle_timeout_seconds: float
    reordering_micros: int
    path_threads: int
    known_window: PathWindow | None = None
    is_initiator: bool
    permit: Permit
    """The worker ends the session when the permit expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReport:
    """One path of a session: addresses, state, counters."""

    wire: str
    """`udp` or `verbs`."""
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
        steering: Steering,
        on_closed: "Callable[[Session], None]",
    ) -> None:
        self.identity = identity
        self.job = job
        """Owner; the session ends with it."""
        self.admission = admission
        """Peers that may be the other end."""
        self.steering = steering
        """Congestion control of what this end sends."""
        self.is_answering = False
        """A waiting listener whose answer to an offer is being made: others get another one."""
        self.state = State.ESTABLISHING if identity.is_initiator else State.LISTENING
        self.close_reason = ""
        self.data_addresses = tuple(endpoint.local_addresses)
        """Where it receives data packets, per path."""
        self.outlook: Outlook | None = None
        """Estimate of its path; None until it is established."""
        self._endpoint: SessionEndpoint | None = endpoint
        self._on_closed = on_closed
        self._last_statistics: dict[str, int] = {}
        self._last_paths: list[PathReport] = []
        self._is_begun = False
        self._is_unit_fixed = False
        self.is_granted = False
        """Whether its job was told of it."""
        self._permit: Permit | None = None
        """A reference, because only referenced permits are extended."""
        self._changed = asyncio.Event()
        """Set when the state changes; replaced for each state."""
        asyncio.get_running_loop().add_reader(endpoint.fileno(), self._observe)

    def begin(self, identity: Identity, start: Start) -> None:
        """Start the worker with a peer; takes over the keys."""
        if self._endpoint is None or self._is_begun:
            start.keys.wipe()
            raise UnavailableError(
                "session.begin.state", f"{self.identity.name} is {self.state.value}, not waiting"
            )
        try:
            self._endpoint.start(
                peer_addresses=list(start.peer_addresses),
                units=list(start.units),
                version=start.version,
                connection_id_local=int.from_bytes(start.connection_id_local, "big"),
                connection_id_peer=int.from_bytes(start.connection_id_peer, "big"),
                send_key=start.keys.send,
                receive_key=start.keys.receive,
                rate_bits_per_second=identity.rate_bits_per_second,
                idle_timeout_ns=round(start.idle_timeout_seconds * 1e9),
                reordering_ns=start.reordering_micros * 1000,
                path_threads=start.path_threads,
                steering=self.steering.for_engine(start.known_window),
                initiator=start.is_initiator,
                permit=start.permit,
            )
        except OSError as error:
            # Parts of it may exist already: do not try again.
            self.close("session.endpoint.resources")
            raise UnavailableError(
                "session.endpoint.resources",
                f"no memory, thread or descriptor for {self.identity.name}: "
                f"{error.strerror or error}",
            ) from error
        finally:
            # The engine has wiped the keys that it took over.
            start.keys.wipe()
        self.identity = identity
        self.data_addresses = tuple(self._endpoint.local_addresses)
        self._is_begun = True
        # The job's memories are those for this unit: they may not change once it has them.
        self._is_unit_fixed = list(start.units) == [self._endpoint.unit_bytes]
        self._permit = start.permit
        self._enter(State.ESTABLISHING)

    @property
    def has_unit(self) -> bool:
        """Return whether the payload bytes of its packets are final, so that a job may use it."""
        return self.state in OPEN or (self.state is State.ESTABLISHING and self._is_unit_fixed)

    @property
    def pinned_bytes(self) -> int:
        """Return the memory in bytes that RDMA devices may use for it."""
        return 0 if self._endpoint is None else self._endpoint.pinned_bytes

    def path_key(self) -> PathKey:
        """Return what its path is known by, once a peer has opened it."""
        peer = "" if self.identity.peer is None else self.identity.peer.spiffe_id
        return PathKey.of(peer, (path.peer_address for path in self.paths()))

    def statistics(self) -> dict[str, int]:
        """Return the counters; of a closed session, the last ones. For any thread."""
        endpoint = self._endpoint
        return self._last_statistics if endpoint is None else endpoint.statistics()

    def message_sizes(self) -> int:
        """Return the lengths of the messages that follow the plan, as bits; 0 if closed.

        Bit b: one has had at most 2^b bytes and more than half of that. For any thread.
        """
        endpoint = self._endpoint
        return 0 if endpoint is None else endpoint.message_sizes()

    def paths(self) -> list[PathReport]:
        """Return the state of each path; of a closed session, the last one. For any thread."""
        endpoint = self._endpoint
        if endpoint is None:
            return self._last_paths
        return [PathReport(**path) for path in endpoint.paths()]

    def install_plan(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Put rows of (length_max, k, m, depth, nanoseconds before parity) into force.

        Ignored if the session is closed.
        """
        if self._endpoint is not None:
            self._endpoint.install_plan(rows)

    def take_job_descriptors(self) -> tuple[int, int, int, int, int] | None:
        """Give the descriptors away, once; the caller closes them. None if closed."""
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
        """Yield the current state and each later one; the last is `CLOSED`."""
        while True:
            changed, state = self._changed, self.state
            yield state
            if state is State.CLOSED:
                return
            await changed.wait()

    def drain(self) -> None:
        """Send nothing new at either end; the session closes once nothing is in flight."""
        if self._endpoint is not None:
            self._endpoint.drain()

    def close(self, reason: ReasonId) -> None:
        """End the session; waits at most one turn of the worker's loop.

        The job gets the reason id, too. If the session had just ended for another reason, that
        reason is kept.
        """
        if self._endpoint is not None:
            self._endpoint.close(reason)
            _, why = self._endpoint.state()
            # A worker that did not start reports no reason.
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
            self._enter(State.ESTABLISHED)
        elif state == "draining":
            self._enter(State.DRAINING)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _finish(self, reason: str) -> None:
        # Read the counters a last time, to keep them; before other threads see no endpoint.
        self._last_statistics, self._last_paths = self.statistics(), self.paths()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        asyncio.get_running_loop().remove_reader(endpoint.fileno())
        endpoint.close()
        self._permit = None
        self.close_reason = reason
        self._enter(State.CLOSED)
        self._on_closed(self)
