"""The initiator against our own listener and engine: a namespace in memory, end to end."""

import asyncio
import contextlib
import errno
import secrets
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Provider,
)
from sealane.daemon.nvme.listener import Listener
from sealane.errors import Error, ProtocolError, UnavailableError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    DISCOVERY_NQN,
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    AnaState,
    LogPage,
)
from sealane.protocol.nvme.subsystem import ALL_COMMANDS, Namespace, Subsystem
from sealane.transport.nvme import (
    Address,
    ControllerEvent,
    Credentials,
    DiscoveredPath,
    EventKind,
    HostController,
    NvmeStatusError,
    discover,
)
from sealane.transport.nvme.admin_queue import AdminQueue
from sealane.transport.nvme.connection_manager import ConnectionManager, PathEvent
from sealane.transport.nvme.handshake import Digests
from sealane.transport.nvme.paths import PathState, ReconnectPolicy

HOST = "nqn.2026-11.dev.sealane:host"
NQN = "nqn.2026-11.dev.sealane:volume:test"
BLOCKS = 1024
BLOCK = 4096
COMPARE_FAILURE = 0x285
SECRET = HostSecret(bytes(range(32)))
CONTROLLER_SECRET = HostSecret(bytes(range(64)))


@dataclass(slots=True)
class Opened:
    """An admission that passes its queue to the engine."""

    controller: _native.Controller
    connect: Connect
    digests: tuple[bool, bool]

    def start(self, descriptor: int) -> None:
        header, data = self.digests
        self.controller.start_queue(
            descriptor,
            queue_id=self.connect.queue_id,
            queue_depth=self.connect.queue_size,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=131_072,
            header_digest=header,
            data_digest=data,
        )

    def close(self) -> None:
        """Nothing was started."""


