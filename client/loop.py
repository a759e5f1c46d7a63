"""An event loop on a thread of its own: what the client without asyncio runs on."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from sealane.client.forks import check_process

T = TypeVar("T")


class Loop:
    """An event loop on a thread; other threads run calls on it and wait for them."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sealane-client", daemon=True
        )
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child: the thread that runs calls is its parent's."""
        return os.getpid() != self._process

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end; if this thread is interrupted, the call is cancelled.

        UsageError `client.forked` in a forked child.
        """
        try:
            check_process(self._process, "what this call belongs to")
        except BaseException:
            call.close()
            raise
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call without waiting; it must not raise."""
        if self.is_forked:
            call.close()
            return
        asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a plain function on the loop's thread, where what belongs to the loop is touched."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def close(self) -> None:
        """Cancel what is under way and end the thread; in a forked child it does nothing."""
        if self.is_forked:
            return
        self.run(_others_cancelled())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@contextlib.contextmanager
def running() -> Iterator[Loop]:
    """Have a loop inside the block."""
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


async def _others_cancelled() -> None:
    """End what an interrupted thread left behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def entered(manager: contextlib.AbstractAsyncContextManager[T]) -> T:
    """Enter on the loop what is left by `left`."""
    return await manager.__aenter__()


async def left(manager: contextlib.AbstractAsyncContextManager[Any]) -> None:
    """Leave it in order."""
    await manager.__aexit__(None, None, None)
