"""A time limit for each message of a stream.

While a caller takes nothing, gRPC holds the message, and the handler waits: nothing checks whether
the caller may still have the stream, and whatever the handler keeps open stays open.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

STREAM_WRITE_SECONDS: Final = 60.0
"""The longest time that a caller may take for one message. Small ones wait in gRPC's buffers."""

_ending: Final[set[asyncio.Future[None]]] = set()


@contextlib.contextmanager
def taken_in_time(refuse: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Cancel the current task, that of the call, unless the block ends within the time limit.

    `refuse` tells the caller, who may not listen: it runs in a task of its own.
    """
    call = asyncio.current_task()

    def end() -> None:
        if call is not None:
            call.cancel()
        telling = asyncio.ensure_future(refuse())
        _ending.add(telling)
        telling.add_done_callback(_ending.discard)

    timer = asyncio.get_running_loop().call_later(STREAM_WRITE_SECONDS, end)
    try:
        yield
    finally:
        timer.cancel()
