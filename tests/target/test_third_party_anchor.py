"""Anchored volumes on third-party targets: rollbacks, forks and foreign anchors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.errors import UnavailableError, VerificationError
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from target.third_party import (
    IN_PLACE_PAGES,
    PAGE,
    SECTORS,
    SLOTS_START,
    World,
    read,
    third_party_world,
)

both_layouts = pytest.mark.parametrize("metadata", [False, True], ids=["pages", "sectors"])


@pytest.fixture
def metadata() -> bool:
    """Whether blocks have metadata; they do by default."""
    return True


@pytest.fixture
async def world(tmp_path: Path, metadata: bool) -> AsyncIterator[World]:
    async with third_party_world(tmp_path, metadata=metadata, hold_seconds=0.5) as made:
        yield made


async def written(world: World, content: bytes) -> bytes:
    """Write and flush sector 10, detach; return a copy of the namespace."""
    async with world.attached() as queue:
        await queue.write(10, content * PAGE)
        await queue.flush()
    return world.image.read_bytes()


@both_layouts
async def test_whole_namespace_put_back_while_detached_is_refused(world: World) -> None:
    await world.create()
    old = await written(world, b"1")
    newest = await written(world, b"2")
    world.put(0, old)
    for _ in range(2):
        with pytest.raises(VerificationError) as caught:
            await world.open()
        assert caught.value.reason == "store.rolled_back"
    world.put(0, newest)
    async with world.attached() as queue:
        assert await read(queue, 10, 1) == b"2" * PAGE


async def test_without_an_anchor_that_is_not_noticed_and_nobody_promises_it(world: World) -> None:
    world.is_anchored = False
    await world.create()
    old = await written(world, b"1")
    await written(world, b"2")
    world.put(0, old)
    async with world.attached() as queue:
        # docs/operate/third-party.md describes `--anchor none`.
        assert await read(queue, 10, 1) == b"1" * PAGE


@both_layouts
async def test_one_sector_put_back_while_detached_is_refused(world: World) -> None:
    """The whole namespace is current except for one older sector."""
    await world.create()
    old = await written(world, b"1")
    newest = await written(world, b"2")
    block = PAGE + 64 if world.metadata else PAGE
    places = [at for at in range(0, len(old), block) if _is_data(world, old, newest, at)]
    assert places
    for at in places:
        if any(old[at : at + block]):
            mixed = newest[:at] + old[at : at + block] + newest[at + block :]
        else:
            # Out of place, the newest version has its own, previously empty, slot.
            mixed = newest[:at] + bytes(block) + newest[at + block :]
        world.put(0, mixed)
        async with world.attached() as queue:
            with pytest.raises(NvmeStatusError):
                await read(queue, 10, 1)


def _is_data(world: World, old: bytes, newest: bytes, at: int) -> bool:
    """Return whether the block is a version of the sector, not one of the store's pages."""
    block = PAGE + 64 if world.metadata else PAGE
    start = _data_start(world) * block
    return at >= start and old[at : at + block] != newest[at : at + block]


def _data_start(world: World) -> int:
    return IN_PLACE_PAGES if world.metadata else SLOTS_START


@both_layouts
async def test_whole_namespace_put_back_at_a_reconnect_is_refused(world: World) -> None:
    await world.create()
    old = await written(world, b"1")
    async with world.attached() as queue:
        await queue.write(10, b"2" * PAGE)
        await queue.flush()
        await world.plain.apply([])
        newest = world.image.read_bytes()
        world.put(0, old)
        await world.plain.apply([world.config()])
        with pytest.raises(NvmeStatusError):
            await read(queue, 10, 1)
        await world.plain.apply([])
        world.put(0, newest)
        await world.plain.apply([world.config()])
        assert await read_in_time(queue) == b"2" * PAGE


async def read_in_time(queue: VolumeQueue) -> bytes:
    """Read sector 10 as soon as the gateway has reopened its store."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(NvmeStatusError):
                return await read(queue, 10, 1)


async def read_until_refused(queue: VolumeQueue) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await read(queue, 10, 1)


async def delayed_by(world: World) -> set[str]:
    """Return the reason why the gateway couldn't reopen its store."""
    assert world.port is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            events = world.port.take_events()
            reasons = {each.reason for each in events if each.kind == "association_delayed"}
            if reasons:
                return reasons
            await asyncio.sleep(0)


