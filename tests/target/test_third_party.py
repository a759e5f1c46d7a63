"""Volumes on a target that isn't ours: for the gateway, an ordinary namespace in a file."""

import asyncio
import os
import secrets
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.transport.nvme.errors import NvmeStatusError
from target.third_party import (
    INVALID_OPCODE,
    LOG_START,
    PAGE,
    PAGES,
    SECTORS,
    SLOTS_START,
    World,
    read,
    third_party_world,
)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with third_party_world(tmp_path) as made:
        yield made


async def test_what_is_written_comes_back_after_detach_and_is_not_in_the_clear(
    world: World,
) -> None:
    await world.create()
    content = secrets.token_bytes(100 * PAGE)
    async with world.attached() as queue:
        await queue.write(3, content)
        assert await read(queue, 3, 100) == content
        assert await read(queue, 200, 2) == bytes(2 * PAGE)
        await queue.deallocate([(50, 10)])
    async with world.attached() as queue:
        expected = content[: 47 * PAGE] + bytes(10 * PAGE) + content[57 * PAGE :]
        assert await read(queue, 3, 100) == expected
    stored = world.image.read_bytes()
    assert all(content[at : at + 16] not in stored for at in range(0, len(content), PAGE))
    assert world.fences == [], "every end was in good order"


async def test_lost_third_party_costs_the_host_a_pause_and_no_acknowledged_write(
    world: World,
) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(0, b"f" * PAGE * 8)
        await queue.flush()
        # Acknowledged but not flushed: the store's table had them only in memory.
        await queue.write(4, b"u" * PAGE * 8)
        await world.plain.apply([])
        await world.plain.apply([world.config()])
        assert await read(queue, 0, 12) == b"f" * PAGE * 4 + b"u" * PAGE * 8
        await queue.write(2, b"n" * PAGE)
        await queue.flush()
    assert world.fences, "what was on its way had to be waited for"
    async with world.attached() as queue:
        expected = b"f" * PAGE * 2 + b"n" * PAGE + b"f" * PAGE + b"u" * PAGE * 8
        assert await read(queue, 0, 12) == expected


async def test_volume_in_use_cannot_be_attached_or_deleted_a_second_time(world: World) -> None:
    await world.create()
    back = await world.open()
    try:
        for use in (world.open(), world.stores.delete("disks", world.volume_id)):
            with pytest.raises(UnavailableError) as caught:
                await use
            assert caught.value.reason == "third_party.busy"
    finally:
        await back.close()
    await world.stores.delete("disks", world.volume_id)


async def test_attach_after_a_process_that_was_killed_waits_for_what_it_had_on_its_way(
    world: World, tmp_path: Path
) -> None:
    await world.create()
    (tmp_path / "third-party" / "disks.lock").write_text("in use\n")
    back = await world.open()
    await back.close()
    assert len(world.fences) == 1
    await (await world.open()).close()
    assert len(world.fences) == 1, "that one ended in good order"


async def test_older_association_is_refused(world: World) -> None:
    await world.create()
    back = await world.open()
    try:
        first = await back.open_queue(1, 5)
        with pytest.raises(Exception, match="epoch 4"):
            await back.open_queue(1, 4)
        second = await back.open_queue(1, 6)
        assert second.target_incarnation != first.target_incarnation
    finally:
        await back.close()
    with pytest.raises(UnavailableError):
        await back.open_queue(1, 7)


async def test_namespace_that_holds_something_is_not_taken(world: World) -> None:
    world.put(0, bytes(1080) + b"\x53\xef")
    with pytest.raises(UsageError) as caught:
        await world.create()
    assert caught.value.reason == "third_party.occupied"
    assert world.pages(0, 1)[1080:1082] == b"\x53\xef"


