"""A volume's back end: the association with its target, re-established whenever it is lost.

All back-end queues of a volume belong to one association epoch. When one queue is lost, all are
dropped. Opening the first queue of the next epoch is a fence: the target answers only once no older
queue can store anything. The engine then resends what is needed.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from sealane import _native
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import OpenQueue, QueueGrant
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.daemon.volume.failures import MOVED, ROLLED_BACK, STANDBY, UNFLUSHED_LOST
from sealane.errors import Error, UnavailableError, VerificationError, reason_of
from sealane.protocol.nvme.constants import (
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    QUEUE_DEPTH_MAX,
    SECURE_TRANSFER_BYTES,
)
from sealane.transport.nvme.initiator import ConnectedQueue, HostController
from sealane.transport.nvme.paths import delay_within
from sealane.transport.tasks import TaskOwner

RETRY_SECONDS_MIN: Final = 0.05
RETRY_SECONDS_MAX: Final = 5.0
LOSS_WINDOW_SECONDS: Final = 60.0
VERIFICATION_LOSSES_MAX: Final = 8
"""Associations that may be lost to forged answers within LOSS_WINDOW_SECONDS; one more fails the
volume."""
_VERIFICATION_REASONS: Final = {"completion.mac", "sector.mac", "pdu.malformed"}
FATAL: Final = {ROLLED_BACK, UNFLUSHED_LOST}
"""Reasons that no further attempt changes: data is lost."""
_INTERNAL_KINDS: Final = {"rekey_due"}
_TAKE_OVER_RETRY_SECONDS: Final = 0.2
_TAKE_OVER_SECONDS: Final = 10.0
"""How long a take-over is tried that a host's commands began; more commands begin another."""


def _nothing() -> None:
    """Do nothing."""


