"""Volume events and their subscribers, as streamed by `watch`.

A subscriber that reads too slowly loses its oldest events, and gets an event with their number.
"""

import asyncio
import contextlib
import datetime as dt
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.protocol.v1 import storage_pb2

EVENT_POLL_SECONDS: Final = 0.1
"""Interval at which the engine is polled for events."""
_BACKLOG_MAX: Final = 1024
FOUND: Final = "found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a volume, for operators; `reason` is a stable id."""

    volume_id: str
    kind: str
    reason: str = ""
    lba: int = 0
    detail: str = ""
    origin: str
    time: dt.datetime = field(default_factory=utc_now)


class _Subscriber:
    def __init__(self, volume_id: str, origin: str) -> None:
        self.volume_id = volume_id
        self._origin = origin
        self._backlog: deque[Event] = deque()
        self._lost = 0
        self._wake = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def put(self, event: Event) -> None:
        if len(self._backlog) == _BACKLOG_MAX:
            self._backlog.popleft()
            self._lost += 1
        self._backlog.append(event)
        self._wake.set()

    async def events(self) -> AsyncIterator[Event]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._lost:
                lost, self._lost = self._lost, 0
                yield Event(
                    volume_id=self.volume_id,
                    kind="lost",
                    reason="watch.backlog.limit",
                    detail=f"{lost} events were not delivered",
                    origin=self._origin,
                )
            while self._backlog:
                yield self._backlog.popleft()
            if self._closed:
                return


class EventLog:
    """Publishes events to subscribers and to the log."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._subscribers: list[_Subscriber] = []
        self._closed = False

    def close(self) -> None:
        """End all current and future subscriptions: a watch must not delay a stop."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.close()

    def publish(self, event: Event) -> None:
        """Log `event` and pass it to the subscribers of its volume."""
        # A job's finding is damage on the device, even if nobody has read it yet.
        log = get_logger().error if event.kind == FOUND else get_logger().info
        log(
            "volume_event",
            volume_id=event.volume_id,
            kind=event.kind,
            reason=event.reason,
            lba=event.lba,
            detail=event.detail,
            origin=event.origin,
        )
        for subscriber in self._subscribers:
            if subscriber.volume_id == event.volume_id:
                subscriber.put(event)

    def report(
        self, volume_id: str, kind: str, *, reason: str = "", lba: int = 0, detail: str = ""
    ) -> None:
        """Publish an event of this node."""
        self.publish(
            Event(
                volume_id=volume_id,
                kind=kind,
                reason=reason,
                lba=lba,
                detail=detail,
                origin=self.origin,
            )
        )

    def report_native(self, volume_id: str, events: Sequence[StorageEvent]) -> None:
        """Publish the events that this node's engine reports for a volume."""
        for event in events:
            self.report(
                volume_id, event.kind, reason=event.reason, lba=event.lba, detail=event.detail
            )

    @contextlib.contextmanager
    def subscribed(self, volume_id: str) -> Iterator[AsyncIterator[Event]]:
        """Subscribe to the events of `volume_id` until the block is left."""
        subscriber = _Subscriber(volume_id, self.origin)
        self._subscribers.append(subscriber)
        if self._closed:
            subscriber.close()
        try:
            yield subscriber.events()
        finally:
            self._subscribers.remove(subscriber)


def event_message(event: Event) -> storage_pb2.VolumeEvent:
    """Return an event as a gRPC message."""
    message = storage_pb2.VolumeEvent(
        volume_id=event.volume_id,
        kind=event.kind,
        reason=event.reason,
        lba=event.lba,
        detail=event.detail,
        origin=event.origin,
    )
    message.time.FromDatetime(event.time)
    return message
