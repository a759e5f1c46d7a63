"""Rotation of a tenant's key: what may begin, which volume gets which key, what is deleted."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.restoring import Place
from broker.tenant_keys import (
    SHARED_WITH,
    TENANT,
    Sealed,
    change,
    former,
    key,
    look_always,
    register,
    rotated,
    rotation_of,
    volume,
)
from brokers import (
    Count,
    MemoryAudit,
    operator_of,
    record_key_rotation_of,
    rewrapping_of,
    running_broker,
    start_broker,
    tenant_key_rotation_of,
)
from control_plane import short_directory
from sealane.crypto.keys import KEY_EPOCHS_MAX, WrappingKey, derive_volume_key
from sealane.crypto.lease import EPOCH_COUNTERS_MAX, LEASE_COUNTERS
from sealane.daemon.broker import tenant_key_rotation
from sealane.daemon.broker.key_epochs import KeyEpochs
from sealane.daemon.broker.records import Tables, TenantKeyUse
from sealane.daemon.broker.registry import TENANT_PURPOSE, Registry
from sealane.daemon.broker.store.contract import Entry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.tenant_key_rotation import (
    INCOMPLETE_SECONDS,
    SWEEP_SECONDS,
    TenantKeyRotation,
)
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import TenantKeyStage
from sealane.protocol.v1 import operator_pb2

OLD, NEW = bytes(32), bytes([1]) * 32


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    """A store with three volumes of a tenant, and one of another."""
    _, _, made = await start_broker(
        SqliteStore(tmp_path / "b.sqlite"), starts=Count(), heads=Count(), kek=OLD
    )
    for number in (1, 2, 3):
        await register(made, number)
    await register(made, 9, tenant="other")
    yield made
    await made.close()


async def prepared(registry: Registry) -> TenantKeyRotation:
    rotation = tenant_key_rotation_of(registry)
    await rotation.prepare(TENANT, 0)
    await rotation.proceed()
    return rotation


async def test_new_epochs_have_another_key_and_sealed_sectors_keep_theirs(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_key_rotation, "BATCH_RECORDS", 2)
    sealed = Sealed()
    await sealed.seal(registry)
    old = bytes(await registry.tenant_key(TENANT, 0))
    rotation, audit = rotation_of(registry)
    await rotation.prepare(TENANT, 0)
    assert (await rotation.progress(TENANT)).stage == TenantKeyStage.PREPARING
    await rotation.proceed()
    shown = await rotation.progress(TENANT)
    assert (shown.number, shown.stage) == (1, TenantKeyStage.PREPARED)
    assert (shown.volumes, shown.ready, shown.rotated, shown.former) == (3, 3, 0, (0,))
    assert (await volume(registry, 1)).key_epoch == 1
    await sealed.seal(registry)

    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    shown = await rotation.progress(TENANT)
    assert (shown.number, shown.stage, shown.rotated, shown.former) == (1, None, 3, (0,))
    assert await registry.tenant_key(TENANT, 1) != old
    for number in (1, 2, 3):
        assert (await volume(registry, number)).key_epoch == 2
        derived = derive_volume_key(old, volume_id=uuid.UUID(int=number), key_epoch=2)
        assert await key(registry, number, 2) != derived
    await sealed.seal(registry)
    assert (await volume(registry, 9)).key_epoch == 1
    noted = [(each["kind"], each["outcome"]) for each in audit.records]
    assert noted == [
        ("tenant_key.prepare", "granted"),
        ("tenant_key.prepare", "done"),
        ("tenant_key.rotate", "granted"),
        *[("key.rotate", "done")] * 3,
        ("tenant_key.rotate", "done"),
    ]


async def test_second_rotation_keeps_all_keys_that_volumes_need(registry: Registry) -> None:
    sealed = Sealed()
    for number in (0, 1):
        await sealed.seal(registry)
        await rotated(registry, number)
    await sealed.seal(registry)
    assert await former(registry) == [0, 1]
    uses = (await volume(registry, 1)).tenant_key_uses
    assert [(use.first_key_epoch, use.number) for use in uses] == [(2, 1), (3, 2)]
    # A volume that came later needs neither.
    made = await register(registry, 4)
    assert made.needed_tenant_keys == {2}
    assert len({await key(registry, 1, epoch) for epoch in (1, 2, 3)}) == 3


async def test_epoch_begun_for_another_reason_has_the_prepared_key(registry: Registry) -> None:
    """By the operator, a withdrawn share, a revoked holder, or the last lease under a key."""
    for number in (4, 5):
        await register(registry, number)
    epochs = KeyEpochs(registry)
    await epochs.note_holder("spiffe://sealane/gateway/evil", uuid.UUID(int=4), 1)
    rotation = await prepared(registry)
    await epochs.rotate(uuid.UUID(int=1))
    await epochs.withdraw(uuid.UUID(int=2), SHARED_WITH)
    await epochs.rotate_held_by("spiffe://sealane/gateway/evil")
    leased = (await volume(registry, 3)).model_copy(
        update={"counters_leased": EPOCH_COUNTERS_MAX - 2 * LEASE_COUNTERS + 1}
    )
    assert leased.with_lease(LEASE_COUNTERS).present_tenant_key == 1
    for number in (1, 2, 4):
        assert (await volume(registry, number)).present_tenant_key == 1
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    # Those that have it already begin no other epoch.
    assert [(await volume(registry, number)).key_epoch for number in range(1, 6)] == [2] * 5


async def test_volume_registered_since_the_beginning_is_of_the_new_key(
    registry: Registry,
) -> None:
    rotation = tenant_key_rotation_of(registry)
    await rotation.prepare(TENANT, 0)
    made = await register(registry, 4)
    assert made.tenant_key_uses == (TenantKeyUse(first_key_epoch=1, number=1),)
    await rotation.proceed()
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    assert (await volume(registry, 4)).key_epoch == 1


async def test_nothing_is_written_that_earlier_versions_do_not_know(registry: Registry) -> None:
    for table, name in [(registry.tenants, TENANT), (registry.volumes, str(uuid.UUID(int=1)))]:
        entry = await registry.store.get(table.key(name))
        assert entry is not None
        assert b"key_number" not in entry.value
        assert b"key_stage" not in entry.value
        assert b"tenant_key_uses" not in entry.value


async def test_preparation_names_the_key_that_it_replaces(registry: Registry) -> None:
    rotation, audit = rotation_of(registry)
    await rotation.prepare(TENANT, 0)
    made = bytes(await registry.tenant_key(TENANT, 1))
    await rotation.prepare(TENANT, 0)
    assert await registry.tenant_key(TENANT, 1) == made
    for number in (1, 2):
        with pytest.raises(UsageError) as caught:
            await rotation.prepare(TENANT, number)
        expected = "rotating" if number == 1 else "number"
        assert caught.value.reason == f"broker.tenant_key.{expected}"
    await rotation.proceed()
    with pytest.raises(UsageError) as caught:
        await rotation.prepare(TENANT, 1)
    assert caught.value.reason == "broker.tenant_key.rotating"
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    await rotation.prepare(TENANT, 0)
    assert (await rotation.progress(TENANT)).number == 1
    assert [each["outcome"] for each in audit.records].count("granted") == 2


async def test_rotation_is_refused_until_every_volume_is_ready(registry: Registry) -> None:
    rotation = tenant_key_rotation_of(registry)
    for number, reason in [(0, "not_prepared"), (1, "number")]:
        with pytest.raises(UsageError) as caught:
            await rotation.rotate(TENANT, number)
        assert caught.value.reason == f"broker.tenant_key.{reason}"
    await rotation.prepare(TENANT, 0)
    with pytest.raises(UsageError) as caught:
        await rotation.rotate(TENANT, 1)
    assert caught.value.reason == "broker.tenant_key.not_prepared"
    await rotation.proceed()
    for _ in range(2):
        await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    assert [(await volume(registry, number)).key_epoch for number in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("name", ["nobody", "", "a/b", "Ä", "x" * 600])
async def test_unknown_tenant_is_refused(registry: Registry, name: str) -> None:
    rotation = tenant_key_rotation_of(registry)
    for call in (rotation.prepare(name, 0), rotation.rotate(name, 0), rotation.progress(name)):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason == "broker.tenant_key.tenant"


async def test_volume_without_epochs_left_stops_nobody_and_the_rotation_is_incomplete(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_always(monkeypatch)
    worn = uuid.UUID(int=2)
    await change(registry, 2, key_epoch=KEY_EPOCHS_MAX)
    sealed = Sealed()
    await sealed.seal(registry)
    rotation, audit = rotation_of(registry)
    await rotation.prepare(TENANT, 0)
    await rotation.proceed()
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    shown = await rotation.progress(TENANT)
    assert (shown.stage, shown.rotated, shown.exhausted) == (TenantKeyStage.INCOMPLETE, 2, (worn,))
    assert ("tenant_key.rotate", "done") not in [
        (each["kind"], each["outcome"]) for each in audit.records
    ]
    await rotation.proceed()
    assert [(await volume(registry, number)).key_epoch for number in (1, 3)] == [2, 2]
    # It doesn't stop another rotation, either.
    await rotation.prepare(TENANT, 1)
    await rotation.proceed()
    await rotation.rotate(TENANT, 2)
    await rotation.proceed()
    await sealed.seal(registry)
    assert (await rotation.progress(TENANT)).stage == TenantKeyStage.INCOMPLETE
    assert await former(registry) == [0, 1]
    await registry.unregister(worn)
    await rotation.proceed()
    assert (await rotation.progress(TENANT)).stage is None
    assert audit.records[-1]["kind"] == "tenant_key.rotate"
    assert audit.records[-1]["outcome"] == "done"


async def test_volume_that_is_not_ready_begins_one_epoch_all_the_same(
    registry: Registry,
) -> None:
    """No broker leaves such a one; a store that has it costs one key epoch, not all."""
    rotation = await prepared(registry)
    await change(registry, 2, tenant_key_uses=())
    await rotation.rotate(TENANT, 1)
    await rotation.proceed()
    record = await volume(registry, 2)
    assert (record.key_epoch, record.present_tenant_key) == (2, 1)


async def failing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> TenantKeyRotation:
    """Return a rotation whose first attempt has failed by itself."""
    await tenant_key_rotation_of(registry).prepare(TENANT, 0)
    rotation = tenant_key_rotation_of(registry)
    failed = asyncio.Event()
    with monkeypatch.context() as patched:

        async def fail() -> None:
            failed.set()
            raise UnavailableError("broker.store.failed", "no store")

        patched.setattr(rotation, "_due", fail)
        keeping = asyncio.ensure_future(rotation.keep())
        await failed.wait()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    return rotation


async def test_failure_is_shown_until_a_pass_succeeds(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = await failing(registry, monkeypatch)
    assert "no store" in (await rotation.progress(TENANT)).failure
    await rotation.proceed()
    assert not (await rotation.progress(TENANT)).failure


async def test_earlier_failure_is_not_shown_to_who_asks_for_another_attempt(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = await failing(registry, monkeypatch)
    await rotation.prepare(TENANT, 0)
    assert not (await rotation.progress(TENANT)).failure


async def test_former_key_is_deleted_when_no_volume_needs_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_always(monkeypatch)
    await rotated(registry)
    await register(registry, 4)
    await rotated(registry, 1)
    rotation, audit = rotation_of(registry)
    for number in (1, 2):
        await registry.unregister(uuid.UUID(int=number))
        await rotation.proceed()
    assert await former(registry) == [0, 1]
    await registry.unregister(uuid.UUID(int=3))
    await rotation.proceed()
    # The volume that came between the rotations needs the second key, not the first.
    assert await former(registry) == [1]
    assert [(each["kind"], each["number"]) for each in audit.records] == [("tenant_key.delete", 0)]
    with pytest.raises(VerificationError) as caught:
        await registry.tenant_key(TENANT, 0)
    assert caught.value.reason == "broker.store.malformed"
    await key(registry, 4, 1)
    await registry.unregister(uuid.UUID(int=4))
    await rotation.proceed()
    assert await former(registry) == []


async def test_key_goes_with_the_last_sealed_sector_of_its_epoch(registry: Registry) -> None:
    """If a release lets go of old epochs: none does yet."""
    await rotated(registry)
    for number in (1, 2, 3):
        await change(registry, number, oldest_key_epoch=2)
    await tenant_key_rotation_of(registry).proceed()
    assert await former(registry) == []
    await key(registry, 1, 2)


async def test_key_of_an_epoch_to_come_is_kept(registry: Registry) -> None:
    """A volume that is ready for a key, and didn't begin its epoch, needs it."""
    rotation = await prepared(registry)
    await rotation.rotate(TENANT, 1)
    assert (await volume(registry, 1)).needed_tenant_keys == {0, 1}
    await change(registry, 1, oldest_key_epoch=2, key_epoch=2)
    assert (await volume(registry, 1)).needed_tenant_keys == {1}


