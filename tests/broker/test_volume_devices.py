"""Volumes on third-party targets as devices: ownership and advances of their anchor."""

import datetime as dt
import uuid
from dataclasses import replace

import pytest

from broker.test_devices import KEM, S, World, refused
from sealane.crypto.certificates import Subject
from sealane.daemon.broker.devices import DEVICES_PER_NODE_MAX, FENCE
from sealane.daemon.broker.records import VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change, volume_record
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import devices_pb2

G = Subject(
    node="g", role="gateway", tenant="t", incarnation=b"4" * 16, kem_public_key=KEM.public_key
)
G_AGAIN = replace(G, incarnation=b"5" * 16)
OTHER = replace(G, node="g2", incarnation=b"6" * 16)


class Volume(World):
    """A volume on a third-party target, at gateway g."""

    volume_id: uuid.UUID

    async def register(self, **update: object) -> VolumeRecord:
        volume_id = uuid.uuid4()
        record = VolumeRecord(
            volume_id=volume_id,
            tenant="t",
            display_name="",
            sector_count=1,
            target_node="g",
            generation=1,
            key_epoch=1,
            mode="local",
            third_party="disks",
            request_id=uuid.uuid4(),
            device_id=volume_id,
        )
        made, is_new = await self.registry.register(record.model_copy(update=update))
        assert is_new
        return made

    async def opened(self, caller: Subject = G) -> devices_pb2.DeviceState:
        return await self.open(caller, self.volume_id, found=())

    async def anchor(self, epoch: int, number: int, caller: Subject = G) -> None:
        change = Change(
            name=volume_record(self.volume_id),
            expected=number - 1,
            record=Anchored(number=number, blob=bytes([number])),
        )
        await self.devices.advance(
            caller, device_id=self.volume_id, fencing_epoch=epoch, changes=[change]
        )

    async def confirmed(self, caller: Subject = G) -> int:
        """Open it for the first time, anchor its first state; return the fencing epoch."""
        state = await self.opened(caller)
        assert state.is_initial
        await self.anchor(state.fencing_epoch, 1, caller)
        await self.devices.confirm(
            caller, device_id=self.volume_id, fencing_epoch=state.fencing_epoch
        )
        return state.fencing_epoch


@pytest.fixture
async def world(registry: Registry) -> Volume:
    made = Volume(registry)
    made.volume_id = (await made.register()).volume_id
    return made


async def test_each_opening_finds_what_the_one_before_anchored_and_ends_it(world: Volume) -> None:
    epoch = await world.confirmed()
    again = await world.opened(G_AGAIN)
    assert not again.is_initial
    assert [(r.name, r.number, r.blob) for r in again.records] == [
        (volume_record(world.volume_id), 1, b"\x01")
    ]
    await refused(VerificationError, "device.fenced", world.anchor(epoch, 2))
    await world.anchor(again.fencing_epoch, 2, G_AGAIN)
    # An older state can't be anchored again.
    await refused(UsageError, "anchor.order", world.anchor(again.fencing_epoch, 1, G_AGAIN))


async def test_only_the_gateway_that_keeps_the_volume_opens_it(world: Volume) -> None:
    for caller, reason in (
        (OTHER, "device.owner.refused"),
        (replace(G, role="target"), "device.owner.refused"),
        (replace(G, tenant="other"), "volume.not_found"),
    ):
        with pytest.raises((VerificationError, UsageError)) as caught:
            await world.opened(caller)
        assert caught.value.reason == reason
    await refused(
        VerificationError, "device.anchor.mismatch", world.open(G, world.volume_id, anchor="none")
    )
    with pytest.raises(UsageError):
        await world.open(G, uuid.UUID(int=99))
    assert await world.registry.devices.get(str(uuid.UUID(int=99))) is None


async def test_anchor_takes_records_of_its_volume_only(world: Volume) -> None:
    epoch = await world.confirmed()
    other = await world.register(device_id=None)
    for name, reason in (
        (CATALOGUE, "volume.not_found"),
        (volume_record(other.volume_id), "device.volume.refused"),
    ):
        change = Change(name=name, expected=0, record=Anchored(number=1, blob=b"1"))
        with pytest.raises((VerificationError, UsageError)) as caught:
            await world.devices.advance(
                G, device_id=world.volume_id, fencing_epoch=epoch, changes=[change]
            )
        assert caught.value.reason == reason


async def test_volume_moves_with_its_anchor_once_the_old_gateway_must_have_stopped(
    world: Volume,
) -> None:
    epoch = await world.confirmed()
    await world.books.move(world.volume_id, "g2", unseen=True)
    moved = (await world.registry.volume(world.volume_id)).record
    assert (moved.target_node, moved.device_id) == ("g2", world.volume_id)
    await refused(VerificationError, "device.owner.refused", world.anchor(epoch, 2))
    await refused(VerificationError, "device.owner.refused", world.opened(G_AGAIN))
    world.now += FENCE - dt.timedelta(seconds=1)
    await refused(UnavailableError, "device.busy", world.opened(OTHER))
    world.now += dt.timedelta(seconds=1)
    state = await world.opened(OTHER)
    assert not state.is_initial
    assert [record.number for record in state.records] == [1]
    await world.anchor(state.fencing_epoch, 2, OTHER)


async def test_deleted_volume_is_no_device_any_more(world: Volume) -> None:
    epoch = await world.confirmed()
    await refused(UsageError, "device.volumes.state", world.books.forget(world.volume_id))
    await world.registry.unregister(world.volume_id)
    await refused(VerificationError, "device.forgotten", world.anchor(epoch, 2))
    await refused(VerificationError, "device.forgotten", world.opened())
    assert await world.registry.anchors.page(limit=1) == ([], False)
    stored = await world.registry.devices.get(str(world.volume_id))
    assert stored is not None
    assert stored.record.wrapped_secret == b""


async def test_volumes_are_none_of_the_devices_that_a_node_may_own(world: Volume) -> None:
    for _ in range(DEVICES_PER_NODE_MAX):
        await world.register()
    await world.opened()
    # Nor does it become the device for new volumes of a target with the same name.
    target = replace(S, node="g", incarnation=G.incarnation)
    await world.attest(target)
    assert await world.registry.served_device("g") is None
    await world.open(target, uuid.UUID(int=7))
    await world.books.move(world.volume_id, "g3", unseen=True)


async def test_same_request_with_another_anchor_is_refused(world: Volume) -> None:
    stored = (await world.registry.volume(world.volume_id)).record
    again = uuid.uuid4()
    asked = stored.model_copy(update={"volume_id": again, "device_id": again})
    assert await world.registry.register(asked) == (stored, False)
    without = stored.model_copy(update={"volume_id": again, "device_id": None})
    await refused(UsageError, "volume.request.exists", world.registry.register(without))
