"""Malformed PDUs at real listeners and at our initiator: each is answered as the specification
has it, ends one connection, is logged once and counted once, and disturbs nobody else.

NVMe/TCP Transport 1.0 §3.5 (errors), §3.6.2.4 and §3.6.2.5 (termination requests).
"""

import asyncio
import contextlib
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import structlog.testing

from attacks.pdus import (
    COMPARE,
    FLUSH,
    IDENTIFY,
    READ,
    WRITE,
    Kind,
    Pdu,
    Way,
    command,
    crc32c,
    data_pdu,
    r2t,
    response,
)
from sealane import _native
from sealane.daemon.storage.listener import Listener
from sealane.daemon.storage.subsystem_config import SubsystemConfig
from sealane.daemon.storage.subsystems import PlainSubsystems
from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.command import decode_completion
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, AdminOpcode
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.admin_queue import AdminQueue
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Address, Digests, open_queue
from sealane.transport.nvme.initiator import HostController
from sealane.transport.nvme.stream import PduStream
from sealane.transport.nvme.volume_queue import ConnectedQueue, bulk_queue
from storage.test_end_to_end import GATEWAY, make_world
from storage.test_plain_subsystems import Nothing

NQN = "nqn.2026-11.dev.sealane:plain:one"
HOST = "nqn.2026-11.dev.sealane:host"
BLOCKS, BLOCK = 64, 4096
SEALED_BLOCK = 4160
LAST, SUCCESS = 0x04, 0x08
SECONDS = 10.0
HEADER_FIELD, SEQUENCE, HEADER_DIGEST, RANGE, LIMIT = 1, 2, 3, 4, 5


class Faults(list[str]):
    """Reason ids as a listener reports them."""

    def __init__(self) -> None:
        super().__init__()
        self._reported = asyncio.Event()

    def note(self, reason: str) -> None:
        self.append(reason)
        self._reported.set()

    async def settled(self, *expected: str) -> None:
        """Wait until these were reported, and no more than these; forget them."""
        async with asyncio.timeout(SECONDS):
            while len(self) < len(expected):
                self._reported.clear()
                await self._reported.wait()
        assert self == list(expected)
        self.clear()


@dataclass
class Place:
    """Where malformed PDUs go: a listener with a volume behind it."""

    address: tuple[str, int]
    nqn: str
    host_nqn: str
    faults: Faults
    ticket: Callable[[int], bytes | None]
    block_bytes: int = BLOCK
    credentials: Credentials | None = None

    def host(self, **more: object) -> HostController:
        traddr, trsvcid = self.address
        fields = {
            "subsystem_nqn": self.nqn,
            "host_nqn": self.host_nqn,
            "credentials": self.credentials,
        }
        return HostController(traddr=traddr, trsvcid=trsvcid, **(fields | more))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def plain() -> AsyncIterator[Place]:
    listener = Listener(Nothing(), traddr="127.0.0.1", trsvcid=0, offers_digests=True)
    faults = Faults()
    listener.observe(faults.note)
    await listener.start()
    subsystems = PlainSubsystems(listener)
    namespace = {"nsid": 1, "store": "memory", "size_bytes": BLOCKS * BLOCK}
    known = {"nqn": NQN, "hosts": [{"nqn": HOST}], "namespaces": [namespace]}
    await subsystems.apply([SubsystemConfig.model_validate(known)])
    try:
        yield Place(listener.address, NQN, HOST, faults, lambda _: None)
    finally:
        await subsystems.close()
        await listener.stop()


@contextlib.asynccontextmanager
async def secure() -> AsyncIterator[Place]:
    async with make_world(None) as world:
        faults = Faults()
        world.target.listener.observe(faults.note)
        nqn = world.target.subsystem_nqn(world.volume_id)
        # An expired ticket of another queue makes the host known.
        world.grant(9)
        yield Place(
            world.target.address,
            nqn,
            GATEWAY,
            faults,
            lambda queue_id: world.grant(queue_id).ticket,
            SEALED_BLOCK,
        )


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[Place]:
    async with make_world(None) as world:
        faults = Faults()
        world.gateway.listener.observe(faults.note)
        export = world.attached.export
        address = (export.traddr, export.trsvcid)
        host = world.host()
        yield Place(
            address,
            export.subsystem_nqn,
            host._host_nqn,
            faults,
            lambda _: None,
            credentials=host._credentials,
        )


