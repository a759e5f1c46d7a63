"""Calls that may wait for an anchor don't occupy the threads that anchors need."""

import asyncio
import threading

from sealane.daemon.volume.store_calls import on_store_thread

# More than the event loop has threads.
CALLS = 64
SECONDS = 1.0


async def test_store_calls_leave_the_loops_own_threads_free() -> None:
    written = threading.Event()
    calls = [asyncio.ensure_future(on_store_thread(written.wait, SECONDS)) for _ in range(CALLS)]
    await asyncio.sleep(0)
    await asyncio.to_thread(written.set)
    assert all(await asyncio.gather(*calls))
