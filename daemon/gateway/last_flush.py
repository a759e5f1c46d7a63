"""The flush before a volume is detached: nothing else would send its journal again."""

from typing import Final

from sealane import _native
from sealane.daemon.gateway.back_end import BackEnd
from sealane.daemon.gateway.own_queue import own_queue
from sealane.errors import Error, UnavailableError

FLUSH_SECONDS: Final = 5.0
"""Longest wait for a back end, and again for the flush."""


async def flush_journal(native: _native.GatewayVolume, back_end: BackEnd) -> None:
    """Make every acknowledged change durable at the target, on a queue of the gateway's own.

    UnavailableError if that can't be had in time. No host's queue may run.
    """
    if not native.statistics()["journal_bytes"]:
        return
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
        raise UnavailableError("connection.timeout", "the target isn't reached") from error
    except OSError as error:
        raise UnavailableError("connection.lost", str(error)) from error
    except Error as error:
        raise UnavailableError(error.reason, str(error.args[0])) from error
