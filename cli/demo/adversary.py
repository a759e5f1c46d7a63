"""The demo's adversaries: one owns the network between gateway and target, one the target's disk.

Neither has a key. The network adversary is a relay that understands just enough NVMe/TCP to find
write capsules (NVMe/TCP Transport 3.6: common header with type, then length at bytes 4–7).
"""

import asyncio
import contextlib
import enum
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

from sealane.protocol.sector import METADATA_BYTES, SECTOR_BYTES

COMMON_HEADER_BYTES = 8
PDU_BYTES_MAX = 1 << 20
CAPSULE_COMMAND = 0x04
WRITE = 0x01
SLBA_OFFSET = COMMON_HEADER_BYTES + 40  # CDW10 of the submission entry
SLOT_BYTES = SECTOR_BYTES + METADATA_BYTES
NODES_PER_PAGE = 248


class WireAttack(enum.Enum):
    """The relay's attack on the next writes."""

    NONE = "none"
    REPLAY = "replay"
    REDIRECT = "redirect"


class WireAdversary:
    """A TCP relay towards the target that can record, replay and redirect writes."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._attack = WireAttack.NONE
        self._recorded: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.attacks_made = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Relay until the block is left; yields the port to connect to."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def arm(self, attack: WireAttack) -> None:
        """Choose the attack on the next writes."""
        self._attack = attack
        self._recorded = None

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine always runs in a task
        self._tasks.add(task)
        # When either side closes, even in the middle of a PDU, the relay ends.
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._relay_both_ways(reader, writer)
        self._tasks.discard(task)

    async def _relay_both_ways(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        with contextlib.closing(upstream_writer), contextlib.closing(writer):
            pumps = [
                asyncio.ensure_future(self._pump_commands(reader, upstream_writer)),
                asyncio.ensure_future(pump_bytes(upstream_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_commands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay PDU by PDU, applying the armed attack."""
        while True:
            header = await reader.readexactly(COMMON_HEADER_BYTES)
            (length,) = struct.unpack_from("<I", header, 4)
            if not COMMON_HEADER_BYTES <= length <= PDU_BYTES_MAX:
                return
            pdu = header + await reader.readexactly(length - COMMON_HEADER_BYTES)
            for outgoing in self._attacked(pdu):
                writer.write(outgoing)
            await writer.drain()

    def _attacked(self, pdu: bytes) -> list[bytes]:
        is_write = pdu[0] == CAPSULE_COMMAND and pdu[COMMON_HEADER_BYTES] == WRITE
        if not is_write or self._attack is WireAttack.NONE:
            return [pdu]
        if self._attack is WireAttack.REDIRECT:
            self._attack = WireAttack.NONE
            self.attacks_made += 1
            (lba,) = struct.unpack_from("<Q", pdu, SLBA_OFFSET)
            return [pdu[:SLBA_OFFSET] + struct.pack("<Q", lba + 1) + pdu[SLBA_OFFSET + 8 :]]
        if self._recorded is None:
            self._recorded = pdu
            return [pdu]
        # The newer write has passed; now replay the older one.
        self._attack = WireAttack.NONE
        self.attacks_made += 1
        return [pdu, self._recorded]


async def pump_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Relay bytes until the end of the stream."""
    while chunk := await reader.read(1 << 18):
        writer.write(chunk)
        await writer.drain()


def block_start(path: Path, lba: int) -> int:
    """Return the byte offset of a sector's block in an inline store (stores.md §2b).

    The freshness tree and its log, if the store has them, precede the blocks.
    """
    with path.open("rb") as file:
        superblock = file.read(SLOT_BYTES)
    if not superblock.startswith(b"SEALSTOR"):
        return lba * SLOT_BYTES
    sizes: tuple[int, int, int, int] = struct.unpack_from("<4Q", superblock, 64)
    block_count, leaf_entries, _, log_pages = sizes
    sets = -(-block_count // leaf_entries)
    node_pages = -(-sets // NODES_PER_PAGE)
    return (3 + log_pages + 2 * node_pages + 2 * sets + lba) * SLOT_BYTES


class DiskAdversary:
    """Owns the file with a volume's sectors, data and metadata side by side."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_slot(self, lba: int) -> bytes:
        """Return the 4160 bytes stored for a sector."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            return os.pread(descriptor, SLOT_BYTES, block_start(self._path, lba))
        finally:
            os.close(descriptor)

    def write_slot(self, lba: int, slot: bytes) -> None:
        """Overwrite the 4160 bytes stored for a sector."""
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, slot, block_start(self._path, lba))
        finally:
            os.close(descriptor)

    def flip_bit(self, lba: int, bit: int) -> None:
        """Flip one bit of a stored sector."""
        slot = bytearray(self.read_slot(lba))
        slot[bit // 8] ^= 1 << (bit % 8)
        self.write_slot(lba, bytes(slot))
