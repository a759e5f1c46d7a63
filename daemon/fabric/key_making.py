"""Secrets that are made in a thread: a caller that goes meanwhile leaves none behind."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def made_in_thread(make: Callable[[], T], *, abandon: Callable[[T | None], None]) -> T:
    """Run `make` in a thread and return its result.

    If this call is cancelled, the thread goes on. When it has ended, `abandon` gets the result that
    nobody waits for, or None if it failed.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))

    def ended(done: "asyncio.Future[T]") -> None:
        has_failed = done.cancelled() or done.exception() is not None
        abandon(None if has_failed else done.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(ended)
        raise