async def test_rotation_of_a_tenant_without_volumes_ends_and_deletes_the_former_key(
    registry: Registry,
) -> None:
    for number in (1, 2, 3):
        await registry.unregister(uuid.UUID(int=number))
    await rotated(registry)
    assert await former(registry) == []
    shown = await tenant_key_rotation_of(registry).progress(TENANT)
    assert (shown.number, shown.stage) == (1, None)


@pytest.mark.parametrize(
    ("is_incomplete", "seconds"), [(False, SWEEP_SECONDS), (True, INCOMPLETE_SECONDS)]
)
async def test_all_volumes_are_looked_at_only_after_a_change_and_not_too_often(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, is_incomplete: bool, seconds: float
) -> None:
    if is_incomplete:
        await change(registry, 3, key_epoch=KEY_EPOCHS_MAX)
    await rotated(registry)
    await rotated(registry, tenant="other")
    rotation = tenant_key_rotation_of(registry)
    looked_for: list[set[str]] = []
    go_through = rotation._go_through

    async def noted(due: Mapping[str, Any]) -> None:
        looked_for.append(set(due))
        await go_through(due)

    monkeypatch.setattr(rotation, "_go_through", noted)
    loop = asyncio.get_running_loop()
    now = float(int(loop.time()))
    monkeypatch.setattr(loop, "time", lambda: now)
    for _ in range(3):
        await rotation.proceed()
    assert looked_for == [{TENANT, "other"}]
    for number in (1, 2):
        await registry.unregister(uuid.UUID(int=number))
        await rotation.proceed()
        await rotation.proceed()
    assert looked_for == [{TENANT, "other"}, {TENANT}]
    monkeypatch.setattr(loop, "time", lambda: now + seconds - 1)
    await rotation.proceed()
    assert len(looked_for) == 2
    monkeypatch.setattr(loop, "time", lambda: now + seconds)
    for _ in range(2):
        await rotation.proceed()
    assert looked_for[2:] == [{TENANT}]


