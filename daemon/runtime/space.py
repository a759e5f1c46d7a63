"""Space of the file systems that a daemon writes to: figures, warnings, and reserves.

Each place is looked at periodically. It is *low* from a percentage of use on, *full* while less is
free, or in its reserve, than a whole reserve (sealane.daemon.runtime.reserve_file), and *unknown*
while its file system answers with an error, or not at all. All this ends by itself.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.reserve_file import RESERVE_BYTES, STAT_BLOCK_BYTES, keep_reserve

SPACE_SECONDS: Final = 5.0
"""Interval at which places are looked at."""
SPACE_SERVICES: Final = ("space",)
"""Health services that are unhealthy while a reserve isn't whole, or a place is unknown."""
HANGING_SECONDS: Final = 30.0
"""A place that wasn't looked at for so long is unknown."""
# What ends a warning, so that use around the limit isn't a line of log every few seconds.
_ENDING_PERCENT: Final = 2

SpaceState = Literal["good", "low", "full", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Space of the file system that holds a directory, in bytes."""

    place: str
    directory: Path
    capacity: int
    free: int
    """What this daemon may still take; the file system may keep more for root."""
    reserve: int
    promised: int
    """What thin files of the directory may still take."""
    state: SpaceState

    @property
    def is_healthy(self) -> bool:
        """Whether small files find space. A file system without a capacity doesn't count any."""
        is_whole = self.reserve >= RESERVE_BYTES or not self.capacity
        return is_whole and self.state != "unknown"

    @property
    def used_percent(self) -> int:
        """Percentage of the capacity that isn't free, rounded down."""
        return 100 * (self.capacity - self.free) // self.capacity if self.capacity else 0


class SpaceWatch:
    """Looks at places by their names, each in a thread of its own: one that hangs stops no other.

    What was found may be read from any thread, without blocking.
    """

    def __init__(
        self,
        places: Mapping[str, Path],
        *,
        warning_percent: int,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Call `report` periodically with whether all places are healthy."""
        self._places = places
        self._warning_percent = warning_percent
        self._report = report
        self._found: dict[str, Space] = {}
        self._looked: dict[str, float] = {}
        self._stopped = threading.Event()

    def look(self) -> Sequence[Space]:
        """Look at all places that exist, grow their reserves, and log what has changed. Blocks."""
        for place in self._places:
            self._look_at(place)
        return self.last()

    def last(self) -> Sequence[Space]:
        """Return what the last look at each place found."""
        return [
            replace(space, state="unknown") if self._is_hanging(place) else space
            for place, space in [*self._found.items()]
        ]

    async def keep(self) -> None:
        """Have all places looked at periodically, until cancelled."""
        for place in self._places:
            self._looked[place] = time.monotonic()
            # A hanging one must not keep the process from ending.
            threading.Thread(
                target=self._keep_looking, args=(place,), name=f"space-{place}", daemon=True
            ).start()
        hanging: set[str] = set()
        try:
            while True:
                found = {place for place in self._places if self._is_hanging(place)}
                for place in found - hanging:
                    get_logger().error("space_unknown", place=place, detail="no answer")
                hanging = found
                await self._report(not found and all(space.is_healthy for space in self.last()))
                await asyncio.sleep(SPACE_SECONDS)
        finally:
            self._stopped.set()

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return the figures of the last look by place, for the metrics."""
        return {
            (space.place,): {
                "capacity_bytes": space.capacity,
                "free_bytes": space.free,
                "reserve_bytes": space.reserve,
                "promised_bytes": space.promised,
                "is_low": int(space.state in {"low", "full"}),
                "is_full": int(space.state == "full"),
                "is_unknown": int(space.state == "unknown"),
            }
            for space in self.last()
        }

    def _keep_looking(self, place: str) -> None:
        while not self._stopped.wait(SPACE_SECONDS):
            self._look_at(place)

    def _is_hanging(self, place: str) -> bool:
        looked = self._looked.get(place)
        return looked is not None and time.monotonic() - looked > HANGING_SECONDS

    def _look_at(self, place: str) -> None:
        before = self._found.get(place)
        detail = None
        try:
            found = self._look(place, self._places[place])
        except OSError as error:
            self._looked[place] = time.monotonic()
            if before is None:
                return
            found, detail = replace(before, state="unknown"), error.strerror
        self._looked[place] = time.monotonic()
        self._found[place] = found
        _log_change("good" if before is None else before.state, found, detail)

    def _look(self, place: str, directory: Path) -> Space:
        directory.stat()
        reserve = keep_reserve(directory)
        system = os.statvfs(directory)
        space = Space(
            place=place,
            directory=directory,
            capacity=system.f_blocks * system.f_frsize,
            free=system.f_bavail * system.f_frsize,
            reserve=reserve,
            promised=_promised(directory),
            state="good",
        )
        # Without a capacity, the file system doesn't count what it has.
        if space.capacity and min(space.reserve, space.free) < RESERVE_BYTES:
            return replace(space, state="full")
        before = self._found.get(place)
        was_low = before is not None and before.state != "good"
        limit = self._warning_percent - (_ENDING_PERCENT if was_low else 0)
        if space.used_percent >= limit:
            return replace(space, state="low")
        return space


def _promised(directory: Path) -> int:
    """Return how much files of a directory have been promised, but not been given yet."""
    promised = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            # Meanwhile the file may have been deleted.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    promised += max(0, found.st_size - found.st_blocks * STAT_BLOCK_BYTES)
    return promised


def _log_change(before: SpaceState, space: Space, detail: str | None) -> None:
    if space.state == before:
        return
    logger = get_logger()
    event, log = {
        "good": ("space_returned", logger.info),
        "low": ("space_low", logger.warning),
        "full": ("space_full", logger.error),
        "unknown": ("space_unknown", logger.error),
    }[space.state]
    log(
        event,
        place=space.place,
        directory=str(space.directory),
        capacity_bytes=space.capacity,
        free_bytes=space.free,
        reserve_bytes=space.reserve,
        promised_bytes=space.promised,
        **({} if detail is None else {"detail": detail}),
    )
