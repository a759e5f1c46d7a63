"""An attached volume as a sequence of bytes: any offset, any length, many calls at once.

    volume = await client.volumes.attach(name, host_nqn=my_nqn)
    async with client.open(volume) as disk:
        await disk.write(1000, b"any bytes, anywhere")
        await disk.flush()

A sector that a write covers in part is read, changed and written by a fused compare-and-write,
which is retried if another writer changed the sector in between. So writers of different bytes of
one sector, on this host or others, never undo each other's writes.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Self

from sealane.client.disk_queues import QUEUES_MAX, DiskQueues, FrontEnd
from sealane.client.facade import any_thread
from sealane.errors import SectorVerificationError, UnavailableError, UsageError
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.volume_queue import Readable, VolumeQueue

OPERATIONS_MAX: Final = 256
"""Most concurrent calls of one disk; others wait."""
CHANGE_ATTEMPTS_MAX: Final = 64
"""Most attempts of one call to change a sector that others change, too."""
_CHANGE_PAUSE_SECONDS: Final = 0.0005
_CHANGE_PAUSE_SECONDS_MAX: Final = 0.05
_COMPARE_FAILURE: Final = 0x285
_RANGE_BLOCKS_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskHandle:
    """The values needed to open a disk, here or in another process."""

    front_end: FrontEnd
    queue_count: int = 2
    timeout_seconds: float = 60.0
    hold_seconds: float = 60.0
    standbys: tuple[FrontEnd, ...] = ()

    def open(self) -> "Disk":
        """Return an asynchronous disk: `async with handle.open() as disk`."""
        return Disk(
            self.front_end,
            queue_count=self.queue_count,
            timeout_seconds=self.timeout_seconds,
            hold_seconds=self.hold_seconds,
            standbys=self.standbys,
        )


class Disk:
    """A volume as a sequence of bytes: `async with client.open(volume) as disk`.

    Calls raise UsageError (a range outside the disk; an unaligned write that the controller can't
    do atomically; `client.forked`: the parent process opened the disk: open its `handle` here),
    SectorVerificationError (a stored sector isn't what was written; it has the LBA),
    NvmeStatusError (any other refusal) and UnavailableError (`disk.timeout`: the front end stayed
    away; `disk.contended`: others kept changing the sector). A write that failed or was cancelled
    may have been done, as a whole or in part. Overlapping calls are done in any order.

    Buffers must not be changed while a call uses them.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        *,
        queue_count: int = 2,
        timeout_seconds: float = 60.0,
        hold_seconds: float = 60.0,
        standbys: Sequence[FrontEnd] = (),
    ) -> None:
        """Use `front_end`, or one of `standbys`: those of other gateways of its fail-over group."""
        if not 1 <= queue_count <= QUEUES_MAX:
            raise UsageError("disk.queues", f"{queue_count} queues; allowed: 1 to {QUEUES_MAX}")
        self._queues = DiskQueues(
            front_end,
            queue_count=queue_count,
            timeout_seconds=timeout_seconds,
            hold_seconds=hold_seconds,
            standbys=standbys,
        )
        self._handle = DiskHandle(
            front_end=front_end,
            queue_count=queue_count,
            timeout_seconds=timeout_seconds,
            hold_seconds=hold_seconds,
            standbys=tuple(standbys),
        )
        self._turns = asyncio.Semaphore(OPERATIONS_MAX)
        self._changing: dict[int, tuple[asyncio.Lock, int]] = {}
        self._sector_bytes = 0
        self._size = 0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def handle(self) -> "DiskHandle":
        """Opens the same disk in another process; it can be pickled, and holds the secret."""
        return self._handle

    @any_thread
    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(
            "a disk can't be pickled: pickle its `handle`, and open that in the other process"
        )

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._size

    @property
    def sector_bytes(self) -> int:
        """Size of a sector in bytes; calls on whole sectors are faster."""
        return self._sector_bytes

    async def open(self) -> None:
        """Connect; `async with` does this."""
        await self._queues.open()
        namespace = self._queues.namespace
        self._sector_bytes = namespace.block_bytes
        self._size = namespace.block_count * namespace.block_bytes

    async def close(self) -> None:
        """Disconnect from the front end, without a flush."""
        await self._queues.close()

    # Calls.

    async def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        self._check(offset, length)
        buffer = bytearray(length)
        await self.readinto(offset, buffer)
        return bytes(buffer)

    async def readinto(self, offset: int, buffer: bytearray | memoryview) -> int:
        """Fill `buffer` from `offset`; return its size in bytes."""
        view = memoryview(buffer).cast("B")
        self._check(offset, len(view))
        async with self._turn(offset):
            await _together(
                [
                    self._read_part(at, view[at - offset : at - offset + length])
                    for at, length in self._parts(offset, len(view))
                ]
            )
        return len(view)

    async def write(self, offset: int, data: Readable, *, durable: bool = False) -> int:
        """Write `data` at `offset`; return its size in bytes. `durable`: survives a power cut."""
        view = memoryview(data).cast("B")
        self._check(offset, len(view))
        pieces = list(self._parts(offset, len(view)))
        self._check_whole(pieces)

        def write_part(at: int, length: int) -> Coroutine[Any, Any, None]:
            part = view[at - offset : at - offset + length]
            if self._is_whole(at, length):
                return self._write_whole(at, part, is_forced=durable)
            return self._change(at, part)

        async with self._turn(offset):
            await _together([write_part(*piece) for piece in pieces])
            if durable and not all(self._is_whole(*piece) for piece in pieces):
                await self._queues.run(lambda queue: queue.flush())
        return len(view)

    async def flush(self) -> None:
        """Make durable every write that has returned."""
        async with self._turn(0):
            await self._queues.run(lambda queue: queue.flush())

    async def write_zeroes(self, offset: int, length: int) -> None:
        """Set exactly these bytes to zero; whole sectors without moving data."""
        self._check(offset, length)
        pieces = list(self._parts(offset, length))
        self._check_whole(pieces)

        def zero_part(at: int, length: int) -> Coroutine[Any, Any, None]:
            if self._is_whole(at, length):
                return self._zero_whole(at, length)
            return self._change(at, memoryview(bytes(length)))

        async with self._turn(offset):
            await _together([zero_part(*piece) for piece in pieces])

    async def discard(self, offset: int, length: int) -> None:
        """Deallocate the whole sectors inside the range: they read as zeros. Others stay."""
        self._check(offset, length)
        size = self._sector_bytes
        first, end = -(-offset // size), (offset + length) // size
        async with self._turn(offset):
            for lba in range(first, end, _RANGE_BLOCKS_MAX):
                ranges = [(lba, min(_RANGE_BLOCKS_MAX, end - lba))]
                await self._queues.run(partial(VolumeQueue.deallocate, ranges=ranges))

    # Parts of calls: whole sectors, or bytes of one sector.

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Cut a range into at most three: bytes of a sector, whole sectors, bytes of a sector."""
        size, end = self._sector_bytes, offset + length
        first_whole, last_whole = -(-offset // size) * size, end // size * size
        if first_whole > last_whole:
            yield offset, length  # inside one sector
            return
        cuts = (offset, first_whole, last_whole, end)
        for start, stop in pairwise(cuts):
            if stop > start:
                yield start, stop - start

    def _is_whole(self, offset: int, length: int) -> bool:
        return offset % self._sector_bytes == length % self._sector_bytes == 0

    def _check(self, offset: int, length: int) -> None:
        if not self._size:
            raise UnavailableError("disk.closed", "the disk isn't open")
        if offset < 0 or length < 0 or offset + length > self._size:
            raise UsageError(
                "disk.range",
                f"{length} bytes at {offset}; allowed: inside the disk's {self._size} bytes",
            )

    def _check_whole(self, pieces: Sequence[tuple[int, int]]) -> None:
        if self._queues.has_compare_and_write or all(self._is_whole(*piece) for piece in pieces):
            return
        raise UsageError(
            "disk.unaligned",
            "the controller offers no compare-and-write: writes must cover whole sectors of "
            f"{self._sector_bytes} bytes",
        )

    async def _read_part(self, offset: int, into: memoryview) -> None:
        size = self._sector_bytes
        lba = offset // size
        if self._is_whole(offset, len(into)):
            await self._queues.run(lambda queue: queue.read(lba, into))
        else:
            sector = bytearray(size)
            await self._queues.run(lambda queue: queue.read(lba, sector))
            start = offset % size
            into[:] = sector[start : start + len(into)]

    async def _write_whole(self, offset: int, data: memoryview, *, is_forced: bool) -> None:
        lba = offset // self._sector_bytes
        await self._queues.run(lambda queue: queue.write(lba, data, is_forced=is_forced))

    async def _zero_whole(self, offset: int, length: int) -> None:
        size = self._sector_bytes
        await self._queues.run(lambda queue: queue.write_zeroes(offset // size, length // size))

    async def _change(self, offset: int, data: memoryview) -> None:
        """Replace bytes of one sector, atomically against other writers."""
        lba, start = divmod(offset, self._sector_bytes)
        async with self._only_changer(lba):
            for attempt in range(CHANGE_ATTEMPTS_MAX):
                if await self._try_change(lba, start, data):
                    return
                longest = _CHANGE_PAUSE_SECONDS * 2.0 ** min(attempt, 16)
                pause = random.uniform(0, min(longest, _CHANGE_PAUSE_SECONDS_MAX))  # noqa: S311
                await asyncio.sleep(pause)
        raise UnavailableError(
            "disk.contended",
            f"others changed LBA {lba} before each of {CHANGE_ATTEMPTS_MAX} attempts to write it",
        )

    async def _try_change(self, lba: int, start: int, data: memoryview) -> bool:
        old = bytearray(self._sector_bytes)
        await self._queues.run(lambda queue: queue.read(lba, old))
        new = bytearray(old)
        new[start : start + len(data)] = data
        if new == old:
            return True

        async def compare_and_write(queue: VolumeQueue) -> None:
            await queue.compare_and_write(lba, old, new)

        try:
            await self._queues.run(compare_and_write)
        except NvmeStatusError as error:
            if error.status != _COMPARE_FAILURE:
                raise
            return False
        return True

    # Bounds and errors.

    @contextlib.asynccontextmanager
    async def _only_changer(self, lba: int) -> AsyncIterator[None]:
        """Let one call of this disk at a time change a sector: others wait."""
        lock, users = self._changing.get(lba, (asyncio.Lock(), 0))
        self._changing[lba] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._changing.pop(lba)
            if users > 1:
                self._changing[lba] = lock, users - 1

    @contextlib.asynccontextmanager
    async def _turn(self, offset: int) -> AsyncIterator[None]:
        async with self._turns:
            try:
                yield
            except NvmeStatusError as error:
                if not error.is_verification_failure:
                    raise
                lba = offset // self._sector_bytes if error.lba is None else error.lba
                raise SectorVerificationError(error.reason, str(error.args[0]), lba=lba) from error


async def _together(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; raise the first error after all have ended."""
    if len(parts) == 1:
        await parts[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(part)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
