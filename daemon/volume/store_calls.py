"""Threads for calls of stores and queues that may wait for an anchor.

Anchors write their files on the event loop's own threads, which these calls must therefore not
occupy: as many of them as there are threads would wait for each other.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

CALLS_AT_ONCE: Final = 16
_threads: Final = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="store-calls")


async def on_store_thread(
    call: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Run a blocking call; others wait while CALLS_AT_ONCE run. It must wait for no other one."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, partial(call, *args, **kwargs))
