"""Target, gateway and initiator on loopback: what is written comes back, and nothing else does."""

import asyncio
import contextlib
import random
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from sealane import _native
from sealane.daemon.storage import listener
from sealane.daemon.storage.back_end import VERIFICATION_LOSSES_MAX
from sealane.daemon.storage.events import StorageEvent
from sealane.daemon.storage.gateway import AttachedVolume, Gateway, GatewaySettings
from sealane.daemon.storage.listener import Admission
from sealane.daemon.storage.target import FILE_STORES, Target, TargetSubsystem
from sealane.errors import ProtocolError, UnavailableError, UsageError
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController, NvmeStatusError, VolumeQueue

HOST = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-000000000001"
GATEWAY = "nqn.2026-11.dev.sealane:gateway:g1"
BLOCK = 4160
SECTORS = 8192
MEBIBYTE = 1 << 20
INTERNAL_ERROR = 0x006

COMPARE_FAILURE = 0x285


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeKey:
    volume_id: uuid.UUID
    generation: int = 1
    sector_count: int = SECTORS
    keys: dict[int, bytearray] = field(
        default_factory=lambda: {1: bytearray(secrets.token_bytes(32))}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    broker_instance: int = 1
    start_epoch: int = 1
    counter_start: int = 1
    counter_end: int = 1 << 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    ticket: bytes
    secret: bytearray
    association_epoch: int
    target_incarnation: int
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    host_nqn: str = GATEWAY


@dataclass(slots=True, kw_only=True)
class World:
    target: Target
    gateway: Gateway
    attached: AttachedVolume
    volume_id: uuid.UUID
    path: Path | None
    grants: list[Grant] = field(default_factory=list)
    via: tuple[str, int] | None = None
    newest_epoch: int = 1

    def grant(self, queue_id: int, *, epoch: int | None = None, host_nqn: str = GATEWAY) -> Grant:
        """What the control channel does, in one process; `epoch` None: the newest."""
        epoch = self.newest_epoch if epoch is None else epoch
        self.newest_epoch = max(epoch, self.newest_epoch)
        secret, ticket = secrets.token_bytes(32), secrets.token_bytes(16)
        self.target.admit_queue(
            ticket,
            volume_id=self.volume_id,
            host_nqn=host_nqn,
            queue_id=queue_id,
            secret=bytearray(secret),
            association_epoch=epoch,
            incarnation=7,
            gateway=None,
        )
        traddr, trsvcid = self.via or self.target.address
        grant = Grant(
            ticket=ticket,
            secret=bytearray(secret),
            association_epoch=epoch,
            target_incarnation=7,
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self.target.subsystem_nqn(self.volume_id),
        )
        self.grants.append(grant)
        return grant

    def host(self, *, host_nqn: str = HOST) -> HostController:
        export = self.attached.export
        return HostController(
            traddr=export.traddr,
            trsvcid=export.trsvcid,
            subsystem_nqn=export.subsystem_nqn,
            host_nqn=host_nqn,
            credentials=Credentials(secret=self.attached.secret),
        )

    def back_host(self, *, host_nqn: str = GATEWAY) -> HostController:
        traddr, trsvcid = self.target.address
        return HostController(
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self.target.subsystem_nqn(self.volume_id),
            host_nqn=host_nqn,
        )

    @contextlib.asynccontextmanager
    async def queue(self) -> AsyncIterator[VolumeQueue]:
        async with self.host() as host:
            queue = await host.open_queue(1)
            try:
                yield queue
            finally:
                await queue.close()

    async def reason(self, reason: str, *, at_target: bool = False) -> None:
        """Wait until an event with this reason is reported."""
        await self.event(lambda event: event.reason == reason, at_target=at_target)

    async def event(
        self, matches: Callable[[StorageEvent], bool], *, at_target: bool = False
    ) -> None:
        """Wait until such an event is reported."""
        async with asyncio.timeout(10):
            while True:
                taken = (
                    self.target.take_events(self.volume_id)
                    if at_target
                    else self.attached.take_events()
                )
                if any(matches(event) for event in taken):
                    return
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def make_world(
    directory: Path | None,
    *,
    counters: Counters | None = None,
    settings: GatewaySettings | None = None,
    store_kind: Literal["emulated", "file", "inline", "memory"] = "file",
) -> AsyncIterator[World]:
    target = Target(
        traddr="127.0.0.1",
        trsvcid=0,
        store_kind="memory" if directory is None and store_kind == "file" else store_kind,
        drive="evo870" if store_kind == "emulated" else None,
        directory=directory,
    )
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0, settings=settings)
    await target.start()
    await gateway.start()
    volume_id = uuid.uuid4()
    await target.create_volume(volume_id, sector_count=SECTORS)

    async def open_queue(queue_id: int, epoch: int) -> Grant:
        await target.close_older_queues(volume_id, GATEWAY, epoch)
        return made.grant(queue_id, epoch=epoch)

    key = VolumeKey(volume_id=volume_id)
    attached = await gateway.attach(
        key, counters=[counters or Counters()], host_nqn=HOST, open_queue=open_queue
    )
    assert not any(key.keys[1])
    made = World(
        target=target,
        gateway=gateway,
        attached=attached,
        volume_id=volume_id,
        path=target.store_path(volume_id),
    )
    try:
        yield made
    finally:
        await gateway.stop()
        await target.stop()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with make_world(tmp_path / "store") as made:
        yield made


