"""A running gateway detects a store that lost data reported as flushed."""

import shutil
from pathlib import Path

import pytest

from sealane.errors import ProtocolError, VerificationError
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from target.pair import SECTORS, World, make_world

PAGE = 4096
LBA = 9


async def write(queue: VolumeQueue, byte: bytes) -> None:
    await queue.write(LBA, byte * PAGE)
    await queue.flush()


async def read(queue: VolumeQueue) -> bytes:
    found = bytearray(PAGE)
    await queue.read(LBA, found)
    return bytes(found)


async def reopen(world: World, *, older: Path | None = None) -> None:
    """Reopen the store, rolled back if there is an older copy."""
    assert world.path is not None
    await world.target.close_volume(world.volume_id)
    if older is not None:
        shutil.copyfile(older, world.path)
    await world.target.open_volume(world.volume_id, sector_count=SECTORS)


async def test_store_put_back_behind_a_flush_fails_the_volume_of_the_gateway_that_lives(
    tmp_path: Path,
) -> None:
    older = tmp_path / "older"
    async with make_world(tmp_path / "stores") as world, world.queue() as queue:
        assert world.path is not None
        await write(queue, b"1")
        await reopen(world)
        assert await read(queue) == b"1" * PAGE
        shutil.copyfile(world.path, older)
        await write(queue, b"2")
        await reopen(world, older=older)
        with pytest.raises(NvmeStatusError):
            await read(queue)
        await world.reason("volume.rolled_back")
        # New queues are refused, too.
        with pytest.raises(NvmeStatusError):
            async with world.queue():
                pass


async def test_store_says_what_it_contains(tmp_path: Path) -> None:
    async with make_world(tmp_path) as world:
        first = world.target.milestone(world.volume_id)
        async with world.queue() as queue:
            await write(queue, b"1")
        flushed = world.target.milestone(world.volume_id)
        await reopen(world)
        for told in (b"", bytes(32), first, flushed):
            world.target.require_milestone(world.volume_id, told)
        later = flushed[:24] + (int.from_bytes(flushed[24:], "little") + 1).to_bytes(8, "little")
        for told in (later, b"\1" + bytes(31), bytes([flushed[0] ^ 1]) + flushed[1:]):
            with pytest.raises(VerificationError) as caught:
                world.target.require_milestone(world.volume_id, told)
            assert caught.value.reason == "volume.rolled_back"
        for length in (31, 33):
            with pytest.raises(ProtocolError):
                world.target.require_milestone(world.volume_id, bytes(length))