async def test_many_exhausted_volumes_are_counted_and_the_first_ones_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_key_rotation, "EXHAUSTED_SHOWN", 2)
    for number in (1, 2, 3):
        await change(registry, number, key_epoch=KEY_EPOCHS_MAX)
    await rotated(registry)
    shown = await tenant_key_rotation_of(registry).progress(TENANT)
    assert shown.exhausted_volumes == 3
    assert shown.exhausted == (uuid.UUID(int=1), uuid.UUID(int=2))


async def test_wrapped_key_is_bound_to_its_number(registry: Registry) -> None:
    """A thief who can make records can't name a former key as the present one."""
    before = await registry.tenants.get(TENANT)
    assert before is not None
    await rotated(registry)
    after = await registry.tenants.get(TENANT)
    assert after is not None
    forged = after.record.model_copy(update={"wrapped_key": before.record.wrapped_key})
    await registry.commit((), registry.tenants.sealed(TENANT, forged))
    with pytest.raises(VerificationError) as caught:
        await registry.tenant_key(TENANT, 1)
    assert caught.value.reason == "key.wrap.invalid"


async def test_thief_of_an_older_store_and_its_key_encryption_key_has_no_new_key(
    registry: Registry,
) -> None:
    stolen, _ = await registry.store.copy()
    registry.keys.replace([WrappingKey(OLD), WrappingKey(NEW)])
    rewrapping = rewrapping_of(registry)
    await rewrapping.announce()
    await rewrapping.begin()
    await rewrapping.proceed()
    await rotated(registry)
    thief = WrappingKey(OLD)
    tables = Tables(None, keys=registry.store.record_keys)
    name = tables.tenants.key(TENANT)
    before = tables.tenants.opened(Entry(name, stolen[name], 0)).record
    old = thief.unwrap(before.wrapped_key, purpose=TENANT_PURPOSE, owner=TENANT)
    one = uuid.UUID(int=1)
    assert derive_volume_key(old, volume_id=one, key_epoch=1) == await key(registry, 1, 1)
    assert derive_volume_key(old, volume_id=one, key_epoch=2) != await key(registry, 1, 2)
    present = await registry.tenants.get(TENANT)
    assert present is not None
    with pytest.raises(VerificationError):
        thief.unwrap(present.record.wrapped_key, purpose=TENANT_PURPOSE, owner=f"{TENANT} 1")


