"""The tenant's host at command level: many commands in flight, any opcode, any field.

It uses the plain front end like any host, with the product's own association.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final, Self

from attacks.pdus import (
    COMMON_BYTES,
    COMPARE,
    DATASET,
    FLUSH,
    FORCE_UNIT_ACCESS,
    READ,
    WRITE,
    WRITE_ZEROES,
    Kind,
    Pdu,
    Way,
    command,
    data_pdu,
    parse,
)
from sealane.client import Attachment
from sealane.daemon.gateway.grants import Export
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController

SECTOR: Final = 4096
IN_CAPSULE_BYTES: Final = 8192
TIMEOUT_SECONDS: Final = 60.0
_DEALLOCATE: Final = 0x04
SUCCESS_FLAG: Final = 0x08
VERIFICATION_STATUSES: Final = (0x282, 0x283, 0x284)


class CommandError(Exception):
    """A command completed with an error status (type and code)."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status:#05x}")
        self.status = status


class QueueLost(Exception):  # noqa: N818 - what happened, not an error of ours
    """The connection ended while a command was in flight."""


async def say(address: tuple[str, int], content: bytes, *, ends: bool = False) -> bytes:
    """Send bytes on a new connection and return everything received until it is closed."""
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.closing(writer):
        writer.write(content)
        if ends:
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


class RawQueue:
    """A plain I/O queue. Data of reads is collected by command id."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._writes: dict[int, bytes] = {}
        self._data: dict[int, bytearray] = {}
        self._ids = 0
        self._pump = asyncio.ensure_future(self._receive())

    @classmethod
    @contextlib.asynccontextmanager
    async def association(
        cls, attachment: Attachment | Export, *, host_nqn: str, secret: str, count: int
    ) -> AsyncIterator[list[Self]]:
        """Connect a controller with `count` I/O queues."""
        host = HostController(
            traddr=attachment.traddr,
            trsvcid=attachment.trsvcid,
            subsystem_nqn=attachment.subsystem_nqn,
            host_nqn=host_nqn,
            credentials=Credentials(secret=HostSecret.parse(secret)),
        )
        async with host:
            await host.request_queues(count)
            queues: list[Self] = []
            try:
                for queue_id in range(1, count + 1):
                    connected = await host.connect_queue(queue_id)
                    queues.append(await cls._open(connected.socket))
                yield queues
            finally:
                for queue in queues:
                    await queue.close()

    @classmethod
    async def _open(cls, connection: socket.socket) -> Self:
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(reader, writer)

    def submit(
        self,
        opcode: int,
        *,
        lba: int = 0,
        blocks: int = 1,
        data: bytes | bytearray = b"",
        control: int = 0,
        transfer: int = 0,
        fused: int = 0,
    ) -> "asyncio.Future[bytes]":
        """Send a command; return a future of its read data."""
        self._ids = (self._ids + 1) % 0x7FFF
        cid = self._ids
        data = bytes(data)
        in_capsule = data if len(data) <= IN_CAPSULE_BYTES else b""
        pdu = command(
            0, opcode, cid, lba=lba, blocks=blocks, data=in_capsule, transfer=transfer or len(data)
        )
        pdu.control = int(pdu.control) | control
        pdu.header[9] |= fused
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[cid] = future
        self._writes[cid] = b"" if in_capsule else data
        self._data[cid] = bytearray()
        if self._pump.done():
            future.set_exception(QueueLost("the queue had ended"))
        else:
            self._writer.write(pdu.encode())
        return future

    async def write(self, lba: int, data: bytes | bytearray, *, is_forced: bool = False) -> None:
        """Write whole sectors."""
        control = FORCE_UNIT_ACCESS if is_forced else 0
        blocks = len(data) // SECTOR
        await self._end(self.submit(WRITE, lba=lba, blocks=blocks, data=data, control=control))

    async def read(self, lba: int, blocks: int = 1) -> bytes:
        """Read whole sectors."""
        data = await self._end(self.start_read(lba, blocks))
        assert len(data) == blocks * SECTOR
        return data

    def start_read(self, lba: int, blocks: int = 1) -> "asyncio.Future[bytes]":
        """Send a read."""
        return self.submit(READ, lba=lba, blocks=blocks, transfer=blocks * SECTOR)

    async def flush(self) -> None:
        """Flush."""
        pending = self.submit(FLUSH)
        await self._end(pending)

    async def deallocate(self, lba: int, blocks: int) -> None:
        """Deallocate one range."""
        ranges = bytes(4) + blocks.to_bytes(4, "little") + lba.to_bytes(8, "little")
        await self._end(self.submit(DATASET, lba=_DEALLOCATE << 32, data=ranges))

    async def write_zeroes(self, lba: int, blocks: int) -> None:
        """Write zeroes."""
        await self._end(self.submit(WRITE_ZEROES, lba=lba, blocks=blocks))

    async def compare_and_write(self, lba: int, expected: bytes, data: bytes) -> None:
        """Write a sector if it holds `expected`; both commands of the fused pair must succeed."""
        compared = self.submit(COMPARE, lba=lba, data=expected, fused=0x01)
        written = self.submit(WRITE, lba=lba, data=data, fused=0x02)
        ends = await asyncio.gather(self._end(compared), self._end(written), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def close(self) -> None:
        """End the queue."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        for future in self._waiting.values():
            future.cancel()

    @staticmethod
    async def _end(pending: "asyncio.Future[bytes]") -> bytes:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await pending

    async def _receive(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(COMMON_BYTES)
                rest = await self._reader.readexactly(int.from_bytes(head[4:8], "little") - 8)
                self._take(parse(0, Way.TO_GATEWAY, head + rest))
        except (OSError, asyncio.IncompleteReadError) as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(QueueLost(str(error)))
                    future.exception()  # Retrieved: the test may await another command.

    def _take(self, pdu: Pdu) -> None:
        cid = pdu.cid
        if pdu.kind == Kind.R2T:
            start, length = int(pdu.transfer_offset), int(pdu.transfer_bytes)
            part = self._writes[cid][start : start + length]
            answer = data_pdu(0, Kind.H2C_DATA, cid, part, offset=start, tag=pdu.tag)
            self._writer.write(answer.encode())
        elif pdu.kind == Kind.C2H_DATA:
            self._data[cid] += pdu.data
            if pdu.flags & SUCCESS_FLAG:
                self._finish(cid, 0)
        elif pdu.kind == Kind.RESPONSE:
            self._finish(cid, int(pdu.status) >> 1 & 0x7FF)

    def _finish(self, cid: int, status: int) -> None:
        future, data = self._waiting.pop(cid), self._data.pop(cid)
        if future.done():
            return
        if status:
            future.set_exception(CommandError(status))
            future.exception()
        else:
            future.set_result(bytes(data))
