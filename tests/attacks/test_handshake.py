"""The adversary as the target: forged Identify, ICResp, Connect answers, R2Ts, terminations.

Size, format and limits of a volume come from its attested descriptor. Forged values on the wire may
slow the gateway down or make it give up, but must not deceive it or make it leak anything.
"""

import asyncio
import struct
from collections.abc import Callable

import pytest

from attacks.pdus import (
    BLOCK,
    DATA,
    FABRICS,
    FLUSH_MILESTONE,
    IDENTIFY,
    READ,
    WRITE,
    Kind,
    Pdu,
    Way,
    r2t,
    response,
)
from attacks.rules import Record, Replace, Rewrite, is_command, is_io_connect, is_write_data
from attacks.world import VOLUME_BYTES, Attacked, attempt, pattern
from sealane.errors import Error

ASYNC_EVENT = 0x0C
LBA = 4
LAST = VOLUME_BYTES // DATA - 1


async def use(world: Attacked) -> None:
    """Write and read one and many sectors up to the end of the volume, or fail without a leak.

    Acknowledged data must be read back.
    """
    try:
        async with world.queue() as queue:
            acknowledged = []
            for lba, blocks in ((LBA, 1), (100, 32), (LAST, 1)):
                outcome = await attempt(queue.write(lba, pattern(lba, 1, blocks)))
                if outcome.is_success:
                    acknowledged.append((lba, blocks))
            for lba, blocks in acknowledged:
                assert await queue.read(lba, blocks) == pattern(lba, 1, blocks)
    except Error:
        pass  # The front end could not open the queue: denial, which cannot be prevented.


def is_identify(structure: int) -> Callable[[Pdu], bool]:
    def match(pdu: Pdu) -> bool:
        return bool(
            pdu.kind == Kind.C2H_DATA
            and pdu.entry
            and pdu.entry[0] == IDENTIFY
            and pdu.entry[40] == structure
        )

    return match


def fill(at: int, form: str, *values: int) -> Callable[[Pdu], object]:
    return lambda pdu: struct.pack_into("<" + form, pdu.data, at, *values)


IDENTIFY_FORGERIES = {
    "no transfer limit": fill(77, "B", 0),
    "transfer limit of one page": fill(77, "B", 1),
    "enormous transfer limit": fill(77, "B", 255),
    "enormous capsules": fill(1792, "I", 0xFFFF_FFFF),
    "no in-capsule data": fill(1792, "I", 4),
    "no volatile write cache": fill(525, "B", 0),
    "other controller": fill(78, "H", 0x4242),
    "nothing but ones": lambda pdu: pdu.data.__setitem__(slice(None), b"\xff" * len(pdu.data)),
    "nothing but zeros": lambda pdu: pdu.data.__setitem__(slice(None), bytes(len(pdu.data))),
}


@pytest.mark.parametrize("name", IDENTIFY_FORGERIES)
async def test_24_forged_identify_controller_changes_no_answer(world: Attacked, name: str) -> None:
    rule = Rewrite(match=is_identify(1), change=IDENTIFY_FORGERIES[name], times=1 << 20)
    world.proxy.add(rule)
    writes = Record(match=is_command(WRITE), times=1 << 20)
    world.proxy.add(writes)
    await use(world)
    assert rule.made >= 1
    # Whatever the target claims, no capsule exceeds the gateway's own limit.
    assert all(len(pdu.data) <= 2 * DATA for pdu in writes.copies)


@pytest.mark.parametrize(
    "change",
    [
        fill(0, "QQQ", 1, 1, 1),
        fill(0, "QQQ", 1 << 40, 1 << 40, 1 << 40),
        fill(128, "HBB", 0, 12, 0),
        fill(128, "HBB", 64, 9, 0),
        fill(26, "B", 0),
    ],
)
async def test_24_forged_identify_namespace_changes_no_answer(
    world: Attacked, change: Callable[[Pdu], object]
) -> None:
    """The gateway takes size, block size and metadata format from the descriptor."""
    rule = Rewrite(match=is_identify(0), change=change, times=1 << 20)
    world.proxy.add(rule)
    async with world.queue() as queue:
        for lba in (0, LAST):
            await queue.write(lba, pattern(lba, 1))
            assert await queue.read(lba) == pattern(lba, 1)
        beyond = await attempt(queue.write(LAST + 1, pattern(LAST + 1, 1)))
    assert not beyond.is_success


async def test_cleared_write_cache_does_not_spare_the_flush(world: Attacked) -> None:
    """A gateway that trusted Identify would answer flushes itself."""
    rule = Rewrite(match=is_identify(1), change=fill(525, "B", 0), times=1 << 20)
    world.proxy.add(rule)
    flushes = Record(match=is_command(FLUSH_MILESTONE), times=10)
    world.proxy.add(flushes)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        await queue.flush()
    assert rule.made >= 1
    assert len(flushes.copies) >= 1