async def test_all_keys_come_under_another_key_encryption_key(registry: Registry) -> None:
    sealed = Sealed()
    await sealed.seal(registry)
    await rotated(registry)
    await sealed.seal(registry)
    registry.keys.replace([WrappingKey(OLD), WrappingKey(NEW)])
    rewrapping = rewrapping_of(registry)
    await rewrapping.announce()
    await rewrapping.begin()
    assert (await rewrapping.progress()).records == 3
    await rewrapping.proceed()
    assert registry.keys.ids == (WrappingKey(NEW).key_id,)
    await sealed.seal(registry)
    await rotated(registry, 1)
    await sealed.seal(registry)


async def test_all_records_come_under_another_record_key(registry: Registry) -> None:
    sealed = Sealed()
    await sealed.seal(registry)
    await rotated(registry)
    await sealed.seal(registry)
    replacing = record_key_rotation_of(registry)
    await replacing.begin(0)
    await replacing.proceed()
    assert (await replacing.progress()).left == 0
    await sealed.seal(registry)


async def test_deleted_volume_is_not_found_although_its_key_is_gone(registry: Registry) -> None:
    record = await volume(registry, 1)
    await rotated(registry)
    for number in (1, 2, 3):
        await registry.unregister(uuid.UUID(int=number))
    await tenant_key_rotation_of(registry).proceed()
    with pytest.raises(UsageError) as caught:
        await registry.volume_key(record, 1)
    assert caught.value.reason == "volume.not_found"


