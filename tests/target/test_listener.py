"""The listener against hosts that split, pipeline, stall or send false data."""

import asyncio
import contextlib
import dataclasses
import secrets
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import pytest
import structlog

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.nvme import listener as listening
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Provider,
)
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.errors import UnavailableError
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.command import Answer, decode_completion
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, AdminOpcode, PduKind, Status
from sealane.protocol.nvme.subsystem import Subsystem, volume_subsystem
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from sealane.transport.nvme.stream import VANISHED_SECONDS, PduStream

HOST = "nqn.2026-11.dev.sealane:host"
OTHER = "nqn.2026-11.dev.sealane:other"
NQN = "nqn.2026-11.dev.sealane:volume:test"
SECOND = "nqn.2026-11.dev.sealane:volume:second"


@dataclass(slots=True)
class Handed:
    """An admission that keeps the descriptor passed to it."""

    box: asyncio.Queue[socket.socket]

    def start(self, descriptor: int) -> None:
        self.box.put_nowait(socket.socket(fileno=socket.dup(descriptor)))

    def close(self) -> None:
        """Nothing was prepared."""


class OneSubsystem(Exported, Provider):
    """A provider with a subsystem whose queues go to the test instead of the engine."""

    def __init__(self) -> None:
        self.shown = volume_subsystem(
            nqn=NQN,
            volume_id=uuid.UUID(int=1),
            serial="1",
            block_count=8,
            metadata_bytes=0,
            transfer_max=131_072,
        )
        self.box: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.closed: asyncio.Queue[int] = asyncio.Queue()
        self.refusals: list[tuple[str, int]] = []
        self.queues_closed: list[tuple[int, int]] = []
        self.secrets: tuple[HostSecret, HostSecret | None] | None = None
        self.idle: int | None = None
        self.hosts = {HOST}
        self.second: OneSubsystem | None = None

    @property
    def subsystem(self) -> Subsystem:
        return self.shown

    def exported(self) -> Iterable[Exported]:
        return (self,)

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        return self.secrets if host_nqn == HOST else None

    def idle_ms(self, association_id: int) -> int | None:
        assert association_id
        return self.idle

    def find(self, subsystem_nqn: str) -> Exported | None:
        if subsystem_nqn == SECOND:
            return self.second
        return self if subsystem_nqn == NQN else None

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        self.queues_closed.append((association_id, queue_id))

    def allows(self, host_nqn: str) -> bool:
        return host_nqn in self.hosts

    async def admit(self, association: Association, connect: Connect) -> Admission:
        assert connect.controller_id == association.controller_id
        return Handed(self.box)

    async def association_closed(self, association_id: int) -> None:
        self.closed.put_nowait(association_id)

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        self.refusals.append((error.reason, connect.queue_id))


