"""Events of a volume: taken from the engine as they come, kept for control in a bounded list."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sealane import _native

_EVENTS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageEvent:
    """Something that happened to a volume. `lba` is 0 where no sector is meant."""

    kind: str
    reason: str
    lba: int = 0
    detail: str
    association: int = 0
    queue_id: int = 0


class EventSource(Protocol):
    """A native volume."""

    def take_events(self) -> list[_native.StorageEvent]:
        """Events since the last call."""

    def event_fd(self) -> int:
        """Descriptor that is readable while there are events."""


class EventFeed:
    """Reads the events of one volume, from all its `sources`, while the loop runs.

    `on_closed` hears of each closed queue; `on_event`, if set, of each event before that, and says
    whether to keep it.
    """

    def __init__(self, source: EventSource, on_closed: Callable[[StorageEvent], None]) -> None:
        self._sources: list[EventSource] = []
        self._on_closed = on_closed
        self.on_event: Callable[[StorageEvent], bool] | None = None
        self._kept: deque[StorageEvent] = deque(maxlen=_EVENTS_MAX)
        self._loop = asyncio.get_running_loop()
        self.add(source)

    def add(self, source: EventSource) -> None:
        """Read another source from now on."""
        self._sources.append(source)
        self._loop.add_reader(source.event_fd(), self._drain, source)

    def remove(self, source: EventSource) -> None:
        """Read what is left of a source and no more of it."""
        self._drain(source)
        self._loop.remove_reader(source.event_fd())
        self._sources.remove(source)

    def drain(self) -> None:
        """Take in what the sources have to say now."""
        for source in self._sources:
            self._drain(source)

    def publish(self, event: StorageEvent) -> None:
        """Add an event of the control side."""
        self._kept.append(event)

    def take(self) -> Sequence[StorageEvent]:
        """Events since the last call, the oldest dropped if there are too many."""
        self.drain()
        taken = list(self._kept)
        self._kept.clear()
        return taken

    def close(self) -> None:
        """Stop reading and let the sources go; what happened until now can still be taken."""
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
