"""Health of the target: reports stores that failed, and ends the process to open them again.

A store whose state on the device is unknown refuses everything until it is opened again. A new
process does that, and gateways send it again what was not flushed. systemd starts it.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.files import read_bounded
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError

STORE_SERVICES: Final = ("stores",)
"""Health services that are unhealthy while a store has failed, or couldn't be opened."""
DEVICE_SERVICES: Final = ("device",)
"""Health services that are unhealthy while the target has lost its device."""
STORE_SECONDS: Final = 2.0
"""Interval at which stores are looked at."""
_NAMED_MAX: Final = 4
SERVING_SECONDS: Final = 60.0
"""How long a process serves at least: a drive that stays broken mustn't stop others often."""
_SERVING_SECONDS_MAX: Final = 3600.0
_OPENINGS: Final = 20
"""A process serves at least this many times as long as it took to open its stores."""


class Ending(BaseModel):
    """How long the process served that ended for these failed stores."""

    volumes: frozenset[uuid.UUID]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How long a process serves before it ends for a failed store."""

    opening_seconds: float
    """How long it took to open the stores."""
    endings: Path
    """Where a process that ends says why; the unit keeps it over a restart."""

    def last(self) -> Ending | None:
        """Return the ending of the last process, if it ended for failed stores; forget it."""
        try:
            content = read_bounded(self.endings)
            self.endings.unlink()
            return Ending.model_validate_json(content)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            get_logger().warning("last_ending_unknown", detail=str(error))
            return None

    def end(self, failed: Sequence[uuid.UUID], seconds: float) -> None:
        """Note for the next process that these stores ended this one."""
        ending = Ending(volumes=frozenset(failed), seconds=seconds)
        try:
            replace_file(self.endings, ending.model_dump_json().encode())
        except Error as error:
            get_logger().warning("ending_not_noted", reason=error.reason, detail=str(error))

    def seconds(self, failed: Sequence[uuid.UUID], last: Ending | None) -> float:
        """Return how long to serve at least: twice as long as last time, for the same stores."""
        least = max(SERVING_SECONDS, _OPENINGS * self.opening_seconds)
        if last is None or last.volumes.isdisjoint(failed):
            return least
        return max(least, min(_SERVING_SECONDS_MAX, 2 * last.seconds))


async def end_with_stores(
    failed: Callable[[], Sequence[uuid.UUID]],
    report: Callable[[bool], Awaitable[None]],
    *,
    unopened: Callable[[], Sequence[uuid.UUID]],
    serving: Serving,
) -> None:
    """Report whether all stores are well; once one has failed, raise UnavailableError.

    Its reason is `store.failed`. Raises at the earliest after the time of `serving`, if the store
    is still there then. Stores that are `unopened` are reported only.
    """
    began = time.monotonic()
    last = await asyncio.to_thread(serving.last)
    reported: tuple[Sequence[uuid.UUID], Sequence[uuid.UUID]] | None = None
    while True:
        found, closed = failed(), unopened()
        if (found, closed) != reported:
            reported = found, closed
            await report(not found and not closed)
            if found or closed:
                get_logger().error(
                    "stores_failed", volumes=[*map(str, found)], unopened=[*map(str, closed)]
                )
        seconds = serving.seconds(found, last)
        if found and time.monotonic() - began >= seconds:
            await asyncio.to_thread(serving.end, found, seconds)
            raise UnavailableError(
                "store.failed",
                f"the stores of these volumes failed and have to be opened again, by the next "
                f"process: {', '.join(map(str, found[:_NAMED_MAX]))}"
                + (f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""),
            )
        await asyncio.sleep(STORE_SECONDS)
