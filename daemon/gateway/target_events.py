"""Events of a target about the volumes that are attached here, published as the gateway's own."""

import asyncio
import datetime as dt
from typing import Final

from sealane.daemon.gateway.targets import Place, Targets
from sealane.daemon.node.channels import until
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.events import Event, EventLog
from sealane.errors import Error, UsageError
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc
from sealane.transport.tasks import TaskOwner

_RETRY_SECONDS: Final = 1.0
_LOST_RETRY_SECONDS: Final = 10.0
"""Pause after a target that doesn't have the volume: it may still be opening a device."""
_MOVED_SECONDS: Final = 120.0
"""How long a moved device may take: its former owner keeps it for up to a minute, and then the new
one opens it. Its volumes aren't lost before that."""


class TargetEvents:
    """Follows the volumes' targets, with one task for each volume."""

    def __init__(self, targets: Targets, events: EventLog) -> None:
        self._targets = targets
        self._events = events
        self._tasks = TaskOwner()
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
        loop = asyncio.get_running_loop()
        node, lost_at, moving_until = place.node, "", 0.0
        while True:
            pause = _RETRY_SECONDS
            if node != place.node:
                node, moving_until = place.node, loop.time() + _MOVED_SECONDS
            left = asyncio.ensure_future(place.left(node))
            try:
                try:
                    pause = await self._publish(volume_id, node, left)
                    lost_at, moving_until = "", 0.0
                except UsageError as error:
                    if error.reason != "namespace.not_found":
                        get_logger().warning("target_events_interrupted", reason=error.reason)
                    else:
                        pause = _LOST_RETRY_SECONDS
                        if lost_at != node and loop.time() >= moving_until:
                            self._report_lost(volume_id, error)
                            lost_at = node
                except Error as error:
                    get_logger().info("target_events_interrupted", reason=error.reason)
                except (ValueError, OverflowError):
                    get_logger().warning("target_events_interrupted", reason="event.time.malformed")
                await asyncio.wait({left}, timeout=pause)
            finally:
                left.cancel()

    async def _publish(self, volume_id: str, node: str, left: asyncio.Future[None]) -> float:
        """Publish what `node` reports until the volume has left it; return the pause after it."""
        request = storage_pb2.WatchEventsRequest(volume_id=volume_id)
        async with self._targets.stream(node) as (channel, renewed):
            stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(request)
            async for message in until(stream, renewed, left):
                self._events.publish(_event(volume_id, message))
            return 0 if renewed.done() else _RETRY_SECONDS

    def _report_lost(self, volume_id: str, error: UsageError) -> None:
        self._events.report(
            volume_id, "lost_by_target", reason=error.reason, detail=str(error.args[0])
        )


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
