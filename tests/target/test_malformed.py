"""Malformed PDUs at real listeners: each gets the answer that the specification requires.

Each ends one connection, is logged once and counted once, and affects no other host.

NVMe/TCP Transport 1.0 §3.5 (errors), §3.6.2.4 and §3.6.2.5 (termination requests).
"""

import struct
from collections.abc import AsyncIterator, Callable

import pytest
import structlog.testing

from attacks.pdus import (
    COMPARE,
    FLUSH,
    READ,
    WRITE,
    Kind,
    Pdu,
    command,
    crc32c,
    data_pdu,
    r2t,
    response,
)
from sealane.protocol.nvme.command import decode_completion
from sealane.transport.nvme.handshake import Digests
from target.pair import make_world
from target.places import (
    BLOCK,
    HEADER_DIGEST,
    HEADER_FIELD,
    LAST,
    LIMIT,
    PLACES,
    QUEUES,
    RANGE,
    SEALED_BLOCK,
    SEQUENCE,
    SUCCESS,
    Faults,
    Place,
    Wire,
    admin_queue,
    capsule,
    changed,
    io_queue,
    pdu,
    plain,
    wire,
)


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with PLACES[request.param]() as made:
        yield made


ANYWHERE: dict[str, tuple[bytes, tuple[int, int]]] = {
    "unknown type": (changed(capsule(), 0, 8), (HEADER_FIELD, 0)),
    "reserved type": (changed(capsule(), 0, 0xFF), (HEADER_FIELD, 0)),
    "connection request": (pdu(Kind.IC_REQ, 128).encode(), (SEQUENCE, 0)),
    "connection response": (pdu(Kind.IC_RESP, 128).encode(), (SEQUENCE, 0)),
    "response capsule": (response(0, 5).encode(), (SEQUENCE, 0)),
    "controller's data": (data_pdu(0, Kind.C2H_DATA, 5, bytes(8)).encode(), (SEQUENCE, 0)),
    "request for data": (r2t(0, 5, offset=0, length=8).encode(), (SEQUENCE, 0)),
    "controller's termination": (pdu(Kind.C2H_TERM, 24).encode(), (SEQUENCE, 0)),
    "reserved flag": (changed(capsule(), 1, 0x80), (HEADER_FIELD, 1)),
    "header digest nobody agreed on": (changed(capsule(), 1, 1), (HEADER_FIELD, 1)),
    "data digest nobody agreed on": (changed(capsule(64), 1, 2), (HEADER_FIELD, 1)),
    "header too short": (changed(capsule(), 2, 71), (HEADER_FIELD, 2)),
    "header too long": (changed(capsule(), 2, 73), (HEADER_FIELD, 2)),
    "no header": (changed(capsule(), 2, 0), (HEADER_FIELD, 2)),
    "data offset without data": (changed(capsule(), 3, 4), (HEADER_FIELD, 3)),
    "data offset within the header": (changed(capsule(64), 3, 8), (HEADER_FIELD, 3)),
    "data offset beyond the header": (changed(capsule(64), 3, 76), (HEADER_FIELD, 3)),
    "shorter than its header": (changed(capsule(), 4, 71), (HEADER_FIELD, 4)),
    "no length": (changed(capsule(), 4, 0), (HEADER_FIELD, 4)),
    "termination too long": (pdu(Kind.H2C_TERM, 24, 129).encode(), (HEADER_FIELD, 4)),
    "too much in a capsule": (capsule(16_384).encode(), (LIMIT, 0)),
    "four gigabytes": (changed(capsule(64), 7, 0xFF), (LIMIT, 0)),
}


async def others_are_served(place: Place) -> None:
    async with place.host() as host:
        assert (await host.identify_namespace()).block_count > 0


def logged(lines: list[structlog.typing.EventDict]) -> list[object]:
    return [line["reason"] for line in lines if line["event"] == "nvme_fault"]


@pytest.mark.slow
@pytest.mark.parametrize("queue", QUEUES)
async def test_malformed_pdus_are_named_logged_and_counted_once(place: Place, queue: str) -> None:
    for name, (sent, expected) in ANYWHERE.items():
        with structlog.testing.capture_logs() as lines:
            async with QUEUES[queue](place) as opened:
                assert await opened.terminated(sent) == expected, name
            await place.faults.settled("pdu.malformed")
        assert logged(lines) == ["pdu.malformed"], name
    await others_are_served(place)


async def test_data_for_an_admin_queue_come_at_the_wrong_time(place: Place) -> None:
    async with admin_queue(place) as opened:
        sent = data_pdu(0, Kind.H2C_DATA, 5, bytes(8)).encode()
        assert await opened.terminated(sent) == (SEQUENCE, 0)
    await place.faults.settled("pdu.malformed")
    await others_are_served(place)