def put(field: str, value: int) -> Callable[[Pdu], object]:
    return lambda pdu: setattr(pdu, field, value)


def at_byte(at: int, value: int) -> Callable[[Pdu], object]:
    return lambda pdu: pdu.header.__setitem__(at, value)


def limit(value: int) -> Callable[[Pdu], object]:
    return lambda pdu: pdu.header.__setitem__(slice(12, 16), value.to_bytes(4, "little"))


IC_FORGERIES = {
    "enormous MAXH2CDATA": limit(0xFFFF_FFFC),
    "tiny MAXH2CDATA": limit(4),
    "MAXH2CDATA 0": limit(0),
    "small MAXH2CDATA": limit(4096),
    "digests nobody asked for": at_byte(11, 3),
    "unknown digests": at_byte(11, 0x80),
    "data alignment": at_byte(10, 31),
    "other version": at_byte(8, 1),
}


@pytest.mark.parametrize("name", IC_FORGERIES)
async def test_forged_ic_response_changes_no_answer(world: Attacked, name: str) -> None:
    rule = Rewrite(
        match=lambda pdu: pdu.kind == Kind.IC_RESP, change=IC_FORGERIES[name], times=1 << 20
    )
    world.proxy.add(rule)
    data = Record(match=is_write_data, times=1 << 20)
    world.proxy.add(data)
    await use(world)
    assert rule.made >= 1
    assert all(len(pdu.data) <= 262_144 for pdu in data.copies)


async def test_digests_asked_for_in_the_gateways_name_change_no_answer(world: Attacked) -> None:
    """The adversary tells each side that the other negotiated something else."""
    rule = Rewrite(
        match=lambda pdu: pdu.kind == Kind.IC_REQ,
        change=lambda pdu: pdu.header.__setitem__(11, pdu.header[11] ^ 0x03),
        times=1 << 20,
    )
    world.proxy.add(rule)
    await use(world)
    assert rule.made >= 1


def answers_connect(pdu: Pdu) -> bool:
    return bool(
        pdu.kind == Kind.RESPONSE and pdu.entry and pdu.entry[0] == FABRICS and pdu.entry[4] == 1
    )


@pytest.mark.parametrize("result", [0x4242, 0xFFFF, 0x0003_0001, 0])
async def test_forged_connect_answer_opens_nothing_else(world: Attacked, result: int) -> None:
    """The forged answer has another controller id or demands authentication."""
    rule = Rewrite(match=answers_connect, change=put("result", result), times=1 << 20)
    world.proxy.add(rule)
    await use(world)
    assert rule.made >= 1


async def test_adversary_that_answers_connect_itself_learns_and_fakes_nothing(
    world: Attacked,
) -> None:
    """The target never learns of the queue, while the gateway regards it as connected."""
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))

    impostor = Replace(match=is_io_connect, make=lambda p: [response(p.link, p.cid, result=1)])
    yes_man = Replace(match=is_command(WRITE, READ), make=lambda p: [response(p.link, p.cid)])
    world.proxy.rules += [impostor, yes_man]
    async with world.queue() as queue:
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("completion.mac", origin="g1")
    assert impostor.made == yes_man.made == 1
    world.proxy.rules.clear()
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


# R2T: data that the adversary can make the gateway send.


def ask(**fields: int) -> Callable[[Pdu], list[Pdu]]:
    """Request data of a write before the target does."""

    def make(pdu: Pdu) -> list[Pdu]:
        request = r2t(
            pdu.link,
            fields.get("cid", pdu.cid),
            offset=fields.get("offset", 0),
            length=fields.get("length", BLOCK),
        )
        return [pdu, request]

    return make


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": BLOCK},
        {"offset": 0xFFFF_F000, "length": 0x2000},
        {"length": 0},
        {"length": 0xFFFF_FFFF},
        {"length": 17 * BLOCK},
        {"length": 4095},
        {"cid": 0x7F},
        {"cid": 0xFFFF},
    ],
)
async def test_r2t_outside_the_commands_data_is_refused(
    world: Attacked, fields: dict[str, int]
) -> None:
    sent = Record(match=is_write_data, times=1 << 20)
    rule = Replace(match=is_command(WRITE), make=ask(**fields))
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1, 16))
        world.proxy.rules += [sent, rule]
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2, 16)))
        await world.refusal("pdu.malformed", origin="g1")
    assert rule.made == 1
    for pdu in sent.copies:
        assert int(pdu.transfer_offset) + len(pdu.data) <= 16 * BLOCK
    allowed = [pattern(LBA, 2, 16)]
    if not outcome.is_success:
        allowed.append(pattern(LBA, 1, 16))
    assert await world.contents(LBA, 16) in allowed


