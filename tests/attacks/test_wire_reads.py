"""Reference tests 11, 12, 13, 23 and 26: attacks on the target's answers.

A host gets the requested sector as last written, or an error.
"""

from collections.abc import Callable

import pytest

from attacks.pdus import BLOCK, DATA, READ, Kind, Pdu, Way, response
from attacks.rules import (
    Drop,
    Gather,
    Hold,
    Match,
    Record,
    Replace,
    Rewrite,
    Rule,
    at_lba,
    every,
    is_command,
    is_read_data,
    is_response,
)
from attacks.world import Attacked, attempt, pattern

LBA, OTHER = 4, 70


def is_answer(pdu: Pdu) -> bool:
    return is_read_data(pdu) or is_response(READ)(pdu)


async def read_under(
    world: Attacked, rule: Rule, *reasons: str, origin: str = "g1", blocks: int = 1
) -> None:
    """Read while `rule` attacks: expect the right sector or an error, and a reported reason."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1, blocks))
        await queue.write(OTHER, pattern(OTHER, 1, blocks))
        world.proxy.add(rule)
        pending = queue.start_read(LBA, blocks)
        outcome = await attempt(pending)
        await world.refusal(*reasons, origin=origin)
    assert rule.made == rule.times
    if outcome.is_success:
        assert pending.result() == pattern(LBA, 1, blocks)
    assert await world.contents(LBA, blocks) == pattern(LBA, 1, blocks)


def flip(byte: int) -> Callable[[Pdu], object]:
    def change(pdu: Pdu) -> None:
        pdu.data[byte] ^= 0x10

    return change


@pytest.mark.parametrize("blocks", [1, 16])
@pytest.mark.parametrize(
    ("place", "byte"),
    [("data", 0), ("tag", 4096), ("iv", 4112), ("mac", 4124), ("key epoch", 4140), ("flags", 4159)],
)
async def test_13_flipped_answer_with_fitting_digest_is_not_believed(
    world: Attacked, place: str, byte: int, blocks: int
) -> None:
    rule = Rewrite(match=is_read_data, change=flip((blocks - 1) * BLOCK + byte))
    await read_under(world, rule, "sector.mac", blocks=blocks)


async def test_12_forged_unwritten_answer_is_not_believed(world: Attacked) -> None:
    """The protocol's "never written" answer (zeros, version 1, flag 1) without its MAC."""

    def forge(pdu: Pdu) -> None:
        pdu.data[:] = bytes(BLOCK - 2) + b"\x01\x01"

    await read_under(world, Rewrite(match=is_read_data, change=forge), "sector.mac")


async def test_12_honest_unwritten_answer_for_another_sector_is_not_believed(
    world: Attacked,
) -> None:
    unwritten = Record(match=is_read_data)
    world.proxy.add(unwritten)
    assert await world.contents(LBA) == bytes(DATA)

    def forge(pdu: Pdu) -> None:
        pdu.data[:] = unwritten.copies[0].data

    await read_under(world, Rewrite(match=is_read_data, change=forge), "sector.mac")


@pytest.mark.parametrize("what", ["data", "command ids"])
async def test_11_answers_of_two_reads_in_flight_exchanged_are_not_believed(
    world: Attacked, what: str
) -> None:
    def exchange(pdus: list[Pdu]) -> list[Pdu]:
        first, second = (pdu for pdu in pdus if is_read_data(pdu))
        if what == "data":
            first.data, second.data = second.data, first.data
        else:
            one, two = int(first.data_command_id), int(second.data_command_id)
            first.data_command_id, second.data_command_id = two, one
        return sorted(pdus, key=is_response(READ))  # data first

    rule = Gather(match=is_answer, count=4, make=exchange)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        await queue.write(OTHER, pattern(OTHER, 1))
        world.proxy.add(rule)
        pending = [queue.start_read(lba) for lba in (LBA, OTHER)]
        outcomes = [await attempt(each) for each in pending]
        await world.refusal("sector.mac", origin="g1")
    assert rule.made == 1
    for lba, each, outcome in zip((LBA, OTHER), pending, outcomes, strict=True):
        if outcome.is_success:
            assert each.result() == pattern(lba, 1)
        assert await world.contents(lba) == pattern(lba, 1)


async def test_11_exchanged_commands_answer_with_another_sector(world: Attacked) -> None:
    """Each read asks for the other's sector; the target refuses the first one."""

    def exchange(pdus: list[Pdu]) -> list[Pdu]:
        first, second = pdus
        one, two = int(first.command_id), int(second.command_id)
        first.command_id, second.command_id = two, one
        return pdus

    rule = Gather(match=is_command(READ), make=exchange)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        await queue.write(OTHER, pattern(OTHER, 1))
        world.proxy.add(rule)
        pending = [queue.start_read(lba) for lba in (LBA, OTHER)]
        outcomes = [await attempt(each) for each in pending]
        await world.refusal("command.mac", origin="s")
    for lba, each, outcome in zip((LBA, OTHER), pending, outcomes, strict=True):
        if outcome.is_success:
            assert each.result() == pattern(lba, 1)


