"""Space of the file systems that a daemon writes to: figures, warnings, and reserves.

Places are looked at periodically. A place is *low* from a percentage of use on, and *full* while
less is free, or in its reserve, than a whole reserve (sealane.daemon.runtime.reserve_file). Both
end by themselves when there is space again.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.reserve_file import RESERVE_BYTES, keep_reserve

SPACE_SECONDS: Final = 5.0
"""Interval at which places are looked at."""
SPACE_SERVICES: Final = ("space",)
"""Health services that are unhealthy while a place is full."""
# What ends a warning, so that use around the limit isn't a line of log every few seconds.
_ENDING_PERCENT: Final = 2
_BLOCK_BYTES: Final = 512  # of st_blocks

SpaceState = Literal["good", "low", "full"]


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
    def used_percent(self) -> int:
        """Percentage of the capacity that isn't free, rounded down."""
        return 100 * (self.capacity - self.free) // self.capacity if self.capacity else 0


class SpaceWatch:
    """Looks at places by their names; `look` blocks, and may be called from any thread."""

    def __init__(
        self,
        places: Mapping[str, Path],
        *,
        warning_percent: int,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Call `report` with whether no place is full, after each look of `keep`."""
        self._places = places
        self._warning_percent = warning_percent
        self._report = report
        self._looking = threading.Lock()
        self._found: dict[str, Space] = {}

    def look(self) -> Sequence[Space]:
        """Look at all places that exist, grow their reserves, and log what has changed."""
        with self._looking:
            for place, directory in self._places.items():
                try:
                    found = self._look(place, directory)
                except OSError as error:
                    if self._found.pop(place, None) is not None:
                        get_logger().warning("space_unknown", place=place, detail=error.strerror)
                    continue
                before = self._found.get(place)
                self._found[place] = found
                _log_change("good" if before is None else before.state, found)
            return [*self._found.values()]

    async def keep(self) -> None:
        """Look periodically, until cancelled."""
        while True:
            found = await asyncio.to_thread(self.look)
            await self._report(all(space.state != "full" for space in found))
            await asyncio.sleep(SPACE_SECONDS)

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return the figures of the last look by place, for the metrics."""
        return {
            (place,): {
                "capacity_bytes": space.capacity,
                "free_bytes": space.free,
                "reserve_bytes": space.reserve,
                "promised_bytes": space.promised,
                "is_low": int(space.state != "good"),
                "is_full": int(space.state == "full"),
            }
            for place, space in [*self._found.items()]
        }

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
        if min(space.reserve, space.free) < RESERVE_BYTES:
            return replace(space, state="full")
        before = self._found.get(place)
        was_low = before is not None and before.state != "good"
        limit = self._warning_percent - (_ENDING_PERCENT if was_low else 0)
        if space.state == "good" and space.used_percent >= limit:
            return replace(space, state="low")
        return space


def _promised(directory: Path) -> int:
    """Return how much files of a directory have been promised, but not been given yet."""
    with os.scandir(directory) as entries:
        found = [entry.stat() for entry in entries if entry.is_file(follow_symlinks=False)]
    return sum(max(0, each.st_size - each.st_blocks * _BLOCK_BYTES) for each in found)


def _log_change(before: SpaceState, space: Space) -> None:
    if space.state == before:
        return
    logger = get_logger()
    log = {"good": logger.info, "low": logger.warning, "full": logger.error}[space.state]
    log(
        {"good": "space_returned", "low": "space_low", "full": "space_full"}[space.state],
        place=space.place,
        directory=str(space.directory),
        capacity_bytes=space.capacity,
        free_bytes=space.free,
        reserve_bytes=space.reserve,
        promised_bytes=space.promised,
    )