async def test_begin_stages_and_deletions_are_covered(registry: Registry) -> None:
    """A store from before any of them would be refused."""
    covered: list[int] = []

    async def cover(revision: int) -> None:
        covered.append(revision)

    rotation = TenantKeyRotation(registry, cover=cover, audit=MemoryAudit())

    async def is_covered(name: str = TENANT) -> bool:
        stored = await registry.tenants.get(name)
        assert stored is not None
        return max(covered) >= stored.revision

    for _ in range(2):
        covered.clear()
        await rotation.prepare(TENANT, 0)
        assert await is_covered()
    await rotation.proceed()
    assert await is_covered()
    for _ in range(2):
        covered.clear()
        await rotation.rotate(TENANT, 1)
        assert await is_covered()
    covered.clear()
    await rotation.proceed()
    assert await is_covered()
    newest = max([(await registry.volume(uuid.UUID(int=n))).revision for n in (1, 2, 3)])
    ended = await registry.tenants.get(TENANT)
    assert ended is not None
    assert any(newest <= each < ended.revision for each in covered), "before the end, too"
    for number in (1, 2, 3):
        await registry.unregister(uuid.UUID(int=number))
    covered.clear()
    another = TenantKeyRotation(registry, cover=cover, audit=MemoryAudit())
    await another.proceed()
    assert await former(registry) == []
    assert covered == [await registry.store.revision()]


