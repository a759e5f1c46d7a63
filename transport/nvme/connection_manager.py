"""Several paths to one subsystem: reconnects lost ones, and connects queues over the best one."""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.constants import QUEUE_DEPTH_MAX, AnaState
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Address, Digests
from sealane.transport.nvme.initiator import (
    ConnectedQueue,
    ControllerEvent,
    EventKind,
    HostController,
)
from sealane.transport.nvme.paths import Backoff, PathState, PathView, ReconnectPolicy, ordered
from sealane.transport.tasks import TaskOwner

PATHS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PathEvent:
    """A path changed its state (`error`: why; `delay_seconds`: how long it waits), or reports.

    `report` is an event that its controller reported; the state is then unchanged.
    """

    address: Address
    state: PathState
    error: Error | None = None
    delay_seconds: float | None = None
    report: ControllerEvent | None = None


@dataclass(slots=True, kw_only=True)
class _Path:
    address: Address
    backoff: Backoff
    state: PathState = PathState.CONNECTING
    host: HostController | None = None
    ana: dict[int, AnaState] = field(default_factory=dict)


class ConnectionManager:
    """Keeps an association over each path of a subsystem: `start`, `connect_queue`, `close`.

    `events` is called on the event loop and must not block. When a queue ends, its owner calls
    `connect_queue` for another one; by then a lost path is no longer chosen.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        subsystem_nqn: str,
        host_nqn: str,
        queue_count: int,
        events: Callable[[PathEvent], None],
        credentials: Credentials | None = None,
        digests: Digests | None = None,
        keep_alive_ms: int = 5000,
        policy: ReconnectPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= len(addresses) <= PATHS_MAX or len(set(addresses)) < len(addresses):
            raise UsageError(
                "paths.count",
                f"{len(addresses)} paths; allowed: 1 to {PATHS_MAX}, each address once",
            )
        reconnect = policy or ReconnectPolicy()
        self._paths = [
            _Path(address=address, backoff=Backoff(reconnect, random.random))
            for address in addresses
        ]
        self._subsystem_nqn = subsystem_nqn
        self._host_nqn = host_nqn
        self._host_id = uuid.uuid4()
        self._queue_count = queue_count
        self._events = events
        self._credentials = credentials
        self._digests = digests
        self._keep_alive_ms = keep_alive_ms
        self._sleep = sleep
        self._clock = clock
        self._tasks = TaskOwner()
        self._changed = asyncio.Event()

    @property
    def states(self) -> dict[Address, PathState]:
        """Return the state of each path."""
        return {path.address: path.state for path in self._paths}

    def start(self) -> None:
        """Start to connect all paths."""
        for path in self._paths:
            self._tasks.start(self._keep(path), name=f"nvme-path-{path.address}")

    async def close(self) -> None:
        """Disconnect from all controllers."""
        await self._tasks.close()

    async def connect_queue(
        self,
        queue_id: int,
        *,
        nsid: int,
        timeout_seconds: float,
        queue_depth: int = QUEUE_DEPTH_MAX,
    ) -> tuple[Address, ConnectedQueue]:
        """Connect a queue over the best available path; wait up to `timeout_seconds` for one.

        UnavailableError at the timeout or when all paths are lost, with the last failure as its
        cause. An error that a controller returns on one path doesn't keep other paths from being
        tried.
        """
        failure: Error | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._is_hopeless():
                    self._changed.clear()
                    for path, host in self._candidates(nsid, queue_id):
                        try:
                            queue = await host.connect_queue(queue_id, queue_depth=queue_depth)
                        except Error as error:
                            failure = error
                        else:
                            return path.address, queue
                    await self._changed.wait()
        except TimeoutError:
            pass
        raise UnavailableError(
            "paths.none", f"no path leads to namespace {nsid} of {self._subsystem_nqn}"
        ) from failure

    def controller(self, address: Address) -> HostController | None:
        """Return the controller at the end of a path, if it is live."""
        return next((path.host for path in self._paths if path.address == address), None)

    def _candidates(self, nsid: int, queue_id: int) -> list[tuple[_Path, HostController]]:
        views = [PathView(state=path.state, ana=path.ana) for path in self._paths]
        chosen = [self._paths[index] for index in ordered(views, nsid=nsid, queue_id=queue_id)]
        return [(path, path.host) for path in chosen if path.host is not None]

    def _is_hopeless(self) -> bool:
        return all(path.state is PathState.GONE for path in self._paths)

    async def _keep(self, path: _Path) -> None:
        while True:
            self._move(path, PathState.CONNECTING)
            error = await self._serve(path)
            # Retrying can't help if the peer's identity was wrong.
            is_final = isinstance(error, VerificationError)
            delay = None if is_final else path.backoff.failed(self._clock())
            if delay is None:
                self._move(path, PathState.GONE, error=error)
                return
            self._move(path, PathState.WAITING, error=error, delay_seconds=delay)
            await self._sleep(delay)

    async def _serve(self, path: _Path) -> Error:
        """Connect a path and wait until it is lost; return the reason."""
        lost: asyncio.Future[Error] = asyncio.get_running_loop().create_future()
        host = HostController(
            traddr=path.address.traddr,
            trsvcid=path.address.trsvcid,
            subsystem_nqn=self._subsystem_nqn,
            host_nqn=self._host_nqn,
            host_id=self._host_id,
            keep_alive_ms=self._keep_alive_ms,
            credentials=self._credentials,
            digests=self._digests,
            events=lambda event: self._report(path, event, lost),
        )
        try:
            await host.connect()
            await host.request_queues(self._queue_count)
            path.ana = await host.ana_states()
            path.host = host
            path.backoff.succeeded()
            self._move(path, PathState.LIVE)
            return await lost
        except Error as error:
            return error
        finally:
            path.host = None
            path.ana = {}
            await host.close()

    def _report(self, path: _Path, event: ControllerEvent, lost: "asyncio.Future[Error]") -> None:
        if event.kind is EventKind.LOST and event.error is not None:
            if not lost.done():
                lost.set_result(event.error)
            return
        if event.ana is not None:
            path.ana = event.ana
        self._changed.set()
        self._events(PathEvent(address=path.address, state=path.state, report=event))

    def _move(
        self,
        path: _Path,
        state: PathState,
        *,
        error: Error | None = None,
        delay_seconds: float | None = None,
    ) -> None:
        path.state = state
        self._changed.set()
        self._events(
            PathEvent(address=path.address, state=state, error=error, delay_seconds=delay_seconds)
        )
