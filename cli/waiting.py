"""`--wait` of verbs that begin what brokers continue by themselves."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

WAIT_SECONDS: Final = 1.0
"""Interval at which `--wait` asks."""

_Answer = TypeVar("_Answer")


async def ended(
    answer: _Answer, left: Callable[[_Answer], str], ask: Callable[[], Awaitable[_Answer]]
) -> _Answer:
    """Show what is `left` until that is nothing, asking again; return the last answer."""
    while said := left(answer):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{said} ")
            sys.stderr.flush()
        await asyncio.sleep(WAIT_SECONDS)
        answer = await ask()
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    return answer
