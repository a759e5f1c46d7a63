"""Events of a target about the volumes that are attached here, published as the gateway's own."""

import asyncio
import datetime as dt
from collections import defaultdict
from functools import partial
from typing import Any, Final, Self

from sealane.daemon.gateway.targets import Place, Targets
from sealane.daemon.node.channels import until
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.events import Event, EventLog
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc
from sealane.transport.tasks import TaskOwner

_RETRY_SECONDS: Final = 1.0
_LOST_RETRY_SECONDS: Final = 10.0
"""Pause after a target that doesn't have the volume: it may still be opening a device."""
_MOVED_SECONDS: Final = 120.0
"""How long a moved device may take: its former owner keeps it for up to a minute, and then the new
one opens it. Its volumes aren't lost before that."""
_ASKED_AT_ONCE: Final = 4
"""Volumes for which a target is asked until it answers. One that is away, or still opens its
volumes, would otherwise be asked for each of a thousand volumes every second."""
_ACCEPT_SECONDS: Final = 10.0
"""How long a target may take to accept a call, during which it has one of the turns."""
_REFUSED_SECONDS: Final = 0.1
"""How long a turn is kept after a refusal: a target gets at most 40 such calls a second."""
_UNANSWERED: Final = ("peer.", "connection.")
"""Families of reasons that the target itself didn't give."""
_OF_VOLUME: Final = ("store.", "anchor.")
"""Families of reasons for which a target doesn't serve one volume, but may serve others."""


class TargetEvents:
    """Follows the volumes' targets, with one task for each volume."""

    def __init__(self, targets: Targets, events: EventLog) -> None:
        self._targets = targets
        self._events = events
        self._tasks = TaskOwner()
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, _ASKED_AT_ONCE)
        )
        self._followers: dict[str, asyncio.Task[None]] = {}

    def follow(self, volume_id: str, place: Place) -> None:
        """Publish what the volume's target reports, until `leave`."""
        self._followers[volume_id] = self._tasks.start(
            self._follow(volume_id, place), name=f"follow-{volume_id}"
        )

    def leave(self, volume_id: str) -> None:
        """Stop following a volume, if it is followed."""
        follower = self._followers.pop(volume_id, None)
        if follower is not None:
            follower.cancel()

    async def close(self) -> None:
        """Stop following all volumes."""
        await self._tasks.close()

    async def _follow(self, volume_id: str, place: Place) -> None:
        followed = _Followed(volume_id, place.node)
        while True:
            followed.note_move(place.node)
            left = asyncio.ensure_future(place.left(followed.node))
            try:
                async with _Turn(self._turns[followed.node], left) as turn:
                    if left.done():
                        continue
                    pause = await self._ask(followed, left, turn)
                    # A target that hasn't answered keeps the turn.
                    await asyncio.wait({left}, timeout=pause)
            finally:
                left.cancel()

    async def _ask(self, followed: "_Followed", left: asyncio.Future[None], turn: "_Turn") -> float:
        """Publish what the target reports as long as it does; return the pause after it."""
        try:
            return await self._publish(followed, left, turn)
        except UsageError as error:
            if error.reason == "namespace.not_found":
                turn.end()
                if followed.is_newly_lost():
                    self._report_lost(followed.volume_id, error)
                return _LOST_RETRY_SECONDS
            get_logger().warning("target_events_interrupted", reason=error.reason)
            await _end_refused(error, left, turn)
        except Error as error:
            get_logger().info("target_events_interrupted", reason=error.reason)
            if error.reason.startswith(_OF_VOLUME):
                turn.end()
                return _LOST_RETRY_SECONDS
            await _end_refused(error, left, turn)
        except (ValueError, OverflowError):
            get_logger().warning("target_events_interrupted", reason="event.time.malformed")
        return _RETRY_SECONDS

    async def _publish(
        self, followed: "_Followed", left: asyncio.Future[None], turn: "_Turn"
    ) -> float:
        """Publish what the target reports until the volume has left it; return the pause after."""
        request = storage_pb2.WatchEventsRequest(volume_id=followed.volume_id)
        async with self._targets.stream(followed.node) as (channel, renewed):
            stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(request)
            # Sent when the target has accepted the call. An error is raised by `until`.
            accepted = asyncio.ensure_future(stream.initial_metadata())
            either: set[asyncio.Future[Any]] = {accepted, left, renewed}
            try:
                done, _ = await asyncio.wait(
                    either, timeout=_ACCEPT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise UnavailableError(
                        "peer.deadline_exceeded",
                        f"target {followed.node} has not accepted the call in time",
                    )
                if accepted not in done:
                    return 0
                if not stream.done():
                    turn.end()
                async for message in until(stream, renewed, left):
                    self._events.publish(_event(followed.volume_id, message))
            finally:
                # `until` may not have begun.
                stream.cancel()
                accepted.cancel()
                await asyncio.wait({accepted})
            followed.note_found()
            return 0 if renewed.done() else _RETRY_SECONDS

    def _report_lost(self, volume_id: str, error: UsageError) -> None:
        self._events.report(
            volume_id, "lost_by_target", reason=error.reason, detail=str(error.args[0])
        )


class _Followed:
    """A volume and what is known of it at the target that has it."""

    def __init__(self, volume_id: str, node: str) -> None:
        self.volume_id = volume_id
        self.node = node
        self._lost_at = ""
        self._moving_until = 0.0

    def note_move(self, node: str) -> None:
        """Note which target has the volume now."""
        if node != self.node:
            self.node = node
            self._moving_until = asyncio.get_running_loop().time() + _MOVED_SECONDS

    def note_found(self) -> None:
        """Note that the target has had the volume."""
        self._lost_at, self._moving_until = "", 0.0

    def is_newly_lost(self) -> bool:
        """Note that the target doesn't have the volume; return whether that is to be reported."""
        if self._lost_at == self.node or asyncio.get_running_loop().time() < self._moving_until:
            return False
        self._lost_at = self.node
        return True


class _Turn:
    """One of the turns to ask a target; ends with the block at the latest.

    The block begins without one if the volume leaves the target first.
    """

    def __init__(self, turns: asyncio.Semaphore, left: asyncio.Future[None]) -> None:
        self._turns = turns
        self._left = left
        self._acquiring: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        self._acquiring = asyncio.ensure_future(self._turns.acquire())
        either: set[asyncio.Future[Any]] = {self._acquiring, self._left}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the next one ask, if it may not already."""
        acquiring, self._acquiring = self._acquiring, None
        if acquiring is not None:
            acquiring.add_done_callback(self._release)
            acquiring.cancel()

    def _release(self, acquiring: asyncio.Future[Any]) -> None:
        if not acquiring.cancelled():
            self._turns.release()


async def _end_refused(error: Error, left: asyncio.Future[None], turn: _Turn) -> None:
    """End the turn soon if the target has answered; if not, it is kept for the whole pause."""
    if not error.reason.startswith(_UNANSWERED):
        await asyncio.wait({left}, timeout=_REFUSED_SECONDS)
        turn.end()


def _event(volume_id: str, message: storage_pb2.VolumeEvent) -> Event:
    """Return a target's event; ValueError or OverflowError if its time can't be one."""
    return Event(
        volume_id=volume_id,
        kind=message.kind,
        reason=message.reason,
        lba=message.lba,
        detail=message.detail,
        origin=message.origin,
        time=message.time.ToDatetime(tzinfo=dt.UTC),
    )
