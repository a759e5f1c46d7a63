"""The flush before a detach: after it, no process resends the volume's journal."""

import asyncio
import time
from typing import Final

from sealane import _native
from sealane.daemon.gateway.back_end import FATAL, BackEnd, RetryDelays
from sealane.daemon.gateway.own_queue import own_queue
from sealane.errors import Error, UnavailableError

FLUSH_SECONDS: Final = 5.0
"""Longest wait for a back end, and for the flush after it."""
LEAVE_SECONDS: Final = 15.0
"""How long a stop begins attempts: targets and brokers may be restarting at the same time."""


async def flush_journal(
    native: _native.GatewayVolume, back_end: BackEnd, *, patience_seconds: float = 0
) -> None:
    """Make all acknowledged changes durable at the target, on a queue of the gateway's own.

    For `patience_seconds` it begins another attempt after one that failed, unless data is lost. It
    ends at most 2 × FLUSH_SECONDS later; UnavailableError if the last attempt failed. No host's
    queue may be running.
    """
    if not native.statistics()["journal_bytes"]:
        return None
    delays = RetryDelays()
    delays.lose()
    give_up = time.monotonic() + patience_seconds
    while True:
        try:
            return await _flush_once(native, back_end)
        except UnavailableError as error:
            left = give_up - time.monotonic()
            if left <= 0 or error.reason in FATAL:
                raise
        await asyncio.sleep(min(delays.next(), left))


async def _flush_once(native: _native.GatewayVolume, back_end: BackEnd) -> None:
    try:
        async with own_queue(
            native,
            back_end,
            block_count=1,
            open_seconds=FLUSH_SECONDS,
            command_seconds=FLUSH_SECONDS,
        ) as queue:
            await queue.flush()
    except TimeoutError as error:
        raise UnavailableError("connection.timeout", "the target did not answer in time") from error
    except OSError as error:
        raise UnavailableError("connection.lost", str(error)) from error
    except Error as error:
        raise UnavailableError(error.reason, str(error.args[0])) from error
