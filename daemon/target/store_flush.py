"""Flush of several stores, where one that fails doesn't keep the others from it."""

from collections.abc import Callable, Mapping

from sealane.daemon.volume.store_calls import on_store_thread


async def failures(syncs: Mapping[str, Callable[[], None]]) -> dict[str, OSError]:
    """Make stores durable, one after the other; return the errors of those that fail, by name."""
    failed = {}
    for name, sync in syncs.items():
        try:
            await on_store_thread(sync)
        except OSError as error:
            failed[name] = error
    return failed
