"""Reference tests 22 and 24: writes changed, moved, repeated, reordered or dropped in transit.

Whatever happens on the wire, the sector afterwards is what the host was told, the target stores
nothing that it refused, and the refusal has the right reason.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from attacks.pdus import (
    BLOCK,
    DATASET,
    FLUSH,
    FLUSH_MILESTONE,
    WRITE,
    WRITE_ZEROES,
    Pdu,
    command,
    response,
)
from attacks.rules import (
    Drop,
    Duplicate,
    Gather,
    Record,
    Replace,
    Rewrite,
    Rule,
    every,
    is_command,
    is_response,
    is_write_data,
)
from attacks.world import Attacked, attempt, pattern
from sealane import _native

LBA = 4
IN_CAPSULE, BY_R2T = 1, 16


def flip(pdu: Pdu, bit: int) -> None:
    pdu.data[bit // 8] ^= 1 << bit % 8


async def after_attack(world: Attacked, lba: int, blocks: int, *, is_new: bool) -> None:
    """Check that the host reads the acknowledged version; without one, either version."""
    found = await world.contents(lba, blocks)
    allowed = [pattern(lba, 2, blocks)]
    if not is_new:
        allowed.append(pattern(lba, 1, blocks))
    assert found in allowed


async def strike(
    world: Attacked, rule: Rule, *, blocks: int, reason: str, origin: str = "s"
) -> None:
    """Write version 1 unattacked, version 2 under attack; check what the host and others read."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1, blocks + 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2, blocks)))
        await world.refusal(reason, origin=origin)
    assert rule.made == rule.times
    await after_attack(world, LBA, blocks, is_new=outcome.is_success)
    assert await world.contents(LBA + blocks) == pattern(LBA + blocks, 1)


@dataclass(frozen=True)
class Change:
    """A forged field of a write."""

    change: Callable[[Pdu], object]
    reason: str
    blocks: int = IN_CAPSULE


def put(field: str, change: Callable[[int], int]) -> Callable[[Pdu], object]:
    return lambda pdu: setattr(pdu, field, change(getattr(pdu, field)))


def shorten(pdu: Pdu) -> None:
    """Write fewer blocks than the gateway asked for, with a capsule that fits."""
    pdu.blocks -= 1
    del pdu.data[-BLOCK:]
    pdu.sgl_bytes = len(pdu.data)
    pdu.fit()


def flip_header(at: int) -> Callable[[Pdu], object]:
    def change(pdu: Pdu) -> None:
        pdu.header[at] ^= 1

    return change


COMMAND_CHANGES = {
    "redirected": Change(put("start_lba", lambda lba: lba + 1), "command.mac"),
    "other namespace": Change(put("nsid", lambda nsid: nsid + 1), "command.mac"),
    "other opcode": Change(put("opcode", lambda _: 0x05), "command.mac"),
    "fused": Change(flip_header(9), "command.mac"),
    "block count raised": Change(put("blocks", lambda blocks: blocks + 1), "command.mac"),
    "MAC, first half": Change(flip_header(16), "command.mac"),
    "MAC, second half": Change(flip_header(71), "command.mac"),
    "hint": Change(flip_header(60), "command.mac"),
}


@pytest.mark.parametrize("name", COMMAND_CHANGES)
async def test_24_changed_write_command_is_refused(world: Attacked, name: str) -> None:
    change = COMMAND_CHANGES[name]
    rule = Rewrite(match=is_command(WRITE), change=change.change)
    await strike(world, rule, blocks=change.blocks, reason=change.reason)


async def test_24_shortened_block_count_is_refused(world: Attacked) -> None:
    """Only the block count changes, because a capsule can't hold two sectors."""
    rule = Rewrite(match=is_command(WRITE), change=put("blocks", lambda blocks: blocks - 1))
    await strike(world, rule, blocks=BY_R2T, reason="command.mac")


