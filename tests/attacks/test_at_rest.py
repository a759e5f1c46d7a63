"""Reference tests 9, 10, 12, 13 and 14: the drive's owner changes what is stored.

The store's file format is in secure-queue.md; only `attacks.disk` depends on it. After each attack
the original bytes are restored and the sector must read correctly: a refusal proves nothing if
honest data is refused as well.
"""

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from attacks.disk import Slot, read_slot, write_slot
from attacks.raw_host import VERIFICATION_STATUSES, CommandError, RawQueue
from attacks.world import Attacked, Cluster, attacked, pattern

LBA = 4
# A set of the freshness tree holds 340 IVs.
IN_SET, NEXT_SET = LBA + 1, LBA + 340


async def refused(world: Attacked, queue: RawQueue, lba: int, *reasons: str) -> None:
    """Check that the host gets a permanent error and that the reason is reported."""
    with pytest.raises(CommandError) as caught:
        await queue.read(lba)
    assert caught.value.status in VERIFICATION_STATUSES
    await world.refusal(*reasons, lba=lba)


@contextlib.asynccontextmanager
async def put_back(world: Attacked, *lbas: int) -> AsyncIterator[list[Slot]]:
    """Yield the stored blocks; restore them afterwards and check that they read correctly."""
    kept = [read_slot(world.store, lba) for lba in lbas]
    yield kept
    for slot in kept:
        write_slot(slot)
    for lba in lbas:
        assert await world.contents(lba) == pattern(lba, 1)


CLASSES = {
    "data, first bit": 0,
    "data, last bit": 8 * 4096 - 1,
    "tag, first bit": 8 * 4096,
    "tag, last bit": 8 * 4112 - 1,
    "iv": 8 * 4123,
    "key epoch": 8 * 4140,
    "write sequence": 8 * 4144,
    "ciphertext checksum": 8 * 4150,
    "version": 8 * 4158 + 1,
    "flags": 8 * 4159,
    "unknown flag": 8 * 4159 + 7,
}
REASONS = ("sector.tag", "sector.stale", "sector.format", "sector.key_epoch", "store.failed")


@pytest.mark.parametrize("name", CLASSES)
async def test_9_flipped_bit_at_rest_is_refused(world: Attacked, name: str) -> None:
    bit = CLASSES[name]
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.changed(lambda block: flip(block, bit)))
            await refused(world, queue, LBA, *REASONS)


async def test_9_flipped_bit_of_a_fast_path_mac_changes_nothing(world: Attacked) -> None:
    """The MAC only saves reading the leaf page; alone it authenticates nothing."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.changed(lambda block: flip(block, 8 * 4124 + 5)))
            assert await queue.read(LBA) == pattern(LBA, 1)


def flip(block: bytearray, bit: int) -> None:
    block[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("other", [IN_SET, NEXT_SET])
async def test_10_swapped_sectors_are_refused(world: Attacked, other: int) -> None:
    async with world.queue() as queue:
        for lba in (LBA, other):
            await queue.write(lba, pattern(lba, 1))
        async with put_back(world, LBA, other) as (here, there):
            write_slot(here.holding(there))
            write_slot(there.holding(here))
            for lba in (LBA, other):
                await refused(world, queue, lba, "sector.stale")


@pytest.mark.parametrize("has_same_iv", [True, False])
@pytest.mark.parametrize("gateway", ["g1", "g3"])
async def test_10_sectors_of_two_volumes_swapped_are_refused(
    cluster: Cluster, world: Attacked, gateway: str, has_same_iv: bool
) -> None:
    """Volumes of one user, and of two users.

    Two volumes may be granted the same counters. If the IVs are equal, the target finds the IV
    that it expects, but the sector doesn't open under the other volume's key.
    """
    reason = "sector.tag" if has_same_iv else "sector.stale"
    async with (
        attacked(cluster, gateway=gateway) as other,
        world.queue() as here,
        other.queue() as there,
    ):
        if not has_same_iv:
            await there.write(IN_SET, pattern(IN_SET, 1))
        for queue in (here, there):
            await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (mine,), put_back(other, LBA) as (theirs,):
            assert (iv_of(mine) == iv_of(theirs)) is has_same_iv
            write_slot(mine.holding(theirs))
            write_slot(theirs.holding(mine))
            await refused(world, here, LBA, reason)
            await refused(other, there, LBA, reason)


def iv_of(slot: Slot) -> bytes:
    return bytes(slot.block[4112:4124])


def zero_everything(block: bytearray) -> None:
    block[:] = bytes(len(block))


def zero_metadata(block: bytearray) -> None:
    block[4096:] = bytes(64)


def zero_iv(block: bytearray) -> None:
    block[4112:4124] = bytes(12)


def say_unwritten(block: bytearray) -> None:
    block[:] = bytes(4158) + b"\x01\x01"


def zeros_with_version(block: bytearray) -> None:
    block[:] = bytes(4158) + b"\x01\x00"


@pytest.mark.parametrize(
    "change", [zero_everything, zero_metadata, zero_iv, say_unwritten, zeros_with_version]
)
async def test_12_sector_made_to_look_unwritten_is_refused(
    world: Attacked, change: Callable[[bytearray], None]
) -> None:
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.changed(change))
            await refused(world, queue, LBA, "sector.stale", "sector.format")


async def test_12_written_bytes_under_an_unwritten_sector_stay_unseen(world: Attacked) -> None:
    """The reverse: bytes stored under an unwritten sector don't make it readable."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        assert await queue.read(IN_SET) == bytes(4096)
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.at(IN_SET))
            assert await queue.read(IN_SET) == bytes(4096)


@pytest.mark.parametrize("kept_bytes", [0, 1, 4, 8, 12, 15])
async def test_13_truncated_tag_is_refused(world: Attacked, kept_bytes: int) -> None:
    def truncate(block: bytearray) -> None:
        block[4096 + kept_bytes : 4112] = bytes(16 - kept_bytes)

    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.changed(truncate))
            await refused(world, queue, LBA, "sector.tag", "store.failed")


async def test_14_older_version_of_a_sector_is_refused(world: Attacked) -> None:
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 0))
        older = read_slot(world.store, LBA)
        await queue.write(LBA, pattern(LBA, 1))
        async with put_back(world, LBA) as (slot,):
            write_slot(slot.holding(older))
            await refused(world, queue, LBA, "sector.stale")


async def test_28_older_version_under_a_later_write_elsewhere_is_refused(
    world: Attacked,
) -> None:
    """Many sectors are rolled back at once: all are refused; those between them read correctly."""
    async with world.queue() as queue:
        lbas = range(LBA, LBA + 16)
        for lba in lbas:
            await queue.write(lba, pattern(lba, 0))
        older = [read_slot(world.store, lba) for lba in lbas]
        for lba in lbas:
            await queue.write(lba, pattern(lba, 1))
        async with put_back(world, *lbas) as slots:
            for slot, old in list(zip(slots, older, strict=True))[::2]:
                write_slot(slot.holding(old))
            for lba in lbas:
                if (lba - LBA) % 2 == 0:
                    await refused(world, queue, lba, "sector.stale")
                else:
                    assert await queue.read(lba) == pattern(lba, 1)
