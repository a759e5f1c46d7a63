"""Admin queues through the listener: events, resets, keep-alive, discovery, authentication."""

import asyncio
import contextlib
import secrets
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.nvme import admin_session
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Portal,
    Provider,
)
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.errors import UnavailableError
from sealane.protocol.nvme.authentication import (
    AUTHENTICATION_REQUIRED,
    AuthenticationCommand,
    HostAuthentication,
    HostSecret,
)
from sealane.protocol.nvme.command import decode_completion
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    DISCOVERY_NQN,
    DYNAMIC_CONTROLLER,
    LogPage,
    PduKind,
    Status,
)
from sealane.protocol.nvme.subsystem import Subsystem, volume_subsystem
from sealane.transport.nvme.stream import PduStream

HOST = "nqn.2026-11.dev.sealane:host"
OTHER = "nqn.2026-11.dev.sealane:other"
NQN = "nqn.2026-11.dev.sealane:volume:test"
HOST_ID = uuid.UUID(int=1)
ENABLE = 0x0046_0001


@dataclass(slots=True)
class Handed:
    """An admission that keeps the descriptor passed to it."""

    box: asyncio.Queue[socket.socket]

    def start(self, descriptor: int) -> None:
        self.box.put_nowait(socket.socket(fileno=socket.dup(descriptor)))

    def close(self) -> None:
        """Nothing was prepared."""


@dataclass(eq=False)
class Plain(Exported, Provider):
    """A provider with one subsystem, controlled by the test."""

    shown: Subsystem
    hosts: set[str] = field(default_factory=lambda: {HOST})
    secrets: tuple[HostSecret, HostSecret | None] | None = None
    idle: int | None = None
    box: asyncio.Queue[socket.socket] = field(default_factory=asyncio.Queue)
    closed: list[int] = field(default_factory=list)

    @property
    def subsystem(self) -> Subsystem:
        return self.shown

    def exported(self) -> Iterable[Exported]:
        return (self,)

    def find(self, subsystem_nqn: str) -> Exported | None:
        return self if subsystem_nqn == NQN else None

    def allows(self, host_nqn: str) -> bool:
        return host_nqn in self.hosts

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        return self.secrets if host_nqn == HOST else None

    def idle_ms(self, association_id: int) -> int | None:
        assert association_id
        return self.idle

    async def admit(self, association: Association, connect: Connect) -> Admission:
        assert connect.controller_id == association.controller_id
        return Handed(self.box)

    async def association_closed(self, association_id: int) -> None:
        self.closed.append(association_id)

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Ignored: the test controls the queues."""

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Ignored: the listener's observers get it."""


