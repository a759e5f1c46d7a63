"""A disk's queues at its front end, which are opened again whenever they are lost."""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sealane.client.forks import check_process
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.constants import AnaState
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import (
    ControllerEvent,
    EventKind,
    HostController,
    VolumeQueue,
)
from sealane.transport.nvme.paths import Backoff, ReconnectPolicy
from sealane.transport.tasks import TaskOwner

_log = logging.getLogger(__name__)

QUEUES_MAX: Final = 16
KEEP_ALIVE_MS: Final = 5000
_RECONNECT: Final = ReconnectPolicy(first_seconds=0.05, most_seconds=2.0, give_up_seconds=None)
_PAUSES: Final = ReconnectPolicy(first_seconds=0.02, most_seconds=1.0, give_up_seconds=None)
RETRIES_MAX: Final = 5
"""Most retries of a command that its controller refused for a lasting reason, but without "do not
retry"; Linux's `nvme_core.max_retries` is the same."""
_FUSED_COMPARE_AND_WRITE: Final = 0x01
# Command Interrupted, Transient Transport Error, Namespace Not Ready, and the path related ones
# (NVMe Base 2.0, figures 98 and 102): the command succeeds once their cause has gone.
_PASSING: Final = {0x021, 0x022, 0x082, 0x300, 0x302, 0x303}
_OTHER_PATH_SECONDS: Final = 0.5
"""How long an optimized path is waited for once another one is connected."""
_RANKS: Final = {AnaState.OPTIMIZED: 0, AnaState.NON_OPTIMIZED: 1}
_WORST_RANK: Final = 2
# Compare Failure is a result: a retry would have the same.
_ANSWERS: Final = {0x285}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Address of a plain namespace, and the host that may use it."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
    host_nqn: str
    secret: str = field(default="", repr=False)


@dataclass(slots=True, kw_only=True)
class _Association:
    path: FrontEnd
    host: HostController
    namespace: NamespaceIdentity
    queues: list[VolumeQueue]
    has_compare_and_write: bool
    undo: contextlib.AsyncExitStack
    """Closes the queues, then the host."""
    rank: int = 0
    """The path's place among others, by its ANA state: 0 is the best."""

    async def close(self) -> None:
        await self.undo.aclose()


_Results = asyncio.Queue[tuple[FrontEnd, _Association | Exception]]


