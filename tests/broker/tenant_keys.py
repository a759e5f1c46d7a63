"""Volumes of tenants, and what was sealed under which of their keys, for tests of rotations."""

import uuid

import pytest

from brokers import MemoryAudit, tenant_key_rotation_of
from sealane.daemon.broker import tenant_key_rotation
from sealane.daemon.broker.records import ShareRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.tenant_key_rotation import TenantKeyRotation
from sealane.protocol.kinds import TenantKeyStage

TENANT = "t"
SHARED_WITH = "u"


async def register(registry: Registry, number: int, *, tenant: str = TENANT) -> VolumeRecord:
    """Register a volume whose id is that number, shared with another tenant."""
    record = VolumeRecord(
        volume_id=uuid.UUID(int=number),
        tenant=tenant,
        display_name="",
        sector_count=1,
        target_node="s",
        generation=1,
        key_epoch=1,
        request_id=uuid.UUID(int=number),
        shares=(ShareRecord(tenant=SHARED_WITH, read_only=False),),
    )
    made, _ = await registry.register(record)
    return made


async def volume(registry: Registry, number: int) -> VolumeRecord:
    return (await registry.volume(uuid.UUID(int=number))).record


async def change(registry: Registry, number: int, **values: object) -> None:
    """Set a volume's record to a state that takes long to reach."""
    await registry.change_volume(
        uuid.UUID(int=number), lambda record: record.model_copy(update=values)
    )


async def key(registry: Registry, number: int, key_epoch: int) -> bytes:
    """Return the key of a key epoch of a volume, as a gateway gets it."""
    return bytes(await registry.volume_key(await volume(registry, number), key_epoch))


async def former(registry: Registry, tenant: str = TENANT) -> list[int]:
    """Return the numbers of a tenant's former keys that are kept."""
    page, _ = await registry.tenant_keys.page(within=f"{tenant}/", limit=100)
    return [stored.record.number for stored in page]


async def rotated(registry: Registry, number: int = 0, *, tenant: str = TENANT) -> None:
    """Replace a tenant's key of that number from the beginning to the end."""
    rotation = tenant_key_rotation_of(registry)
    await rotation.prepare(tenant, number)
    await rotation.proceed()
    await rotation.rotate(tenant, number + 1)
    await rotation.proceed()


def rotation_of(registry: Registry) -> tuple[TenantKeyRotation, MemoryAudit]:
    audit = MemoryAudit()
    return tenant_key_rotation_of(registry, audit=audit), audit


def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have brokers look at all volumes after every change of a tenant."""
    monkeypatch.setattr(tenant_key_rotation, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(tenant_key_rotation, "INCOMPLETE_SECONDS", 0.0)


async def check_ready(registry: Registry) -> None:
    """Check that all volumes go on under the present key, unless it is being prepared."""
    tenant = await registry.tenants.get(TENANT)
    assert tenant is not None
    if tenant.record.key_stage != TenantKeyStage.PREPARING:
        next_keys = {each.next_tenant_key for each in (await live(registry)).values()}
        assert next_keys <= {tenant.record.key_number}


async def live(registry: Registry) -> dict[uuid.UUID, VolumeRecord]:
    """Return the volumes that weren't deleted."""
    page, has_more = await registry.volumes.page(limit=100)
    assert not has_more
    return {each.record.volume_id: each.record for each in page if not each.record.is_deleted}


async def check_end(registry: Registry) -> None:
    """Check that all volumes seal under the present key, and that needed keys alone are kept."""
    tenant = await registry.tenants.get(TENANT)
    assert tenant is not None
    present = tenant.record.key_number
    volumes = (await live(registry)).values()
    assert tenant.record.volume_count == len(volumes)
    assert {each.present_tenant_key for each in volumes} <= {present}
    needed = frozenset[int]().union(*(each.needed_tenant_keys for each in volumes))
    assert set(await former(registry)) == needed - {present}


class Sealed:
    """Keys that sectors were sealed under, by volume and key epoch: they must stay the same."""

    def __init__(self) -> None:
        self.keys: dict[tuple[uuid.UUID, int], bytes] = {}
        self.numbers: dict[tuple[uuid.UUID, int], int] = {}

    def forget(self, name: tuple[uuid.UUID, int]) -> None:
        """Let go of a sector that can't be opened any longer, by a volume and key epoch."""
        del self.keys[name], self.numbers[name]

    async def seal(self, registry: Registry) -> None:
        """Seal a sector under the newest key of each live volume, and read all others."""
        for record in (await live(registry)).values():
            for key_epoch in record.key_epochs:
                found = bytes(await registry.volume_key(record, key_epoch))
                name = (record.volume_id, key_epoch)
                if key_epoch == record.key_epoch:
                    self.keys.setdefault(name, found)
                    self.numbers.setdefault(name, record.present_tenant_key)
                assert self.keys.get(name, found) == found, f"{name} can't be opened"
        assert len({*self.keys.values()}) == len(self.keys), "two key epochs have the same key"