@pytest.mark.parametrize("field", ["start_lba", "nsid", "blocks"])
async def test_24_redirected_read_is_refused(world: Attacked, field: str) -> None:
    def change(pdu: Pdu) -> None:
        setattr(pdu, field, int(getattr(pdu, field)) + 1)

    rule = Rewrite(match=is_command(READ), change=change)
    await read_under(world, rule, "command.mac", origin="s")


def to_answer(old: Record, *, with_completion: bool) -> Callable[[Pdu], list[Pdu]]:
    """Answer a read with recorded data, and with the completion if requested."""

    def make(pdu: Pdu) -> list[Pdu]:
        copy = old.copies[0].sent(pdu.link)
        copy.data_command_id = pdu.cid
        made = [copy]
        if with_completion:
            completion = old.copies[1].sent(pdu.link)
            completion.answered_id = pdu.cid
            made.append(completion)
        return made

    return make


def is_read_answer(lba: int) -> Match:
    return every(at_lba(lba), is_answer)


async def test_23_old_answer_for_the_same_lba_is_not_believed(world: Attacked) -> None:
    old = Record(match=is_read_data)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(old)
        assert await queue.read(LBA) == pattern(LBA, 1)
        await queue.write(LBA, pattern(LBA, 2))

        rule = Replace(match=is_read_data, make=to_answer(old, with_completion=False))
        world.proxy.add(rule)
        pending = queue.start_read(LBA)
        outcome = await attempt(pending)
        await world.refusal("sector.mac", origin="g1")
    assert rule.made == 1
    if outcome.is_success:
        assert pending.result() == pattern(LBA, 2)
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_23_old_answer_with_its_completion_is_not_believed(world: Attacked) -> None:
    """The read is dropped and answered with genuine data and completion of an older read."""
    old = Record(match=is_read_answer(LBA), times=2)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(old)
        assert await queue.read(LBA) == pattern(LBA, 1)
        await queue.write(LBA, pattern(LBA, 2))

        def answer(pdu: Pdu) -> list[Pdu]:
            return to_answer(old, with_completion=True)(pdu)

        rule = Replace(match=is_command(READ), make=answer)
        world.proxy.add(rule)
        pending = queue.start_read(LBA)
        outcome = await attempt(pending)
        await world.refusal("completion.mac", "sector.mac", origin="g1")
    assert rule.made == 1
    if outcome.is_success:
        assert pending.result() == pattern(LBA, 2)
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_23_held_answer_given_to_a_later_read_is_not_believed(world: Attacked) -> None:
    """A sector is read, written and read; the second read gets the answer of the first."""
    hold = Hold(match=is_read_answer(LBA), times=2)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(hold)
        first = queue.start_read(LBA)
        await world.proxy.until(lambda: hold.made == 2)
        await queue.write(LBA, pattern(LBA, 2))
        held = hold.take()

        def answer(pdu: Pdu) -> list[Pdu]:
            late = [each.sent() for each in held]
            late[0].data_command_id = pdu.cid
            late[1].answered_id = pdu.cid
            return late

        rule = Replace(match=is_command(READ), make=answer)
        world.proxy.add(rule)
        second = queue.start_read(LBA)
        outcome = await attempt(second)
        await world.refusal("completion.mac", "sector.mac", origin="g1")
        if outcome.is_success:
            assert second.result() == pattern(LBA, 2)
        await attempt(first)
    assert rule.made == 1
    assert await world.contents(LBA) == pattern(LBA, 2)


async def test_23_answer_delayed_over_a_write_is_the_old_one_only_for_the_old_read(
    world: Attacked,
) -> None:
    """A delayed read may return the sector as it was when the read was sent."""
    hold = Hold(match=is_read_answer(LBA), times=2)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(hold)
        early = queue.start_read(LBA)
        await world.proxy.until(lambda: hold.made == 2)
        await queue.write(LBA, pattern(LBA, 2))
        await world.proxy.inject(*hold.take())
        assert await early == pattern(LBA, 1)
        assert await queue.read(LBA) == pattern(LBA, 2)


async def test_24_completion_without_data_is_not_believed(world: Attacked) -> None:
    await read_under(world, Drop(match=is_read_data), "pdu.malformed")


async def test_24_read_answered_by_the_adversary_alone_is_not_believed(world: Attacked) -> None:
    rule = Replace(match=is_command(READ), make=lambda pdu: [response(pdu.link, pdu.cid)])
    await read_under(world, rule, "completion.mac")


