"""Listeners with a volume, and raw connections to them."""

import asyncio
import contextlib
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from attacks.pdus import (
    FLUSH,
    WRITE,
    Kind,
    Pdu,
    Way,
    command,
)
from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import SubsystemConfig
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, AdminOpcode
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Address, Digests, open_queue
from sealane.transport.nvme.initiator import HostController
from target.pair import GATEWAY, make_world
from target.test_plain_subsystems import Nothing

NQN = "nqn.2026-11.dev.sealane:plain:one"
HOST = "nqn.2026-11.dev.sealane:host"
BLOCKS, BLOCK = 64, 4096
SEALED_BLOCK = 4160
LAST, SUCCESS = 0x04, 0x08
HEADER_FIELD, SEQUENCE, HEADER_DIGEST, RANGE, LIMIT = 1, 2, 3, 4, 5


class Faults(list[str]):
    """Reason ids that a listener reported."""

    def __init__(self) -> None:
        super().__init__()
        self._reported = asyncio.Event()

    def note(self, reason: str) -> None:
        self.append(reason)
        self._reported.set()

    async def settled(self, *expected: str) -> None:
        """Wait until exactly these are reported; clear them."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self) < len(expected):
                self._reported.clear()
                await self._reported.wait()
        assert self == list(expected)
        self.clear()


@dataclass
class Place:
    """The receiver of malformed PDUs: a listener with a volume."""

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
        # An expired ticket of another queue identifies the host.
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


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def next(self) -> Pdu | None:
        """Return the next PDU; None when the peer has closed."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await self.reader.read(1)
            if not head:
                return None
            head += await self.reader.readexactly(7)
            rest = await self.reader.readexactly(int.from_bytes(head[4:8], "little") - 8)
        content = head + rest
        return Pdu(0, Way.TO_GATEWAY, bytearray(content[: head[2]]), bytearray(content[head[2] :]))

    async def status(self, sent: bytes) -> int:
        """Return status (type and code) of the next response; skip data before it."""
        self.writer.write(sent)
        while True:
            pdu = await self.next()
            assert pdu is not None, "the connection was closed"
            if pdu.kind == Kind.RESPONSE:
                return int(pdu.status) >> 1 & 0x7FF

    async def terminated(self, sent: bytes) -> tuple[int, int]:
        """Return error status and field offset of the termination request that answers `sent`."""
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
    """Open an admin queue and enable its controller."""
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
        timeout_seconds=PATIENCE_SECONDS,
    )
    assert started.stream.digests == (bool(digests & 1), bool(digests & 2))
    async with wire(started.stream.socket) as opened:
        assert await opened.status(_native.encode_capsule_cmd(bytes(enable), b"", **used)) == 0
        yield opened


@contextlib.asynccontextmanager
async def io_queue(place: Place, *, digests: Digests | None = None) -> AsyncIterator[Wire]:
    """Open an I/O queue in its own association."""
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
