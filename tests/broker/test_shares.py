"""Volumes shared with other tenants, at the broker."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import MemoryAudit, running_broker
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.daemon.broker.records import SHARES_MAX
from sealane.daemon.broker.service import BrokerService
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2

OWNER = Subject(
    node="g",
    role="gateway",
    tenant="t",
    incarnation=bytes(16),
    kem_public_key=X25519KemKey.create().public_key,
)
GUEST = replace(OWNER, node="h", tenant="u")
TARGET = replace(OWNER, node="s", role="target")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerService]:
    async with running_broker(tmp_path / "b.sqlite") as service:
        yield service


async def register(broker: BrokerService, **values: str) -> str:
    answer = await broker.register_volume(
        OWNER,
        **{
            "request_id": str(uuid.uuid4()),
            "display_name": "",
            "size_bytes": 4096,
            "target_node": "s",
            **values,
        },  # type: ignore[arg-type]
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id


async def said_to(
    broker: BrokerService, caller: Subject, volume_id: str
) -> broker_pb2.VolumeDescriptor:
    signed = await broker.descriptor(caller, volume_id)
    return broker_pb2.VolumeDescriptor.FromString(signed.descriptor)


async def lease(broker: BrokerService, caller: Subject, volume_id: str, key_epoch: int) -> None:
    await broker.leases.grant(
        caller, volume_id=volume_id, key_epoch=key_epoch, request_id=uuid.uuid4().bytes
    )


async def key(broker: BrokerService, caller: Subject, volume_id: str, key_epoch: int) -> None:
    await broker.release_key(caller, volume_id=volume_id, key_epoch=key_epoch, request_id=bytes(16))


async def test_a_guest_gets_keys_and_counters_as_far_as_it_may(broker: BrokerService) -> None:
    volume_id = await register(broker)
    with pytest.raises(UsageError):
        await key(broker, GUEST, volume_id, 1)
    await broker.share_volume(OWNER, volume_id, tenant="u", read_only=True)
    await key(broker, GUEST, volume_id, 1)
    with pytest.raises(VerificationError) as caught:
        await lease(broker, GUEST, volume_id, 1)
    assert caught.value.reason == "volume.read_only"
    await broker.share_volume(OWNER, volume_id, tenant="u", read_only=False)
    await lease(broker, GUEST, volume_id, 1)
    assert len((await said_to(broker, OWNER, volume_id)).shares) == 1


async def test_the_end_of_a_share_is_the_beginning_of_a_key_epoch(broker: BrokerService) -> None:
    volume_id = await register(broker)
    await broker.share_volume(OWNER, volume_id, tenant="u", read_only=False)
    await broker.share_volume(OWNER, volume_id, tenant="v", read_only=False)
    before = await broker.registry.store.revision()
    await broker.unshare_volume(OWNER, volume_id, tenant="u")
    stored = await broker.registry.volume(uuid.UUID(volume_id))
    # One commit: the key is rotated in the same moment as the guest is removed.
    assert stored.revision == before + 1
    assert [share.tenant for share in stored.record.shares] == ["v"]
    assert stored.record.key_epoch == 2
    for call in (key, lease):
        with pytest.raises(UsageError) as caught:
            await call(broker, GUEST, volume_id, 1)
        assert caught.value.reason == "volume.not_found"
    with pytest.raises(UsageError) as caught:
        await broker.unshare_volume(OWNER, volume_id, tenant="u")
    assert caught.value.reason == "volume.share.not_found"
    assert (await said_to(broker, OWNER, volume_id)).key_epoch == 2


async def test_a_share_ends_also_where_no_key_epoch_is_left(broker: BrokerService) -> None:
    volume_id = await register(broker)
    await broker.share_volume(OWNER, volume_id, tenant="u", read_only=False)
    stored = await broker.registry.volume(uuid.UUID(volume_id))
    full = stored.record.model_copy(update={"key_epoch": KEY_EPOCHS_MAX})
    await broker.registry.commit((), broker.registry.volumes.sealed(stored.name, full))
    signed = await broker.unshare_volume(OWNER, volume_id, tenant="u")
    after = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    assert (after.key_epoch, len(after.shares)) == (KEY_EPOCHS_MAX, 0)
    assert isinstance(broker.audit, MemoryAudit)
    assert broker.audit.records[-1]["rotated"] is False
    with pytest.raises(UsageError):
        await key(broker, GUEST, volume_id, 1)


async def test_each_is_told_of_its_own_share_only(broker: BrokerService) -> None:
    volume_id = await register(broker)
    for tenant in ("v", "u"):
        await broker.share_volume(OWNER, volume_id, tenant=tenant, read_only=True)
    told = {
        who: [share.tenant for share in (await said_to(broker, caller, volume_id)).shares]
        for who, caller in (("owner", OWNER), ("guest", GUEST), ("target", TARGET))
    }
    assert told == {"owner": ["u", "v"], "guest": ["u"], "target": []}
    page, _ = await broker.descriptors(GUEST, page_size=10, page_token="")
    (listed,) = [broker_pb2.VolumeDescriptor.FromString(each.descriptor) for each in page]
    assert [share.tenant for share in listed.shares] == ["u"]
    page, _ = await broker.descriptors(replace(GUEST, tenant="w"), page_size=10, page_token="")
    assert not page


@pytest.mark.parametrize("tenant", ["t", "", "T", "a b", "x" * 64])
async def test_only_another_tenant_can_be_shared_with(broker: BrokerService, tenant: str) -> None:
    volume_id = await register(broker)
    with pytest.raises(UsageError) as caught:
        await broker.share_volume(OWNER, volume_id, tenant=tenant, read_only=False)
    assert caught.value.reason == "volume.share.tenant"


async def test_volumes_of_one_gateway_are_not_shared(broker: BrokerService) -> None:
    volume_id = await register(broker, mode="local", third_party="p", target_node="g")
    with pytest.raises(UsageError) as caught:
        await broker.share_volume(OWNER, volume_id, tenant="u", read_only=True)
    assert caught.value.reason == "volume.share.third_party"


async def test_a_volume_has_a_bound_of_shares(broker: BrokerService) -> None:
    volume_id = await register(broker)
    for number in range(SHARES_MAX):
        await broker.share_volume(OWNER, volume_id, tenant=f"u{number}", read_only=True)
    with pytest.raises(UsageError) as caught:
        await broker.share_volume(OWNER, volume_id, tenant="u", read_only=True)
    assert caught.value.reason == "volume.share.limit"
    await broker.share_volume(OWNER, volume_id, tenant="u0", read_only=False)


async def test_a_volume_that_is_being_filled_gives_a_guest_no_key(broker: BrokerService) -> None:
    volume_id = await register(broker, mode="off")
    await broker.share_volume(OWNER, volume_id, tenant="u", read_only=False)
    with pytest.raises(UnavailableError) as caught:
        await key(broker, GUEST, volume_id, 1)
    assert caught.value.reason == "volume.filling"
    with pytest.raises(VerificationError):
        await broker.finish_filling(GUEST, volume_id)