@pytest.mark.parametrize("blocks", [IN_CAPSULE, BY_R2T])
@pytest.mark.parametrize("place", ["data", "tag", "iv", "sector mac", "key epoch", "flags"])
async def test_24_flipped_ciphertext_or_metadata_with_fitting_digest_is_refused(
    world: Attacked, place: str, blocks: int
) -> None:
    """The proxy recomputes negotiated digests: they authenticate nothing."""
    at = {"data": 100, "tag": 4096, "iv": 4112, "sector mac": 4124, "key epoch": 4140}
    byte = at.get(place, 4159) + (blocks - 1) * BLOCK
    rule = Rewrite(match=is_write_data, change=lambda pdu: flip(pdu, 8 * byte))
    forged = Record(match=is_write_data)
    world.proxy.add(forged)
    await strike(world, rule, blocks=blocks, reason="sector.mac")


async def test_refused_ciphertext_never_reaches_the_store(world: Attacked) -> None:
    honest, forged = Record(match=is_write_data), Record(match=is_write_data)
    async with world.queue() as queue:
        world.proxy.add(honest)
        await queue.write(LBA, pattern(LBA, 1))
        await queue.flush()
        world.proxy.add(Rewrite(match=is_write_data, change=lambda pdu: flip(pdu, 8 * 4000)))
        world.proxy.add(forged)
        await attempt(queue.write(LBA + 1, pattern(LBA + 1, 2)))
        await world.refusal("sector.mac", origin="s")
    # The bytes up to the flipped one: any stored copy of the forged sector has them. An honest
    # retry sends the same ciphertext, so the flipped byte has to be part of the search.
    good, bad = (bytes(each.copies[0].data) for each in (honest, forged))
    assert _native.find_pieces(world.store, [good[:32]]) != []
    assert _native.find_pieces(world.store, [bad[3990:4010]]) == []


async def test_22_duplicate_of_a_write_is_refused(world: Attacked) -> None:
    rule = Duplicate(match=is_command(WRITE))
    await strike(world, rule, blocks=IN_CAPSULE, reason="command.mac")


async def test_22_older_write_replayed_after_a_newer_one_is_refused(world: Attacked) -> None:
    old = Record(match=is_command(WRITE))
    async with world.queue() as queue:
        world.proxy.add(old)
        await queue.write(LBA, pattern(LBA, 1))
        await queue.write(LBA, pattern(LBA, 2))
        (copy,) = old.copies
        await world.proxy.inject(copy)
        await world.refusal("command.mac", origin="s")
        await attempt(queue.write(LBA + 1, pattern(LBA + 1, 2)))
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_24_two_writes_in_the_other_order_are_refused(world: Attacked) -> None:
    rule = Gather(match=is_command(WRITE), make=reversed)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcomes = await asyncio.gather(
            attempt(queue.write(LBA, pattern(LBA, 2))),
            attempt(queue.write(LBA + 1, pattern(LBA + 1, 2))),
        )
        await world.refusal("command.mac", origin="s")
    assert rule.made == 1
    await after_attack(world, LBA, 1, is_new=outcomes[0].is_success)


def splice(pdus: list[Pdu]) -> list[Pdu]:
    """Exchange the first sectors of two writes."""
    first, second = pdus[0].block(0), pdus[1].block(0)
    pdus[0].set_block(0, second)
    pdus[1].set_block(0, first)
    return pdus


@pytest.mark.parametrize("blocks", [IN_CAPSULE, BY_R2T])
async def test_24_sectors_spliced_from_two_writes_are_refused(world: Attacked, blocks: int) -> None:
    rule = Gather(match=is_write_data, make=splice)
    other = LBA + 64
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1, blocks))
        await queue.write(other, pattern(other, 1, blocks))
        world.proxy.add(rule)
        outcomes = await asyncio.gather(
            attempt(queue.write(LBA, pattern(LBA, 2, blocks))),
            attempt(queue.write(other, pattern(other, 2, blocks))),
        )
        await world.refusal("sector.mac", origin="s")
    assert rule.made == 1
    await after_attack(world, LBA, blocks, is_new=outcomes[0].is_success)
    await after_attack(world, other, blocks, is_new=outcomes[1].is_success)


def swap_blocks(pdu: Pdu) -> None:
    first, second = pdu.block(0), pdu.block(1)
    pdu.set_block(0, second)
    pdu.set_block(1, first)


async def test_24_sectors_of_one_write_exchanged_are_refused(world: Attacked) -> None:
    rule = Rewrite(match=is_write_data, change=swap_blocks)
    await strike(world, rule, blocks=BY_R2T, reason="sector.mac")


