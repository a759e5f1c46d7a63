"""Tests of the adversary itself: a refusal proves something only if the attack happened."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from attacks.pdus import (
    BLOCK,
    READ,
    WRITE,
    Kind,
    Pdu,
    Way,
    command,
    crc32c,
    data_pdu,
    parse,
    r2t,
    response,
)
from attacks.proxy import Link, Proxy
from attacks.rules import Drop, Duplicate, Gather, Hold, Record, Replace, Rewrite, is_command


def test_crc32c_is_the_published_one() -> None:
    assert crc32c(b"123456789") == bytes.fromhex("839206e3")
    assert crc32c(bytes(32)) == bytes.fromhex("aa36918a")


@pytest.mark.parametrize("flags", [0x00, 0x01, 0x02, 0x03])
def test_pdu_survives_parsing_with_and_without_digests(flags: int) -> None:
    made = data_pdu(3, Kind.C2H_DATA, 9, b"abcdefgh", offset=4096, flags=flags | 0x04).fit()
    again = parse(3, Way.TO_GATEWAY, made.encode())
    assert (again.header, again.data, again.flags) == (made.header, made.data, flags | 0x04)
    assert (again.cid, again.transfer_offset, again.transfer_bytes) == (9, 4096, 8)
    assert len(made.encode()) == made.pdu_bytes


def test_changed_data_gets_a_fitting_digest() -> None:
    pdu = data_pdu(0, Kind.C2H_DATA, 1, b"abcdefgh", flags=0x07).fit()
    honest = pdu.encode()
    pdu.data[0] ^= 1
    forged = pdu.encode()
    assert forged[28:36] == b"`bcdefgh"
    assert forged[-4:] == crc32c(b"`bcdefgh") != honest[-4:]
    assert forged[24:28] == crc32c(bytes(pdu.header)) == honest[24:28]


def test_field_names_reach_the_bytes_they_name() -> None:
    pdu = command(0, WRITE, 7, lba=0x1122, blocks=2, data=bytes(2 * BLOCK))
    entry = bytes(pdu.header[8:])
    assert entry[0] == WRITE
    assert entry[2:4] == b"\x07\0"
    assert entry[40:48] == (0x1122).to_bytes(8, "little")
    assert (pdu.blocks, pdu.sgl_bytes, pdu.cid) == (2, 2 * BLOCK, 7)
    pdu.blocks = 1
    assert pdu.control & 0xFFFF == 0
    assert response(0, 5, status=0x4004).cid == 5
    assert r2t(0, 6, offset=8, length=16).encode()[12:20] == b"\x08\0\0\0\x10\0\0\0"


def writes(count: int) -> list[Pdu]:
    return [command(0, WRITE, cid, lba=cid, data=bytes([cid]) * 8) for cid in range(count)]


def test_rules_act_as_often_as_they_say_and_only_where_they_match() -> None:
    match = is_command(WRITE)
    read = command(0, READ, 1)
    one, two, three = writes(3)
    drop = Drop(match=match)
    assert drop(read) == [read]
    assert [drop(pdu) for pdu in (one, two)] == [[], [two]]
    assert drop.made == 1

    doubled = Duplicate(match=match)(one)
    assert [pdu.encode() for pdu in doubled] == [one.encode()] * 2
    assert doubled[0] is not doubled[1]

    hold = Hold(match=match, times=2)
    assert [hold(pdu) for pdu in (one, two, three)] == [[], [], [three]]
    assert hold.take() == [one, two]
    assert hold.take() == []

    record = Record(match=match)
    assert record(one) == [one]
    assert record.copies[0].encode() == one.encode()

    assert Replace(match=match, make=lambda pdu: [read, pdu])(one) == [read, one]
    (changed,) = Rewrite(match=match, change=lambda pdu: setattr(pdu, "start_lba", 99))(one)
    assert changed.start_lba == 99


def test_gather_waits_for_all_and_acts_once() -> None:
    gather = Gather(match=is_command(WRITE), make=reversed)
    one, two, three = writes(3)
    assert gather(one) == []
    assert gather.made == 0
    assert gather(two) == [two, one]
    assert gather.made == 1
    assert gather(three) == [three]


class Ends:
    """A target that records what arrives and can answer, and a gateway's connections to it."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.answers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(8)
                rest = await reader.readexactly(int.from_bytes(head[4:8], "little") - 8)
                self.arrived.put_nowait(head + rest)
        writer.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Ends, Proxy]]:
    ends = Ends()
    server = await asyncio.start_server(ends.serve, "127.0.0.1", 0)
    try:
        async with Proxy(server.sockets[0].getsockname()[:2]).listening() as proxy:
            yield ends, proxy
    finally:
        server.close()
        for writer in ends.answers:
            writer.close()


async def test_proxy_relays_redirects_and_remembers(ends: tuple[Ends, Proxy]) -> None:
    target, proxy = ends
    one, two = writes(2)
    reader, writer = await asyncio.open_connection(*proxy.address)
    with contextlib.closing(writer):
        writer.write(one.encode())
        assert await target.arrived.get() == one.encode()
        (link,) = proxy.links
        await proxy.inject(two.sent(link.number))
        assert await target.arrived.get() == two.encode()
        answer = response(link.number, 0)
        await proxy.inject(answer)
        assert await reader.readexactly(24) == answer.encode()
    await proxy.until(lambda: not link.is_open)
    assert [pdu.encode() for pdu in link.history] == [one.encode()]


async def test_proxy_keeps_the_targets_side_when_it_lingers(ends: tuple[Ends, Proxy]) -> None:
    target, proxy = ends
    proxy.is_lingering = True
    one, two = writes(2)
    _, writer = await asyncio.open_connection(*proxy.address)
    writer.write(one.encode())
    assert await target.arrived.get() == one.encode()
    link: Link = proxy.links[0]
    writer.close()
    await writer.wait_closed()
    await proxy.inject(two.sent(link.number))
    assert await target.arrived.get() == two.encode()
    target.answers[0].close()
    await proxy.until(lambda: not link.is_open)