@dataclass(slots=True)
class World:
    provider: OneSubsystem
    listener: Listener
    faults: list[str]

    def host(self, **changes: object) -> HostController:
        traddr, trsvcid = self.listener.address
        fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST}
        return HostController(
            traddr=traddr,
            trsvcid=trsvcid,
            **(fields | changes),  # type: ignore[arg-type]
        )

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(*self.listener.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    provider = OneSubsystem()
    provider.second = OneSubsystem()
    made = Listener(provider, traddr="127.0.0.1", trsvcid=0)
    faults: list[str] = []
    made.observe(faults.append)
    await made.start()
    try:
        yield World(provider, made, faults)
    finally:
        await made.stop()


def io_connect(host: HostController, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "command_id": 4,
        "queue_id": 1,
        "queue_size": 32,
        "host_id": host._host_id,
        "controller_id": host.identity.controller_id,
        "subsystem_nqn": NQN,
        "host_nqn": HOST,
    }
    made = Connect(**(fields | changes))  # type: ignore[arg-type]
    return _native.encode_capsule_cmd(*made.encode())


@pytest.mark.parametrize("cut", [1, 8, 127, 128, 129, 136, 200, 1000, 1223, 1224, 1225, 1260])
async def test_pipelined_bytes_reach_the_engine_untouched(world: World, cut: int) -> None:
    """Bytes after Connect, even in the same segment, stay in the socket."""
    behind = secrets.token_bytes(100)
    async with world.host() as host, world.raw() as (reader, writer):
        stream = _native.encode_ic_req() + io_connect(host) + behind
        writer.write(stream[:cut])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(stream[cut:])
        response = await reader.readexactly(128 + 24)
        assert decode_completion(response[136:152])[1] == 0
        with await world.provider.box.get() as handed:
            handed.setblocking(True)
            left = await asyncio.to_thread(handed.recv, 100, socket.MSG_WAITALL)
            assert left == behind
            # The response was complete before the queue was passed on.
            handed.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(handed, b"engine")
            assert await reader.readexactly(6) == b"engine"


async def answered(world: World, sent: bytes) -> tuple[int, int]:
    async with world.raw() as (reader, writer):
        writer.write(_native.encode_ic_req() + sent)
        response = await reader.readexactly(128 + 24)
        _, status, result = decode_completion(response[136:152])
        return status, result


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"queue_id": 17}, Status.CONNECT_PARAMETERS),
        ({"queue_size": 1}, Status.CONNECT_PARAMETERS),
        ({"queue_size": 129}, Status.CONNECT_PARAMETERS),
        ({"controller_id": 99}, Status.CONNECT_PARAMETERS),
        ({"host_nqn": f"{HOST}2"}, Status.CONNECT_HOST),
        ({"host_nqn": OTHER}, Status.CONNECT_PARAMETERS),
        ({"subsystem_nqn": SECOND}, Status.CONNECT_PARAMETERS),
        ({"subsystem_nqn": f"{NQN}2"}, Status.CONNECT_PARAMETERS),
        ({"record_format": 1}, Status.CONNECT_FORMAT),
        ({"queue_id": 0}, Status.CONNECT_PARAMETERS),
    ],
)
async def test_wrong_connects_are_refused(
    world: World, changes: dict[str, object], status: int
) -> None:
    world.provider.hosts.add(OTHER)
    async with world.host() as host:
        assert (await answered(world, io_connect(host, **changes)))[0] == status
    assert world.provider.box.empty()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"controller_id": 99}, 16 | 1 << 16),
        ({"host_nqn": OTHER}, 512 | 1 << 16),
        ({"subsystem_nqn": SECOND}, 256 | 1 << 16),
        ({"queue_id": 17}, 42),
    ],
)
async def test_a_refused_connect_names_its_field(
    world: World, changes: dict[str, object], named: int
) -> None:
    world.provider.hosts.add(OTHER)
    async with world.host() as host:
        assert (await answered(world, io_connect(host, **changes)))[1] == named


async def test_a_host_may_name_another_host_id_on_a_queue(world: World) -> None:
    async with world.host() as host, world.raw() as (reader, writer):
        writer.write(_native.encode_ic_req() + io_connect(host, host_id=uuid.UUID(int=5)))
        response = await reader.readexactly(128 + 24)
        assert decode_completion(response[136:152])[1] == 0
        (await world.provider.box.get()).close()
        (association,) = world.listener.associations
        assert association.host_id == host._host_id


async def test_a_queue_id_connects_once_per_association(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "QUEUE_REUSE_SECONDS", 0.05)
    async with world.host() as host:
        (await host.connect_queue(1)).close()
        (await world.provider.box.get()).close()
        assert (await answered(world, io_connect(host)))[0] == Status.SEQUENCE_ERROR
    assert world.faults == ["connect.queue.in_use"]


def closed(queue_id: int, *, reason: str = "", association: int = 1) -> StorageEvent:
    return StorageEvent(
        kind="queue_closed", reason=reason, detail="", association=association, queue_id=queue_id
    )


async def test_a_queue_id_connects_again_when_its_queue_is_drained(world: World) -> None:
    async with world.host() as host:
        (await host.connect_queue(1)).close()
        (await world.provider.box.get()).close()
        again = asyncio.ensure_future(answered(world, io_connect(host)))
        # Meanwhile another queue does something that takes longer than a refusal.
        (await host.connect_queue(2)).close()
        (await world.provider.box.get()).close()
        world.listener.queue_closed(closed(2))
        assert not again.done()
        assert world.provider.box.empty()
        world.listener.queue_closed(closed(1))
        assert (await again)[0] == 0
        (await world.provider.box.get()).close()
    assert world.provider.queues_closed == [(1, 2), (1, 1)]


