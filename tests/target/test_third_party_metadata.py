"""Volumes on third-party namespaces with 64 bytes of metadata: each sector is one block."""

import secrets
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sealane.errors import UnavailableError, UsageError
from sealane.transport.nvme.errors import NvmeStatusError
from target.third_party import (
    IN_PLACE_PAGES,
    INVALID_OPCODE,
    PAGE,
    SECTORS,
    World,
    read,
    third_party_world,
)

BLOCK = PAGE + 64


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with third_party_world(tmp_path, metadata=True) as made:
        yield made


async def lay_out(world: World) -> None:
    """Format the volume; in mode off, fill it, as the gateway does before the first attach."""
    await world.create()
    if world.is_off:
        async with world.attached() as queue:
            await queue.write_zeroes(0, SECTORS)


def place(world: World, lba: int) -> int:
    """Return the offset of a sector's block: after the label (mode off) or the store's pages."""
    return ((1 if world.is_off else IN_PLACE_PAGES) + lba) * BLOCK


def stored(world: World, lba: int) -> bytes:
    with world.image.open("rb") as file:
        file.seek(place(world, lba))
        return file.read(BLOCK)


def store(world: World, lba: int, block: bytes) -> None:
    with world.image.open("r+b") as file:
        file.seek(place(world, lba))
        file.write(block)


@pytest.mark.slow
@pytest.mark.parametrize("is_off", [False, True])
async def test_what_is_written_comes_back_after_detach_and_lies_sealed_in_its_place(
    world: World, is_off: bool
) -> None:
    world.is_off = is_off
    await lay_out(world)
    content = secrets.token_bytes(100 * PAGE)
    async with world.attached() as queue:
        assert await read(queue, 0, SECTORS) == bytes(SECTORS * PAGE)
        await queue.write(3, content)
        await queue.write_zeroes(50, 10)
        if is_off:
            with pytest.raises(NvmeStatusError) as caught:
                await queue.deallocate([(3, 1)])
            assert caught.value.status == INVALID_OPCODE
        else:
            await queue.deallocate([(102, 1)])
        await queue.compare_and_write(200, bytes(PAGE), b"b" * PAGE)
        with pytest.raises(NvmeStatusError):
            await queue.compare_and_write(200, bytes(PAGE), b"c" * PAGE)
    end = content[57 * PAGE :] if is_off else content[57 * PAGE : -PAGE] + bytes(PAGE)
    expected = content[: 47 * PAGE] + bytes(10 * PAGE) + end
    async with world.attached() as queue:
        assert await read(queue, 3, 100) == expected
        assert await read(queue, 200, 1) == b"b" * PAGE
    image = world.image.read_bytes()
    assert all(content[at : at + 16] not in image for at in range(0, len(content), PAGE))
    assert stored(world, 3)[-2:] == b"\x01\x00", "version and flags of a sealed sector"


async def test_lost_third_party_costs_the_host_a_pause_and_no_acknowledged_write(
    world: World,
) -> None:
    await lay_out(world)
    async with world.attached() as queue:
        await queue.write(0, b"f" * PAGE * 8)
        await queue.flush()
        await queue.write(4, b"u" * PAGE * 8)
        await world.plain.apply([])
        await world.plain.apply([world.config()])
        assert await read(queue, 0, 12) == b"f" * PAGE * 4 + b"u" * PAGE * 8
    assert world.fences


async def test_older_sector_put_back_while_attached_is_refused(world: World) -> None:
    await lay_out(world)
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE, is_forced=True)
        old = stored(world, 10)
        await queue.write(10, b"2" * PAGE, is_forced=True)
        store(world, 10, old)
        with pytest.raises(NvmeStatusError):
            await read(queue, 10, 1)


@pytest.mark.parametrize("is_off", [False, True])
async def test_older_sector_put_back_while_detached_is_refused_but_in_mode_off(
    world: World, is_off: bool
) -> None:
    world.is_off = is_off
    await lay_out(world)
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE)
    old = stored(world, 10)
    async with world.attached() as queue:
        await queue.write(10, b"2" * PAGE)
    # Opening makes a checkpoint: from then on no record is taken for one that was never durable.
    await (await world.open()).close()
    store(world, 10, old)
    async with world.attached() as queue:
        if is_off:
            # docs/operate/third-party.md: nothing determines which version of a sector is current.
            assert await read(queue, 10, 1) == b"1" * PAGE
        else:
            with pytest.raises(NvmeStatusError):
                await read(queue, 10, 1)


@pytest.mark.parametrize("is_off", [False, True])
async def test_erased_changed_and_moved_sectors_are_errors(world: World, is_off: bool) -> None:
    world.is_off = is_off
    await lay_out(world)
    async with world.attached() as queue:
        await queue.write(10, secrets.token_bytes(3 * PAGE))
    # Opening makes a checkpoint: from then on no record is taken for one that was never durable.
    await (await world.open()).close()
    genuine = stored(world, 10)
    changed = bytearray(genuine)
    changed[77] ^= 1
    without_iv = genuine[: PAGE + 16] + bytes(12) + genuine[PAGE + 28 :]
    for forged in (bytes(BLOCK), without_iv, bytes(changed), stored(world, 11)):
        store(world, 10, forged)
        async with world.attached() as queue:
            with pytest.raises(NvmeStatusError):
                await read(queue, 10, 1)
            assert len(await read(queue, 12, 1)) == PAGE
    store(world, 10, genuine)
    async with world.attached() as queue:
        assert len(await read(queue, 10, 1)) == PAGE


@pytest.mark.parametrize("is_off", [False, True])
async def test_store_that_is_not_the_volumes_is_refused(world: World, is_off: bool) -> None:
    world.is_off = is_off
    await lay_out(world)
    other = uuid.uuid4()
    with pytest.raises(UsageError) as caught:
        await world.stores.create("disks", other, sector_count=SECTORS, store_key=bytearray(32))
    assert caught.value.reason == "third_party.occupied"
    genuine = world.store_key
    world.store_key = bytes(32)
    with pytest.raises(UnavailableError, match="forged"):
        await world.open()
    world.store_key = genuine
    await (await world.open()).close()
    await world.stores.delete("disks", world.volume_id)
    with pytest.raises(UnavailableError, match="not a Sealane store"):
        await world.open()
