"""An event loop on a thread of its own, on which the synchronous client runs its calls."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

from sealane.client.forks import check_process
from sealane.errors import UsageError

P = ParamSpec("P")
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
        """True in a forked child, which doesn't have the loop's thread."""
        return os.getpid() != self._process

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end; if this thread is interrupted, the call is cancelled.

        Raises UsageError: `client.forked` in a forked child, `client.callback` on the loop's own
        thread, which would wait for itself.
        """
        try:
            self._check_caller()
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

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a plain function on the loop's thread, for objects that belong to the loop."""

        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called())

    def _check_caller(self) -> None:
        check_process(self._process, "the client or disk that this call is made on")
        if threading.current_thread() is self._thread:
            raise UsageError(
                "client.callback",
                "a callback of the synchronous client can't call that client: return first",
            )

    def close(self) -> None:
        """Cancel the calls in flight and end the thread; do nothing in a forked child."""
        if self.is_forked:
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@contextlib.contextmanager
def running() -> Iterator[Loop]:
    """Run a loop for the length of the block."""
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


async def _cancel_others() -> None:
    """Cancel the calls of interrupted threads, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
