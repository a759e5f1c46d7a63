"""The registry on every store: a lost race is retried on fresh data; nothing stale is granted."""

import asyncio
import datetime as dt
import uuid

import pytest

from sealane.crypto import certificates
from sealane.daemon.broker.records import GrantRecord, VolumeRecord
from sealane.daemon.broker.registry import VOLUMES_PER_TENANT_MAX, Registry
from sealane.errors import LeaseError, UnavailableError, UsageError


def volume(request: int = 1) -> VolumeRecord:
    return VolumeRecord(
        volume_id=uuid.uuid4(),
        tenant="t",
        display_name="d",
        sector_count=1,
        target_node="s",
        generation=1,
        key_epoch=1,
        request_id=uuid.UUID(int=request),
    )


def grant(of: VolumeRecord, lease_id: int = 1) -> GrantRecord:
    return GrantRecord(
        broker_instance=3,
        start_epoch=1,
        lease_id=lease_id,
        counter_start=256,
        counter_end=512,
        volume_id=of.volume_id,
        key_epoch=1,
        recipient="spiffe://sealane/gateway/g",
        incarnation=bytes(16),
        granted_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    )


async def test_grant_for_a_volume_that_changed_meanwhile_is_not_entered(
    registry: Registry,
) -> None:
    made, _ = await registry.register(volume())
    seen = await registry.volume(made.volume_id)
    await registry.unregister(made.volume_id)
    assert not await registry.record_grant(grant(made), volume=seen)
    assert await registry.grants.get(grant(made).name) is None


async def test_same_lease_is_never_entered_twice(registry: Registry) -> None:
    made, _ = await registry.register(volume())
    for expected in (True, None):
        seen = await registry.volume(made.volume_id)
        if expected:
            assert await registry.record_grant(grant(made), volume=seen)
        else:
            with pytest.raises(LeaseError) as caught:
                await registry.record_grant(grant(made), volume=seen)
            assert caught.value.reason == "lease.overlap"


async def test_lease_comes_back_once(registry: Registry) -> None:
    made, _ = await registry.register(volume())
    seen = await registry.volume(made.volume_id)
    await registry.record_grant(grant(made), volume=seen)
    returns = await asyncio.gather(*(registry.record_return((3, 1), 1, 300 + i) for i in range(8)))
    assert sorted(returns) == [False] * 7 + [True]
    stored = await registry.grants.get(grant(made).name)
    assert stored is not None
    assert stored.record.touched == 300 + returns.index(True)
    assert not await registry.record_return((3, 1), 2, [300])


async def test_brokers_that_race_make_one_tenant_and_one_volume(registry: Registry) -> None:
    keys = await asyncio.gather(*(registry.tenant_key("t", 0) for _ in range(8)))
    assert len({bytes(key) for key in keys}) == 1
    made = await asyncio.gather(*(registry.register(volume()) for _ in range(8)))
    assert [is_new for _, is_new in made].count(0) == 7
    assert len({record.volume_id for record, _ in made}) == 1
    others = await asyncio.gather(*(registry.register(volume(i)) for i in range(2, 10)))
    assert all(is_new for _, is_new in others)
    tenant = await registry.tenants.get("t")
    assert tenant is not None
    assert tenant.record.volume_count == 9


async def test_deleted_volume_stays_deleted_and_counts_once(registry: Registry) -> None:
    made, _ = await registry.register(volume())
    await asyncio.gather(*(registry.unregister(made.volume_id) for _ in range(4)))
    with pytest.raises(UsageError):
        await registry.volume(made.volume_id)
    tenant = await registry.tenants.get("t")
    assert tenant is not None
    assert tenant.record.volume_count == 0
    again, is_new = await registry.register(volume())
    assert is_new
    assert again.volume_id != made.volume_id


async def test_a_repeated_registration_is_a_use(registry: Registry) -> None:
    made, revision = await registry.register(volume())
    assert await registry.register(volume()) == (made, 0)
    with pytest.raises(UsageError) as caught:
        await registry.unregister(made.volume_id, registered_at=revision)
    assert caught.value.reason == "volume.taken_up.state"
    other, revision = await registry.register(volume(2))
    await registry.unregister(other.volume_id, registered_at=revision)
    assert await registry.registered("t", uuid.UUID(int=2)) is None


async def test_endless_race_is_given_up(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.broker.registry._BACK_OFF_SECONDS_MAX", 0.0)
    monkeypatch.setattr("sealane.daemon.broker.registry._BACK_OFF_SECONDS", 0.0)

    async def lost() -> None:
        return None

    with pytest.raises(UnavailableError) as caught:
        await registry.settle(lost)
    assert caught.value.reason == "broker.store.contended"


def test_signatures_of_all_volumes_of_a_tenant_are_remembered() -> None:
    assert certificates._verify_descriptor.cache_info().maxsize == VOLUMES_PER_TENANT_MAX
