"""Deallocate, write zeroes and compare-and-write under attack."""

import asyncio
from collections.abc import Callable

import pytest

from attacks.ledger import WRITE_IF
from attacks.pdus import DATASET, WRITE, WRITE_ZEROES, Kind, Pdu, response
from attacks.raw_host import CommandError
from attacks.rules import Drop, Record, Replace, Rewrite, is_command, is_response
from attacks.world import SECTOR, Attacked, attempt, pattern

LBA = 4
COMPARE_FAILURE = 0x285
CHANGES = (DATASET, WRITE_ZEROES)


def other_first_block(pdu: Pdu) -> None:
    pdu.data[8:16] = (LBA + 2).to_bytes(8, "little")


def more_blocks(pdu: Pdu) -> None:
    pdu.data[4:8] = (3).to_bytes(4, "little")


def one_more_range(pdu: Pdu) -> None:
    pdu.data += bytes(4) + (1).to_bytes(4, "little") + (LBA + 2).to_bytes(8, "little")
    pdu.start_lba = int(pdu.start_lba) + 1
    pdu.sgl_bytes = len(pdu.data)
    pdu.fit()


def attributes(pdu: Pdu) -> None:
    pdu.start_lba = 0


@pytest.mark.parametrize("change", [other_first_block, more_blocks, one_more_range, attributes])
async def test_24_changed_deallocate_is_refused(
    world: Attacked, change: Callable[[Pdu], object]
) -> None:
    """The list of ranges is authenticated with its command."""
    rule = Rewrite(match=is_command(DATASET), change=change)
    async with world.queue() as queue:
        for lba in range(LBA, LBA + 4):
            await queue.write(lba, pattern(lba, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.deallocate(LBA, 2))
        await world.refusal("command.mac", origin="s")
    assert rule.made == 1
    for lba in (LBA + 2, LBA + 3):
        assert await world.contents(lba) == pattern(lba, 1)
    for lba in (LBA, LBA + 1):
        allowed = [bytes(SECTOR)] if outcome.is_success else [bytes(SECTOR), pattern(lba, 1)]
        assert await world.contents(lba) in allowed


async def test_24_swallowed_deallocate_with_forged_completion_is_not_believed(
    world: Attacked,
) -> None:
    """A sector that a tenant was told is deallocated must not reappear."""
    rule = Replace(match=is_command(*CHANGES), make=lambda pdu: [response(pdu.link, pdu.cid)])
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.deallocate(LBA, 1))
        await world.refusal("completion.mac", origin="g1")
    assert rule.made == 1
    allowed = [bytes(SECTOR)] if outcome.is_success else [bytes(SECTOR), pattern(LBA, 1)]
    assert await world.contents(LBA) in allowed


async def test_22_deallocate_replayed_over_a_newer_write_is_refused(world: Attacked) -> None:
    old = Record(match=is_command(*CHANGES))
    async with world.queue() as queue:
        world.proxy.add(old)
        await queue.write(LBA, pattern(LBA, 1))
        await queue.deallocate(LBA, 1)
        assert await queue.read(LBA) == bytes(SECTOR)
        await queue.write(LBA, pattern(LBA, 2))
        await world.proxy.inject(*old.copies)
        await world.refusal("command.mac", origin="s")
    assert len(old.copies) == 1
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_23_data_from_before_a_deallocate_does_not_come_back(world: Attacked) -> None:
    old = Record(match=lambda pdu: pdu.kind == Kind.C2H_DATA and len(pdu.data) == SECTOR + 64)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(old)
        await queue.read(LBA)
        await queue.write_zeroes(LBA, 1)

        def put_back(pdu: Pdu) -> None:
            pdu.data[:] = old.copies[0].data

        rule = Rewrite(
            match=lambda pdu: pdu.kind == Kind.C2H_DATA and len(pdu.data) == SECTOR + 64,
            change=put_back,
        )
        world.proxy.add(rule)
        pending = queue.start_read(LBA)
        outcome = await attempt(pending)
        await world.refusal("sector.mac", origin="g1")
        if outcome.is_success:
            assert pending.result() == bytes(SECTOR)
    assert rule.made == 1
    assert await world.contents(LBA) == bytes(SECTOR)


@pytest.mark.parametrize("loses", ["command", "completion"])
async def test_compare_and_write_with_a_lost_outcome_says_what_happened(
    world: Attacked, loses: str
) -> None:
    """A retried conditional write that finds its own first attempt succeeds; it is no mismatch."""
    lost = Drop(match=is_command(WRITE_IF) if loses == "command" else is_response(WRITE_IF))
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(lost)
        pending = asyncio.ensure_future(
            attempt(queue.compare_and_write(LBA, pattern(LBA, 1), pattern(LBA, 2)))
        )
        await world.proxy.until(lambda: lost.made)
        world.proxy.cut(*world.proxy.io_links())
        outcome = await pending
    found = await world.contents(LBA)
    if outcome.is_success:
        assert found == pattern(LBA, 2)
    elif isinstance(outcome.error, CommandError) and outcome.error.status == COMPARE_FAILURE:
        assert found == pattern(LBA, 1), "a mismatch was reported, and the write was done"


async def test_expected_iv_of_a_conditional_write_cannot_be_changed(world: Attacked) -> None:
    def expect_unwritten(pdu: Pdu) -> None:
        pdu.data[4096 + 48 : 4096 + 60] = bytes(12)

    rule = Rewrite(match=is_command(WRITE_IF), change=expect_unwritten)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.compare_and_write(LBA, pattern(LBA, 1), pattern(LBA, 2)))
        await world.refusal("sector.mac", origin="s")
    assert rule.made == 1
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


async def test_conditional_write_made_unconditional_is_refused(world: Attacked) -> None:
    def make_write(pdu: Pdu) -> None:
        pdu.opcode = WRITE

    rule = Rewrite(match=is_command(WRITE_IF), change=make_write)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        await attempt(queue.compare_and_write(LBA, pattern(LBA, 1), pattern(LBA, 2)))
        await world.refusal("command.mac", origin="s")
    assert rule.made == 1
    assert await world.contents(LBA) in (pattern(LBA, 1), pattern(LBA, 2))
