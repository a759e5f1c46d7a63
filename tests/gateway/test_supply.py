"""Counters and keys of attached volumes: refilled in time; new key epochs are followed."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from patience import PATIENCE_SECONDS
from sealane._native import QueueClosedError
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.crypto.lease import LEASE_COUNTERS, Arena, CounterRange, Lease, LeaseHolder
from sealane.daemon.gateway import supply
from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.back_ends import VolumeBackEnd
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.data_path import AttachedVolume
from sealane.daemon.gateway.grants import OpenQueue
from sealane.daemon.gateway.leases import LeaseCache
from sealane.daemon.gateway.supply import Supply, released_keys
from sealane.daemon.gateway.targets import Place
from sealane.daemon.gateway.unflushed import Unflushed
from sealane.daemon.volume.events import EventLog
from sealane.errors import UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2

SELF = b"g" * 16
VOLUME = str(uuid.UUID(int=1))


@dataclass
class EpochBroker:
    """A volume's key epochs, its keys and its leases."""

    newest: int = 1
    oldest: int = 1
    arena: Arena = field(default_factory=lambda: Arena(broker_instance=1, start_epoch=1))
    handed_out: list[bytearray] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    tenant: str = "t"
    questions: int = 0
    lists: int = 0
    shares: list[broker_pb2.VolumeShare] = field(default_factory=list)
    target: str = "s"

    async def descriptor(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        self.questions += 1
        await asyncio.sleep(0)
        if not self.tenant:
            raise UsageError("volume.not_found", "there is no such volume")
        return self.described(volume_id)

    def described(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        return broker_pb2.VolumeDescriptor(
            target_node=self.target,
            volume_id=volume_id,
            tenant=self.tenant,
            shares=self.shares,
            key_epoch=self.newest,
            oldest_key_epoch=self.oldest,
        )

    async def descriptors_of(
        self, volume_ids: Collection[str]
    ) -> dict[str, broker_pb2.VolumeDescriptor]:
        self.lists += 1
        await asyncio.sleep(0)
        return {each: self.described(each) for each in volume_ids if self.tenant}

    async def key(self, _: broker_pb2.VolumeDescriptor, *, key_epoch: int) -> bytearray:
        if key_epoch > self.newest:
            raise UsageError("volume.key_epoch", "there is no such key epoch")
        await asyncio.sleep(0)
        self.handed_out.append(bytearray([key_epoch]) * 32)
        return self.handed_out[-1]

    async def lease(self, descriptor: broker_pb2.VolumeDescriptor) -> Lease:
        if descriptor.key_epoch != self.newest:
            raise UsageError("volume.key_epoch", "counters are leased for the newest epoch only")
        return self.arena.grant(
            volume_id=uuid.UUID(descriptor.volume_id), incarnation=SELF, return_token=bytes(16)
        )

    async def return_lease(self, volume_id: str, lease: Lease, touched: int) -> int:
        count = self.arena.give_back(
            lease.lease_id,
            touched,
            volume_id=uuid.UUID(volume_id),
            incarnation=SELF,
            return_token=lease.return_token,
        )
        self.returned.append(count)
        return count


@dataclass
class Port:
    """The keys and counters of a volume in the engine."""

    counters: list[CounterRange]
    keys: dict[int, bytes] = field(default_factory=dict)
    failed: str = ""
    is_closed: bool = False

    def add_key(self, key_epoch: int, key: bytearray) -> None:
        if key_epoch in self.keys:
            raise ValueError(f"key epoch {key_epoch} was added before")
        self.keys[key_epoch] = bytes(key)

    def fail(self, reason: str, detail: str) -> None:
        self._check_open()
        assert not self.failed
        assert detail
        self.failed = reason

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        self.counters += granted

    def _check_open(self) -> None:
        if self.is_closed:
            raise QueueClosedError("the volume is closed")

    def counters_remaining(self) -> int:
        self._check_open()
        return sum(c.count for c in self.counters)

    def replace_counters(self, granted: Sequence[CounterRange] = ()) -> list[CounterRange]:
        taken, self.counters = self.counters, [*granted]
        return taken


@dataclass
class World:
    broker: EpochBroker
    attached: dict[str, Attached]
    port: Port
    events: EventLog

    def supply(self) -> Supply:
        client = cast("BrokerClient", self.broker)
        return Supply(
            self.attached,
            tenant=lambda: "t",
            targets=lambda: ("s", "s2"),
            broker=client,
            leases=LeaseCache(client),
            events=self.events,
        )

    @contextlib.asynccontextmanager
    async def supplied(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.supply().run())
            yield
            task.cancel()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(supply, "REFILL_POLL_SECONDS", 0.001)
    monkeypatch.setattr(supply, "KEY_EPOCH_POLL_SECONDS", 0.005)
    broker = EpochBroker()
    descriptor = await broker.descriptor(VOLUME)
    holder = LeaseHolder()
    lease = await broker.lease(descriptor)
    holder.add(lease)
    port = Port([lease.counters], {1: b"\1" * 32})
    attached = Attached(
        descriptor=descriptor,
        port=cast("AttachedVolume", port),
        leases=holder,
        host_nqn="nqn.h",
        back_end=VolumeBackEnd(
            open_queue=cast("OpenQueue", None), place=Place(descriptor.target_node)
        ),
        unflushed=cast("Unflushed", None),
    )
    return World(broker, {VOLUME: attached}, port, EventLog("g"))


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)


async def test_a_new_key_epoch_is_followed_with_a_lease_of_its_own(world: World) -> None:
    before = world.port.counters[0]
    async with world.supplied():
        world.broker.newest = 3
        await until(lambda: 3 in world.port.keys)
        await until(lambda: world.broker.returned)
    attached = world.attached[VOLUME]
    assert world.port.keys == {epoch: bytes([epoch]) * 32 for epoch in (1, 2, 3)}
    assert attached.descriptor.key_epoch == 3
    assert not any(c.overlaps(before) for c in world.port.counters)
    # The rest of the old epoch's lease was returned; keys are wiped where they passed.
    assert world.broker.returned == [LEASE_COUNTERS]
    assert not any(any(key) for key in world.broker.handed_out)


async def test_a_key_epoch_that_two_notice_at_once_is_entered_once(world: World) -> None:
    runs = world.supply()
    world.broker.newest = 2
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(runs.follow(VOLUME) for _ in range(2)))
    assert sorted(world.port.keys) == [1, 2]
    assert world.attached[VOLUME].descriptor.key_epoch == 2


