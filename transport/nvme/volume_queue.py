"""I/O queues of a host: connected ones, and bulk transfers through the engine."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from sealane import _native
from sealane.errors import UnavailableError, foreign_reason
from sealane.protocol.nvme.constants import FRONT_TRANSFER_BYTES, NAMESPACE_ID
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.errors import NvmeStatusError

IO_TIMEOUT_SECONDS = (
    60.0  # for one command; longer than a busy drive takes, shorter than a person waits
)

# How long a cancelled call waits for its commands: a working drive completes them within this time.
CANCEL_SECONDS = 5.0

P = ParamSpec("P")
Readable = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedQueue:
    """An I/O queue whose Connect succeeded. Its owner hands the socket over, then closes it."""

    socket: socket.socket
    queue_id: int
    queue_depth: int
    h2c_data_max: int
    transfer_max: int
    in_capsule_max: int
    header_digest: bool = False
    data_digest: bool = False

    def describe(
        self, *, block_bytes: int, nsid: int = NAMESPACE_ID
    ) -> "_native.HostQueueDescription":
        """Return the queue's description for the engine, which serves one namespace on it."""
        return {
            "descriptor": self.socket.fileno(),
            "queue_depth": self.queue_depth,
            "h2c_data_max": self.h2c_data_max,
            "transfer_max": self.transfer_max,
            "in_capsule_max": self.in_capsule_max,
            "header_digest": self.header_digest,
            "data_digest": self.data_digest,
            "block_bytes": block_bytes,
            "nsid": nsid,
        }

    def close(self) -> None:
        """Close this side's file descriptor."""
        self.socket.close()


class VolumeQueue:
    """Reads and writes on one plain I/O queue; many concurrent tasks, each with many commands.

    It belongs to the event loop it was created on; the engine's thread moves the bytes. Calls raise
    NvmeStatusError, or UnavailableError if the queue ended or has too many transfers.

    A cancelled read ends at once and doesn't touch its buffer afterwards. Any other cancelled call
    ends once none of its commands is in flight, so that they can't overtake later calls; if that
    takes longer than CANCEL_SECONDS, the queue is closed. A second cancellation doesn't wait.
    """

    def __init__(self, native: _native.HostQueue, namespace: NamespaceIdentity) -> None:
        self._native = native
        self.namespace = namespace
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(native.event_fd(), self._take_done)

    async def write(self, lba: int, data: Readable, *, is_forced: bool = False) -> None:
        """Write whole blocks, durably if `is_forced`."""
        await self._drained(self._native.write, lba, data, is_forced=is_forced)

    async def read(self, lba: int, into: "bytearray | memoryview") -> None:
        """Fill `into` with whole blocks."""
        ticket = self._start(self._native.read, lba, into)
        try:
            await self._end(ticket)
        except asyncio.CancelledError:
            self._native.cancel(ticket)
            self._ends.pop(ticket, None)
            raise

    async def compare(self, lba: int, data: Readable) -> None:
        """Compare stored blocks with `data`; NvmeStatusError "Compare Failure" if they differ."""
        await self._drained(self._native.compare, lba, data)

    async def compare_and_write(self, lba: int, expected: Readable, data: Readable) -> None:
        """Write `data` if the stored blocks equal `expected`, atomically; errors as `compare`."""
        await self._drained(self._native.compare_and_write, lba, expected, data)

    async def write_zeroes(self, lba: int, blocks: int, *, deallocate: bool = False) -> None:
        """Make blocks read as zeros, and deallocate them if `deallocate`."""
        await self._drained(self._native.write_zeroes, lba, blocks, deallocate=deallocate)

    async def verify(self, lba: int, blocks: int) -> None:
        """Have the controller check stored blocks."""
        await self._drained(self._native.verify, lba, blocks)

    async def deallocate(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Deallocate up to 256 ranges of (lba, blocks)."""
        await self._drained(self._native.deallocate, ranges)

    async def flush(self) -> None:
        """Make completed writes durable."""
        await self._drained(self._native.flush)

    def progress(self) -> int:
        """Return the bytes moved since the queue was opened."""
        return self._native.progress()

    @property
    def outstanding(self) -> int:
        """Return the number of transfers that are waited for."""
        return len(self._ends)

    async def close(self) -> None:
        """Close the queue; calls that wait for a transfer get UnavailableError."""
        await self._finish()
        self._loop.remove_reader(self._native.event_fd())

    async def _finish(self) -> None:
        await asyncio.to_thread(self._native.close)
        self._take_done()

    def _start(self, call: Callable[P, int], *args: P.args, **kwargs: P.kwargs) -> int:
        try:
            ticket = call(*args, **kwargs)
        except _native.QueueError as error:
            raise _translated(error) from error
        self._ends[ticket] = self._loop.create_future()
        return ticket

    async def _end(self, ticket: int) -> None:
        future = self._ends[ticket]
        await asyncio.wait((future,))
        error = future.exception()
        if error is not None:
            raise _translated(error) from error

    async def _drained(self, call: Callable[P, int], *args: P.args, **kwargs: P.kwargs) -> None:
        ticket = self._start(call, *args, **kwargs)
        try:
            await self._end(ticket)
        except asyncio.CancelledError:
            self._native.cancel(ticket)
            future = self._ends.get(ticket)
            if future is not None:
                await asyncio.wait((future,), timeout=CANCEL_SECONDS)
                if not future.done():
                    await self._finish()
            raise

    def _take_done(self) -> None:
        for ticket, error in self._native.take_done():
            future = self._ends.pop(ticket, None)
            if future is None:
                continue  # a cancelled read
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # a cancelled caller won't retrieve the exception


def _translated(error: BaseException) -> BaseException:
    if isinstance(error, _native.StatusError):
        return NvmeStatusError(error.args[0], lba=error.args[1], is_final=error.args[3])
    if isinstance(error, _native.QueueError):
        return UnavailableError(foreign_reason(error.args[0]), error.args[1])
    return error


def bulk_queue(
    connected: ConnectedQueue,
    namespace: NamespaceIdentity,
    *,
    nsid: int = NAMESPACE_ID,
    io_bytes: int = FRONT_TRANSFER_BYTES,
    timeout_seconds: float = IO_TIMEOUT_SECONDS,
) -> VolumeQueue:
    """Hand a connected queue of a plain namespace to the engine; closes this side's descriptor."""
    with contextlib.closing(connected):
        native = _native.HostQueue(
            connected.describe(block_bytes=namespace.block_bytes, nsid=nsid),
            io_bytes=io_bytes,
            timeout_seconds=timeout_seconds,
        )
    return VolumeQueue(native, namespace)
