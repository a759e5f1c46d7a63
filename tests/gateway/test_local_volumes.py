"""Volumes of mode "local" on third-party targets, at broker, target and gateway."""

import uuid

import pytest

from sealane.crypto.certificates import Subject
from sealane.daemon.gateway.servicer import VolumesServicer
from sealane.daemon.gateway.volumes import Via
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import (
    broker_pb2,
    volumes_pb2,
)
from volume_control import HOST, World


async def _create_local(world: World) -> str:
    descriptor = await world.volumes.create(
        request_id="", display_name="d", size_bytes=1 << 20, target_node="", third_party="disks"
    )
    return descriptor.volume_id


async def test_volume_on_a_third_party_is_described_as_such_and_not_at_the_target(
    world: World,
) -> None:
    volume_id = await _create_local(world)
    assert world.third_parties.volumes == {"disks": uuid.UUID(volume_id)}
    assert not world.target.volumes
    shown = await VolumesServicer(world.volumes).GetVolume(
        volumes_pb2.GetVolumeRequest(name=f"volumes/{volume_id}"),
        None,  # type: ignore[arg-type]
    )
    assert (shown.mode, shown.third_party, shown.target_node) == ("local", "disks", "g")
    assert "C5" not in shown.claims
    assert (shown.freshness, shown.anchor) == ("tree of the gateway", "broker")
    assert "C6" in shown.claims
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    # The gateway opens the third party's queues through its journal of unflushed writes.
    opened = vars(world.gateway.attached[0].open_queue)["_open_queue"]
    assert opened == world.third_parties.attached[0].open_queue
    await world.volumes.detach(volume_id)
    assert world.third_parties.attached[0].is_closed
    await world.volumes.delete(volume_id)
    assert not world.third_parties.volumes


async def test_third_party_is_left_when_an_attach_fails(world: World) -> None:
    volume_id = await _create_local(world)
    world.gateway.failure = UnavailableError("gateway.full", "no room")
    with pytest.raises(UnavailableError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.third_parties.attached[0].is_closed
    assert world.volumes.attached(volume_id) is None


async def test_volume_that_a_third_party_has_no_room_for_is_not_registered(world: World) -> None:
    world.third_parties.failure = UsageError("third_party.occupied", "something else is there")
    with pytest.raises(UsageError):
        await _create_local(world)
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_job_cannot_choose_the_address_of_a_third_party(world: World) -> None:
    volume_id = await _create_local(world)
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via(traddr="192.0.2.1"))
    assert caught.value.reason == "volume.via"


async def test_another_gateway_of_the_tenant_gets_neither_key_nor_lease_of_a_local_volume(
    world: World,
) -> None:
    volume_id = await _create_local(world)
    other = Subject(
        node="g2",
        role="gateway",
        tenant="t",
        incarnation=b"i" * 16,
        kem_public_key=world.identities["gateway"].keys.kem_public,
    )
    for call in (world.broker.release_key, world.broker.leases.grant):
        with pytest.raises(VerificationError) as caught:
            await call(other, volume_id=volume_id, key_epoch=1, request_id=b"r" * 16)
        assert caught.value.reason == "volume.owner.refused"


async def test_local_volume_of_another_gateway_is_not_attached(world: World) -> None:
    other = Subject(
        node="g2",
        role="gateway",
        tenant="t",
        incarnation=b"i" * 16,
        kem_public_key=world.identities["gateway"].keys.kem_public,
    )
    registered = await world.broker.register_volume(
        other,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="g2",
        mode="local",
        third_party="disks",
    )
    descriptor = broker_pb2.VolumeDescriptor.FromString(registered.volume.descriptor)
    world.third_parties.volumes["disks"] = uuid.UUID(descriptor.volume_id)
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(descriptor.volume_id, host_nqn=HOST, via=Via())
    assert caught.value.reason == "volume.owner"
    assert world.third_parties.attached == []


@pytest.mark.parametrize(
    ("mode", "third_party", "node"),
    [("odd", "disks", "g"), ("local", "", "g"), ("", "disks", "g"), ("local", "disks", "other")],
)
async def test_broker_registers_no_other_mode_and_no_other_owner(
    world: World, mode: str, third_party: str, node: str
) -> None:
    with pytest.raises(UsageError):
        await world.broker.register_volume(
            world.identities["gateway"].subject,
            request_id=str(uuid.uuid4()),
            display_name="",
            size_bytes=4096,
            target_node=node,
            mode=mode,
            third_party=third_party,
        )


async def test_target_takes_no_volume_of_another_mode(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="g",
        mode="local",
        third_party="disks",
    )
    with pytest.raises(UsageError) as caught:
        await world.storage.create(world.identities["gateway"].subject, answer.volume)
    assert caught.value.reason == "namespace.mode"