@pytest.mark.parametrize("how", ["reset", "end"])
async def test_a_connect_that_waits_for_a_queue_id_hears_of_the_controllers_end(
    world: World, how: str
) -> None:
    host = world.host()
    await host.connect()
    (await host.connect_queue(1)).close()
    (await world.provider.box.get()).close()
    again = asyncio.ensure_future(answered(world, io_connect(host)))
    (await host.connect_queue(2)).close()
    (await world.provider.box.get()).close()
    if how == "reset":
        await host._set_configuration(0)
        assert (await again)[0] == Status.SEQUENCE_ERROR
    await host.close()
    if how == "end":
        assert (await again)[0] in {Status.CONNECT_PARAMETERS, Status.SEQUENCE_ERROR}
    assert world.provider.box.empty()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("shut down", "controller.shut_down"),
        ("lost", "connection.lost"),
        ("fenced", "association.fenced"),
        ("not allowed", "connect.host"),
    ],
)
async def test_the_log_says_why_an_association_ended(world: World, how: str, reason: str) -> None:
    with structlog.testing.capture_logs() as lines:
        host = world.host()
        await host.connect()
        (association,) = world.listener.associations
        if how == "lost":
            assert host._admin is not None
            await host._admin.close()
        elif how == "fenced":
            world.listener.end_association(1)
        elif how == "not allowed":
            world.provider.hosts.clear()
            world.listener.changed()
        else:
            await host.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await association.drained.wait()
        await host.close()
    ended = [line for line in lines if line["event"] == "association_ended"]
    assert [line["reason"] for line in ended] == [reason]
    assert ended[0]["host"] == HOST


async def test_association_ends_with_its_admin_connection(world: World) -> None:
    async with world.host():
        pass
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await world.provider.closed.get() == 1


def io_fields(**changes: object) -> Connect:
    fields: dict[str, object] = {
        "command_id": 0,
        "queue_id": 0,
        "queue_size": 32,
        "host_id": uuid.UUID(int=1),
        "controller_id": DYNAMIC_CONTROLLER,
        "subsystem_nqn": NQN,
        "host_nqn": HOST,
    }
    return Connect(**(fields | changes))  # type: ignore[arg-type]


def admin_connect(*, keep_alive_ms: int) -> bytes:
    return _native.encode_capsule_cmd(*io_fields(keep_alive_ms=keep_alive_ms).encode())


async def test_silent_host_loses_its_association(world: World) -> None:
    async with world.raw() as (reader, writer):
        writer.write(_native.encode_ic_req() + admin_connect(keep_alive_ms=1))
        await reader.readexactly(128 + 24)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.read() == b""
            await world.provider.closed.get()


async def test_keep_alive_keeps_the_association(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: asyncio.Queue[int] = asyncio.Queue()
    handle = AdminController.handle

    def counted(self: AdminController, entry: bytes, data: bytes = b"") -> Answer | None:
        if entry[0] == AdminOpcode.KEEP_ALIVE:
            beats.put_nowait(1)
        return handle(self, entry, data)

    monkeypatch.setattr(AdminController, "handle", counted)
    async with world.host(keep_alive_ms=1000) as host:
        for _ in range(3):  # 1.5 s: longer than the time-out
            await beats.get()
        assert (await host.identify_namespace()).block_count == 8


IC_REQ = _native.encode_ic_req()


def changed(pdu: bytes, offset: int, value: int) -> bytes:
    made = bytearray(pdu)
    made[offset] = value
    return bytes(made)


@pytest.mark.parametrize(
    ("sent", "fatal_status", "offset"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1, 0),  # unknown type
        (bytes([9]) * 128, 1, None),
        (struct.pack("<BBBBI", 0, 0, 128, 0, 0xFFFF_FFFF), 1, 4),
        (_native.encode_ic_resp(4096), 2, 0),
        (changed(IC_REQ, 8, 1), 6, 8),
        (changed(IC_REQ, 10, 1), 6, 10),
        (changed(IC_REQ, 11, 4), 6, 11),
        (IC_REQ + IC_REQ, 2, 0),
        (IC_REQ + _native.encode_c2h_data(1, b"1234"), 2, 0),
    ],
)
async def test_malformed_starts_are_terminated(
    world: World, sent: bytes, fatal_status: int, offset: int | None
) -> None:
    async with world.raw() as (reader, writer):
        writer.write(sent)
        received = await reader.read()
        answer = received[128:] if received[:1] == bytes([PduKind.IC_RESP]) else received
        assert answer[0] == PduKind.C2H_TERM
        code, information = struct.unpack_from("<HI", answer, 8)
        assert code == fatal_status
        assert offset is None or information == offset
    assert world.faults == ["pdu.malformed"]