async def test_24_error_made_of_a_good_read_is_not_believed(world: Attacked) -> None:
    """Errors are authenticated, too: only the target can send one."""

    def change(pdu: Pdu) -> None:
        pdu.status = 0x4000 | 0x281 << 1

    await read_under(world, Rewrite(match=is_response(READ), change=change), "completion.mac")


def shift(by: int) -> Callable[[Pdu], object]:
    def change(pdu: Pdu) -> None:
        pdu.transfer_offset = int(pdu.transfer_offset) + by & 0xFFFF_FFFF

    return change


def cut_metadata(pdu: Pdu) -> None:
    """Cut blocks to 4096 bytes, as if the namespace had no metadata."""
    del pdu.data[DATA:]
    pdu.fit()


def cut_tag(pdu: Pdu) -> None:
    del pdu.data[-1:]
    pdu.fit()


def lengthen(pdu: Pdu) -> None:
    pdu.data += bytes(64)
    pdu.fit()


def lie_about_length(pdu: Pdu) -> None:
    pdu.transfer_bytes = len(pdu.data) - 4


def say_success(pdu: Pdu) -> None:
    """Set the flag that omits the completion, and with it the completion's MAC."""
    pdu.flags = int(pdu.flags) | 0x0C


def other_command(pdu: Pdu) -> None:
    pdu.data_command_id = int(pdu.data_command_id) ^ 0x40


@pytest.mark.parametrize(
    "change",
    [
        shift(64),
        shift(-64),
        shift(1 << 31),
        cut_metadata,
        cut_tag,
        lengthen,
        lie_about_length,
        say_success,
        other_command,
    ],
)
async def test_13_wrong_lengths_and_offsets_of_an_answer_are_refused(
    world: Attacked, change: Callable[[Pdu], object]
) -> None:
    await read_under(world, Rewrite(match=is_read_data, change=change), "pdu.malformed")


async def test_24_success_flag_in_place_of_the_completion_is_refused(world: Attacked) -> None:
    """On a secure queue every command ends with a MAC, even a read of correct sectors."""
    world.proxy.add(Drop(match=is_response(READ)))
    await read_under(world, Rewrite(match=is_read_data, change=say_success), "pdu.malformed")


async def test_data_twice_over_the_same_place_is_refused(world: Attacked) -> None:
    rule = Replace(match=is_read_data, make=lambda pdu: [pdu, pdu.copy()])
    await read_under(world, rule, "pdu.malformed")


async def test_data_for_a_write_is_refused(world: Attacked) -> None:
    """The gateway must not receive into a buffer that it is sending."""

    def make(pdu: Pdu) -> list[Pdu]:
        header = bytearray(24)
        header[0], header[1], header[2] = Kind.C2H_DATA, 0x04, 24
        forged = Pdu(pdu.link, Way.TO_GATEWAY, header, bytearray(BLOCK))
        forged.data_command_id = pdu.cid
        return [forged.fit(), pdu]

    rule = Replace(match=is_command(0x01), make=make)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("pdu.malformed", origin="g1")
    assert rule.made == 1
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


async def test_26_capture_holds_no_plaintext_and_only_this_protocol(world: Attacked) -> None:
    """Every byte of the data path is a PDU that was parsed; none is wrapped in another layer."""
    marker = b"plain sector contents never leave"
    content = (marker * 2048)[: 16 * DATA]
    async with world.queue() as queue:
        await queue.write(LBA, content)
        await queue.write(OTHER, content[:DATA])
        assert await queue.read(LBA, 16) == content
        assert await queue.read(OTHER) == content[:DATA]
    captured = [pdu for link in world.proxy.links for pdu in link.history]
    assert sum(len(pdu.data) for pdu in captured) >= 2 * 17 * BLOCK
    pieces = [content[at : at + 16] for at in range(0, DATA, 16)]
    for pdu in captured:
        assert pdu.kind in set(Kind)
        assert not any(piece in pdu.data for piece in pieces)
    written = b"".join(bytes(pdu.data) for pdu in captured if pdu.way is Way.TO_TARGET)
    assert marker not in written


async def test_7_equal_plaintext_never_makes_equal_ciphertext(world: Attacked) -> None:
    """The same data at one LBA twice, at two LBAs, and in two sectors of one write."""
    writes = Record(match=lambda pdu: pdu.kind == Kind.COMMAND and bool(pdu.entry), times=1 << 20)
    world.proxy.add(writes)
    async with world.queue() as queue:
        for lba in (LBA, LBA, OTHER):
            await queue.write(lba, bytes(DATA))
    blocks = [bytes(pdu.data) for pdu in writes.copies if is_command(0x01)(pdu)]
    assert len(blocks) == 3
    for field in (slice(0, 4096), slice(4096, 4112), slice(4112, 4124)):
        assert len({block[field] for block in blocks}) == 3
    chunks = [block[at : at + 16] for block in blocks for at in range(0, DATA, 16)]
    assert len(set(chunks)) == len(chunks)