@pytest.fixture
async def inline_world(tmp_path: Path) -> AsyncIterator[World]:
    """A world whose stored sectors can be found, as on a drive."""
    async with make_world(tmp_path / "store", store_kind="inline") as made:
        yield made


def data(size: int) -> bytes:
    return random.Random(5).randbytes(size)


@pytest.mark.parametrize("kind", ["emulated", "file", "inline", "memory"])
async def test_eight_mebibytes_come_back_and_the_store_holds_no_plaintext(
    tmp_path: Path, kind: Literal["emulated", "file", "inline", "memory"]
) -> None:
    content = data(8 * MEBIBYTE)
    directory = tmp_path / "store" if kind in FILE_STORES else None
    made = make_world(directory, store_kind=kind)
    async with made as world:
        async with world.queue() as queue:
            await queue.write(3, content)
            await queue.flush()
            back = bytearray(len(content))
            await queue.read(3, back)
            assert back == content
            assert queue.progress() == 2 * len(content)
        statistics = world.attached.statistics()
        sectors = len(content) // 4096
        assert statistics["sectors_sealed"] == statistics["sectors_opened"] == sectors
        assert statistics["counters_used"] == 256 * sectors
        assert statistics["refusals"] == 0
        assert world.target.statistics(world.volume_id)["sectors_written"] == sectors
        if world.path is not None:
            pieces = [content[at : at + 16] for at in range(0, len(content), 65536)]
            assert _native.find_pieces(world.path, pieces) == []


async def test_find_pieces_finds_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "haystack"
    path.write_bytes(b"x" * 100_000 + b"needle-needle-16" + b"y" * 10)
    assert _native.find_pieces(path, [b"absent", b"needle-needle-16"]) == [(1, 100_000)]


async def test_one_sector_writes_travel_in_the_capsule(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1, io_bytes=4096)
        content = data(64 * 4096)
        await queue.write(0, content)
        back = bytearray(len(content))
        await queue.read(0, back)
        await queue.close()
        assert back == content


async def test_unwritten_sectors_read_as_zeros(world: World) -> None:
    async with world.queue() as queue:
        await queue.write(10, b"\xaa" * 4096)
        back = bytearray(b"\xff" * (3 * 4096))
        await queue.read(9, back)
        assert back == bytes(4096) + b"\xaa" * 4096 + bytes(4096)