async def test_a_first_command_other_than_connect_is_out_of_sequence(world: World) -> None:
    sent = _native.encode_capsule_cmd(bytes(64), bytes(1024))
    assert (await answered(world, sent))[0] == Status.SEQUENCE_ERROR
    assert world.faults == ["connect.expected"]


async def test_connect_data_that_is_no_name_is_refused(world: World) -> None:
    entry, data = io_fields().encode()
    sent = _native.encode_capsule_cmd(entry, changed(data, 511, 1))
    assert (await answered(world, sent))[0] == Status.CONNECT_PARAMETERS
    assert world.faults == ["connect.malformed"]


async def test_stalled_handshake_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.05)
    async with world.raw() as (reader, writer):
        writer.write(_native.encode_ic_req()[:100])
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("CONNECTIONS_MAX", "connections.limit"),
        ("CONNECTIONS_PER_SOURCE_MAX", "connections.source.limit"),
    ],
)
async def test_connections_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(listening, limit, 1)
    async with world.host():
        with pytest.raises(UnavailableError):
            await world.host().connect()
    assert world.faults == [reason]


@pytest.mark.parametrize("limit", ["CONNECTIONS_MAX", "CONNECTIONS_PER_SOURCE_MAX"])
async def test_hosts_with_io_queues_do_not_count_as_connections(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A gateway has an association for each volume, all from one address."""
    monkeypatch.setattr(listening, limit, 4)

    async def connects(wanted: bool) -> None:
        """Wait until another host is served, or is not: the listener hears of ends later."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    async with world.host():
                        served = True
                except UnavailableError:
                    served = False
                if served == wanted:
                    return

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            host = await stack.enter_async_context(world.host())
            (await host.connect_queue(1)).close()
            (await world.provider.box.get()).close()
        await connects(True)
        # They count again when they have no queue left, and not when they are gone.
        for association in range(1, 9):
            world.listener.queue_closed(closed(1, association=association))
        await connects(False)
    await connects(True)


async def test_half_open_connections_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKES_MAX", 1)
    # The first has identified itself and doesn't count.
    async with world.host(), world.raw() as (reader, writer):
        writer.write(IC_REQ)
        await reader.readexactly(128)
        with pytest.raises(UnavailableError):
            await world.host().connect()
    assert world.faults[0] == "handshakes.limit"


async def test_io_queues_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "IO_QUEUES_MAX", 1)
    async with world.host() as host:
        (await host.connect_queue(1)).close()
        (await world.provider.box.get()).close()
        sent = io_connect(host, queue_id=2)
        assert (await answered(world, sent))[0] == Status.CONNECT_BUSY
        assert "queues.limit" in world.faults
        # One that ended frees its place for another.
        world.listener.queue_closed(closed(1))
        (await host.connect_queue(2)).close()
        (await world.provider.box.get()).close()


async def test_events_are_taken_once() -> None:
    volume = _native.Namespace(store="memory", block_count=8, sealed=True)
    feed = EventFeed(volume, lambda _: None)
    assert list(feed.take()) == []
    feed.close()