async def test_of_two_gateways_the_one_that_opened_first_can_neither_flush_nor_go_on(
    world: World,
) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE)
        await queue.flush()
        # Another machine with the same node name and its own lock.
        taken_over = await world.broker.open()
        kept = world.broker.records
        await queue.write(10, b"2" * PAGE)
        with pytest.raises(NvmeStatusError):
            await queue.flush()
        # Then it releases the store, which the other may have changed.
        with pytest.raises(NvmeStatusError):
            await read_until_refused(queue)
        assert world.broker.records == kept
        # It doesn't even try to open it, because opening writes before it anchors.
        assert await delayed_by(world) == {"device.fenced"}
        await taken_over.close()


async def test_new_gateway_finds_the_anchor_of_the_old_one(world: World, tmp_path: Path) -> None:
    """The anchor belongs to the volume, wherever the gateway kept its files."""
    await world.create()
    old = await written(world, b"1")
    newest = await written(world, b"2")
    (tmp_path / "moved").mkdir()
    async with third_party_world(
        tmp_path / "moved", metadata=world.metadata, hold_seconds=0.5
    ) as other:
        other.image.write_bytes(old)
        await other.plain.apply([])
        await other.plain.apply([other.config()])
        other.volume_id, other.key, other.store_key = world.volume_id, world.key, world.store_key
        other.broker, other.attachments = world.broker, 10
        with pytest.raises(VerificationError) as caught:
            await other.open()
        assert caught.value.reason == "store.rolled_back"
        other.put(0, newest)
        async with other.attached() as queue:
            assert await read(queue, 10, 1) == b"2" * PAGE


async def test_lost_anchor_and_one_of_another_state_open_nothing(world: World) -> None:
    """A state of the namespace is refused if the anchor names another one."""
    await world.create()
    await written(world, b"1")
    newest = await written(world, b"2")
    kept = world.broker.records
    name = next(iter(kept))
    blob = bytearray(kept[name].blob)
    blob[20] ^= 1
    for records in ({}, {name: type(kept[name])(number=kept[name].number, blob=bytes(blob))}):
        world.broker.records = dict(records)
        with pytest.raises(VerificationError) as caught:
            await world.open()
        assert caught.value.reason == "store.rolled_back"
    world.broker.records = kept
    world.put(0, newest)
    async with world.attached() as queue:
        assert await read(queue, 10, 1) == b"2" * PAGE


async def test_flush_waits_for_the_anchor(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE)
        before = world.broker.records
        world.broker.is_silent = True
        world.broker.was_asked.clear()
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(queue.flush())
            await world.broker.was_asked.wait()
            assert not flushing.done()
            world.broker.is_silent = False
        assert world.broker.records != before
        assert await read(queue, 10, 1) == b"1" * PAGE


async def test_what_was_laid_out_is_not_laid_out_again_nor_believed(world: World) -> None:
    await world.create()
    old = await written(world, b"1")
    newest = await written(world, b"2")
    await world.create()
    async with world.attached() as queue:
        assert await read(queue, 10, 1) == b"2" * PAGE
    newest = world.image.read_bytes()
    world.put(0, old)
    with pytest.raises(VerificationError):
        await world.create()
    # An emptied namespace isn't a new one.
    world.put(0, bytes(len(newest)))
    for use in (world.create(), world.open()):
        with pytest.raises((UnavailableError, Exception), match=r"not a Sealane store|laid out"):
            await use
    world.put(0, newest)
    async with world.attached() as queue:
        assert await read(queue, 10, 1) == b"2" * PAGE


async def test_laying_out_that_was_cut_short_is_begun_anew(world: World) -> None:
    await world.create()
    world.broker.is_initialised = False
    world.put(0, bytes(PAGE))
    await world.create()
    assert world.broker.is_initialised
    async with world.attached() as queue:
        assert await read(queue, 0, SECTORS) == bytes(SECTORS * PAGE)