@pytest.mark.parametrize("opcode", [WRITE_ZEROES, DATASET, FLUSH, FLUSH_MILESTONE, WRITE])
async def test_24_injected_command_is_refused(world: Attacked, opcode: int) -> None:
    """This includes deallocate and write zeroes, the cheapest way to destroy data."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        (link,) = world.proxy.io_links()
        ranges = b"\0" * 4 + (1).to_bytes(4, "little") + LBA.to_bytes(8, "little")
        data = {DATASET: ranges, WRITE: bytes(BLOCK)}.get(opcode, b"")
        forged = command(link.number, opcode, 0x66, lba=LBA, data=data)
        if opcode == DATASET:
            forged.control, forged.start_lba = 0, 4 << 32
        await world.proxy.inject(forged)
        await world.refusal("command.mac", origin="s")
    assert await world.contents(LBA) == pattern(LBA, 1)


@pytest.mark.parametrize("forged_status", [0, 0x0004])
async def test_24_dropped_write_with_forged_completion_is_not_believed(
    world: Attacked, forged_status: int
) -> None:
    rule = Replace(
        match=is_command(WRITE),
        make=lambda pdu: [response(pdu.link, pdu.cid, result=0xABCD, status=forged_status)],
    )
    await strike(world, rule, blocks=IN_CAPSULE, reason="completion.mac", origin="g1")


async def test_24_completion_of_another_write_is_not_believed(world: Attacked) -> None:
    """The completion of the previous write, with the command id of the dropped one."""
    honest = Record(match=is_response(WRITE))

    def claim(pdu: Pdu) -> list[Pdu]:
        copy = honest.copies[0].sent()
        copy.header[20:22] = pdu.header[10:12]
        return [copy]

    async with world.queue() as queue:
        world.proxy.add(honest)
        await queue.write(LBA, pattern(LBA, 1))
        rule = Replace(match=is_command(WRITE), make=claim)
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("completion.mac", origin="g1")
    assert rule.made == 1
    await after_attack(world, LBA, 1, is_new=outcome.is_success)


@pytest.mark.parametrize("change", ["status", "result", "error made success"])
async def test_24_changed_completion_is_not_believed(world: Attacked, change: str) -> None:
    changes: dict[str, Callable[[Pdu], object]] = {
        "status": put("status", lambda status: status | 0x0286 << 1),
        "result": put("result", lambda result: result ^ 1),
        "error made success": put("status", lambda _: 0x4000),
    }
    rule = Rewrite(match=is_response(WRITE), change=changes[change])
    await strike(world, rule, blocks=IN_CAPSULE, reason="completion.mac", origin="g1")


async def test_24_swallowed_flush_is_never_acknowledged(world: Attacked) -> None:
    """It gets no answer; the next command reveals that one is missing."""
    rule = Drop(match=is_command(FLUSH_MILESTONE))
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        flushed = asyncio.ensure_future(attempt(queue.flush()))
        await world.proxy.until(lambda: rule.made)
        written = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("command.mac", origin="s")
        assert not flushed.done() or not (await flushed).is_success or written.is_success
        flushed.cancel()
    await after_attack(world, LBA, 1, is_new=written.is_success)


async def test_24_swallowed_flush_with_forged_completion_is_not_believed(
    world: Attacked,
) -> None:
    flushes = Record(match=is_command(FLUSH_MILESTONE), times=10)
    rule = Replace(
        match=is_command(FLUSH_MILESTONE), make=lambda pdu: [response(pdu.link, pdu.cid)]
    )
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(flushes)
        world.proxy.add(rule)
        outcome = await attempt(queue.flush())
        await world.refusal("completion.mac", origin="g1")
    # If a flush was acknowledged, it was sent again and arrived.
    assert not outcome.is_success or len(flushes.copies) > rule.made


async def test_24_cleared_force_unit_access_is_refused(world: Attacked) -> None:
    rule = Rewrite(
        match=every(is_command(WRITE), lambda pdu: bool(pdu.control & 1 << 30)),
        change=put("control", lambda control: control & ~(1 << 30)),
    )
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1), is_forced=True)
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2), is_forced=True))
        await world.refusal("command.mac", origin="s")
    assert rule.made == 1, "the gateway did not pass force unit access on"
    await after_attack(world, LBA, 1, is_new=outcome.is_success)