PLACES = {"plain": plain, "secure": secure, "gateway": gateway}


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with PLACES[request.param]() as made:
        yield made


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def next(self) -> Pdu | None:
        """Next PDU; None when the peer has closed."""
        async with asyncio.timeout(SECONDS):
            head = await self.reader.read(1)
            if not head:
                return None
            head += await self.reader.readexactly(7)
            rest = await self.reader.readexactly(int.from_bytes(head[4:8], "little") - 8)
        content = head + rest
        return Pdu(0, Way.TO_GATEWAY, bytearray(content[: head[2]]), bytearray(content[head[2] :]))

    async def status(self, sent: bytes) -> int:
        """Status (type and code) of the next response, after data that may come before."""
        self.writer.write(sent)
        while True:
            pdu = await self.next()
            assert pdu is not None, "the connection was closed"
            if pdu.kind == Kind.RESPONSE:
                return int(pdu.status) >> 1 & 0x7FF

    async def terminated(self, sent: bytes) -> tuple[int, int]:
        """Fatal error status and field offset of the termination request that answers `sent`."""
        self.writer.write(sent)
        answers = []
        while (pdu := await self.next()) is not None:
            answers.append(pdu)
        kinds = [pdu.kind for pdu in answers]
        assert kinds[-1:] in ([Kind.C2H_TERM], [Kind.H2C_TERM]), f"answers: {kinds}"
        quoted = bytes(answers[-1].data)
        assert len(quoted) >= 8
        assert quoted in sent, "quotes the header at fault"
        code, information = struct.unpack_from("<HI", answers[-1].header, 8)
        return code, information


@contextlib.asynccontextmanager
async def wire(connection: socket.socket) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def admin_queue(place: Place, *, digests: int = 0) -> AsyncIterator[Wire]:
    """An admin queue that has connected and enabled its controller."""
    connect = Connect(
        command_id=1,
        queue_id=0,
        queue_size=32,
        host_id=uuid.uuid4(),
        controller_id=DYNAMIC_CONTROLLER,
        subsystem_nqn=place.nqn,
        host_nqn=place.host_nqn,
    )
    used = {"header_digest": bool(digests & 1), "data_digest": bool(digests & 2)}
    enable = bytearray(64)
    enable[0:2], enable[4] = bytes([AdminOpcode.FABRICS, 0x40]), 0
    struct.pack_into("<II", enable, 44, 0x14, 0x0046_0001)
    started = await open_queue(
        Address(*place.address),
        connect,
        credentials=place.credentials,
        digests=Digests(header=bool(digests & 1), data=bool(digests & 2)),
        timeout_seconds=SECONDS,
    )
    assert started.stream.digests == (bool(digests & 1), bool(digests & 2))
    async with wire(started.stream.socket) as opened:
        assert await opened.status(_native.encode_capsule_cmd(bytes(enable), b"", **used)) == 0
        yield opened


@contextlib.asynccontextmanager
async def io_queue(place: Place, *, digests: Digests | None = None) -> AsyncIterator[Wire]:
    """An I/O queue of an association of its own."""
    async with place.host(digests=digests) as host:
        connected = await host.connect_queue(1, ticket=place.ticket(1))
        async with wire(connected.socket) as opened:
            yield opened


QUEUES = {"admin": admin_queue, "I/O": io_queue}


def pdu(kind: int, size: int, data: int = 0, flags: int = 0) -> Pdu:
    header = bytearray(size)
    header[0], header[1], header[2] = kind, flags, size
    return Pdu(0, Way.TO_TARGET, header, bytearray(data)).fit()


def changed(made: Pdu, at: int, value: int) -> bytes:
    content = bytearray(made.encode())
    content[at] = value
    return bytes(content)


def capsule(data: int = 0) -> Pdu:
    return command(0, WRITE if data else FLUSH, 5, data=bytes(data))


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
    """Data of the write that `data_case` starts: command 5, four blocks."""
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
    # A secure queue need not see the data to know that such a command isn't its host's.
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
            async with admin_queue(place) as opened:
                opened.writer.write(command(0, 0x0C, 5, nsid=0, blocks=1).encode())
                identify = command(0, IDENTIFY, 5, nsid=0, transfer=4096)
                assert await opened.status(identify.encode()) == 0x003, where
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


async def connected_pair() -> tuple[PduStream, Wire]:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    far.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=far)
    return PduStream(near, data_max=65_536), Wire(reader, writer)


def completion(cid: int) -> bytes:
    return response(0, cid).encode()


def data_for(cid: int, size: int, **changes: int) -> bytes:
    made = data_pdu(0, Kind.C2H_DATA, cid, bytes(size))
    for name, value in changes.items():
        setattr(made, name, value)
    return made.encode()


