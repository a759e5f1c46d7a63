"""Flush of several stores, where one that fails doesn't keep the others from it."""

import asyncio
from collections.abc import Callable, Mapping


async def failures(syncs: Mapping[str, Callable[[], None]]) -> dict[str, OSError]:
    """Make stores durable, one after the other; return the errors of those that fail, by name."""
    failed = {}
    for name, sync in syncs.items():
        try:
            await asyncio.to_thread(sync)
        except OSError as error:
            failed[name] = error
    return failed