async def test_a_refill_that_comes_too_late_for_its_epoch_follows_the_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "KEY_EPOCH_POLL_SECONDS", 3600)
    world.broker.newest = 2
    world.port.counters = []
    async with world.supplied():
        await until(lambda: world.attached[VOLUME].descriptor.key_epoch == 2)
    assert world.port.counters_remaining() == LEASE_COUNTERS


@pytest.mark.parametrize("tenant", ["t", ""])
async def test_a_volume_that_is_detached_while_the_broker_is_asked_is_let_be(
    world: World, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    """The volume is detached and closed between request and answer, whatever the answer."""
    described = EpochBroker.descriptor
    world.broker.tenant = tenant

    async def detached_meanwhile(
        broker: EpochBroker, volume_id: str
    ) -> broker_pb2.VolumeDescriptor:
        world.attached.pop(volume_id, None)
        world.port.is_closed = True
        return await described(broker, volume_id)

    monkeypatch.setattr(EpochBroker, "descriptor", detached_meanwhile)
    asked = world.broker.questions
    async with world.supplied():
        await until(lambda: world.broker.questions > asked)
        await asyncio.sleep(0.02)
    assert not world.port.failed


async def test_low_counters_are_refilled_and_an_unchanged_epoch_is_left_alone(world: World) -> None:
    first = world.port.counters[0]
    world.port.counters = []
    async with world.supplied():
        await until(lambda: world.port.counters)
        await asyncio.sleep(0.02)
    assert world.port.counters_remaining() == LEASE_COUNTERS
    assert not world.port.counters[0].overlaps(first)
    assert world.port.keys.keys() == {1}


@pytest.mark.parametrize(("oldest", "newest"), [(2, 1), (1, 1 + KEY_EPOCHS_MAX), (1, 0)])
async def test_impossible_epochs_are_refused(oldest: int, newest: int) -> None:
    broker = EpochBroker(newest=newest, oldest=oldest)
    with pytest.raises(VerificationError) as caught:
        async with released_keys(cast("BrokerClient", broker), await broker.descriptor(VOLUME)):
            pass
    assert caught.value.reason == "volume.key_epoch.malformed"


async def test_keys_are_wiped_also_when_one_is_refused() -> None:
    broker = EpochBroker(newest=2)
    descriptor = await broker.descriptor(VOLUME)
    broker.newest = 1
    with pytest.raises(UsageError):
        async with released_keys(cast("BrokerClient", broker), descriptor):
            pass
    assert len(broker.handed_out) == 1
    assert not any(broker.handed_out[0])


async def test_a_volume_that_is_shared_no_more_is_failed_and_left_alone(world: World) -> None:
    async with world.supplied():
        world.broker.tenant = ""
        await until(lambda: world.port.failed)
        asked, world.port.counters = world.broker.questions, []
        await asyncio.sleep(0.05)
    assert world.port.failed == "volume.withdrawn"
    assert not world.port.counters
    assert world.broker.questions == asked


async def test_a_volume_is_asked_for_by_itself_only_if_something_changed(world: World) -> None:
    async with world.supplied():
        await until(lambda: world.attached[VOLUME].followed is not None)
        asked, lists = world.broker.questions, world.broker.lists
        await until(lambda: world.broker.lists > lists + 3)
        assert world.broker.questions == asked
        world.broker.shares = [broker_pb2.VolumeShare(tenant="u")]
        await until(lambda: world.broker.questions > asked)


async def test_many_volumes_are_asked_for_in_several_calls(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "ASKED_AT_ONCE", 1)
    world.attached[str(uuid.UUID(int=2))] = replace(
        world.attached[VOLUME],
        port=cast("AttachedVolume", Port([], {1: b"\1" * 32})),
        is_read_only=True,
        following=asyncio.Lock(),
    )
    async with world.supplied():
        world.broker.newest = 2
        await until(lambda: all(a.descriptor.key_epoch == 2 for a in world.attached.values()))


async def test_a_volume_that_may_only_be_read_by_now_is_failed(world: World) -> None:
    world.broker.tenant = "owner"
    world.broker.shares = [broker_pb2.VolumeShare(tenant="t")]
    async with world.supplied():
        await asyncio.sleep(0.05)
        assert not world.port.failed
        world.broker.shares = [broker_pb2.VolumeShare(tenant="t", read_only=True)]
        await until(lambda: world.port.failed)


async def test_a_reader_follows_key_epochs_without_a_lease(world: World) -> None:
    attached = world.attached[VOLUME]
    attached.is_read_only, attached.leases, world.port.counters = True, LeaseHolder(), []
    granted = world.broker.arena.counters_free(uuid.UUID(VOLUME))
    async with world.supplied():
        world.broker.newest = 2
        await until(lambda: 2 in world.port.keys)
        await asyncio.sleep(0.02)
    assert attached.descriptor.key_epoch == 2
    assert world.broker.arena.counters_free(uuid.UUID(VOLUME)) == granted


async def test_a_volume_whose_device_has_moved_is_followed_to_its_new_target(world: World) -> None:
    attached = world.attached[VOLUME]
    assert attached.target == "s"
    place = attached.back_end.place
    assert place is not None
    with world.events.subscribed(VOLUME) as subscribed:
        events = aiter(subscribed)
        async with world.supplied():
            world.broker.target = "s2"
            event = await anext(events)
            assert (event.kind, event.detail) == ("target_changed", "s to s2")
            assert (attached.target, attached.descriptor.target_node) == ("s2", "s2")
            # There it can't be reached; it is reported once, whatever else changes.
            world.broker.target = "s3"
            event = await anext(events)
            assert (event.kind, event.reason) == ("target_unknown", "volume.target.unknown")
            assert "'s3'" in event.detail
            assert "gateway.targets" in event.detail
            questions = world.broker.questions
            await until(lambda: world.broker.questions > questions + 2)
            world.broker.newest = 2
            assert (await anext(events)).kind == "key_epoch"
            assert (place.node, attached.target) == ("s2", "s2")
            world.broker.target = "s"
            event = await anext(events)
            assert (event.kind, event.detail) == ("target_changed", "s2 to s")
    assert (place.node, attached.target) == ("s", "s")