FROM_CONTROLLER: dict[str, tuple[bytes, tuple[int, int]]] = {
    "unknown type": (changed(response(0, 1), 0, 10), (HEADER_FIELD, 0)),
    "connection request": (pdu(Kind.IC_REQ, 128).encode(), (SEQUENCE, 0)),
    "connection response": (pdu(Kind.IC_RESP, 128).encode(), (SEQUENCE, 0)),
    "command": (capsule().encode(), (SEQUENCE, 0)),
    "host's data": (data_pdu(0, Kind.H2C_DATA, 1, bytes(8)).encode(), (SEQUENCE, 0)),
    "host's termination": (pdu(Kind.H2C_TERM, 24).encode(), (SEQUENCE, 0)),
    "header digest": (changed(response(0, 1), 1, 1), (HEADER_FIELD, 1)),
    "header length": (changed(response(0, 1), 2, 25), (HEADER_FIELD, 2)),
    "response with data": (changed(response(0, 1), 4, 25), (HEADER_FIELD, 4)),
    "response to nothing": (completion(77), (HEADER_FIELD, 20)),
    "data of nothing": (data_for(77, 8), (HEADER_FIELD, 8)),
    "more data than asked for": (data_for(1, 4104), (RANGE, 0)),
    "data out of order": (data_for(1, 8, transfer_offset=8), (SEQUENCE, 0)),
    "success before the end": (data_for(1, 8, flags=SUCCESS), (HEADER_FIELD, 1)),
    "four gigabytes": (changed(data_pdu(0, Kind.C2H_DATA, 1, bytes(8)), 7, 0xFF), (LIMIT, 0)),
}


@pytest.mark.parametrize("name", FROM_CONTROLLER)
async def test_an_admin_queue_names_every_fault_of_its_controller(name: str) -> None:
    sent, expected = FROM_CONTROLLER[name]
    stream, controller = await connected_pair()
    lost: list[Error] = []
    queue = AdminQueue(stream, timeout_seconds=SECONDS, lost=lost.append)
    identify = bytes([IDENTIFY, 0x40]).ljust(64, b"\0")
    asked = asyncio.ensure_future(queue.submit(identify, room=4096))
    assert (await controller.next()).kind == Kind.COMMAND  # type: ignore[union-attr]
    controller.writer.write(sent)
    answer = await controller.next()
    assert answer is not None
    assert answer.kind == Kind.H2C_TERM
    assert bytes(answer.data) in sent
    assert struct.unpack_from("<HI", answer.header, 8) == expected
    with pytest.raises(UnavailableError):
        await asked
    assert [error.reason for error in lost] == ["pdu.malformed"]
    await queue.close()
    assert await controller.next() is None
    controller.writer.close()


@pytest.mark.parametrize("name", FROM_CONTROLLER)
async def test_an_io_queue_names_every_fault_of_its_controller(name: str) -> None:
    sent, expected = FROM_CONTROLLER[name]
    stream, controller = await connected_pair()
    connected = ConnectedQueue(
        socket=stream.socket,
        queue_id=1,
        queue_depth=8,
        h2c_data_max=65_536,
        transfer_max=65_536,
        in_capsule_max=8192,
    )
    identity = NamespaceIdentity(block_count=BLOCKS, block_bytes=BLOCK, metadata_bytes=0)
    queue = bulk_queue(connected, identity, io_bytes=BLOCK, timeout_seconds=SECONDS)
    reading = asyncio.ensure_future(queue.read(0, bytearray(BLOCK)))
    asked = await controller.next()
    assert asked is not None
    # The engine counts command ids from another number than the control side.
    renamed = bytearray(sent)
    if renamed[0] == Kind.C2H_DATA and renamed[8] == 1:
        renamed[8:10] = int(asked.command_id).to_bytes(2, "little")
    controller.writer.write(bytes(renamed))
    answer = await controller.next()
    assert answer is not None
    assert answer.kind == Kind.H2C_TERM
    code, information = struct.unpack_from("<HI", answer.header, 8)
    assert (code, information) == expected
    controller.writer.close()
    with pytest.raises(UnavailableError) as refused:
        await reading
    assert refused.value.reason == "pdu.malformed"
    await queue.close()


IC_RESPONSES = {
    "version": (8, 1),
    "alignment": (10, 31),
    "digests": (11, 3),
    "type": (0, 2),
    "length": (2, 127),
}


@pytest.mark.parametrize("name", IC_RESPONSES)
async def test_a_connection_response_that_cannot_be_is_answered(name: str) -> None:
    at, value = IC_RESPONSES[name]
    sent = bytearray(_native.encode_ic_resp(8192))
    sent[at] = value
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(128)
        writer.write(sent)
        heard.put_nowait((await reader.readexactly(1))[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    traddr, trsvcid = server.sockets[0].getsockname()
    host = HostController(traddr=traddr, trsvcid=trsvcid, subsystem_nqn=NQN, host_nqn=HOST)
    with pytest.raises(ProtocolError):
        await host.connect()
    assert await heard.get() == Kind.H2C_TERM
    server.close()
    await server.wait_closed()


def test_completions_of_the_tests_own_parser_are_what_ours_reads() -> None:
    assert decode_completion(bytes(response(0, 7).header[8:24])) == (7, 0, 0)
