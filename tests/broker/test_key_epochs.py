"""Key epochs at the broker: rotation, access to keys, and exhausted keys."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import operator_of, running_broker, token_of
from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, open_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.crypto.lease import EPOCH_COUNTERS_MAX, LEASE_COUNTERS
from sealane.daemon.broker.leases import SignedLease
from sealane.daemon.broker.records import VolumeRecord
from sealane.daemon.broker.service import BrokerService
from sealane.errors import LeaseError, UsageError
from sealane.protocol.v1 import broker_pb2, operator_pb2

KEM = X25519KemKey.create()
GATEWAY = Subject(
    node="g", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=KEM.public_key
)
OTHER = replace(GATEWAY, node="h")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerService]:
    async with running_broker(tmp_path / "b.sqlite") as service:
        yield service


async def register(broker: BrokerService) -> str:
    answer = await broker.register_volume(
        GATEWAY, request_id=str(uuid.uuid4()), display_name="", size_bytes=4096, target_node="s"
    )
    return broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id


async def descriptor(broker: BrokerService, volume_id: str) -> broker_pb2.VolumeDescriptor:
    signed = await broker.descriptor(GATEWAY, volume_id)
    return broker_pb2.VolumeDescriptor.FromString(signed.descriptor)


async def key(
    broker: BrokerService, volume_id: str, key_epoch: int, caller: Subject = GATEWAY
) -> bytes:
    secret = await broker.release_key(
        caller, volume_id=volume_id, key_epoch=key_epoch, request_id=bytes(16)
    )
    context = Context(
        purpose="volume key",
        recipient=caller.spiffe_id,
        incarnation=caller.incarnation,
        request_id=bytes(16),
        volume_id=volume_id,
        key_epoch=key_epoch,
    )
    opened = open_signed(
        secret,
        private_key=KEM,
        context=context,
        signer=broker.authority.signing_key.public_key(),
    )
    return bytes(opened)


async def lease(broker: BrokerService, volume_id: str, key_epoch: int) -> SignedLease:
    return await broker.leases.grant(
        GATEWAY, volume_id=volume_id, key_epoch=key_epoch, request_id=uuid.uuid4().bytes
    )


async def change(broker: BrokerService, volume_id: str, **values: int) -> None:
    """Set a volume's record to a state that would take petabytes of writes to reach."""
    stored = await broker.registry.volume(uuid.UUID(volume_id))
    after = stored.record.model_copy(update=values)
    VolumeRecord.model_validate(after.model_dump())
    await broker.registry.commit((), broker.registry.volumes.sealed(stored.name, after))


async def test_a_new_epoch_has_another_key_and_the_old_one_stays_readable(
    broker: BrokerService,
) -> None:
    volume_id = await register(broker)
    first = await key(broker, volume_id, 1)
    assert (await broker.rotate_key(uuid.UUID(volume_id))).key_epoch == 2
    said = await descriptor(broker, volume_id)
    assert (said.oldest_key_epoch, said.key_epoch) == (1, 2)
    assert await key(broker, volume_id, 1) == first
    assert await key(broker, volume_id, 2) != first
    for key_epoch in (0, 3):
        with pytest.raises(UsageError) as caught:
            await key(broker, volume_id, key_epoch)
        assert caught.value.reason == "volume.key_epoch"


async def test_counters_are_leased_for_the_newest_epoch_only(broker: BrokerService) -> None:
    volume_id = await register(broker)
    await broker.rotate_key(uuid.UUID(volume_id))
    with pytest.raises(UsageError) as caught:
        await lease(broker, volume_id, 1)
    assert caught.value.reason == "volume.key_epoch"
    await lease(broker, volume_id, 2)


async def test_a_lost_holder_costs_the_volumes_it_can_seal_for_their_epoch(
    broker: BrokerService,
) -> None:
    held, older, unheld, gone = [await register(broker) for _ in range(4)]
    for volume_id in (held, older, gone):
        await key(broker, volume_id, 1, OTHER)
    await broker.rotate_key(uuid.UUID(older))
    await key(broker, unheld, 1)
    await broker.unregister_volume(GATEWAY, gone)
    for _ in range(2):
        # Again: keys that aren't the newest aren't rotated.
        await broker.rotate_keys_of(OTHER.spiffe_id)
    epochs = [(await descriptor(broker, v)).key_epoch for v in (held, older, unheld)]
    assert epochs == [2, 2, 1]
    # The trusted gateway gets the new key; the other one's old key opens no new data.
    assert await key(broker, held, 2) != await key(broker, held, 1)


