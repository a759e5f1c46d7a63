"""`--wait` of verbs that begin what brokers continue by themselves."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

WAIT_SECONDS: Final = 1.0
"""Interval at which `--wait` asks at first; it doubles up to `WAIT_SECONDS_MAX`."""
WAIT_SECONDS_MAX: Final = 5.0
"""Longest interval: a broker may read its whole store to answer."""

_Answer = TypeVar("_Answer")


async def ended(
    answer: _Answer, left: Callable[[_Answer], str], ask: Callable[[], Awaitable[_Answer]]
) -> _Answer:
    """Show what is `left` until that is nothing, asking again; return the last answer."""
    seconds = WAIT_SECONDS
    while said := left(answer):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{said} ")
            sys.stderr.flush()
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, WAIT_SECONDS_MAX)
        answer = await ask()
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    return answer
