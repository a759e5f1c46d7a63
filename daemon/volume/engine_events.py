"""A volume's events from the engine, kept in a bounded list for the control plane."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sealane import _native

_EVENTS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageEvent:
    """An event of a volume; `lba` is 0 if it isn't about a sector."""

    kind: str
    reason: str
    lba: int = 0
    detail: str
    association: int = 0
    queue_id: int = 0


class EventSource(Protocol):
    """A native volume."""

    def take_events(self) -> list[_native.StorageEvent]:
        """Return the events since the last call."""

    def event_fd(self) -> int:
        """Return a descriptor that is readable while there are events."""


class EventFeed:
    """Reads the events of one volume from all its sources, in the running event loop.

    Calls `on_event`, if set, for each event: it returns whether to keep the event. Then calls
    `on_closed` if the event is a closed queue.
    """

    def __init__(self, source: EventSource, on_closed: Callable[[StorageEvent], None]) -> None:
        self._sources: list[EventSource] = []
        self._on_closed = on_closed
        self.on_event: Callable[[StorageEvent], bool] | None = None
        self._kept: deque[StorageEvent] = deque(maxlen=_EVENTS_MAX)
        self._loop = asyncio.get_running_loop()
        self.add(source)

    def add(self, source: EventSource) -> None:
        """Start reading another source."""
        self._sources.append(source)
        self._loop.add_reader(source.event_fd(), self._drain, source)

    def remove(self, source: EventSource) -> None:
        """Read a source's last events, then stop reading it."""
        self._drain(source)
        self._loop.remove_reader(source.event_fd())
        self._sources.remove(source)

    def drain(self) -> None:
        """Read the sources' current events."""
        for source in self._sources:
            self._drain(source)

    def publish(self, event: StorageEvent) -> None:
        """Add an event of the control plane."""
        self._kept.append(event)

    def take(self) -> Sequence[StorageEvent]:
        """Return the events since the last call; the oldest are dropped if there are too many."""
        self.drain()
        taken = list(self._kept)
        self._kept.clear()
        return taken

    def close(self) -> None:
        """Stop reading and remove all sources; events up to now can still be taken."""
        for source in [*self._sources]:
            self.remove(source)

    def _drain(self, source: EventSource) -> None:
        for native in source.take_events():
            event = StorageEvent(
                kind=native.kind,
                reason=native.reason,
                lba=native.lba or 0,
                detail=native.detail,
                association=native.association,
                queue_id=native.queue_id,
            )
            if self.on_event is None or self.on_event(event):
                self._kept.append(event)
            if event.kind == "queue_closed":
                self._on_closed(event)
