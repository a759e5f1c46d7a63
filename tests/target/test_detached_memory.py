"""A detached volume holds no key, journal or buffer, whenever its objects are collected."""

import gc
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealane import _native
from sealane.daemon.gateway.data_path import GatewaySettings
from target.pair import MEBIBYTE, World, counters, make_world

ROUNDS = 12
WRITTEN = 12 * MEBIBYTE
PIECE = 128 * 1024
# The share of all written data that allocators and the target's store may keep.
KEPT_MAX = 4 * WRITTEN


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Run without the cyclic garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def fill_journal(world: World) -> None:
    async with world.queue() as queue:
        content = secrets.token_bytes(PIECE)
        for lba in range(0, WRITTEN // 4096, PIECE // 4096):
            await queue.write(lba, content)


@pytest.mark.usefixtures("uncollected")
async def test_a_detached_volume_leaves_no_key_and_no_memory_behind() -> None:
    settings = GatewaySettings(journal_bytes_max=64 * MEBIBYTE)
    async with make_world(None, settings=settings) as world:
        journals = world.gateway.journals
        grown: list[int] = []
        for number in range(ROUNDS):
            await fill_journal(world)
            assert (journals.volumes, journals.taken >= WRITTEN - MEBIBYTE) == (1, True)
            await world.attached.detach()
            await world.attached.wipe()
            # The engine drops, and so zeroes, the keys with the volume.
            assert (journals.volumes, journals.taken) == (0, 0)
            with pytest.raises(_native.QueueClosedError):
                world.attached.counters_remaining()
            assert world.attached.statistics() == {}
            lease = counters(start_epoch=number + 2)
            world.attached = await world.attach(secrets.token_bytes(32), lease)
            grown.append(resident_bytes())
        assert grown[-1] - grown[1] < KEPT_MAX


async def test_journals_of_all_volumes_share_a_bound() -> None:
    settings = GatewaySettings(journal_bytes_max=64 * MEBIBYTE, journals_bytes_max=4 * MEBIBYTE)
    async with make_world(None, settings=settings) as world:
        await fill_journal(world)
        assert world.gateway.journals.taken <= 4 * MEBIBYTE
        assert world.attached.statistics()["journal_flushes"] > 0
        assert world.attached.statistics()["journal_bytes"] <= 5 * MEBIBYTE


@pytest.mark.usefixtures("uncollected")
async def test_attaching_and_detaching_leave_no_objects_for_the_collector() -> None:
    async with make_world(None) as world:

        async def rounds(first: int, count: int) -> int:
            for number in range(first, first + count):
                await world.attached.detach()
                await world.attached.wipe()
                lease = counters(start_epoch=number + 2)
                world.attached = await world.attach(secrets.token_bytes(32), lease)
            return len(gc.get_objects())

        before = await rounds(0, 10)
        after = await rounds(10, 100)
        assert after - before < 100, "a cycle of references in each attachment"