class DiskQueues:
    """Runs calls on the least busy queue, and waits for the front end while it is unavailable.

    `timeout_seconds` bounds one command, `hold_seconds` the retries of a call after its first
    failure. A call whose queue was lost is repeated, so it must be idempotent.

    With `standbys`, one path at a time is used: the optimized one, otherwise the first to answer.
    A lost path is closed before the next one is used. That alone doesn't end the commands that its
    gateway has received: the front ends must be of one fail-over group, in which the target fences
    that gateway before another one carries out anything (docs/operate/fail-over.md).
    """

    def __init__(
        self,
        front_end: FrontEnd,
        *,
        queue_count: int,
        timeout_seconds: float,
        hold_seconds: float,
        standbys: Sequence[FrontEnd] = (),
    ) -> None:
        self._front_end = front_end
        self._paths = tuple(dict.fromkeys((front_end, *standbys)))
        self._queue_count = queue_count
        self._timeout_seconds = timeout_seconds
        self._hold_seconds = hold_seconds
        self._process = os.getpid()
        self._association: _Association | None = None
        self._namespace: NamespaceIdentity | None = None
        self._has_compare_and_write = False
        self._connecting: asyncio.Task[None] | None = None
        self._failure: Error | None = None
        self._failures: dict[FrontEnd, Error] = {}
        """Last failure of each path since the association was lost."""
        self._is_open = False
        self._tasks = TaskOwner()
        self._closing = TaskOwner()
        """What closes associations: awaited, never cancelled."""

    @property
    def namespace(self) -> NamespaceIdentity:
        """Size and format at the time the disk was opened."""
        if self._namespace is None:
            raise UnavailableError("disk.closed", "the disk isn't open")
        return self._namespace

    @property
    def has_compare_and_write(self) -> bool:
        """True if the controller offers fused compare-and-write."""
        return self._has_compare_and_write

    async def open(self) -> None:
        """Connect once, without retries; log the paths that fail verification."""
        try:
            association = await self._connect(is_repeated=False)
        except BaseException:
            await self._closing.wait()
            raise
        for path, error in self._failures.items():
            if isinstance(error, VerificationError):
                where = f"{path.traddr}:{path.trsvcid}"
                _log.warning("%s over %s is refused: %s", path.subsystem_nqn, where, error)
        self._namespace = association.namespace
        self._has_compare_and_write = association.has_compare_and_write
        self._association = association
        self._is_open = True

    async def close(self) -> None:
        """End every call and disconnect."""
        self._is_open = False
        if os.getpid() != self._process:
            # The sockets and tasks are the parent's.
            self._association = None
            return
        try:
            await self._tasks.close()
        finally:
            association, self._association = self._association, None
            if association is not None:
                self._start_closing(association)
            await self._closing.wait()

    async def run(self, call: Callable[[VolumeQueue], Awaitable[None]]) -> None:
        """Make a call on a queue; retry if the queue is lost or the status allows a retry.

        As a Linux host does ("do not retry", NVMe Base 2.0 §3.3.3.2.1), but bounded by time instead
        of a count where the cause is temporary.
        """
        check_process(self._process, "the disk")
        deadline, backoff, retries = None, Backoff(_PAUSES, random.random), 0
        while True:
            association = await self._alive(deadline or self._deadline())
            queue = min(association.queues, key=lambda queue: queue.outstanding)
            failure: Error
            try:
                return await call(queue)
            except UnavailableError as error:
                if error.reason == "queue.busy" or not self._is_open:
                    raise
                self._lost(association, error)
                failure = error
            except NvmeStatusError as error:
                if error.is_final or error.status in _ANSWERS:
                    raise
                if error.status not in _PASSING:
                    retries += 1
                    if retries > RETRIES_MAX:
                        raise
                failure = self._failures[association.path] = error
                await asyncio.sleep(backoff.failed(time.monotonic()) or 0.0)
            deadline = deadline or self._deadline()
            if time.monotonic() >= deadline:
                raise self._timed_out() from failure

    def _deadline(self) -> float:
        return time.monotonic() + self._hold_seconds

    async def _alive(self, deadline: float) -> _Association:
        while self._association is None:
            if isinstance(self._failure, VerificationError):
                raise self._failure
            if not self._is_open:
                raise UnavailableError("disk.closed", "the disk isn't open")
            if self._connecting is None:
                self._connecting = self._tasks.start(self._reconnect(None), name="disk-reconnect")
            waiting, left = self._connecting, deadline - time.monotonic()
            done, _ = await asyncio.wait((waiting,), timeout=max(0.0, left))
            if not done:
                raise self._timed_out() from self._failure
            if not waiting.cancelled() and (fault := waiting.exception()) is not None:
                raise fault  # no Error: unexpected, so nothing retries it
        return self._association

    def _timed_out(self) -> UnavailableError:
        return UnavailableError(
            "disk.timeout",
            f"{self._front_end.subsystem_nqn} could not be reached, or could not do the command, "
            f"for {self._hold_seconds:g} s: {self._reasons()}",
        )

    def _refused(self) -> Error:
        """Return why no path was connected; one that may come back is enough to try again."""
        failures = list(self._failures.values())
        if len(self._paths) == 1:
            return failures[0]
        first = min(failures, key=lambda error: isinstance(error, VerificationError))
        kind = VerificationError if isinstance(first, VerificationError) else UnavailableError
        return kind(first.reason, f"no path to {self._front_end.subsystem_nqn}: {self._reasons()}")

    def _reasons(self) -> str:
        """Name every path with its last failure."""
        otherwise = "no answer" if self._association is None else "not in use"
        return "; ".join(
            f"{path.traddr}:{path.trsvcid}: {self._failures.get(path, otherwise)}"
            for path in self._paths
        )

    def _lost(self, association: _Association, error: Error) -> None:
        """Drop the association: none of its commands may be in flight when the next one begins."""
        if self._association is not association:
            return
        self._association = None
        self._failure = error
        self._failures = {association.path: error}
        self._connecting = self._tasks.start(self._reconnect(association), name="disk-reconnect")

    async def _reconnect(self, old: _Association | None) -> None:
        try:
            if old is not None:
                await asyncio.shield(self._start_closing(old))
            self._association = await self._connect(is_repeated=True)
        except VerificationError as error:
            # The wrong front end answers; retrying won't change that.
            self._failure, self._is_open = error, False
        finally:
            self._connecting = None

    async def _connect(self, *, is_repeated: bool) -> _Association:
        """Try all paths at once; return the best of those that answer soon after the first.

        `is_repeated`: try each path again, independently of the others, until one answers or all
        fail verification. Otherwise try each once, and give all of them the time to answer.
        """
        attempts, results = TaskOwner(), _Results()
        connected: list[_Association] = []
        failed: dict[FrontEnd, Error] = {}
        best: _Association | None = None

        def is_decided() -> bool:
            if is_repeated and any(each.rank == 0 for each in connected):
                return True
            if len(connected) + len(failed) < len(self._paths):
                return False
            are_refused = all(isinstance(error, VerificationError) for error in failed.values())
            return bool(connected) or not is_repeated or are_refused

        try:
            for path in self._paths:
                attempts.start(self._attempt(path, results, is_repeated), name="disk-path")
            until: float | None = None
            while not is_decided():
                try:
                    async with asyncio.timeout_at(until):
                        path, result = await results.get()
                except TimeoutError:
                    break
                if isinstance(result, Error):
                    failed[path] = self._failures[path] = result
                elif isinstance(result, Exception):
                    raise result
                else:
                    failed.pop(path, None)
                    self._failures.pop(path, None)
                    connected.append(result)
                    until = until or asyncio.get_running_loop().time() + _OTHER_PATH_SECONDS
            best = min(connected, key=lambda each: each.rank, default=None)
        finally:
            # In tasks of their own, so that a cancellation leaves no association open.
            for each in connected:
                if each is not best:
                    self._start_closing(each)
            self._closing.start(self._end(attempts, results), name="disk-close")
        if best is None:
            raise self._refused()
        return best

    async def _attempt(self, path: FrontEnd, results: _Results, is_repeated: bool) -> None:
        backoff = Backoff(_RECONNECT, random.random)
        while True:
            result: _Association | Exception
            try:
                result = await self._connect_to(path)
            except Exception as error:  # noqa: BLE001
                result = error
            results.put_nowait((path, result))
            if not (is_repeated and isinstance(result, Error)):
                return
            await asyncio.sleep(backoff.failed(time.monotonic()) or 0.0)

    async def _end(self, attempts: TaskOwner, results: _Results) -> None:
        """End the attempts, and close what they have connected in the meantime."""
        await attempts.close()
        while not results.empty():
            _, late = results.get_nowait()
            if not isinstance(late, Exception):
                self._start_closing(late)

    def _start_closing(self, association: _Association) -> asyncio.Task[None]:
        return self._closing.start(association.close(), name="disk-close")

    async def _connect_to(self, front: FrontEnd) -> _Association:
        host = HostController(
            traddr=front.traddr,
            trsvcid=front.trsvcid,
            subsystem_nqn=front.subsystem_nqn,
            host_nqn=front.host_nqn,
            keep_alive_ms=KEEP_ALIVE_MS,
            credentials=(
                Credentials(secret=HostSecret.parse(front.secret)) if front.secret else None
            ),
            events=lambda event: self._report(host, event),
        )
        queues: list[VolumeQueue] = []
        async with contextlib.AsyncExitStack() as undo:
            await host.connect()
            undo.push_async_callback(host.close)
            granted = await host.request_queues(self._queue_count)
            for queue_id in range(1, min(granted, self._queue_count) + 1):
                queue = await host.open_queue(
                    queue_id, nsid=front.namespace_id, timeout_seconds=self._timeout_seconds
                )
                undo.push_async_callback(queue.close)
                queues.append(queue)
            namespace = queues[0].namespace
            if self._namespace is not None and namespace != self._namespace:
                raise VerificationError(
                    "disk.changed", f"the namespace is {namespace}, was {self._namespace}"
                )
            rank = 0
            if len(self._paths) > 1:
                states = await host.ana_states()
                state = states.get(front.namespace_id, AnaState.OPTIMIZED)
                rank = _RANKS.get(state, _WORST_RANK)
            kept = undo.pop_all()
        fused = host.identity.fused_commands & _FUSED_COMPARE_AND_WRITE
        return _Association(
            path=front,
            undo=kept,
            host=host,
            namespace=namespace,
            queues=queues,
            has_compare_and_write=bool(fused),
            rank=rank,
        )

    def _report(self, host: HostController, event: ControllerEvent) -> None:
        association = self._association
        if event.kind is not EventKind.LOST or event.error is None:
            return
        if association is not None and association.host is host:
            self._lost(association, event.error)