def _connected(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    listening_socket = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    near = stack.enter_context(socket.create_connection(listening_socket.getsockname()))
    far = stack.enter_context(listening_socket.accept()[0])
    return near, far


def test_both_ends_notice_a_peer_that_vanishes_without_a_word() -> None:
    with contextlib.ExitStack() as stack:
        for end in _connected(stack):
            PduStream(end, data_max=0)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count <= VANISHED_SECONDS
            timeout = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == VANISHED_SECONDS * 1000


@pytest.fixture
def draining(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event: queues of the served subsystem don't drain until it is set."""
    gate = asyncio.Event()

    async def association_closed(association_id: int) -> None:
        world.provider.closed.put_nowait(association_id)
        await gate.wait()

    world.provider.hosts.add(OTHER)
    monkeypatch.setattr(world.provider, "association_closed", association_closed)
    return gate


async def _vanish(world: World) -> None:
    """Connect, and disconnect without a controller shutdown; return when its queues drain."""
    old = world.host()
    await old.connect()
    assert old._admin is not None
    await old._admin.close()
    await world.provider.closed.get()
    await old.close()


async def test_a_host_that_left_is_answered_when_its_old_queues_are_drained(
    world: World, draining: asyncio.Event
) -> None:
    await _vanish(world)
    again = world.host()
    connecting = asyncio.ensure_future(again.connect())
    try:
        # Two connections of another host, one after the other, take longer than one would.
        async with world.host(host_nqn=OTHER), world.host(host_nqn=OTHER):
            assert not connecting.done()
            draining.set()
        await connecting
    finally:
        draining.set()
        await asyncio.gather(connecting, return_exceptions=True)
        await again.close()


async def test_a_host_that_left_during_a_reset_is_waited_for_too(
    world: World, draining: asyncio.Event
) -> None:
    # Nothing reads the admin queue meanwhile: only its socket shows that the host is gone.
    old, again = world.host(), world.host()
    await old.connect()
    resetting = asyncio.ensure_future(old._set_configuration(0))
    await world.provider.closed.get()
    resetting.cancel()
    await asyncio.gather(resetting, return_exceptions=True)
    await old.close()
    connecting = asyncio.ensure_future(again.connect())
    try:
        # Two connections of another host, one after the other, take longer than one would.
        async with world.host(host_nqn=OTHER), world.host(host_nqn=OTHER):
            assert not connecting.done()
            draining.set()
        await connecting
    finally:
        draining.set()
        await asyncio.gather(connecting, return_exceptions=True)
        await again.close()


async def test_a_host_that_left_for_too_long_a_drain_is_told_to_come_again(
    world: World, draining: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "DRAIN_LEFT_SECONDS", 0.0)
    await _vanish(world)
    with pytest.raises(NvmeStatusError) as caught:
        await world.host().connect()
    assert caught.value.status & 0x7FF == Status.CONNECT_BUSY
    draining.set()


async def test_a_second_controller_of_a_host_leaves_the_first_alone(world: World) -> None:
    async with world.host() as first, world.host() as second:
        assert await first.active_namespaces() == await second.active_namespaces()


async def test_host_that_is_connecting_at_a_stop_is_told_nothing(world: World) -> None:
    # It connects again; told that there is no such subsystem, it might give up.
    async with world.host() as host, world.raw() as (reader, writer):
        writer.write(IC_REQ)
        await reader.readexactly(128)
        world.listener.end_accepting()
        writer.write(io_connect(host))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.read() == b""
    assert world.faults == []


async def test_host_waits_before_the_listener_accepts_and_after(world: World) -> None:
    listener = Listener(world.provider, traddr="127.0.0.1", trsvcid=0)
    listener.open()
    waiting = dataclasses.replace(world, listener=listener)
    async with waiting.raw() as (reader, writer):
        writer.write(IC_REQ)
        answer = asyncio.ensure_future(reader.readexactly(128))
        assert not (await asyncio.wait([answer], timeout=0.1))[0]
        await listener.start()
        await answer
    listener.end_accepting()
    async with waiting.raw() as (reader, writer):
        writer.write(IC_REQ)
        answer = asyncio.ensure_future(reader.readexactly(128))
        assert not (await asyncio.wait([answer], timeout=0.1))[0]
        await listener.stop()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer
