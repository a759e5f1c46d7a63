"""Rotation of the key encryption key: what may begin, what is refused, what remains."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from brokers import Count, MemoryAudit, rewrapping_of, start_broker
from etcd_server import Cluster
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import rewrapping
from sealane.daemon.broker.authority import authority_entry, same_authority
from sealane.daemon.broker.keyring import UNNAMED
from sealane.daemon.broker.records import InstanceRecord, TenantRecord, instance_name
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.rewrapping import Rewrapping
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError, UsageError

OLD, NEW, OTHER = (bytes([each]) * 32 for each in (1, 2, 3))
ID = {key: WrappingKey(key).key_id for key in (OLD, NEW, OTHER)}


async def opened(path: Path, *keys: bytes) -> Registry:
    store = SqliteStore(path)
    try:
        return await Registry.open(store, *map(WrappingKey, keys), node="b")
    except BaseException:
        await store.close()
        raise


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """A store with keys of tenants and devices under OLD, at a broker that also has NEW."""
    path = tmp_path / "b.sqlite"
    _, _, first = await start_broker(SqliteStore(path), starts=Count(), heads=Count(), kek=OLD)
    await fill(first)
    await first.close()
    registry = await opened(path, OLD, NEW)
    await rewrapping_of(registry).announce()
    yield registry
    await registry.close()


async def fill(registry: Registry) -> None:
    for tenant in ("t1", "t2", "t3"):
        await registry.tenant_key(tenant, 0)
    for number in (1, 2):
        name = uuid.UUID(int=number)
        record, same_key = await registry.new_device(name, owner="n")
        await registry.commit([same_key], registry.devices.sealed(str(name), record))


async def secrets_of(registry: Registry) -> list[bytes]:
    tenants, _ = await registry.tenants.page(limit=100)
    former, _ = await registry.tenant_keys.page(limit=100)
    devices, _ = await registry.devices.page(limit=100)
    return [
        *[bytes(await registry.tenant_key(each.name, each.record.key_number)) for each in tenants],
        *[bytes(await registry.tenant_key(r.tenant, r.number)) for r in (e.record for e in former)],
        *[
            bytes(registry.device_secret(each.record))
            for each in devices
            if not each.record.is_forgotten
        ],
    ]


async def test_all_keys_are_the_same_under_the_new_key_and_nothing_is_under_the_old(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrapping, "BATCH_RECORDS", 2)
    before, anchor, audit = await secrets_of(registry), registry.authority.anchor_pem, MemoryAudit()
    rotation = rewrapping_of(registry, audit=audit)
    await rotation.begin()
    progress = await rotation.progress()
    assert (progress.key_id, progress.previous_key_id) == (ID[NEW], ID[OLD])
    assert (progress.records, progress.left) == (5, 5)
    assert await secrets_of(registry) == before, "the old key is readable until the end"
    await rotation.proceed()
    progress = await rotation.progress()
    assert (progress.left, progress.previous_key_id) == (0, UNNAMED)
    assert progress.retired == (ID[OLD],)
    assert [(each["kind"], each["outcome"]) for each in audit.records] == [
        ("encryption_key.rotate", "granted"),
        ("encryption_key.rotate", "done"),
    ]
    await rotation.proceed()
    assert registry.keys.ids == (ID[NEW],), "the old key is forgotten"
    await registry.close()
    alone = await opened(tmp_path / "b.sqlite", NEW)
    assert await secrets_of(alone) == before
    assert alone.authority.anchor_pem == anchor
    await alone.close()


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_broker_without_a_needed_key_says_so_at_its_start(
    registry: Registry, tmp_path: Path, is_over: bool
) -> None:
    rotation = rewrapping_of(registry)
    await rotation.begin()
    if is_over:
        await rotation.proceed()
    await registry.close()
    for lacking in [(OLD,)] if is_over else [(OLD,), (NEW,)]:
        with pytest.raises(UsageError) as caught:
            await opened(tmp_path / "b.sqlite", *lacking)
        assert caught.value.reason == "broker.key.missing"
        assert "broker.next_key" in str(caught.value)


async def test_begin_is_idempotent_and_a_second_rotation_waits_for_the_first(
    registry: Registry, tmp_path: Path
) -> None:
    audit = MemoryAudit()
    rotation = rewrapping_of(registry, audit=audit)
    await rotation.begin()
    await rotation.begin()
    assert len(audit.records) == 1
    await registry.close()
    # The second operator's broker has another next key.
    second = await opened(tmp_path / "b.sqlite", OLD, NEW)
    second.keys.replace([WrappingKey(NEW), WrappingKey(OTHER)])
    with pytest.raises(UsageError) as caught:
        await rewrapping_of(second).begin()
    assert caught.value.reason == "broker.key.rotating"
    await second.close()


async def test_begin_succeeds_if_another_broker_was_faster_even_to_the_end(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = rewrapping_of(registry), rewrapping_of(registry)
    note = slow._note

    async def overtaken(*arguments: Any) -> None:
        await note(*arguments)
        await fast.begin()
        await fast.proceed()

    monkeypatch.setattr(slow, "_note", overtaken)
    await slow.begin()
    assert (await slow.progress()).retired == (ID[OLD],)


async def test_a_retired_key_is_never_used_again(registry: Registry) -> None:
    rotation = rewrapping_of(registry)
    await rotation.begin()
    await rotation.proceed()
    await rotation.announce([WrappingKey(NEW), WrappingKey(OLD)])
    with pytest.raises(UsageError) as caught:
        await rotation.begin()
    assert caught.value.reason == "broker.key.retired"
    # The next rotation is to a key that was never used.
    await rotation.announce([WrappingKey(NEW), WrappingKey(OTHER)])
    await rotation.begin()
    await rotation.proceed()
    assert (await rotation.progress()).retired == (ID[OLD], ID[NEW])


async def test_rotation_needs_another_key(registry: Registry) -> None:
    rotation = rewrapping_of(registry)
    await rotation.announce([WrappingKey(OLD)])
    with pytest.raises(UsageError) as caught:
        await rotation.begin()
    assert caught.value.reason == "broker.key.next"


async def test_every_broker_must_have_the_key_unless_it_is_gone(registry: Registry) -> None:
    rotation = rewrapping_of(registry)
    name, record = instance_name(7), InstanceRecord(node="b7", start_epoch=1)
    await registry.commit(puts=registry.instances.sealed(name, record))
    with pytest.raises(UsageError) as caught:
        await rotation.begin()
    assert caught.value.reason == "broker.key.not_held"
    assert "7 (b7)" in str(caught.value)
    await rewrapping_of(registry, instance=7).announce()
    assert (await rotation.progress()).previous_key_id == UNNAMED
    await rotation.begin()
    assert (await rotation.progress()).previous_key_id == ID[OLD]


async def test_an_instance_that_is_gone_need_not_have_the_key(registry: Registry) -> None:
    name, record = instance_name(7), InstanceRecord(node="b7", start_epoch=1)
    await registry.commit(puts=registry.instances.sealed(name, record))
    rotation = rewrapping_of(registry)
    await rotation.begin(gone=[7])
    assert (await rotation.progress()).previous_key_id == ID[OLD]


async def test_a_reload_must_not_take_a_needed_key_away(registry: Registry) -> None:
    rotation = rewrapping_of(registry)
    await rotation.begin()
    for keys in ([NEW], [OLD], [OTHER]):
        with pytest.raises(UsageError) as caught:
            await rotation.announce([WrappingKey(each) for each in keys])
        assert caught.value.reason == "broker.key.missing"
    assert registry.keys.ids == tuple(sorted([ID[OLD], ID[NEW]]))
    await rotation.proceed()
    await rotation.announce([WrappingKey(NEW)])
    assert registry.keys.ids == (ID[NEW],)


async def test_what_cannot_be_decrypted_keeps_the_rotation_open(registry: Registry) -> None:
    broken = TenantRecord(wrapped_key=bytes(60), key_id=ID[OLD])
    await registry.commit(puts=registry.tenants.sealed("t2", broken))
    rotation = rewrapping_of(registry)
    await rotation.begin()
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            await rotation.proceed()
        assert caught.value.reason == "broker.key.unread"
        assert "tenants/t2" in str(caught.value)
    progress = await rotation.progress()
    assert (progress.left, progress.previous_key_id) == (1, ID[OLD])


async def test_records_of_earlier_versions_name_no_key(registry: Registry) -> None:
    """Such a store is served as it is, and its first rotation names all keys."""
    authority = await registry.authority_record()
    unnamed = authority.record.model_copy(update={"key_id": UNNAMED})
    puts = dict(authority_entry(unnamed))
    for tenant in ("t1", "t2", "t3"):
        stored = await registry.tenants.get(tenant)
        assert stored is not None
        puts |= registry.tenants.sealed(
            tenant, stored.record.model_copy(update={"key_id": UNNAMED})
        )
    await registry.commit([same_authority(authority)], puts)
    before = await secrets_of(registry)
    await registry.tenant_key("t4", 0)
    fresh = await registry.tenants.get("t4")
    assert fresh is not None
    assert fresh.record.key_id == UNNAMED, "earlier versions still read what is new"
    assert b"key_id" not in registry.tenants.sealed("t4", fresh.record)["tenants/t4"]
    rotation = rewrapping_of(registry)
    await rotation.begin()
    await rotation.proceed()
    assert (await secrets_of(registry))[:3] == before[:3]
    assert (await rotation.progress()).retired == (ID[OLD],)


async def test_a_broker_that_slept_through_a_rotation_wraps_nothing_under_its_key(
    registry: Registry,
) -> None:
    rotation = rewrapping_of(registry)
    await rotation.begin()
    asleep = await registry.authority_record()
    await rotation.proceed()
    await rotation.announce([WrappingKey(NEW), WrappingKey(OTHER)])
    await rotation.begin()
    await rotation.proceed()
    registry.keys.replace([WrappingKey(NEW), WrappingKey(OTHER)])
    await rotation._pass(asleep)
    for table in (registry.tenants, registry.devices):
        page, _ = await table.page(limit=100)  # type: ignore[attr-defined]
        assert {each.record.key_id for each in page} == {ID[OTHER]}


async def test_two_brokers_on_one_etcd_rotate_at_once(etcd: Cluster) -> None:
    prefix = f"/{uuid.uuid4()}/"

    async def joined(writer: str, *keys: bytes) -> Registry:
        store = await EtcdStore.open(etcd.endpoints, writer=writer, credentials=None, prefix=prefix)
        return await Registry.open(store, *map(WrappingKey, keys), node="b")

    brokers = [await joined(f"0000{number}", OLD, NEW) for number in (1, 2)]
    await fill(brokers[0])
    before = await secrets_of(brokers[1])
    rotations = [
        rewrapping_of(registry, instance=number) for number, registry in enumerate(brokers, start=1)
    ]
    await asyncio.gather(*[each.announce() for each in rotations])

    async def rotate(rotation: Rewrapping) -> None:
        await rotation.begin()
        await rotation.proceed()

    names = [f"new{number}" for number in range(20)]
    await asyncio.gather(
        *map(rotate, rotations),
        *[brokers[number % 2].tenant_key(name, 0) for number, name in enumerate(names)],
    )
    alone = await joined("00003", NEW)
    assert set(before) <= set(await secrets_of(alone))
    assert (await rewrapping_of(alone).progress()).left == 0
    for registry in (*brokers, alone):
        await registry.close()