@pytest.mark.parametrize("opcode", [READ, WRITE])
async def test_r2t_for_a_command_without_data_to_send_is_refused(
    world: Attacked, opcode: int
) -> None:
    """The buffer of a read, or of a write whose data was in the capsule."""
    rule = Replace(match=is_command(opcode), make=ask())
    sent = Record(match=lambda pdu: pdu.kind == Kind.H2C_DATA, times=1 << 20)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.rules += [sent, rule]
        await attempt(queue.read(LBA) if opcode == READ else queue.write(LBA, pattern(LBA, 1)))
        await world.refusal("pdu.malformed", origin="g1")
    assert rule.made == 1
    assert sent.copies == []


async def test_r2t_in_pieces_gets_only_ciphertext_of_its_own_command(world: Attacked) -> None:
    """The adversary requests the data piece by piece, and gets only what it can see anyway."""
    pieces: list[Pdu] = []
    starts = range(0, 16 * BLOCK, BLOCK)

    def in_pieces(pdu: Pdu) -> list[Pdu]:
        return [r2t(pdu.link, pdu.cid, offset=at, length=BLOCK) for at in starts]

    def collect(pdu: Pdu) -> list[Pdu]:
        if pdu.kind == Kind.H2C_DATA:
            pieces.append(pdu)
            return []
        return [pdu]

    rule = Replace(match=is_command(WRITE), make=in_pieces)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1, 16))
        world.proxy.rules += [rule, collect]
        pending = asyncio.ensure_future(attempt(queue.write(LBA, pattern(LBA, 2, 16))))
        await world.proxy.until(lambda: len(pieces) == len(starts))
        world.proxy.rules.clear()
        world.proxy.cut(*world.proxy.io_links())
        outcome = await pending
    assert [int(pdu.transfer_offset) for pdu in pieces] == list(starts)
    seen = b"".join(bytes(pdu.data) for pdu in pieces)
    assert b"version" not in seen
    allowed = [pattern(LBA, 2, 16)]
    if not outcome.is_success:
        allowed.append(pattern(LBA, 1, 16))
    assert await world.contents(LBA, 16) in allowed


@pytest.mark.parametrize("code", [1, 2, 6, 0xFFFF])
async def test_forged_termination_is_a_lost_connection_and_no_more(
    world: Attacked, code: int
) -> None:
    def terminate(pdu: Pdu) -> list[Pdu]:
        header = bytearray(24)
        header[0], header[2], header[4] = Kind.C2H_TERM, 24, 24
        header[8:10] = code.to_bytes(2, "little")
        return [Pdu(pdu.link, Way.TO_GATEWAY, header)]

    rule = Replace(match=is_command(WRITE), make=terminate)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
    assert rule.made == 1
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


@pytest.mark.parametrize("kind", [0x00, 0x01, 0x02, 0x04, 0x06, 0x08, 0x0A, 0xFF])
async def test_pdu_of_a_kind_no_target_sends_is_refused(world: Attacked, kind: int) -> None:
    def forge(pdu: Pdu) -> list[Pdu]:
        size = {0x00: 128, 0x01: 128, 0x04: 72}.get(kind, 24)
        header = bytearray(size)
        header[0], header[2], header[4] = kind, size, size
        return [Pdu(pdu.link, Way.TO_GATEWAY, header), pdu]

    rule = Replace(match=is_command(WRITE), make=forge)
    async with world.queue() as queue:
        await queue.write(LBA, pattern(LBA, 1))
        world.proxy.add(rule)
        outcome = await attempt(queue.write(LBA, pattern(LBA, 2)))
        await world.refusal("pdu.malformed", origin="g1")
    assert rule.made == 1
    allowed = [pattern(LBA, 2)] if outcome.is_success else [pattern(LBA, 1), pattern(LBA, 2)]
    assert await world.contents(LBA) in allowed


async def test_forged_event_that_the_namespace_shrank_changes_no_answer(world: Attacked) -> None:
    """Sent as completion of the outstanding event request, and with an unknown command id."""
    shrunk = Rewrite(match=is_identify(0), change=fill(0, "QQQ", 1, 1, 1), times=1 << 20)
    async with world.queue() as queue:
        await queue.write(LAST, pattern(LAST, 1))
        world.proxy.add(shrunk)
        for link in [link for link in world.proxy.links if link.is_open and not link.is_io]:
            parked = [cid for cid, entry in link.entries.items() if entry[0] == ASYNC_EVENT]
            for cid in (*parked, 0x7FFE):
                # A notice: namespace attributes changed, log page 4.
                forged = response(link.number, cid, result=0x02 | 0x04 << 16)
                await world.proxy.inject(forged)
        outcome = await attempt(queue.write(LAST, pattern(LAST, 2)))
    async with world.queue() as queue:
        allowed = [pattern(LAST, 2)]
        if not outcome.is_success:
            allowed.append(pattern(LAST, 1))
        assert await queue.read(LAST) in allowed
        assert not (await attempt(queue.write(LAST + 1, pattern(LAST + 1, 1)))).is_success
