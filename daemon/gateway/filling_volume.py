"""A volume that is being filled: attached to its back end, but not exported."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

from sealane import _native
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.back_end import BackEnd
from sealane.daemon.gateway.counters import add_counters, replace_counters
from sealane.daemon.gateway.own_queue import own_queue
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.errors import Error
from sealane.transport.nvme.volume_queue import VolumeQueue
from sealane.transport.tasks import TaskOwner

_OPEN_SECONDS: Final = 30.0
# Longer than the wait for a lost target, so that the gateway's timeout comes first.
_COMMAND_SECONDS: Final = 300.0


class FillingVolume:
    """A volume that is filled with sealed zeros through a queue of the gateway's own."""

    def __init__(
        self, *, native: _native.GatewayVolume, back_end: BackEnd, feed: EventFeed, sectors: int
    ) -> None:
        self._native = native
        self._back_end = back_end
        self._feed = feed
        self._sectors = sectors
        self._stack = contextlib.AsyncExitStack()
        self._queue: VolumeQueue | None = None
        self._tasks = TaskOwner()
        feed.on_event = back_end.take_event

    async def write_zeroes(self, lba: int, sectors: int) -> None:
        """Write sealed zeros; raises the errors of VolumeQueue."""
        await self._run((await self._opened()).write_zeroes(lba, sectors))

    async def flush(self) -> None:
        """Make the written zeros durable."""
        await self._run((await self._opened()).flush())

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        """Give the volume more counters."""
        add_counters(self._native, granted)

    def counters_remaining(self) -> int:
        """Return the number of counters not yet given to the queue."""
        return self._native.counters_remaining()

    def take_counters(self) -> list[CounterRange]:
        """Take the remaining counters, after `close`."""
        return replace_counters(self._native)

    def take_events(self) -> Sequence[StorageEvent]:
        """Return the events since the last call."""
        return self._feed.take()

    async def close(self) -> None:
        """Close the queue and disconnect from the target; unflushed zeros may be lost."""
        try:
            await self._stack.aclose()
            await self._tasks.close()
        finally:
            await asyncio.to_thread(self._native.close_queues)
            await self._back_end.close()
            self._feed.close()

    async def wipe(self) -> None:
        """Wipe the keys and free all memory."""
        self._feed.on_event = None
        await asyncio.to_thread(self._native.close)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a command. A cancelled caller doesn't wait for it; `close` ends it."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                await work
            except Error as error:
                ended.set_exception(error)
                ended.exception()  # a cancelled caller won't retrieve the exception
            else:
                ended.set_result(None)

        self._tasks.start(run(), name="filling-command")
        await asyncio.wait((ended,))
        ended.result()

    async def _opened(self) -> VolumeQueue:
        if self._queue is None:
            self._queue = await self._stack.enter_async_context(
                own_queue(
                    self._native,
                    self._back_end,
                    block_count=self._sectors,
                    open_seconds=_OPEN_SECONDS,
                    command_seconds=_COMMAND_SECONDS,
                )
            )
        return self._queue