async def test_holders_are_told_apart_by_their_whole_name(broker: BrokerService) -> None:
    volume_id = await register(broker)
    await key(broker, volume_id, 1, replace(GATEWAY, node="g1"))
    await broker.rotate_keys_of(GATEWAY.spiffe_id)
    assert (await descriptor(broker, volume_id)).key_epoch == 1


async def test_the_lease_that_brings_a_key_near_its_bound_is_its_last(
    broker: BrokerService,
) -> None:
    volume_id = await register(broker)
    await change(broker, volume_id, counters_leased=EPOCH_COUNTERS_MAX - 3 * LEASE_COUNTERS + 1)
    await lease(broker, volume_id, 1)
    assert (await descriptor(broker, volume_id)).key_epoch == 1
    await lease(broker, volume_id, 1)
    assert (await descriptor(broker, volume_id)).key_epoch == 2
    with pytest.raises(UsageError):
        await lease(broker, volume_id, 1)
    stored = await broker.registry.volume(uuid.UUID(volume_id))
    assert stored.record.counters_leased == 0


async def test_what_comes_back_is_not_counted_against_its_key(broker: BrokerService) -> None:
    volume_id = await register(broker)
    granted = await lease(broker, volume_id, 1)

    async def leased() -> int:
        return (await broker.registry.volume(uuid.UUID(volume_id))).record.counters_leased

    assert await leased() == LEASE_COUNTERS
    arena = (broker.leases.arena.broker_instance, broker.leases.arena.start_epoch)
    await broker.leases.take_back(
        GATEWAY,
        volume_id=volume_id,
        arena=arena,
        lease_id=granted.lease_id,
        touched=256 + 1000,
        return_token=token_of(broker, granted),
    )
    assert await leased() == 1000


async def test_a_volume_without_epochs_left_refuses_another_and_then_counters(
    broker: BrokerService,
) -> None:
    volume_id = await register(broker)
    await change(
        broker,
        volume_id,
        key_epoch=KEY_EPOCHS_MAX,
        counters_leased=EPOCH_COUNTERS_MAX - LEASE_COUNTERS,
    )
    with pytest.raises(UsageError) as refused:
        await broker.rotate_key(uuid.UUID(volume_id))
    assert refused.value.reason == "volume.key_epoch.limit"
    await lease(broker, volume_id, KEY_EPOCHS_MAX)
    with pytest.raises(LeaseError) as exhausted:
        await lease(broker, volume_id, KEY_EPOCHS_MAX)
    assert exhausted.value.reason == "lease.key_exhausted"


async def test_the_operator_sees_every_lease_and_its_end(
    tmp_path: Path, broker: BrokerService
) -> None:
    first, second = [await register(broker) for _ in range(2)]
    returned = await lease(broker, first, 1)
    await lease(broker, second, 1)
    arena = (broker.leases.arena.broker_instance, broker.leases.arena.start_epoch)
    await broker.leases.take_back(
        GATEWAY,
        volume_id=first,
        arena=arena,
        lease_id=returned.lease_id,
        touched=256,
        return_token=token_of(broker, returned),
    )

    async def books(broker: BrokerService, **request: object) -> list[operator_pb2.LeaseEntry]:
        entries: list[operator_pb2.LeaseEntry] = []
        token = ""
        while True:
            page = await operator_of(broker).ListLeases(
                operator_pb2.ListLeasesRequest(page_size=1, page_token=token, **request),  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
            )
            entries += page.leases
            token = page.next_page_token
            if not token:
                return entries

    assert [(e.volume_id, e.state, e.returned) for e in await books(broker)] == [
        (first, "returned", LEASE_COUNTERS),
        (second, "out", 0),
    ]
    (entry,) = await books(broker, volume_id=second)
    assert (entry.recipient, entry.counters) == (GATEWAY.spiffe_id, LEASE_COUNTERS)
    await broker.close()
    await broker.registry.store.close()
    async with running_broker(tmp_path / "b.sqlite") as again:
        assert [e.state for e in await books(again)] == ["returned", "burned"]
