"""Health of the target: reports stores that failed, and ends the process to open them again.

A store whose state on the device is unknown refuses everything until it is opened again. A new
process does that, and gateways send it again what was not flushed. systemd starts it.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError

STORE_SERVICES: Final = ("stores",)
"""Health services that are unhealthy while a store has failed."""
DEVICE_SERVICES: Final = ("device",)
"""Health services that are unhealthy while the target has lost its device."""
STORE_SECONDS: Final = 2.0
"""Interval at which stores are looked at."""
_NAMED_MAX: Final = 4
SERVING_SECONDS: Final = 60.0
"""How long a process serves at least: a drive that stays broken mustn't stop others often."""


async def end_with_stores(
    failed: Callable[[], Sequence[uuid.UUID]],
    report: Callable[[bool], Awaitable[None]],
    *,
    serving_seconds: float = SERVING_SECONDS,
) -> None:
    """Report whether no store has failed; once one has, raise UnavailableError `store.failed`.

    Raises at the earliest `serving_seconds` from now, if the store is still there then.
    """
    earliest = time.monotonic() + serving_seconds
    reported: Sequence[uuid.UUID] | None = None
    while True:
        found = failed()
        if found != reported:
            reported = found
            await report(not found)
            if found:
                get_logger().error("stores_failed", volumes=[*map(str, found)])
        if found and time.monotonic() >= earliest:
            raise UnavailableError(
                "store.failed",
                f"the stores of these volumes failed and have to be opened again, by the next "
                f"process: {', '.join(map(str, found[:_NAMED_MAX]))}"
                + (f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""),
            )
        await asyncio.sleep(STORE_SECONDS)