async def test_operator_sees_and_takes_each_step(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "b.sqlite") as broker:
        registry = broker.registry
        for number in (1, 2):
            await register(registry, number)
        await register(registry, 9, tenant="other")
        operator = operator_of(broker)
        rotation = operator._tenant_keys

        async def listed(**request: object) -> operator_pb2.ListTenantKeysResponse:
            return await operator.ListTenantKeys(
                operator_pb2.ListTenantKeysRequest(**request),  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
            )

        assert not (await listed()).tenant_keys
        shown = await operator.PrepareTenantKey(
            operator_pb2.PrepareTenantKeyRequest(tenant=TENANT, number=0),
            None,  # type: ignore[arg-type]
        )
        assert (shown.number, shown.stage, shown.volumes, shown.ready) == (1, "preparing", 2, 0)
        await rotation.proceed()
        [one] = (await listed()).tenant_keys
        assert (one.tenant, one.stage, one.ready, one.volumes) == (TENANT, "prepared", 2, 2)
        await operator.RotateTenantKey(
            operator_pb2.RotateTenantKeyRequest(tenant=TENANT, number=1),
            None,  # type: ignore[arg-type]
        )
        await rotation.proceed()
        got = await operator.GetTenantKey(
            operator_pb2.GetTenantKeyRequest(tenant=TENANT),
            None,  # type: ignore[arg-type]
        )
        assert (got.stage, got.rotated, list(got.former_numbers)) == ("", 2, [0])
        names: list[str] = []
        token = ""
        while True:
            page = await listed(page_size=1, page_token=token)
            names += [each.tenant for each in page.tenant_keys]
            token = page.next_page_token
            if not token:
                break
        assert names == [TENANT]
        with pytest.raises(UsageError):
            await operator.RotateTenantKey(
                operator_pb2.RotateTenantKeyRequest(tenant=TENANT, number=7),
                None,  # type: ignore[arg-type]
            )
        audit = broker.audit
        assert isinstance(audit, MemoryAudit)
        assert audit.records[-1]["reason"] == "broker.tenant_key.number"
        assert audit.records[-1]["tenant"] == TENANT


@pytest.fixture
def place() -> Iterator[Place]:
    with short_directory() as root:
        yield Place(root)


async def test_sectors_sealed_after_a_prepared_snapshot_can_be_opened_after_its_restore(
    place: Place,
) -> None:
    sealed = Sealed()
    async with place.opened() as opened:
        registry = opened.service.registry
        for number in (1, 2):
            await register(registry, number)
        await sealed.seal(registry)
        await opened.tenant_keys.prepare(TENANT, 0)
        await opened.tenant_keys.proceed()
        snapshot = await place.snapshot(opened)
        await opened.tenant_keys.rotate(TENANT, 1)
        await opened.tenant_keys.proceed()
        await KeyEpochs(registry).rotate(uuid.UUID(int=1))
        await sealed.seal(registry)
    assert sealed.numbers[uuid.UUID(int=1), 3] == 1
    place.lose()
    await place.restore(snapshot)
    async with place.opened() as opened:
        registry = opened.service.registry
        # All that was sealed is opened, and what is sealed from now on is under the new key.
        await sealed.seal(registry)
        record = await volume(registry, 1)
        assert (record.key_epoch, record.present_tenant_key) == (17, 1)
        await opened.tenant_keys.rotate(TENANT, 1)
        await opened.tenant_keys.proceed()
        shown = await opened.tenant_keys.progress(TENANT)
        assert (shown.stage, shown.rotated) == (None, 2)
        assert (await volume(registry, 1)).key_epoch == 17
        await sealed.seal(registry)


@pytest.mark.parametrize("stage", [TenantKeyStage.PREPARING, TenantKeyStage.ROTATING])
async def test_rotation_goes_on_after_a_restore(place: Place, stage: TenantKeyStage) -> None:
    sealed = Sealed()
    async with place.opened() as opened:
        registry = opened.service.registry
        for number in (1, 2):
            await register(registry, number)
        await sealed.seal(registry)
        await opened.tenant_keys.prepare(TENANT, 0)
        if stage == TenantKeyStage.ROTATING:
            await opened.tenant_keys.proceed()
            await opened.tenant_keys.rotate(TENANT, 1)
        snapshot = await place.snapshot(opened)
    place.lose()
    await place.restore(snapshot)
    async with place.opened() as opened:
        registry = opened.service.registry
        assert (await opened.tenant_keys.progress(TENANT)).stage == stage
        await opened.tenant_keys.proceed()
        await opened.tenant_keys.rotate(TENANT, 1)
        await opened.tenant_keys.proceed()
        assert (await opened.tenant_keys.progress(TENANT)).stage is None
        await sealed.seal(registry)