async def test_two_queues_work_at_once(world: World) -> None:
    async with world.host() as host:
        assert await host.request_queues(2) == 2
        queues = [await host.open_queue(1), await host.open_queue(2)]
        content = data(2 * MEBIBYTE)
        await asyncio.gather(queues[0].write(0, content), queues[1].write(1024, content))
        back = bytearray(len(content))
        await queues[0].read(1024, back)
        assert back == content
        for queue in queues:
            await queue.close()


async def test_wrong_host_is_refused(world: World) -> None:
    with pytest.raises(NvmeStatusError) as caught:
        await world.host(host_nqn=f"{HOST[:-1]}2").connect()
    assert caught.value.status == 0x184
    await world.reason("connect.host")


async def test_range_beyond_the_namespace_is_refused_and_the_queue_lives_on(world: World) -> None:
    async with world.queue() as queue:
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(SECTORS - 1, bytes(8192))
        assert caught.value.status == 0x080
        await queue.write(SECTORS - 1, bytes(4096))


async def test_exhausted_lease_refuses_writes_and_a_new_one_heals() -> None:
    three = Counters(counter_end=1 + 3 * 256)
    async with make_world(None, counters=three) as world, world.queue() as queue:
        await queue.write(0, bytes(3 * 4096))
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(8, bytes(4096))
        assert caught.value.status == 0x082
        await world.reason("lease.exhausted")
        world.attached.add_counters([Counters(start_epoch=2)])
        await queue.write(8, bytes(4096))


async def test_counters_that_a_failed_write_burned_are_counted() -> None:
    three = Counters(counter_end=1 + 3 * 256)
    async with make_world(None, counters=three) as world, world.queue() as queue:
        with pytest.raises(NvmeStatusError):
            await queue.write(0, bytes(4 * 4096))
        statistics = world.attached.statistics()
        assert statistics["counters_used"] == statistics["counters_leased"] == 3 * 256
        assert world.attached.counters_remaining() == 0


async def test_ticket_is_good_once(world: World) -> None:
    grant = world.grant(1)
    async with world.back_host() as host:
        (await host.connect_queue(1, ticket=grant.ticket)).close()
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError) as caught:
            await host.connect_queue(1, ticket=grant.ticket)
    assert caught.value.status == 0x182
    await world.reason("queue.ticket", at_target=True)


async def test_ticket_is_for_one_queue_id_and_host(world: World) -> None:
    grant = world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(2, ticket=grant.ticket)
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)
    with pytest.raises(NvmeStatusError):
        await world.back_host(host_nqn=HOST).connect()


async def test_no_ticket_no_queue(world: World) -> None:
    world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1)


async def test_expired_ticket_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealane.daemon.storage.target.TICKET_SECONDS", 0.0)
    grant = world.grant(1)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)


async def test_a_ticket_of_another_admitted_host_is_refused_and_spent(world: World) -> None:
    other = f"{GATEWAY}:other"
    world.grant(1, host_nqn=other)
    grant = world.grant(1)
    async with world.back_host(host_nqn=other) as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)
    await world.reason("queue.ticket", at_target=True)
    async with world.back_host() as host:
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(1, ticket=grant.ticket)


@pytest.mark.parametrize("by", [GATEWAY, f"{GATEWAY}:that-takes-its-place"])
async def test_a_queue_that_was_fenced_before_it_started_never_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("sealane.daemon.storage.target.GATEWAYS_MAX", 1)
    grant = world.grant(1)
    admit = TargetSubsystem.admit

    async def fenced(self: TargetSubsystem, *args: Any) -> Admission:
        admission = await admit(self, *args)
        await world.target.close_older_queues(world.volume_id, by, 2)
        return admission

    monkeypatch.setattr(TargetSubsystem, "admit", fenced)
    async with world.back_host() as host:
        with contextlib.suppress(NvmeStatusError, UnavailableError):
            (await host.connect_queue(1, ticket=grant.ticket)).close()
    await world.reason("queue.epoch", at_target=True)
    assert world.target.statistics(world.volume_id)["queues_running"] == 0