async def test_namespace_holds_one_volume_until_that_is_deleted(world: World) -> None:
    await world.create()
    await world.create()
    other = uuid.uuid4()
    with pytest.raises(UsageError, match="holds something"):
        await world.stores.create("disks", other, sector_count=SECTORS, store_key=bytearray(32))
    with pytest.raises(UnavailableError, match="another store"):
        await world.stores.delete("disks", other)
    await (await world.open()).close()
    await world.stores.delete("disks", world.volume_id)
    await world.stores.create("disks", other, sector_count=SECTORS, store_key=bytearray(32))
    with pytest.raises(UnavailableError, match=r"another store|forged"):
        await world.open()


async def test_namespace_that_is_too_small_or_not_configured_is_refused(world: World) -> None:
    with pytest.raises(UnavailableError, match=f"has {PAGES} pages"):
        await world.stores.create(
            "disks", world.volume_id, sector_count=SECTORS + 50, store_key=bytearray(32)
        )
    with pytest.raises(UsageError, match="disks"):
        await world.stores.create(
            "elsewhere", world.volume_id, sector_count=SECTORS, store_key=bytearray(32)
        )


# Attacks on data stored by the third party.


async def test_changed_or_swapped_sectors_are_errors(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(10, secrets.token_bytes(4 * PAGE), is_forced=True)
        first, second, third, fourth = (SLOTS_START + slot for slot in world.used_slots())
        changed = bytearray(world.pages(first, 1))
        changed[77] ^= 1
        world.put(first, bytes(changed))
        a, b = world.pages(second, 1), world.pages(third, 1)
        world.put(second, b)
        world.put(third, a)
        for lba in (10, 11, 12):
            with pytest.raises(NvmeStatusError):
                await read(queue, lba, 1)
        assert fourth
        assert len(await read(queue, 13, 1)) == PAGE


async def test_older_copy_put_back_while_attached_is_refused(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE, is_forced=True)
        await queue.flush()
        old = world.image.read_bytes()
        await queue.write(10, b"2" * PAGE, is_forced=True)
        await queue.flush()
        world.put(0, old)
        with pytest.raises(NvmeStatusError):
            await read(queue, 10, 1)


async def test_sector_put_back_while_detached_is_an_error(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(10, b"1" * PAGE)
    (slot,) = world.used_slots()
    old = world.pages(SLOTS_START + slot, 1)
    async with world.attached() as queue:
        await queue.write(10, b"2" * PAGE)
    # Opening makes a checkpoint, after which no record is regarded as never durable.
    await (await world.open()).close()
    for slot in world.used_slots():
        world.put(SLOTS_START + slot, old)
    async with world.attached() as queue:
        with pytest.raises(NvmeStatusError):
            await read(queue, 10, 1)


@pytest.mark.parametrize("page", [0, 1, LOG_START, SLOTS_START])
async def test_damaged_map_or_sector_never_reads_as_data(world: World, page: int) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(0, b"1" * PAGE * 46)
    async with world.attached() as queue:
        assert await read(queue, 0, 1) == b"1" * PAGE
    if page == 1:
        for checkpoint in (1, 2):
            world.put(checkpoint, bytes(PAGE))
    # The writes are still in the log: nothing has been merged.
    for number in range(page, page + 16 if page == LOG_START else page + 1):
        content = bytearray(world.pages(number, 1))
        content[100] ^= 1
        world.put(number, bytes(content))
    if page == SLOTS_START:
        async with world.attached() as queue:
            with pytest.raises(NvmeStatusError):
                await read(queue, 0, 46)
        return
    with pytest.raises((UnavailableError, VerificationError)) as caught:
        await world.open()
    assert caught.value.reason in {"third_party.store", "store.rolled_back"}


async def test_store_made_by_who_has_no_key_of_the_volume_is_refused(world: World) -> None:
    """Everything on the namespace is authentic under another key, the best that a forger can do."""
    world.is_anchored = False
    await world.create()
    own, world.store_key = world.store_key, bytes(32)
    world.put(0, bytes(PAGE))
    await world.create()
    world.store_key = own
    with pytest.raises(UnavailableError, match="forged"):
        await world.open()
    # The volume's own superblock with the forger's log and tree.
    forged = world.pages(1, PAGES - 1)
    world.put(0, bytes(PAGE))
    await world.create()
    world.put(1, forged)
    with pytest.raises(UnavailableError, match="no checkpoint is whole"):
        await world.open()


async def test_renamed_store_is_refused(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        await queue.write(0, b"1" * PAGE)
    other = uuid.uuid4()
    superblock = bytearray(world.pages(0, 1))
    assert superblock[16:32] == world.volume_id.bytes
    superblock[16:32] = other.bytes
    world.put(0, bytes(superblock))
    world.volume_id = other
    with pytest.raises(UnavailableError, match="damaged or forged"):
        await world.open()


# Mode off.


async def test_mode_off_reads_what_was_sealed_and_nothing_unwritten(world: World) -> None:
    world.is_off = True
    await world.create()
    async with world.attached() as queue:
        with pytest.raises(NvmeStatusError):
            await read(queue, 7, 1)
        await queue.write_zeroes(0, SECTORS)
        assert await read(queue, 0, SECTORS) == bytes(SECTORS * PAGE)
        await queue.write(7, b"a" * PAGE)
        await queue.compare_and_write(7, b"a" * PAGE, b"b" * PAGE)
        with pytest.raises(NvmeStatusError):
            await queue.compare_and_write(7, b"a" * PAGE, b"c" * PAGE)
        with pytest.raises(NvmeStatusError) as caught:
            await queue.deallocate([(7, 1)])
        assert caught.value.status == INVALID_OPCODE
    async with world.attached() as queue:
        assert await read(queue, 6, 3) == bytes(PAGE) + b"b" * PAGE + bytes(PAGE)


async def test_stopping_waits_for_nothing_that_hangs(world: World) -> None:
    await world.create()
    back = await world.open()
    await world.plain.apply([])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await back.close()


async def test_gateway_scrubs_its_volume_and_goes_on_over_a_reconnection(world: World) -> None:
    await world.create()
    async with world.attached() as queue:
        assert world.back is not None
        await queue.write(0, bytes(PAGE))
        await queue.write(SECTORS - 1, bytes(PAGE))
        await queue.flush()
        jobs = world.back.jobs
        # One piece immediately, the next one in hours.
        await jobs.start("scrub", bytes_per_second=1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await asyncio.sleep(0.005)
                if jobs.list()[0].checked:
                    break
        await world.plain.apply([])
        await world.plain.apply([world.config()])
        assert await read(queue, 0, 1) == bytes(PAGE)
        assert jobs.list()[0].interruptions == 1
        await jobs.change("scrub", order=None, bytes_per_second=0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await asyncio.sleep(0.005)
                if (job := jobs.list()[0]).is_over:
                    break
        assert (job.state, job.checked, job.found) == ("finished", 2, 0)


@pytest.mark.parametrize("metadata", [False, True])
async def test_volume_grows_as_far_as_its_namespace(tmp_path: Path, metadata: bool) -> None:
    larger = SECTORS + 100
    async with third_party_world(tmp_path, metadata=metadata) as world:
        await world.create()
        content = secrets.token_bytes(2 * PAGE)
        async with world.attached() as queue:
            await queue.write(SECTORS - 2, content)

        async def resize() -> None:
            await world.stores.resize(
                "disks",
                world.volume_id,
                sector_count=SECTORS,
                larger_sector_count=larger,
                store_key=bytearray(world.store_key),
                open_device=world.open_device,
            )

        if not metadata:
            with pytest.raises(UnavailableError) as caught:
                await resize()
            assert caught.value.reason == "store.extend"
        await world.plain.apply([])
        os.truncate(world.image, (PAGES + 5000) * (PAGE + 64 * metadata))
        await world.plain.apply([world.config(PAGES + 5000)])
        for _ in range(2):
            await resize()
        async with world.attached() as queue:
            assert await read(queue, SECTORS - 2, 2) == content
        back = await world.stores.attach(
            "disks",
            world.volume_id,
            sector_count=larger,
            store_key=bytearray(world.store_key),
            open_device=world.open_device,
        )
        await back.close()