class Queue:
    """A host's queue, at command level."""

    def __init__(self, stream: PduStream, result: int) -> None:
        self.stream = stream
        self.result = result
        self.controller_id = result & 0xFFFF
        self._command_id = 0

    @classmethod
    async def connect(
        cls,
        listener: Listener,
        *,
        nqn: str = NQN,
        host: str = HOST,
        queue_id: int = 0,
        controller_id: int = DYNAMIC_CONTROLLER,
        keep_alive_ms: int = 0,
        digests: tuple[bool, bool] = (False, False),
    ) -> Self:
        command = Connect(
            command_id=0,
            queue_id=queue_id,
            queue_size=32,
            keep_alive_ms=keep_alive_ms,
            host_id=HOST_ID,
            controller_id=controller_id,
            subsystem_nqn=nqn,
            host_nqn=host,
        )
        connection = socket.socket()
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, listener.address)
            stream = PduStream(connection, data_max=1 << 17)
            header, data = digests
            await stream.send(_native.encode_ic_req(header_digest=header, data_digest=data))
            granted, _ = await stream.receive()
            stream.use_digests(header=bool(granted.digests & 1), data=bool(granted.digests & 2))
            await stream.send(stream.encode_command(*command.encode()))
            response, _ = await stream.receive()
            _, status, result = decode_completion(response.entry)
            assert status == 0, hex(status)
        except BaseException:
            connection.close()
            raise
        return cls(stream, result)

    async def command(
        self, opcode: int, *words: int, nsid: int = 0, length: int = 4096, cid: int | None = None
    ) -> tuple[int, bytes]:
        """Send a command; return status and data."""
        self._command_id += 1
        padded = (*words, 0, 0, 0, 0, 0, 0)[:6]
        command_id = self._command_id if cid is None else cid
        entry = struct.pack(
            "<BBHI16xQI3xB6I", opcode, 0x40, command_id, nsid, 0, length, 0x5A, *padded
        )
        await self.stream.send(self.stream.encode_command(entry, b""))
        return await self.answer()

    async def park(self, command_id: int) -> None:
        entry = struct.pack("<BBHI16xQI3xB24x", 0x0C, 0x40, command_id, 0, 0, 0, 0x5A)
        await self.stream.send(self.stream.encode_command(entry, b""))

    async def answer(self) -> tuple[int, bytes]:
        header, data = await self.stream.receive()
        if header.kind == PduKind.C2H_DATA:
            header, _ = await self.stream.receive()
        _, status, self.result = decode_completion(header.entry)
        return status, data

    async def configure(self, value: int) -> None:
        entry = bytearray(64)
        entry[0:2] = b"\x7f\x40"
        struct.pack_into("<IQ", entry, 44, 0x14, value)
        await self.stream.send(self.stream.encode_command(bytes(entry), b""))
        assert (await self.answer())[0] == 0

    async def get_log(self, page: int, length: int) -> bytes:
        status, data = await self.command(0x02, page | (length // 4 - 1) << 16, length=length)
        assert status == 0
        return data

    async def authenticate(self, machine: HostAuthentication) -> None:
        """Exchange messages until the state machine has succeeded or failed."""
        while machine.has_message:
            message = machine.take()
            sent = AuthenticationCommand(
                command_id=1, kind=AuthenticationCommand.SEND, length=len(message)
            )
            await self.stream.send(_native.encode_capsule_cmd(sent.encode(), message))
            assert (await self.answer())[0] == 0
            if machine.is_authenticated or machine.has_failed:
                return
            fetch = AuthenticationCommand(
                command_id=2, kind=AuthenticationCommand.RECEIVE, length=4096
            )
            await self.stream.send(_native.encode_capsule_cmd(fetch.encode(), b""))
            machine.receive((await self.answer())[1])

    async def ended(self) -> None:
        """Wait until the listener closes the connection."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                while True:
                    await self.stream.receive()
            except UnavailableError:
                return

    def close(self) -> None:
        self.stream.socket.close()


@dataclass
class World:
    plain: Plain
    listener: Listener
    faults: list[str]
    queues: list[Queue] = field(default_factory=list)

    async def connect(self, **options: object) -> Queue:
        queue = await Queue.connect(self.listener, **options)  # type: ignore[arg-type]
        self.queues.append(queue)
        return queue

    async def admin(self, **options: object) -> Queue:
        queue = await self.connect(**options)
        await queue.configure(ENABLE)
        return queue


@pytest.fixture
async def world() -> AsyncIterator[World]:
    plain = Plain(
        volume_subsystem(
            nqn=NQN,
            volume_id=uuid.UUID(int=1),
            serial="1",
            block_count=8,
            metadata_bytes=0,
            transfer_max=131_072,
        )
    )
    listener = Listener(plain, traddr="127.0.0.1", trsvcid=0, offers_digests=True)
    made = World(plain, listener, [])
    listener.observe(made.faults.append)
    await listener.start()
    try:
        yield made
    finally:
        for queue in made.queues:
            queue.close()
        await listener.stop()


# Events and permissions


async def test_a_host_hears_of_a_resized_namespace(world: World) -> None:
    queue = await world.admin()
    await queue.command(0x09, 0x0B, 0x100, length=0)
    await queue.park(90)
    (namespace,) = world.plain.shown.namespaces
    world.plain.shown = replace(world.plain.shown, namespaces=(replace(namespace, block_count=16),))
    world.listener.changed()
    assert await queue.answer() == (0, b"")
    assert queue.result == 0x04_00_02
    status, data = await queue.command(0x06, 0, nsid=1)
    assert (status, struct.unpack_from("<Q", data)[0]) == (0, 16)


async def test_a_host_that_is_no_longer_allowed_is_closed(world: World) -> None:
    queue = await world.admin()
    world.plain.hosts.clear()
    world.listener.changed()
    await queue.ended()
    assert world.plain.closed == [1]


async def test_a_pdu_that_is_no_command_ends_the_admin_queue(world: World) -> None:
    queue = await world.admin()
    await queue.stream.send(_native.encode_c2h_data(1, b"1234"))
    header, _ = await queue.stream.receive()
    assert (header.kind, header.cid) == (PduKind.C2H_TERM, 2)
    await queue.ended()
    assert world.faults == ["pdu.malformed"]


async def test_data_beyond_the_capsule_is_terminated_before_it_is_read(world: World) -> None:
    queue = await world.admin()
    await queue.stream.send(_native.encode_capsule_cmd(bytes(64), bytes(8193))[:72])
    header, _ = await queue.stream.receive()
    assert header.kind == PduKind.C2H_TERM


async def test_a_host_that_takes_no_answers_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_session, "SEND_SECONDS", 0.05)
    queue = await world.admin()
    entry = struct.pack(
        "<BBHI16xQI3xB6I", 0x02, 0x40, 1, 0, 0, 131_072, 0x5A, 0x7FFF << 16, 0, 0, 0, 0, 0
    )
    heard = asyncio.Event()
    world.listener.observe(lambda _: heard.set())
    with contextlib.suppress(UnavailableError):
        for _ in range(64):  # 128 KiB each: more than any socket buffer
            await queue.stream.send(_native.encode_capsule_cmd(entry, b""))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await heard.wait()
    assert world.faults == ["connection.stalled"]


# Digests


@pytest.mark.parametrize("digests", [(True, False), (False, True), (True, True)])
async def test_digests_are_granted_as_asked(world: World, digests: tuple[bool, bool]) -> None:
    queue = await world.admin(digests=digests)
    assert queue.stream.digests == digests
    status, data = await queue.command(0x06, 1)
    assert (status, len(data)) == (0, 4096)


async def test_damaged_data_fails_its_command_only(world: World) -> None:
    queue = await world.admin(digests=(False, True))
    behaviour = bytearray(64)
    struct.pack_into("<BBH", behaviour, 0, 0x09, 0x40, 7)
    struct.pack_into("<QI3xBI", behaviour, 24, 0, 512, 0x01, 0x16)
    capsule = bytearray(queue.stream.encode_command(bytes(behaviour), bytes(512)))
    capsule[100] ^= 1
    await queue.stream.send(bytes(capsule))
    assert (await queue.answer())[0] == Status.TRANSIENT_TRANSPORT_ERROR
    await queue.stream.send(queue.stream.encode_command(bytes(behaviour), bytes(512)))
    assert (await queue.answer())[0] == 0


async def test_a_damaged_header_ends_the_connection(world: World) -> None:
    queue = await world.admin(digests=(True, False))
    capsule = bytearray(queue.stream.encode_command(bytes(64), b""))
    capsule[20] ^= 1
    await queue.stream.send(bytes(capsule))
    header, _ = await queue.stream.receive()
    assert (header.kind, header.cid) == (PduKind.C2H_TERM, 3)


# Resets


async def test_a_reset_ends_the_io_queues_and_keeps_the_association(world: World) -> None:
    admin = await world.admin()
    await world.connect(queue_id=1, controller_id=admin.controller_id)
    (await world.plain.box.get()).close()
    status, _ = await admin.command(0x09, 0x07, 0, length=0)
    assert status == Status.SEQUENCE_ERROR
    await admin.configure(0)
    assert world.plain.closed == [1]
    # Errors from queues that the engine closed aren't counted as faults of the host.
    world.listener.queue_closed(
        StorageEvent(
            kind="queue_closed", reason="queue_closed", detail="", association=1, queue_id=1
        )
    )
    await admin.configure(ENABLE)
    await world.connect(queue_id=1, controller_id=admin.controller_id)
    (await world.plain.box.get()).close()
    assert (await admin.command(0x18, length=0))[0] == 0


async def test_io_queues_wait_until_the_controller_is_enabled(world: World) -> None:
    admin = await world.connect()
    with pytest.raises(AssertionError, match=hex(Status.SEQUENCE_ERROR)):
        await world.connect(queue_id=1, controller_id=admin.controller_id)
    assert world.plain.box.empty()


async def test_a_fault_on_an_io_queue_ends_that_queue(world: World) -> None:
    admin = await world.admin()
    await world.connect(queue_id=1, controller_id=admin.controller_id)
    (await world.plain.box.get()).close()
    world.listener.queue_closed(
        StorageEvent(
            kind="queue_closed", reason="pdu_malformed", detail="", association=1, queue_id=1
        )
    )
    assert world.faults == ["pdu_malformed"]
    assert (await admin.command(0x18, length=0))[0] == 0
    await world.connect(queue_id=1, controller_id=admin.controller_id)
    (await world.plain.box.get()).close()


# Keep-alive


async def test_traffic_on_io_queues_keeps_an_association_alive(world: World) -> None:
    world.plain.idle = 0
    queue = await world.admin(keep_alive_ms=1)  # rounded up to a second
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[float] = asyncio.Queue()
    original = world.plain.idle_ms

    def idle_ms(association_id: int) -> int | None:
        asked.put_nowait(loop.time())
        return original(association_id)

    world.plain.idle_ms = idle_ms  # type: ignore[method-assign]
    await asked.get()
    assert (await queue.command(0x18, length=0))[0] == 0
    world.plain.idle = 10_000
    await queue.ended()
    assert world.faults == ["keep_alive.expired"]


# Discovery


def records(log: bytes) -> list[tuple[int, str, str, str]]:
    """Return subsystem type, name, address and port of each record."""
    count = struct.unpack_from("<Q", log, 8)[0]
    found = []
    for number in range(1, count + 1):
        record = log[1024 * number :][:1024]
        texts = [record[at : at + size] for at, size in ((256, 256), (512, 256), (32, 32))]
        found.append((record[2], *(text.strip(b"\0 ").decode() for text in texts)))
    return found


async def test_discovery_shows_each_host_what_it_may_use(world: World) -> None:
    port = str(world.listener.address[1])
    current = (3, DISCOVERY_NQN, "127.0.0.1", port)
    mine = await world.admin(nqn=DISCOVERY_NQN)
    log = await mine.get_log(LogPage.DISCOVERY, 3072)
    assert records(log) == [current, (2, NQN, "127.0.0.1", port)]
    assert log[1024:1028] == bytes([3, 1, 3, 4])
    theirs = await world.admin(nqn=DISCOVERY_NQN, host=OTHER)
    assert records(await theirs.get_log(LogPage.DISCOVERY, 2048)) == [current]


async def test_a_persistent_discovery_controller_hears_of_changes(world: World) -> None:
    queue = await world.admin(nqn=DISCOVERY_NQN, host=OTHER, keep_alive_ms=30_000)
    await queue.command(0x09, 0x0B, 1 << 31, length=0)
    await queue.park(91)
    before = await queue.get_log(LogPage.DISCOVERY, 1024)
    world.plain.hosts.add(OTHER)
    world.listener.changed()
    assert await queue.answer() == (0, b"")
    assert queue.result == 0x70_F0_02
    log = await queue.get_log(LogPage.DISCOVERY, 3072)
    assert len(records(log)) == 2
    assert struct.unpack_from("<Q", log)[0] > struct.unpack_from("<Q", before)[0]


async def test_discovery_controllers_have_no_io_queues(world: World) -> None:
    admin = await world.admin(nqn=DISCOVERY_NQN)
    with pytest.raises(AssertionError, match="0x182"):
        await world.connect(nqn=DISCOVERY_NQN, queue_id=1, controller_id=admin.controller_id)


async def test_a_discovery_visit_ends_unless_it_is_persistent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_session, "DISCOVERY_VISIT_SECONDS", 0.05)
    await (await world.connect(nqn=DISCOVERY_NQN)).ended()
    assert world.faults == ["keep_alive.expired"]


async def test_a_discovery_listener_serves_nothing_else(world: World) -> None:
    portal = Portal(traddr="::", trsvcid=4420)
    only = Listener(world.plain, traddr="127.0.0.1", trsvcid=0, portals=lambda: [portal])
    await only.start()
    try:
        with pytest.raises(AssertionError, match="0x182"):
            await Queue.connect(only)
        queue = await Queue.connect(only, nqn=DISCOVERY_NQN)
        await queue.configure(ENABLE)
        log = await queue.get_log(LogPage.DISCOVERY, 3072)
        assert records(log)[1] == (2, NQN, "127.0.0.1", "4420")
        queue.close()
    finally:
        await only.stop()


# Authentication


def host_machine(secret: HostSecret, controller: HostSecret | None = None) -> HostAuthentication:
    return HostAuthentication(
        host_nqn=HOST,
        subsystem_nqn=NQN,
        secret=secret,
        controller_secret=controller,
        random=secrets.token_bytes,
    )


def secret() -> HostSecret:
    return HostSecret(secrets.token_bytes(32))


async def test_a_host_authenticates_on_every_queue(world: World) -> None:
    mine, theirs = secret(), secret()
    world.plain.secrets = (mine, theirs)
    admin = await world.connect()
    assert admin.result == admin.controller_id | AUTHENTICATION_REQUIRED
    assert (await admin.command(0x06, 1))[0] == Status.AUTHENTICATION_REQUIRED
    await admin.authenticate(host_machine(mine, theirs))
    await admin.configure(ENABLE)
    queue = await world.connect(queue_id=1, controller_id=admin.controller_id)
    assert queue.result & AUTHENTICATION_REQUIRED
    assert (await queue.command(0x02, length=0))[0] == Status.AUTHENTICATION_REQUIRED
    assert world.plain.box.empty()
    await queue.authenticate(host_machine(mine, theirs))
    (await world.plain.box.get()).close()


async def test_a_wrong_secret_ends_the_connection(world: World) -> None:
    world.plain.secrets = (secret(), None)
    admin = await world.connect()
    with pytest.raises(Exception, match="authentication"):
        await admin.authenticate(host_machine(secret()))
    await admin.ended()
    assert world.faults == ["authentication.failed"]


async def test_io_queues_wait_for_the_admin_queues_authentication(world: World) -> None:
    world.plain.secrets = (secret(), None)
    admin = await world.connect()
    with pytest.raises(AssertionError, match="0x191"):
        await world.connect(queue_id=1, controller_id=admin.controller_id)


async def test_an_authentication_that_stalls_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_session, "AUTHENTICATION_SECONDS", 0.05)
    world.plain.secrets = (secret(), None)
    await (await world.connect()).ended()
    assert world.faults == ["connection.timeout"]