async def test_older_association_epochs_are_refused_and_closed() -> None:
    newer = 1 << 63
    async with (
        make_world(None, settings=GatewaySettings(hold_seconds=0.2)) as world,
        world.queue() as queue,
    ):
        await queue.write(0, bytes(4096))
        old = world.grant(2)
        await world.target.close_older_queues(world.volume_id, GATEWAY, newer)
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(0, bytes(4096))
        assert caught.value.status == 0x300
        await world.reason("queue.epoch")
        with pytest.raises(ProtocolError, match="older"):
            world.grant(1, epoch=1)
        async with world.back_host() as host:
            with pytest.raises(NvmeStatusError):
                await host.connect_queue(2, ticket=old.ticket)


def change(path: Path, at: int, content: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def stored(path: Path, lba: int) -> bytes:
    with path.open("rb") as file:
        file.seek(lba * BLOCK)
        return file.read(BLOCK)


async def refused_read(queue: VolumeQueue, lba: int) -> int:
    back = bytearray(b"\x11" * 4096)
    with pytest.raises(NvmeStatusError) as caught:
        await queue.read(lba, back)
    assert caught.value.is_verification_failure
    assert back == b"\x11" * 4096
    return caught.value.status


async def test_flipped_bit_in_the_store_is_refused_by_its_tag(inline_world: World) -> None:
    world = inline_world
    assert world.path is not None
    async with world.queue() as queue:
        await queue.write(5, data(4096))
        block = bytearray(stored(world.path, 5))
        block[100] ^= 1
        change(world.path, 5 * BLOCK, block)
        assert await refused_read(queue, 5) == 0x282
        await world.reason("sector.tag")
        await queue.read(6, bytearray(4096))


async def test_swapped_and_older_sectors_in_the_store_are_stale(inline_world: World) -> None:
    world = inline_world
    assert world.path is not None
    async with world.queue() as queue:
        await queue.write(5, data(4096))
        old = stored(world.path, 5)
        await queue.write(5, data(8192))
        five, six = stored(world.path, 5), stored(world.path, 6)
        change(world.path, 5 * BLOCK, six + five)
        assert await refused_read(queue, 5) == 0x284
        change(world.path, 5 * BLOCK, old + six)
        assert await refused_read(queue, 5) == 0x284
        await world.reason("sector.stale", at_target=True)
        change(world.path, 5 * BLOCK, five)
        await queue.read(5, bytearray(8192))


class Interceptor:
    """Between gateway and target: forwards bytes, may change or repeat what a gateway sends.

    `forges`: completions of writes to forge.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.recorded = bytearray()
        self.serving: set[asyncio.Task[None]] = set()
        self.rewrites = 0
        self.replays = 0
        self.forges = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        # Cancelled at the end of a test, and no error of it.
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._relay(reader, writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(writer.transport.abort)
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            stack.callback(up_writer.transport.abort)
            try:
                async with asyncio.TaskGroup() as tasks:
                    written = asyncio.Event()
                    tasks.create_task(self._forward(reader, up_writer, written, requests=True))
                    tasks.create_task(self._forward(up_reader, writer, written, requests=False))
            except* OSError:
                pass  # a peer is done

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        written: asyncio.Event,
        *,
        requests: bool,
    ) -> None:
        while chunk := await reader.read(1 << 20):
            sent = bytearray(chunk)
            is_write = requests and chunk[0] == 0x04 and chunk[8] == 0x01
            if is_write:
                written.set()
            if self.forges and not requests and written.is_set():
                self.forges -= 1
                sent[8] ^= 1  # dword 0 of a completion entry
            if is_write and self.rewrites:
                self.rewrites -= 1
                sent[48] ^= 1  # first LBA
            writer.write(sent)
            if is_write and self.replays:
                self.replays -= 1
                writer.write(sent)
            await writer.drain()
        with contextlib.suppress(OSError):  # the other end may be gone already
            writer.write_eof()


@contextlib.asynccontextmanager
async def intercepted(world: World) -> AsyncIterator[Interceptor]:
    interceptor = Interceptor(world.target.address)
    server = await asyncio.start_server(interceptor.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    world.via = (host, port)
    try:
        yield interceptor
    finally:
        world.via = None
        server.close()
        for task in interceptor.serving:
            task.cancel()
        await asyncio.gather(*interceptor.serving, return_exceptions=True)


async def test_redirected_write_is_refused_and_written_where_it_belongs(world: World) -> None:
    async with intercepted(world) as wire, world.queue() as queue:
        await queue.write(4, data(4096))
        wire.rewrites = 1
        await queue.write(4, bytes(4096))
        await world.reason("command.mac", at_target=True)
        back = bytearray(8192)
        await queue.read(4, back)
        assert back == bytes(8192)
        assert world.attached.statistics()["sectors_unwritten"] == 1


async def test_write_that_is_redirected_for_ever_ends_with_a_path_error() -> None:
    async with (
        make_world(None, settings=GatewaySettings(hold_seconds=0.2)) as world,
        intercepted(world) as wire,
        world.queue() as queue,
    ):
        await queue.write(4, data(4096))
        wire.rewrites = 1 << 30
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(4, bytes(4096))
        assert caught.value.status == 0x300
        wire.rewrites = 0
        back = bytearray(4096)
        async with asyncio.timeout(10):
            while not any(back):
                # The next attempt to reconnect may come later than this hold time.
                with contextlib.suppress(NvmeStatusError):
                    await queue.read(4, back)
        assert back == data(4096)


async def test_forged_completions_that_keep_coming_fail_the_volume(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.storage.back_end.RETRY_SECONDS_MAX", 0.001)
    async with intercepted(world) as wire, world.queue() as queue:
        wire.forges = 1 << 30
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(4, data(4096))
        assert caught.value.status == INTERNAL_ERROR
        assert (1 << 30) - wire.forges == VERIFICATION_LOSSES_MAX + 1
        await world.reason("verification.limit")
        wire.forges = 0
        with pytest.raises(NvmeStatusError) as caught:
            await queue.read(4, bytearray(4096))
        assert caught.value.status == INTERNAL_ERROR


async def test_optional_commands_do_what_they_say(world: World) -> None:
    async with world.queue() as queue:
        content, back = data(16 * 4096), bytearray(16 * 4096)
        await queue.write(0, content)
        await queue.verify(0, 16)
        await queue.compare(0, content)
        with pytest.raises(NvmeStatusError) as caught:
            await queue.compare(1, content[:4096])
        assert caught.value.status & 0x7FF == COMPARE_FAILURE
        await queue.write_zeroes(0, 2)
        await queue.write_zeroes(2, 2, deallocate=True)
        await queue.deallocate([(4, 1), (6, 2)])
        expected = bytearray(content)
        for lba in (0, 1, 2, 3, 4, 6, 7):
            expected[lba * 4096 : (lba + 1) * 4096] = bytes(4096)
        await queue.read(0, back)
        assert back == expected
        await queue.verify(0, 16)
        await queue.compare(0, expected)
        await queue.compare_and_write(6, bytes(4096), content[:4096])
        with pytest.raises(NvmeStatusError) as caught:
            await queue.compare_and_write(6, bytes(4096), content[4096:8192])
        assert caught.value.status & 0x7FF == COMPARE_FAILURE
        expected[6 * 4096 : 7 * 4096] = content[:4096]
        await queue.read(0, back)
        assert back == expected
    assert world.attached.statistics()["refusals"] == 0


async def test_replayed_write_is_refused_and_the_host_goes_on(world: World) -> None:
    async with intercepted(world) as wire, world.queue() as queue:
        wire.replays = 1
        await queue.write(4, data(4096))
        await world.reason("command.mac", at_target=True)
        await queue.write(5, data(4096))
        assert world.attached.statistics()["associations_lost"] == 1


async def test_detach_ends_the_host_and_deletes_the_export(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1)
        await world.attached.detach()
        with pytest.raises(UnavailableError):
            await queue.write(0, bytes(4096))
        await queue.close()
    with pytest.raises(NvmeStatusError):
        await world.host().connect()


async def test_detach_flushes_what_no_host_flushed(world: World) -> None:
    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    assert world.attached.statistics()["journal_bytes"]
    await world.attached.detach()
    seen = world.attached.statistics()
    assert (seen["flushes"], seen["journal_flushes"], seen["journal_bytes"]) == (1, 0, 0)
    assert world.attached.statistics()["journal_bytes"] == 0
    assert "journal_dropped" not in [event.kind for event in world.attached.take_events()]


@pytest.mark.parametrize(
    ("is_silent", "reason"), [(False, "call.unreachable"), (True, "connection.timeout")]
)
async def test_detach_reports_a_journal_that_it_cannot_flush(
    world: World, monkeypatch: pytest.MonkeyPatch, is_silent: bool, reason: str
) -> None:
    async def unreachable(queue_id: int, epoch: int) -> Grant:
        if is_silent:
            await asyncio.Event().wait()
        raise UnavailableError("call.unreachable", "no target")

    monkeypatch.setattr("sealane.daemon.storage.last_flush.FLUSH_SECONDS", 0.1)
    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    monkeypatch.setattr(world.attached.back_end, "_open_queue", unreachable)
    await world.attached.detach()
    dropped = [e.reason for e in world.attached.take_events() if e.kind == "journal_dropped"]
    assert dropped == [reason]


async def test_deleted_volume_leaves_no_file(world: World) -> None:
    assert world.path is not None
    assert world.path.stat().st_mode & 0o777 == 0o600
    await world.target.delete_volume(world.volume_id)
    assert not world.path.exists()
    with pytest.raises(UsageError):
        world.grant(1)


async def test_plain_front_end_stays_on_loopback() -> None:
    with pytest.raises(UsageError, match="loopback"):
        Gateway(traddr="192.0.2.1", trsvcid=0)


async def test_address_in_use_is_said_so(world: World) -> None:
    traddr, trsvcid = world.gateway.address
    with pytest.raises(UsageError, match=str(trsvcid)):
        await Gateway(traddr=traddr, trsvcid=trsvcid).start()


async def test_secrets_are_wiped_once_the_queue_has_them(world: World) -> None:
    async with world.host() as host:
        connected = await host.connect_queue(1)
        assert not any(world.grants[-1].secret)
        connected.close()


def test_a_queue_secret_makes_one_queue_only() -> None:
    secret = bytearray(b"\x05" * 32)
    parameters = _native.SecureQueueParameters(
        secret=secret,
        volume_id=bytes(16),
        host_nqn=HOST,
        queue_id=1,
        association_epoch=1,
        incarnation=1,
    )
    assert secret == bytes(32)
    controller = _native.Controller(
        association=1, host_nqn=GATEWAY, host_id=bytes(16), controller_id=1
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for attempt in range(2):
            refused = pytest.raises(ValueError, match="used") if attempt else nullcontext()
            with refused:
                controller.start_queue(
                    ours.fileno(),
                    queue_id=1,
                    queue_depth=8,
                    h2c_data_max=8192,
                    in_capsule_max=8192,
                    transfer_max=8192,
                    secure=parameters,
                )
    controller.close()
    assert controller.queues_running() == 0


async def test_host_may_shut_its_controller_down_after_its_queues(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.close()
        await world.event(lambda event: event.kind == "queue_closed")
        assert (await host.identify_namespace()).block_bytes == 4096


async def test_association_ends_after_its_last_farewell(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_FAREWELL_SECONDS", 0)
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.close()
        with pytest.raises(UnavailableError):
            await ask_until_refused(host)


async def ask_until_refused(host: HostController) -> None:
    async with asyncio.timeout(10):
        while True:
            await host.identify_namespace()