def wanted(tag: int, **changes: int) -> Pdu:
    """Return the data of the write started by `data_case`: command 5, four blocks."""
    size = changes.pop("size", BLOCK)
    made = data_pdu(0, Kind.H2C_DATA, changes.pop("cid", 5), bytes(size), tag=tag, flags=0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


DATA_CASES: dict[str, tuple[Callable[[int], Pdu], tuple[int, int]]] = {
    "another tag": (lambda tag: wanted(tag ^ 0x100), (HEADER_FIELD, 10)),
    "another command": (lambda tag: wanted(tag, cid=6), (HEADER_FIELD, 8)),
    "behind the end": (lambda tag: wanted(tag, transfer_offset=4 * BLOCK), (RANGE, 0)),
    "an offset that wraps": (lambda tag: wanted(tag, transfer_offset=0xFFFF_FFFF), (RANGE, 0)),
    "out of order": (lambda tag: wanted(tag, transfer_offset=BLOCK), (SEQUENCE, 0)),
    "a length that contradicts": (lambda tag: wanted(tag, transfer_bytes=8), (HEADER_FIELD, 16)),
    "no data": (lambda tag: wanted(tag, size=0), (HEADER_FIELD, 16)),
    "last too early": (lambda tag: wanted(tag, flags=LAST), (HEADER_FIELD, 1)),
    "a host's success": (lambda tag: wanted(tag, flags=SUCCESS), (HEADER_FIELD, 1)),
}


@pytest.mark.parametrize("where", ["plain", "gateway"])
async def test_data_outside_a_request_are_refused_and_write_nothing(where: str) -> None:
    async with PLACES[where]() as place:
        for name, (make, expected) in DATA_CASES.items():
            async with io_queue(place) as opened:
                write = command(0, WRITE, 5, blocks=4, transfer=4 * BLOCK)
                opened.writer.write(write.encode())
                request = await opened.next()
                assert request is not None
                assert request.kind == Kind.R2T
                assert await opened.terminated(make(int(request.tag)).encode()) == expected, name
            await place.faults.settled("pdu.malformed")
        async with io_queue(place) as opened:
            assert await read(opened, 0, 4) == bytes(4 * BLOCK)


async def read(opened: Wire, lba: int, blocks: int) -> bytes:
    opened.writer.write(
        command(0, READ, 9, lba=lba, blocks=blocks, transfer=blocks * BLOCK).encode()
    )
    content = b""
    while True:
        answer = await opened.next()
        assert answer is not None
        if answer.kind == Kind.C2H_DATA:
            content += answer.data
        if answer.kind == Kind.RESPONSE:
            assert int(answer.status) >> 1 == 0
        if answer.kind == Kind.RESPONSE or answer.flags & SUCCESS:
            return content


@pytest.mark.parametrize("queue", QUEUES)
async def test_a_host_that_leaves_within_a_pdu_is_no_fault(place: Place, queue: str) -> None:
    whole = capsule(4096).encode()
    # A secure queue detects such a command as forged even without its data.
    is_forged = queue == "I/O" and place.block_bytes == SEALED_BLOCK
    for length in (1, 7, 8, 71) if is_forged else (1, 7, 8, 71, 72, 100, len(whole) - 1):
        async with QUEUES[queue](place) as opened:
            opened.writer.write(whole[:length])
            opened.writer.write_eof()
            assert await opened.next() is None
    await others_are_served(place)
    assert place.faults == []


async def test_a_wrong_header_digest_ends_the_connection() -> None:
    async with plain() as place:
        for name, queue in QUEUES.items():
            digests = 1 if name == "admin" else Digests(header=True)
            async with queue(place, digests=digests) as opened:  # type: ignore[operator]
                sent = bytearray(capsule().encode())
                sent[1], sent[4] = 1, 76
                digest = bytearray(crc32c(bytes(sent)))
                digest[0] ^= 1
                code, _ = await opened.terminated(bytes(sent + digest))
                assert code == HEADER_DIGEST, name
            await place.faults.settled("pdu.malformed")
        await others_are_served(place)


async def test_a_wrong_data_digest_is_answered_and_the_connection_goes_on() -> None:
    async with plain() as place:
        for name, queue in QUEUES.items():
            digests = 2 if name == "admin" else Digests(data=True)
            async with queue(place, digests=digests) as opened:  # type: ignore[operator]
                made = capsule(4096)
                made.flags = 2
                content = bytearray(made.fit().encode())
                content[-1] ^= 1
                assert await opened.status(bytes(content)) == 0x022, name
                if name == "I/O":
                    assert await opened.status(capsule().encode()) == 0
                    assert await read_digested(opened) == bytes(BLOCK)
        assert place.faults == []


async def read_digested(opened: Wire) -> bytes:
    opened.writer.write(command(0, READ, 9, transfer=BLOCK).encode())
    answer = await opened.next()
    assert answer is not None
    assert answer.kind == Kind.C2H_DATA
    assert bytes(answer.data[BLOCK:]) == crc32c(answer.data[:BLOCK])
    return bytes(answer.data[:BLOCK])


async def test_a_command_id_in_use_is_refused() -> None:
    for where in ("plain", "gateway"):
        async with PLACES[where]() as place:
            async with io_queue(place) as opened:
                write = command(0, WRITE, 5, blocks=4, transfer=4 * BLOCK)
                opened.writer.write(write.encode())
                assert (await opened.next()).kind == Kind.R2T  # type: ignore[union-attr]
                assert await opened.status(command(0, FLUSH, 5).encode()) == 0x003, where
            assert place.faults == []


async def test_the_id_of_an_event_request_may_be_used_again() -> None:
    for where in ("plain", "gateway"):
        async with PLACES[where]() as place:
            async with admin_queue(place) as opened:
                opened.writer.write(command(0, 0x0C, 5, nsid=0, blocks=1).encode())
                assert await opened.status(command(0, 0x18, 5, nsid=0).encode()) == 0, where
            assert place.faults == []


def entry(made: Pdu, at: int, form: str, value: int) -> bytes:
    struct.pack_into("<" + form, made.header, 8 + at, value)
    return made.encode()


def write_one(lba: int = 0, blocks: int = 1) -> Pdu:
    return command(0, WRITE, 5, lba=lba, blocks=blocks, data=b"\xee" * BLOCK * blocks)


COMMANDS: dict[str, tuple[bytes, set[int]]] = {
    "unknown opcode": (command(0, 0x7A, 5).encode(), {0x001}),
    "vendor's opcode": (command(0, 0x81, 5, data=bytes(BLOCK)).encode(), {0x001}),
    "PRPs": (entry(write_one(), 1, "B", 0x00), {0x002}),
    "reserved SGL": (entry(write_one(), 39, "B", 0x20), {0x011}),
    "offset in the capsule": (entry(write_one(), 24, "Q", 64), {0x016}),
    "another length": (entry(write_one(), 32, "I", 8), {0x00F}),
    "no namespace": (entry(write_one(), 4, "I", 0), {0x00B}),
    "wrong namespace": (entry(write_one(), 4, "I", 2), {0x00B}),
    "every namespace": (entry(write_one(), 4, "I", 0xFFFF_FFFF), {0x00B}),
}


@pytest.mark.parametrize("where", ["plain", "gateway"])
async def test_commands_that_cannot_be_are_answered_and_change_nothing(where: str) -> None:
    async with PLACES[where]() as place, io_queue(place) as opened:
        async with place.host() as host:
            count = (await host.identify_namespace()).block_count
        beyond = {
            "first block behind the end": write_one(count).encode(),
            "last block behind the end": write_one(count - 1, 2).encode(),
            "block that wraps": write_one((1 << 64) - 1, 2).encode(),
            "read behind the end": command(0, READ, 5, lba=count, transfer=BLOCK).encode(),
        }
        if where == "plain":
            compared = command(0, COMPARE, 5, lba=count, data=bytes(BLOCK))
            beyond["compare behind the end"] = compared.encode()
        cases = COMMANDS | {name: (sent, {0x080}) for name, sent in beyond.items()}
        for name, (sent, expected) in cases.items():
            status = await opened.status(sent)
            assert status in expected, f"{name}: {status:#05x}"
        assert await read(opened, 0, 1) == bytes(BLOCK)
        assert await read(opened, count - 1, 1) == bytes(BLOCK)
        assert place.faults == []


async def test_a_command_without_the_queues_key_ends_it_and_stores_nothing() -> None:
    async with make_world(None) as world:
        faults = Faults()
        world.target.listener.observe(faults.note)
        world.grant(9)
        async with world.back_host() as host:
            connected = await host.connect_queue(1, ticket=world.grant(1).ticket)
            async with wire(connected.socket) as opened:
                opened.writer.write(command(0, WRITE, 5, data=bytes(SEALED_BLOCK)).encode())
                assert await opened.next() is None
            await faults.settled("command.mac")
        assert world.target.statistics(world.volume_id)["sectors_written"] == 0


# The initiator against a controller.


def test_completions_of_the_tests_own_parser_are_what_ours_reads() -> None:
    assert decode_completion(bytes(response(0, 7).header[8:24])) == (7, 0, 0)
