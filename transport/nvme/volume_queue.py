"""I/O queues of a host: connected, and with the engine behind them for bulk transfers."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from sealane import _native
from sealane.errors import UnavailableError
from sealane.protocol.nvme.constants import FRONT_TRANSFER_BYTES, NAMESPACE_ID
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.errors import NvmeStatusError

IO_TIMEOUT_SECONDS = (
    60.0  # one command; longer than a busy drive takes, shorter than a person waits
)

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

    def close(self) -> None:
        """Close this side's descriptor."""
        self.socket.close()


class VolumeQueue:
    """Bulk reads and writes on one plain I/O queue, many commands in flight.

    One transfer at a time; each runs on a thread without the interpreter's lock. Buffers must
    not be touched during a transfer. Calls raise NvmeStatusError, or UnavailableError if the
    queue ended.
    """

    def __init__(self, native: _native.HostQueue, namespace: NamespaceIdentity) -> None:
        self._native = native
        self.namespace = namespace

    @property
    def native(self) -> _native.HostQueue:
        """The engine's queue, for callers that bring their own thread."""
        return self._native

    async def write(self, lba: int, data: Readable, *, is_forced: bool = False) -> None:
        """Write whole blocks, durably if `is_forced`."""
        await self._run(self._native.write, lba, data, is_forced=is_forced)

    async def read(self, lba: int, into: "bytearray | memoryview") -> None:
        """Fill `into` with whole blocks."""
        await self._run(self._native.read, lba, into)

    async def compare(self, lba: int, data: Readable) -> None:
        """Compare stored blocks with these; NvmeStatusError "Compare Failure" if they differ."""
        await self._run(self._native.compare, lba, data)

    async def compare_and_write(self, lba: int, expected: Readable, data: Readable) -> None:
        """Write `data` if the blocks stored equal `expected`, in one step; errors as `compare`."""
        await self._run(self._native.compare_and_write, lba, expected, data)

    async def write_zeroes(self, lba: int, blocks: int, *, deallocate: bool = False) -> None:
        """Make blocks read as zeros, and give them up if `deallocate`."""
        await self._run(self._native.write_zeroes, lba, blocks, deallocate=deallocate)

    async def verify(self, lba: int, blocks: int) -> None:
        """Have the controller check stored blocks."""
        await self._run(self._native.verify, lba, blocks)

    async def deallocate(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Give up to 256 ranges of (lba, blocks) up."""
        await self._run(self._native.deallocate, ranges)

    async def flush(self) -> None:
        """Make completed writes durable."""
        await self._run(self._native.flush)

    def progress(self) -> int:
        """Bytes moved since the queue was opened."""
        return self._native.progress()

    async def close(self) -> None:
        """End the queue."""
        await asyncio.to_thread(self._native.close)

    @staticmethod
    async def _run(call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await asyncio.to_thread(call, *args, **kwargs)
        except _native.StatusError as error:
            raise NvmeStatusError(error.args[0], lba=error.args[1]) from error
        except _native.QueueError as error:
            raise UnavailableError(error.args[0], error.args[1]) from error


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
            connected.socket.fileno(),
            queue_depth=connected.queue_depth,
            h2c_data_max=connected.h2c_data_max,
            transfer_max=connected.transfer_max,
            in_capsule_max=connected.in_capsule_max,
            io_bytes=io_bytes,
            block_bytes=namespace.block_bytes,
            timeout_seconds=timeout_seconds,
            nsid=nsid,
            header_digest=connected.header_digest,
            data_digest=connected.data_digest,
        )
    return VolumeQueue(native, namespace)
