"""Tests of the demo's adversaries: a refusal proves something only if the attack happened."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sealane.cli.demo.adversary import (
    SLBA_OFFSET,
    SLOT_BYTES,
    DiskAdversary,
    WireAdversary,
    WireAttack,
)


def write_capsule(lba: int, fill: int) -> bytes:
    """Return a CapsuleCmd PDU that writes one sector; only fields read by a relay are set."""
    pdu = bytearray(72 + 512)
    pdu[:8] = struct.pack("<BBBBI", 0x04, 0, 72, 72, len(pdu))
    pdu[8] = 0x01
    struct.pack_into("<Q", pdu, SLBA_OFFSET, lba)
    pdu[72:] = bytes([fill]) * 512
    return bytes(pdu)


class Wire:
    """A sender, and what arrives beyond the adversary."""

    def __init__(self, adversary: WireAdversary, writer: asyncio.StreamWriter) -> None:
        self.adversary = adversary
        self.writer = writer
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, pdu: bytes) -> None:
        self.writer.write(pdu)
        await self.writer.drain()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    connected: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()

    async def target(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await connected
        try:
            while True:
                header = await reader.readexactly(8)
                (length,) = struct.unpack_from("<I", header, 4)
                link.arrived.put_nowait(header + await reader.readexactly(length - 8))
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(target, "127.0.0.1", 0)
    adversary = WireAdversary(*server.sockets[0].getsockname()[:2])
    async with adversary.listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        link = Wire(adversary, writer)
        connected.set_result(link)
        yield link
        writer.close()
    server.close()
    await server.wait_closed()


async def test_unarmed_relay_changes_nothing(wire: Wire) -> None:
    await wire.send(write_capsule(3, 1))
    assert await wire.arrived.get() == write_capsule(3, 1)


async def test_redirect_changes_the_lba_of_one_write(wire: Wire) -> None:
    wire.adversary.arm(WireAttack.REDIRECT)
    await wire.send(write_capsule(3, 1))
    await wire.send(write_capsule(3, 2))
    assert await wire.arrived.get() == write_capsule(4, 1)
    assert await wire.arrived.get() == write_capsule(3, 2)
    assert wire.adversary.attacks_made == 1


async def test_replay_brings_the_older_write_after_the_newer(wire: Wire) -> None:
    wire.adversary.arm(WireAttack.REPLAY)
    await wire.send(write_capsule(3, 1))
    await wire.send(write_capsule(3, 2))
    arrived = [await wire.arrived.get() for _ in range(3)]
    assert arrived == [write_capsule(3, 1), write_capsule(3, 2), write_capsule(3, 1)]
    assert wire.adversary.attacks_made == 1


def test_disk_adversary_flips_exactly_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(bytes(3 * SLOT_BYTES))
    disk = DiskAdversary(path)
    disk.flip_bit(1, 8 * 100 + 3)
    expected = bytearray(3 * SLOT_BYTES)
    expected[SLOT_BYTES + 100] = 8
    assert path.read_bytes() == bytes(expected)