class AssociationEpochs:
    """Epoch numbers of a volume's associations, strictly increasing.

    They follow the clock, so they also increase across restarts of this process. If the clock steps
    back while the process runs, they still increase; `floor`, the newest epoch that the target
    knows, covers a step back during a restart.
    """

    def __init__(self, *, floor: int = 0, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._last = floor
        self._now_ns = now_ns

    def next(self) -> int:
        """Return the next epoch."""
        self._last = max(self._last + 1, self._now_ns())
        return self._last


class RetryDelays:
    """Delays before attempts to connect again, with jitter.

    Within one outage they are `delay_within`. Before the first attempt after a loss there is none,
    unless losses repeat: then it doubles with each, and none of the outage's is shorter. Losses age
    out.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._now = now
        self._uniform = uniform
        self._losses: deque[float] = deque(maxlen=64)
        self._is_first = True

    def lose(self) -> None:
        """Record a loss: the next attempts are those of a new outage."""
        now = self._now()
        while self._losses and self._losses[0] < now - LOSS_WINDOW_SECONDS:
            self._losses.popleft()
        self._losses.append(now)
        self._is_first = True

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        earlier = len(self._losses) - 1
        longest = RETRY_SECONDS_MIN * 2 ** (earlier - 1) if earlier else 0.0
        if not self._is_first:
            within = delay_within(
                self._now() - self._losses[-1],
                first_seconds=RETRY_SECONDS_MIN,
                most_seconds=RETRY_SECONDS_MAX,
            )
            longest = max(longest, within)
        self._is_first = False
        longest = min(longest, RETRY_SECONDS_MAX)
        return self._uniform(longest / 2, longest)


class LossLimit:
    """Counter of losses within a time window."""

    def __init__(self, limit: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._times: deque[float] = deque(maxlen=limit)
        self._limit = limit
        self._now = now

    def is_exceeded(self) -> bool:
        """Record a loss; return whether that is one more than the window allows."""
        now = self._now()
        exceeded = len(self._times) == self._limit and self._times[0] >= now - LOSS_WINDOW_SECONDS
        self._times.append(now)
        return exceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueName:
    """Identifier of a front-end queue of the volume."""

    association_id: int
    queue_id: int


EndQueues = Callable[[], Coroutine[Any, Any, None]]
"""Ends the queues of the volume's host, which may connect again."""
_OWN: Final = QueueName(association_id=0, queue_id=1)
"""A queue that only takes over, without a host."""


@dataclass(slots=True, kw_only=True)
class PreparedQueue:
    """A connected back-end queue that is not in use yet."""

    back: ConnectedQueue
    grant: QueueGrant
    secure: _native.SecureQueueParameters
    host: HostController


class BackEnd:
    """Opens and replaces the back-end queues of one attached volume."""

    def __init__(
        self,
        *,
        native: _native.GatewayVolume,
        volume_id: bytes,
        open_queue: OpenQueue,
        epochs: AssociationEpochs,
        report: Callable[[StorageEvent], None],
        member: GroupMember | None = None,
        delays: RetryDelays | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._native = native
        self._volume_id = volume_id
        self._open_queue = open_queue
        self._epochs = epochs
        self._epoch = epochs.next()
        self._report = report
        self.member = member
        self.on_serving: Callable[[], None] = _nothing
        """Called when a member of a fail-over group begins to serve, or is fenced."""
        self._delays = delays or RetryDelays()
        self._sleep = sleep
        self._forgeries = LossLimit(VERIFICATION_LOSSES_MAX)
        self._queues: dict[QueueName, HostController | None] = {}
        self._replaced: dict[QueueName, HostController] = {}
        self._leaving: set[HostController] = set()
        self._turn = asyncio.Lock()
        self._is_alive = asyncio.Event()
        if member is None:
            self._is_alive.set()
        self._incarnation = 0
        self._is_confirming = False
        self._taking = asyncio.Lock()
        """Held by who decides on a take-over, from its look at the group to its end."""
        self._is_take_over_due = False
        self.is_fenced = False
        """Whether another gateway took over from this one; the volume must be opened again."""
        self._tasks = TaskOwner()

    async def prepare(self, name: QueueName) -> PreparedQueue:
        """Open a back-end queue for a front-end queue that is about to start."""
        while True:
            await self._is_alive.wait()
            async with self._turn:
                if self._is_alive.is_set():
                    return await self._connect(name)

    def start(self, name: QueueName, prepared: PreparedQueue) -> None:
        """Attach the back end to a running front-end queue."""
        self._queues[name] = prepared.host
        try:
            self._hand_over(name, prepared)
        except _native.StaleAssociationError:
            # The association was lost in between: the next one includes this queue.
            self._queues[name] = None
            self._leave(prepared.host)
            if self._is_alive.is_set() and prepared.grant.association_epoch == self._epoch:
                self.lose("the association ended while a queue was being opened")
            elif self._is_alive.is_set():
                self._tasks.start(self._supply(name), name="back-end-supply")

    @property
    def is_standby(self) -> bool:
        """Whether another gateway of the group serves: queues start without a back end."""
        return self.member is not None and not self.member.is_serving

    def join(self, name: QueueName) -> None:
        """Record a running front-end queue whose commands are held until there is a take-over."""
        self._queues[name] = None
        if self._is_alive.is_set():
            self._tasks.start(self._supply(name), name="back-end-supply")

    async def stand_ready(self, end_queues: EndQueues) -> None:
        """Prepare for a connecting host: serve it if no other gateway does.

        Waits for a take-over in progress, so that the host's queue belongs to one term.
        `end_queues` as for `begin_take_over`; for queues that start meanwhile.
        """
        if self.member is None or self.member.is_serving:
            return
        async with self._taking:
            # Queues that have started hold commands of an earlier term.
            if not self.is_standby or self._queues or not await self.member.is_vacant():
                return
            try:
                await self._serve_next(end_queues)
            except VerificationError as error:
                # Another gateway has begun to serve since: this one stands by.
                if error.reason != MOVED:
                    raise

    def begin_take_over(self, end_queues: EndQueues) -> None:
        """Take over from the serving gateway of the group, unless that is in progress.

        `end_queues` ends the host's queues first. Their commands came before this gateway served:
        the host may have repeated them on another path already, and must send them again.
        """
        if self.is_standby and not self._is_take_over_due and not self.is_fenced:
            self._is_take_over_due = True
            self._tasks.start(self._take_over(end_queues), name="back-end-take-over")

    async def take_over(self, end_queues: EndQueues, *, accepts_loss: bool) -> None:
        """Take over from the serving gateway of the group, or raise what the target answered.

        `end_queues` as for `begin_take_over`.
        """
        async with self._taking:
            if self.is_standby:
                await end_queues()
                await self._look()
                await self._serve_next(end_queues, accepts_loss=accepts_loss, by_operator=True)

    async def release(self) -> None:
        """Tell the target that it has all that this gateway acknowledged, and serve no longer.

        Nothing may be acknowledged any more. After an error it is unknown whether it has heard.
        """
        member = self.member
        if member is not None and member.is_serving and member.leave is not None:
            await member.leave()
            member.stand_by()

    async def _look(self) -> None:
        if self.member is not None and self.member.look is not None:
            await self.member.look()

    async def _serve_next(
        self, end_queues: EndQueues, *, accepts_loss: bool = False, by_operator: bool = False
    ) -> None:
        async with self._turn:
            if not self.is_standby or self.member is None:
                return
            if self.is_fenced:
                # What its queues hold is older than the other gateway's writes.
                raise UnavailableError(STANDBY, "another gateway has just taken over")
            if self._queues:
                raise UnavailableError(STANDBY, "the host's queues are of an earlier term")
            self.member.accepts_loss, self.member.by_operator = accepts_loss, by_operator
            try:
                await self._reconnect(end_queues)
            finally:
                self.member.accepts_loss = self.member.by_operator = False
                self._begin_to_serve()

    def discard(self, prepared: PreparedQueue) -> None:
        """Close a prepared queue that was not started."""
        prepared.back.close()
        self._leave(prepared.host)

    async def close_association(self, association_id: int) -> None:
        """Disconnect from the target for a front-end association that has ended."""
        gone = [name for name in self._queues if name.association_id == association_id]
        hosts = [self._queues.pop(name) for name in gone]
        hosts += [self._replaced.pop(name, None) for name in gone]
        await self._leave_all(hosts)

    def close_queue(self, name: QueueName) -> None:
        """Disconnect from the target for a front-end queue that has ended; others continue."""
        for hosts in (self._queues, self._replaced):
            host = hosts.pop(name, None)
            if host is not None:
                self._leave(host)

    async def close(self) -> None:
        """Disconnect from the target permanently."""
        await self._tasks.close()
        hosts = [*self._queues.values(), *self._replaced.values(), *self._leaving]
        self._queues.clear()
        self._replaced.clear()
        self._leaving.clear()
        await self._leave_all(hosts)

    def take_event(self, event: StorageEvent) -> bool:
        """Handle an event of the engine; return whether to publish it."""
        name = QueueName(association_id=event.association, queue_id=event.queue_id)
        if event.kind == "association_lost":
            if event.reason in _VERIFICATION_REASONS and self._forgeries.is_exceeded():
                self._native.fail(
                    "verification.limit",
                    f"more than {VERIFICATION_LOSSES_MAX} associations ended with {event.reason} "
                    f"within {LOSS_WINDOW_SECONDS:g} s",
                )
            else:
                self.lose(event.detail)
        elif event.kind == "rekey_due":
            self._tasks.start(self._rekey(name), name="back-end-rekey")
        elif event.kind == "queue_rekeyed":
            replaced = self._replaced.pop(name, None)
            if replaced is not None:
                self._leave(replaced)
        return event.kind not in _INTERNAL_KINDS

    def lose(self, detail: str) -> None:
        """Drop the association and start to establish the next one, unless that is in progress."""
        if self._is_alive.is_set():
            self._is_alive.clear()
            self._native.lose_association(detail)
            self._tasks.start(self._recover(), name="back-end-recover")

    async def _leave_all(self, hosts: Iterable[HostController | None]) -> None:
        tasks = [self._leave(host) for host in hosts if host is not None]
        if tasks:
            # The tasks continue if this is cancelled.
            await asyncio.wait(tasks)

    def _leave(self, host: HostController) -> asyncio.Task[None]:
        """Disconnect from a controller in the background."""

        async def leave() -> None:
            await host.close()
            self._leaving.discard(host)

        self._leaving.add(host)
        return self._tasks.start(leave(), name="back-end-leave")

    async def _recover(self) -> None:
        reported = ""
        self._delays.lose()
        while True:
            await self._sleep(self._delays.next())
            try:
                async with self._turn:
                    await self._reconnect()
            except (Error, TimeoutError, OSError) as error:
                reason = reason_of(error, otherwise="connection.timeout")
                if reason == STANDBY:
                    return
                if reason in FATAL:
                    # The volume has failed: hosts that connect from now on get the same error.
                    self._is_alive.set()
                    return
                if reason != reported:
                    reported = reason
                    self._report(
                        StorageEvent(kind="association_delayed", reason=reason, detail=str(error))
                    )
            else:
                self._report(
                    StorageEvent(
                        kind="association_restored", reason="", detail=f"epoch {self._epoch}"
                    )
                )
                return

    def confirm(self, settled_incarnation: int | None) -> None:
        """After a restart of the target, begin a new term once it has everything acknowledged.

        Until then the target lets no standby take over.
        """
        member = self.member
        if member is None or not member.is_serving or self._is_confirming:
            return
        if settled_incarnation == self._incarnation != member.confirmed:
            self._is_confirming = True
            self._tasks.start(self._confirm(member, self._incarnation), name="back-end-confirm")

    async def _confirm(self, member: GroupMember, incarnation: int) -> None:
        try:
            async with self._turn:
                if not member.is_serving or not self._is_alive.is_set():
                    return
                member.is_confirming, member.holder = True, incarnation
                try:
                    self.discard(await self._connect(_OWN))
                finally:
                    member.is_confirming = False
        except (Error, TimeoutError, OSError) as error:
            reason = reason_of(error, otherwise="connection.timeout")
            self._report(StorageEvent(kind="take_over_delayed", reason=reason, detail=str(error)))
            await self._sleep(RETRY_SECONDS_MAX)
        finally:
            self._is_confirming = False

    async def _take_over(self, end_queues: EndQueues) -> None:
        reported = ""
        give_up = time.monotonic() + _TAKE_OVER_SECONDS
        try:
            async with self._taking:
                while self.is_standby and time.monotonic() < give_up:
                    try:
                        await end_queues()
                        await self._look()
                        await self._serve_next(end_queues)
                    except (Error, TimeoutError, OSError) as error:
                        reason = reason_of(error, otherwise="connection.timeout")
                        if reason != reported:
                            reported = reason
                            self._report(
                                StorageEvent(
                                    kind="take_over_delayed", reason=reason, detail=str(error)
                                )
                            )
                        await self._sleep(_TAKE_OVER_RETRY_SECONDS)
        finally:
            self._is_take_over_due = False

    def _begin_to_serve(self) -> None:
        """After an attempt to take over: if the target let this gateway serve, it does."""
        if self.is_standby:
            return
        self._report(StorageEvent(kind="took_over", reason="", detail=f"epoch {self._epoch}"))
        self.on_serving()
        if not self._is_alive.is_set():
            # It serves, but a queue couldn't be connected.
            self._tasks.start(self._recover(), name="back-end-recover")

    def _fenced(self) -> None:
        """Stop for good: another gateway serves the group, and may have changed any sector."""
        if self.member is not None and self.member.is_serving:
            self.is_fenced = True
            self.member.stand_by()
            self._is_alive.clear()
            self._native.lose_association("another gateway has taken over")
            self.on_serving()

    async def _reconnect(self, end_queues: EndQueues | None = None) -> None:
        """Open every queue in a new association epoch; all of them or an error.

        With `end_queues`, open and close one of its own to take over, and end all others.
        """
        hosts = [*self._queues.values(), *self._replaced.values()]
        self._replaced.clear()
        self._queues = dict.fromkeys(self._queues)
        await self._leave_all(hosts)
        self._epoch = self._epochs.next()
        if end_queues is not None:
            try:
                self.discard(await self._connect(_OWN))
            finally:
                # What started before it served holds commands of an earlier term.
                if self._queues:
                    self._queues.clear()
                    self._tasks.start(end_queues(), name="back-end-end-queues")
        # Queues may be added or removed in the meantime.
        while missing := [name for name, host in self._queues.items() if host is None]:
            prepared = await self._connect(missing[0])
            if missing[0] not in self._queues:
                self.discard(prepared)
                continue
            self._queues[missing[0]] = prepared.host
            try:
                self._hand_over(missing[0], prepared)
            except _native.StaleAssociationError as error:
                raise UnavailableError("association.lost", str(error)) from error
        self._is_alive.set()

    async def _supply(self, name: QueueName) -> None:
        """Open the back end of a queue that the association was established without."""
        try:
            prepared = await self.prepare(name)
        except (Error, TimeoutError, OSError) as error:
            self.lose(f"could not open a back-end queue: {error}")
            return
        # A later queue of this name has its own back end.
        if name in self._queues and self._queues[name] is None:
            self.start(name, prepared)
        else:
            self.discard(prepared)

    async def _rekey(self, name: QueueName) -> None:
        """Replace a queue whose keys are nearly used up, in the same association."""
        try:
            prepared = await self.prepare(name)
        except (Error, TimeoutError, OSError) as error:
            self.lose(f"could not replace a queue whose keys are used up: {error}")
            return
        old = self._queues.get(name)
        if old is None:
            self.discard(prepared)
            return
        self._queues[name] = prepared.host
        self._replaced[name] = old
        # If it is stale, the recovery in progress closes both.
        with contextlib.suppress(_native.StaleAssociationError):
            self._hand_over(name, prepared)

    async def _open(self, queue_id: int) -> QueueGrant:
        """Request a queue from the target, which must have what the engine knows is flushed."""
        try:
            return await self._open_queue(queue_id, self._epoch, self._native.milestone)
        except VerificationError as error:
            if error.reason == ROLLED_BACK:
                self._native.fail(ROLLED_BACK, str(error))
            elif error.reason == UNFLUSHED_LOST and not self.is_standby:
                self._native.fail(UNFLUSHED_LOST, str(error))
            elif error.reason == STANDBY:
                self._fenced()
            raise

    async def _connect(self, name: QueueName) -> PreparedQueue:
        grant = await self._open(name.queue_id)
        self._incarnation = grant.target_incarnation
        try:
            secure = _native.SecureQueueParameters(
                secret=grant.secret,
                volume_id=self._volume_id,
                host_nqn=grant.host_nqn,
                queue_id=name.queue_id,
                association_epoch=grant.association_epoch,
                incarnation=grant.target_incarnation,
            )
        finally:
            grant.secret[:] = bytes(len(grant.secret))
        # Each queue has its own controller, so a replacement can have the same queue id.
        host = HostController(
            traddr=grant.traddr,
            trsvcid=grant.trsvcid,
            subsystem_nqn=grant.subsystem_nqn,
            host_nqn=grant.host_nqn,
        )
        try:
            await host.connect()
            back = await host.connect_queue(
                name.queue_id, queue_depth=QUEUE_DEPTH_MAX, ticket=grant.ticket
            )
        except BaseException:
            await host.close()
            raise
        return PreparedQueue(back=back, grant=grant, secure=secure, host=host)

    def _hand_over(self, name: QueueName, prepared: PreparedQueue) -> None:
        back, grant = prepared.back, prepared.grant
        with contextlib.closing(back), contextlib.suppress(_native.QueueClosedError):
            # Limits are this gateway's and the descriptor's; Identify data can only lower them.
            self._native.replace_back(
                back.socket.fileno(),
                association=name.association_id,
                queue_id=name.queue_id,
                queue_depth=back.queue_depth,
                h2c_data_max=min(back.h2c_data_max, H2C_DATA_BYTES),
                transfer_max=min(back.transfer_max, SECURE_TRANSFER_BYTES),
                in_capsule_max=min(back.in_capsule_max, IN_CAPSULE_BYTES),
                association_epoch=grant.association_epoch,
                incarnation=grant.target_incarnation,
                confirmed=grant.confirmed,
                milestone=grant.milestone,
                secure=prepared.secure,
            )