@dataclass(eq=False)
class InMemory(Exported, Provider):
    """A subsystem with one or two namespaces in memory."""

    digests: tuple[bool, bool] = (False, False)
    secrets: tuple[HostSecret, HostSecret | None] | None = None
    namespaces: dict[int, _native.Namespace] = field(default_factory=dict)
    ana: AnaState = AnaState.OPTIMIZED
    controllers: dict[int, _native.Controller] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add(1)

    def add(self, nsid: int) -> None:
        self.namespaces[nsid] = _native.Namespace(store="memory", block_count=BLOCKS, sealed=False)

    @property
    def subsystem(self) -> Subsystem:
        shown = tuple(
            Namespace(
                nsid=nsid,
                namespace_uuid=uuid.UUID(int=nsid),
                block_count=BLOCKS,
                ana_state=self.ana,
            )
            for nsid in self.namespaces
        )
        return Subsystem(
            nqn=NQN,
            serial="1",
            transfer_max=131_072,
            namespaces=shown,
            commands=ALL_COMMANDS,
            fused_blocks=1,
            nsid_max=8,
            is_multipath=True,
        )

    def exported(self) -> Iterable[Exported]:
        return (self,)

    def find(self, subsystem_nqn: str) -> Exported | None:
        return self if subsystem_nqn == NQN else None

    def allows(self, host_nqn: str) -> bool:
        return host_nqn == HOST

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        assert host_nqn == HOST
        return self.secrets

    async def admit(self, association: Association, connect: Connect) -> Admission:
        controller = self.controllers.get(association.association_id)
        if controller is None:
            controller = _native.Controller(
                association=association.association_id,
                host_nqn=connect.host_nqn,
                host_id=connect.host_id.bytes,
                controller_id=association.controller_id,
            )
            self.controllers[association.association_id] = controller
            controller.set_namespaces(
                [(nsid, made, "optimized") for nsid, made in self.namespaces.items()]
            )
        return Opened(controller, connect, self.digests)

    async def association_closed(self, association_id: int) -> None:
        controller = self.controllers.pop(association_id, None)
        if controller is not None:
            await asyncio.to_thread(controller.close)

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Nobody watches."""


@dataclass(slots=True)
class World:
    exported: InMemory
    listener: Listener
    address: Address
    events: "asyncio.Queue[ControllerEvent]" = field(default_factory=asyncio.Queue)
    is_stopped: bool = False

    async def stop(self) -> None:
        """Stop like a killed target."""
        if not self.is_stopped:
            self.is_stopped = True
            await self.listener.stop()

    def host(self, **changes: object) -> HostController:
        fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST}
        fields |= {"traddr": self.address.traddr, "trsvcid": self.address.trsvcid}
        return HostController(**(fields | changes))  # type: ignore[arg-type]

    def watching(self, **changes: object) -> HostController:
        return self.host(events=self.events.put_nowait, **changes)

    async def event(self) -> ControllerEvent:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.events.get()


@contextlib.asynccontextmanager
async def served(exported: InMemory, *, port: int = 0) -> AsyncIterator[World]:
    listener = Listener(exported, traddr="127.0.0.1", trsvcid=port, offers_digests=True)
    await listener.start()
    made = World(exported, listener, Address(*listener.address))
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with served(InMemory()) as made:
        yield made


@pytest.mark.parametrize("digests", [(False, False), (True, False), (False, True), (True, True)])
async def test_blocks_come_back(digests: tuple[bool, bool]) -> None:
    data = secrets.token_bytes(37 * BLOCK)
    asked = Digests(header=digests[0], data=digests[1])
    async with served(InMemory(digests)) as world, world.host(digests=asked) as host:
        queue = await host.open_queue(1)
        try:
            await queue.write(3, data, is_forced=True)
            back = bytearray(len(data))
            await queue.read(3, back)
        finally:
            await queue.close()
    assert back == data


async def test_every_command_of_a_bulk_queue(world: World) -> None:
    data = secrets.token_bytes(8 * BLOCK)
    block, other = data[:BLOCK], secrets.token_bytes(BLOCK)
    async with world.host() as host:
        queue = await host.open_queue(1)
        try:
            await queue.write(0, data)
            await queue.compare(0, data)
            with pytest.raises(NvmeStatusError) as caught:
                await queue.compare(1, block)
            assert (caught.value.status, caught.value.lba) == (COMPARE_FAILURE, 1)
            await queue.compare_and_write(0, block, other)
            with pytest.raises(NvmeStatusError) as caught:
                await queue.compare_and_write(0, block, other)
            assert caught.value.status == COMPARE_FAILURE
            await queue.write_zeroes(1, 2)
            await queue.deallocate([(3, 1), (5, 2)])
            await queue.verify(0, BLOCKS)
            await queue.flush()
            back = bytearray(8 * BLOCK)
            await queue.read(0, back)
        finally:
            await queue.close()
    blank = bytes(BLOCK)
    kept = data[4 * BLOCK : 5 * BLOCK]
    assert back == other + 3 * blank + kept + 2 * blank + data[7 * BLOCK :]


async def test_blocks_beyond_the_end_are_refused_and_the_queue_goes_on(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1)
        try:
            with pytest.raises(NvmeStatusError) as caught:
                await queue.verify(BLOCKS - 1, 2)
            assert caught.value.status == 0x080
            with pytest.raises(ValueError, match="1 to 256 ranges"):
                await queue.deallocate([])
            with pytest.raises(ValueError, match="1 to 256 ranges"):
                await queue.deallocate([(0, 1)] * 257)
            with pytest.raises(ValueError, match="whole blocks"):
                await queue.compare_and_write(0, bytes(BLOCK), bytes(2 * BLOCK))
            await queue.write(0, bytes(BLOCK))
        finally:
            await queue.close()


async def test_a_second_namespace_is_another(world: World) -> None:
    world.exported.add(5)
    async with world.host() as host:
        assert await host.active_namespaces() == [1, 5]
        assert (await host.namespace_names(5)).uuid == uuid.UUID(int=5)
        first, second = await host.open_queue(1, nsid=1), await host.open_queue(2, nsid=5)
        try:
            await second.write(0, b"x" * BLOCK)
            back = bytearray(BLOCK)
            await first.read(0, back)
        finally:
            await first.close()
            await second.close()
    assert back == bytes(BLOCK)


@pytest.mark.parametrize("controller_secret", [None, CONTROLLER_SECRET])
async def test_the_initiator_authenticates(controller_secret: HostSecret | None) -> None:
    credentials = Credentials(secret=SECRET, controller_secret=controller_secret)
    exported = InMemory(secrets=(SECRET, CONTROLLER_SECRET))
    async with served(exported) as world, world.host(credentials=credentials) as host:
        queue = await host.open_queue(1)
        await queue.write(0, bytes(BLOCK))
        await queue.close()
        await host.authenticate()
        assert await host.active_namespaces() == [1]


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        (None, "authentication.required"),
        (Credentials(secret=HostSecret(bytes(32))), "authentication.refused"),
        (
            Credentials(secret=SECRET, controller_secret=HostSecret(bytes(32))),
            "authentication.failed",
        ),
    ],
)
async def test_wrong_secrets_lead_nowhere(credentials: Credentials | None, reason: str) -> None:
    async with served(InMemory(secrets=(SECRET, CONTROLLER_SECRET))) as world:
        with pytest.raises(VerificationError) as caught:
            await world.host(credentials=credentials).connect()
    assert caught.value.reason == reason


async def test_a_controller_that_never_authenticates_is_not_trusted(world: World) -> None:
    """A host that requires the controller's proof doesn't proceed without it."""
    credentials = Credentials(secret=SECRET, controller_secret=CONTROLLER_SECRET)
    with pytest.raises(Error):
        await world.host(credentials=credentials).connect()


async def test_events_arrive_with_what_changed(world: World) -> None:
    async with world.watching() as host:
        world.exported.add(2)
        world.listener.changed()
        event = await world.event()
        assert (event.kind, event.namespaces) == (EventKind.NAMESPACES_CHANGED, (2,))
        assert await host.active_namespaces() == [1, 2]

        world.exported.ana = AnaState.INACCESSIBLE
        world.listener.changed()
        event = await world.event()
        assert event.kind is EventKind.ANA_CHANGED
        assert event.ana == {1: AnaState.INACCESSIBLE, 2: AnaState.INACCESSIBLE}


async def test_loss_is_reported_once(world: World) -> None:
    async with world.watching() as host:
        await world.stop()
        event = await world.event()
        assert event.kind is EventKind.LOST
        assert isinstance(event.error, UnavailableError)
        with pytest.raises(UnavailableError):
            await host.active_namespaces()
        assert world.events.empty()


async def test_an_unanswered_keep_alive_ends_the_association_in_its_own_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: asyncio.Queue[float] = asyncio.Queue()

    async def silent(_: AdminQueue, entry: bytes, **bounds: float) -> tuple[bytes, int]:
        asked.put_nowait(bounds["timeout_seconds"])
        raise UnavailableError("connection.timeout", "no answer")

    async with world.host(keep_alive_ms=40):
        monkeypatch.setattr(AdminQueue, "submit", silent)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await asked.get() == 0.04
        monkeypatch.undo()


async def test_without_a_descriptor_for_its_socket_a_controller_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "socket", exhausted)
    host = HostController(traddr="127.0.0.1", trsvcid=1, subsystem_nqn=NQN, host_nqn=HOST)
    with pytest.raises(UnavailableError, match="too many open files"):
        await host.connect()


async def test_leaving_is_no_loss(world: World) -> None:
    async with world.watching():
        pass
    assert world.events.empty()


async def test_discovery_finds_the_subsystem(world: World) -> None:
    async with world.host(subsystem_nqn=DISCOVERY_NQN) as host:
        found = await discover(host)
    expected = DiscoveredPath(subsystem_nqn=NQN, address=world.address, is_discovery=False)
    assert expected in found


@dataclass(slots=True)
class Restless:
    """A discovery controller whose log changes between reads."""

    changes: int
    count: int = 1
    reads: int = 0

    async def log_page(
        self, page: int, length: int, *, offset: int = 0, retain_event: bool = False
    ) -> bytes:
        assert page == LogPage.DISCOVERY
        assert retain_event or offset == 0
        if offset:
            return bytes(length)
        self.reads += 1
        return struct.pack("<QQH", min(self.reads, self.changes), self.count, 0).ljust(
            length, b"\0"
        )


async def test_a_discovery_log_is_read_until_it_holds_still() -> None:
    restless = Restless(changes=5)
    assert await discover(restless) == []  # type: ignore[arg-type]
    assert restless.reads == 6


async def test_a_discovery_log_that_never_holds_still_is_given_up() -> None:
    restless = Restless(changes=1_000_000)
    with pytest.raises(UnavailableError) as caught:
        await discover(restless)  # type: ignore[arg-type]
    assert caught.value.reason == "discovery.unstable"


async def test_a_discovery_log_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="allowed: 1024"):
        await discover(Restless(changes=1, count=1025))  # type: ignore[arg-type]


async def test_a_cancelled_command_leaves_the_queue_usable(world: World) -> None:
    async with world.host() as host:
        asked = asyncio.ensure_future(host.active_namespaces())
        await asyncio.sleep(0)  # let it be sent
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        assert await host.active_namespaces() == [1]


# Paths.


@dataclass(slots=True)
class Paths:
    """A manager whose delays last until the test ends them."""

    manager: ConnectionManager
    events: "asyncio.Queue[PathEvent]"
    resume: asyncio.Event

    async def reach(self, address: Address, state: PathState) -> PathEvent:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                event = await self.events.get()
                if (event.address, event.state) == (address, state) and event.report is None:
                    return event


@contextlib.asynccontextmanager
async def managed(*addresses: Address, **changes: object) -> AsyncIterator[Paths]:
    events: asyncio.Queue[PathEvent] = asyncio.Queue()
    resume = asyncio.Event()

    async def sleep(_: float) -> None:
        await resume.wait()

    fields: dict[str, object] = {"subsystem_nqn": NQN, "host_nqn": HOST, "queue_count": 2}
    fields |= {"events": events.put_nowait, "sleep": sleep}
    manager = ConnectionManager(addresses, **(fields | changes))  # type: ignore[arg-type]
    manager.start()
    try:
        yield Paths(manager, events, resume)
    finally:
        await manager.close()


async def _live(paths: Paths, address: Address) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while paths.manager.states[address] is not PathState.LIVE:
            await paths.events.get()


async def _queue_address(paths: Paths, queue_id: int) -> Address:
    address, queue = await paths.manager.connect_queue(
        queue_id, nsid=1, timeout_seconds=PATIENCE_SECONDS
    )
    queue.close()
    return address


async def test_queues_move_to_the_path_that_is_left(world: World) -> None:
    async with (
        served(InMemory()) as other,
        managed(world.address, other.address) as paths,
    ):
        await asyncio.gather(*(_live(paths, address) for address in (world.address, other.address)))
        first = await _queue_address(paths, 1)
        second = await _queue_address(paths, 2)
        assert {first, second} == {world.address, other.address}

        lost = world if first == world.address else other
        await lost.stop()
        await paths.reach(lost.address, PathState.WAITING)
        assert await _queue_address(paths, 1) == second


async def test_a_lost_path_comes_back() -> None:
    exported = InMemory()
    async with contextlib.AsyncExitStack() as stack:
        async with served(exported) as first:
            address = first.address
            paths = await stack.enter_async_context(managed(address))
            await paths.reach(address, PathState.LIVE)
        waiting = await paths.reach(address, PathState.WAITING)
        assert isinstance(waiting.error, UnavailableError)
        assert waiting.delay_seconds is not None

        await stack.enter_async_context(served(exported, port=address.trsvcid))
        paths.resume.set()
        await paths.reach(address, PathState.LIVE)
        assert await _queue_address(paths, 1) == address


async def test_a_path_that_stays_lost_is_given_up(world: World) -> None:
    await world.stop()
    now = iter([0.0, 5.0, 10.0, 15.0])
    policy = ReconnectPolicy(give_up_seconds=10.0)
    async with managed(world.address, policy=policy, clock=lambda: next(now)) as paths:
        paths.resume.set()
        gone = await paths.reach(world.address, PathState.GONE)
        assert isinstance(gone.error, UnavailableError)
        with pytest.raises(UnavailableError) as caught:
            async with asyncio.timeout(PATIENCE_SECONDS):  # immediately, not at the timeout
                await paths.manager.connect_queue(1, nsid=1, timeout_seconds=3600)
        assert caught.value.reason == "paths.none"


async def test_a_controller_that_fails_verification_is_not_asked_again() -> None:
    async with (
        served(InMemory(secrets=(SECRET, None))) as world,
        managed(world.address, credentials=Credentials(secret=CONTROLLER_SECRET)) as paths,
    ):
        gone = await paths.reach(world.address, PathState.GONE)
    assert isinstance(gone.error, VerificationError)


async def test_an_inaccessible_namespace_is_waited_for(world: World) -> None:
    world.exported.ana = AnaState.INACCESSIBLE
    async with managed(world.address) as paths:
        await paths.reach(world.address, PathState.LIVE)
        asked = asyncio.ensure_future(_queue_address(paths, 1))
        await asyncio.sleep(0)
        assert not asked.done()
        world.exported.ana = AnaState.NON_OPTIMIZED
        world.listener.changed()
        assert await asked == world.address


async def test_no_path_in_time_is_an_error(world: World) -> None:
    world.exported.ana = AnaState.INACCESSIBLE
    async with managed(world.address) as paths:
        await paths.reach(world.address, PathState.LIVE)
        with pytest.raises(UnavailableError) as caught:
            await paths.manager.connect_queue(1, nsid=1, timeout_seconds=0)
        assert caught.value.reason == "paths.none"
