"""Replaces a tenant's key k_s, from which its volumes' keys derive, while brokers run.

The order of events (docs/operate/rotation.md; tests/broker/test_tenant_keys_model.py):

1. **Begun**: one commit makes a new key with the next number, and keeps the one before. Volumes
   registered from here on are of the new key, because their commit compares the tenant's record.
2. **Prepared**: each live volume's record says that its next key epoch derives from the new key;
   each commit compares the volume's record. Epochs that have begun stay with their key. After a
   pass that found no other volume, one commit says that all are ready. No further key can be made
   before.
3. The operator takes a snapshot. A restore goes on at later key epochs than the snapshot has, and
   sectors sealed in between can be read only if the snapshot knows from which key they derive.
4. **Rotating**: one commit by the operator. Each volume whose present key epoch is of an earlier
   key begins its next one. After a pass that found no such volume, one commit ends the rotation.
   Volumes that have no key epochs left don't stop the others, but the rotation is incomplete until
   they are deleted.
5. **Deleted**: a former key goes when no live volume needs it. No volume comes to need a former
   key: only the present one is written into volumes, by a commit of 1 that compares the tenant's
   record, or one of 2 for a volume that stands in the way of the next key until it is changed. So
   a pass that began after the key became a former one, and found that no volume needs it, holds
   for ever.

Any broker may do the work of 2, 4 and 5, several at once, and again after a crash. Heads cover 1,
the ends of 2 and 4, and the beginning of 4: a store from before them is refused as rolled back.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from sealane.crypto.certificates import NAME_PATTERN
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.continuing import Continuing
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.key_epochs import record_rotation
from sealane.daemon.broker.records import (
    Stored,
    TenantKeyRecord,
    TenantRecord,
    VolumeRecord,
)
from sealane.daemon.broker.registry import Registry, new_tenant_key
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError
from sealane.protocol.kinds import TenantKeyStage

BATCH_RECORDS: Final = 32
"""Volumes that one commit changes."""
SWEEP_SECONDS: Final = 3600.0
"""Least time between two looks at all volumes for former keys that none of them needs."""
INCOMPLETE_SECONDS: Final = 60.0
"""The same for the end of an incomplete rotation."""
EXHAUSTED_SHOWN: Final = 100
"""Volumes without key epochs left that are named."""

_WORKING: Final = {TenantKeyStage.PREPARING, TenantKeyStage.ROTATING}
"""Stages that brokers end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKeyProgress:
    """A tenant's present key, and how far its rotation is; None: none is in progress.

    Of its `volumes`, `ready` derive their next key epoch from the present key, and `rotated` their
    present one. `exhausted_volumes` have no key epochs left; `exhausted` are the first
    `EXHAUSTED_SHOWN` of them. `former` are the numbers of keys that are
    kept. `failure` is why this broker's last attempt ended, if it failed.
    """

    tenant: str
    number: int
    stage: TenantKeyStage | None
    volumes: int
    ready: int
    rotated: int
    exhausted_volumes: int
    exhausted: tuple[uuid.UUID, ...]
    former: tuple[int, ...]
    failure: str


@dataclass(slots=True)
class _Pass:
    """What one pass over all volumes finds of a tenant."""

    tenant: Stored[TenantRecord]
    found: int = 0
    left: int = 0
    needed: set[int] = field(default_factory=set)
    batch: list[Stored[VolumeRecord]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.tenant.record.key_number

    @property
    def stage(self) -> TenantKeyStage | None:
        return self.tenant.record.key_stage

    def changed(self, volume: VolumeRecord) -> VolumeRecord | None:
        """Return the volume as it is to become; None: it is so already, or can't."""
        is_ready = volume.next_tenant_key == self.number
        if self.stage == TenantKeyStage.PREPARING:
            return None if is_ready else volume.ready_for(self.number)
        if (
            self.stage == TenantKeyStage.ROTATING
            and volume.present_tenant_key != self.number
            and volume.has_key_epochs_left
        ):
            # All were made ready before. One that isn't would begin one epoch after another.
            ready = volume if is_ready else volume.ready_for(self.number)
            return ready.in_next_epoch()
        return None


class TenantKeyRotation:
    """Begins and continues rotations of tenants' keys, as one of the store's brokers."""

    def __init__(self, registry: Registry, *, cover: Cover, audit: Audit) -> None:
        self._registry = registry
        self._cover = cover
        self._audit = audit
        self._proceeding = asyncio.Lock()
        self._continuing = Continuing(self.proceed, event="tenant_key_not_replaced")
        # Revision of each tenant's record when the last pass had nothing to do.
        self._idle: dict[str, int] = {}
        # Time of the last passes for such tenants: of incomplete rotations, and of all others.
        self._swept: dict[bool, float] = {}

    async def prepare(self, tenant: str, number: int) -> None:
        """Make the key that follows a tenant's key `number`; idempotent, also after the end.

        UsageError `broker.tenant_key.tenant`: there is no such tenant; `.number`: it has another
        key; `.rotating`: the last rotation is still in progress.
        """
        made = await self._registry.settle(lambda: self._attempt_prepare(tenant, number))
        await self._cover(made)
        self._continuing.want()

    async def _attempt_prepare(self, tenant: str, number: int) -> int | None:
        registry = self._registry
        stored = await self._tenant(tenant)
        before = stored.record
        if before.key_number == number + 1:
            # By this call, or by another that named the same key: it may not be covered yet.
            return stored.revision
        _check_number(before, tenant, number)
        if before.key_stage not in {None, TenantKeyStage.INCOMPLETE}:
            raise UsageError(
                "broker.tenant_key.rotating",
                f"the rotation to key {number} of tenant {tenant} is {before.key_stage}: another "
                "one can follow when that has ended",
            )
        wrapping, key_id, same_key = await registry.new_wrapping()
        wrapped = await asyncio.to_thread(new_tenant_key, wrapping, tenant, number + 1)
        former = TenantKeyRecord(
            tenant=tenant, number=number, wrapped_key=before.wrapped_key, key_id=before.key_id
        )
        after = before.model_copy(
            update={
                "wrapped_key": wrapped,
                "key_id": key_id,
                "key_number": number + 1,
                "key_stage": TenantKeyStage.PREPARING,
            }
        )
        # Recorded first: no key comes into use without a record, after a conflict or crash again.
        await self._note("tenant_key.prepare", "granted", tenant, number + 1)
        return await registry.commit(
            [
                registry.tenants.unchanged(tenant, stored),
                registry.tenant_keys.unchanged(former.name, None),
                same_key,
            ],
            {
                **registry.tenants.sealed(tenant, after),
                **registry.tenant_keys.sealed(former.name, former),
            },
        )

    async def rotate(self, tenant: str, number: int) -> None:
        """Have all volumes of a tenant begin a key epoch of its key `number`; idempotent.

        UsageError `broker.tenant_key.tenant`, `.number`; `.not_prepared`: a volume isn't ready, or
        the key was never prepared.
        """
        begun = await self._registry.settle(lambda: self._attempt_rotate(tenant, number))
        await self._cover(begun)
        self._continuing.want()

    async def _attempt_rotate(self, tenant: str, number: int) -> int | None:
        stored = await self._tenant(tenant)
        record = stored.record
        _check_number(record, tenant, number)
        if number == 0 or record.key_stage == TenantKeyStage.PREPARING:
            raise UsageError(
                "broker.tenant_key.not_prepared",
                f"key {number} of tenant {tenant} is not prepared: a restored snapshot could not "
                "tell which sectors are sealed under it",
            )
        if record.key_stage != TenantKeyStage.PREPARED:
            return stored.revision  # as in `_attempt_prepare`
        await self._note("tenant_key.rotate", "granted", tenant, number)
        return await self._stage(stored, TenantKeyStage.ROTATING)

    async def keep(self) -> None:
        """Continue rotations whenever there are any; ends with VerificationError only."""
        await self._continuing.keep()

    async def proceed(self) -> None:
        """Do what brokers do by themselves: make volumes ready, begin epochs, delete former keys.

        Returns when nothing is left to do; errors of the store.
        """
        async with self._proceeding:
            while passes := await self._due():
                await self._go_through(passes)
                for each in passes.values():
                    await self._conclude(each)
                self._continuing.failure = ""

    async def _due(self) -> dict[str, _Pass]:
        """Return the tenants that all volumes have to be looked at for.

        They have former keys. Tenants without a rotation in progress are due together, each once
        after a change of its record, such as the deletion of a volume, but not more often than
        `SWEEP_SECONDS`, those with an incomplete one `INCOMPLETE_SECONDS`.
        """
        names = {stored.record.tenant async for stored in self._former()}
        self._idle = {name: idle for name, idle in self._idle.items() if name in names}
        if not names:
            return {}
        due: dict[str, _Pass] = {}
        now, swept = asyncio.get_running_loop().time(), dict(self._swept)
        async for tenant in self._registry.tenants.records():
            name, stage = tenant.name, tenant.record.key_stage
            if name not in names:
                continue
            is_due = stage in _WORKING or name not in self._idle
            if not is_due and tenant.revision != self._idle[name]:
                is_incomplete = stage == TenantKeyStage.INCOMPLETE
                seconds = INCOMPLETE_SECONDS if is_incomplete else SWEEP_SECONDS
                is_due = now - swept.get(is_incomplete, -seconds) >= seconds
                if is_due:
                    self._swept[is_incomplete] = now
            if is_due:
                due[name] = _Pass(tenant)
        return due

    async def _go_through(self, passes: Mapping[str, _Pass]) -> None:
        """Read all volumes once, and change those that have to be."""
        async for volume in self._volumes():
            each = passes.get(volume.record.tenant)
            if each is None:
                continue
            each.needed |= volume.record.needed_tenant_keys
            each.left += volume.record.present_tenant_key != each.number
            if each.changed(volume.record) is not None:
                each.found += 1
                each.batch.append(volume)
            if len(each.batch) == BATCH_RECORDS:
                await self._change(each)
        for each in passes.values():
            await self._change(each)
        if any(each.found and each.stage == TenantKeyStage.ROTATING for each in passes.values()):
            # A rolled-back store must not bring a key back into use.
            await self._cover(await self._registry.store.revision())

    async def _change(self, each: _Pass) -> None:
        """Change a batch in one commit, or, if a record was changed meanwhile, one by one."""
        batch, each.batch = each.batch, []
        if not batch or await self._commit(each, batch):
            return
        for volume in batch:
            await self._registry.settle(partial(self._change_one, each, volume.name))

    async def _change_one(self, each: _Pass, name: str) -> bool | None:
        volume = await self._registry.volumes.get(name)
        if volume is None or volume.record.is_deleted:
            return True
        return await self._commit(each, [volume]) or None

    async def _commit(self, each: _Pass, volumes: Sequence[Stored[VolumeRecord]]) -> bool:
        """Change these volumes, if the tenant's rotation is still where it was.

        True also if it isn't; False: a record was changed.
        """
        registry, name = self._registry, each.tenant.name
        tenant = await registry.tenants.get(name)
        if tenant is None or not _is_same(tenant.record, each):
            return True
        changed = [
            (volume, after)
            for volume in volumes
            if (after := each.changed(volume.record)) is not None
        ]
        if not changed:
            return True
        puts: dict[str, bytes] = {}
        for volume, after in changed:
            puts |= registry.volumes.sealed(volume.name, after)
        # The tenant's key is still the same then: the next one comes only when these volumes have
        # been changed.
        compares = [registry.volumes.unchanged(volume.name, volume) for volume, _ in changed]
        if await registry.commit(compares, puts) is None:
            return False
        if each.stage == TenantKeyStage.ROTATING:
            # Together: they share the log's writes.
            await asyncio.gather(*(record_rotation(self._audit, after) for _, after in changed))
        return True

    async def _conclude(self, each: _Pass) -> None:
        """Take the next stage if the pass found no volume to change, and delete what isn't needed.

        Otherwise there is another pass.
        """
        name = each.tenant.name
        deleted = await self._delete_former(each)
        if each.found:
            return
        after = each.stage
        if each.stage == TenantKeyStage.PREPARING:
            after = TenantKeyStage.PREPARED
        elif each.stage in {TenantKeyStage.ROTATING, TenantKeyStage.INCOMPLETE}:
            after = TenantKeyStage.INCOMPLETE if each.left else None
        if after != each.stage:
            await self._end_stage(each, after)
        elif not deleted:
            self._idle[name] = each.tenant.revision
            return
        self._idle.pop(name, None)

    async def _end_stage(self, each: _Pass, after: TenantKeyStage | None) -> None:
        async def attempt() -> int | None:
            stored = await self._tenant(each.tenant.name)
            # Volumes that came since are of the new key, so what the pass found still holds.
            if not _is_same(stored.record, each):
                return 0
            if after != TenantKeyStage.INCOMPLETE:
                kind = "tenant_key.rotate" if after is None else "tenant_key.prepare"
                await self._note(kind, "done", stored.name, each.number)
            else:
                get_logger().error(
                    "tenant_key_rotation_incomplete", tenant=stored.name, volumes=each.left
                )
            return await self._stage(stored, after)

        revision = await self._registry.settle(attempt)
        if revision:
            await self._cover(revision)

    async def _stage(
        self, stored: Stored[TenantRecord], stage: TenantKeyStage | None
    ) -> int | None:
        after = stored.record.model_copy(update={"key_stage": stage})
        return await self._registry.commit(
            [self._registry.tenants.unchanged(stored.name, stored)],
            self._registry.tenants.sealed(stored.name, after),
        )

    async def _delete_former(self, each: _Pass) -> bool:
        """Delete the tenant's former keys that no volume needs; return whether there were any.

        The pass began when they were former keys already. The last one is kept during a rotation:
        it is how brokers find that there is one.
        """
        below = each.number if each.stage is None else each.number - 1
        table, has_deleted = self._registry.tenant_keys, False
        async for stored in self._former(each.tenant.name):
            number = stored.record.number
            if number >= below or number in each.needed:
                continue
            await self._note("tenant_key.delete", "done", each.tenant.name, number)
            revision = await self._registry.commit(
                [table.unchanged(stored.name, stored)], deletes=[table.key(stored.name)]
            )
            has_deleted = True
            if revision is not None:
                await self._cover(revision)
        return has_deleted

    async def progress(self, tenant: str) -> TenantKeyProgress:
        """Return which key a tenant has, and how far its rotation is.

        UsageError `broker.tenant_key.tenant`.
        """
        stored = await self._tenant(tenant)
        [found] = await self._counted([stored], counting={tenant})
        return found

    async def page(self, *, after: str, limit: int) -> tuple[list[TenantKeyProgress], str]:
        """Return those of up to `limit` tenants after `after` whose key was ever replaced.

        Also the name to go on after; empty: these were the last. Volumes are counted only for
        tenants whose rotation is in progress.
        """
        page, has_more = await self._registry.tenants.page(after=after, limit=limit)
        replaced = [stored for stored in page if stored.record.key_number]
        counting = {stored.name for stored in replaced if stored.record.key_stage is not None}
        return await self._counted(replaced, counting=counting), page[-1].name if has_more else ""

    async def _counted(
        self, tenants: Sequence[Stored[TenantRecord]], *, counting: Collection[str]
    ) -> list[TenantKeyProgress]:
        former: dict[str, list[int]] = {tenant.name: [] for tenant in tenants}
        for tenant in tenants:
            async for key in self._former(tenant.name):
                former[tenant.name].append(key.record.number)
        volumes: dict[str, list[VolumeRecord]] = {name: [] for name in former}
        if counting:
            async for volume in self._volumes():
                if volume.record.tenant in counting:
                    volumes[volume.record.tenant].append(volume.record)
        return [
            _progress(tenant, volumes[tenant.name], former[tenant.name], self._continuing.failure)
            for tenant in tenants
        ]

    async def _tenant(self, name: str) -> Stored[TenantRecord]:
        """Return a tenant; UsageError `broker.tenant_key.tenant`."""
        is_name = NAME_PATTERN.fullmatch(name) is not None
        stored = await self._registry.tenants.get(name) if is_name else None
        if stored is None:
            raise UsageError(
                "broker.tenant_key.tenant",
                f"tenant {name[:80]!r} has no key: it never had a volume",
            )
        return stored

    async def _volumes(self) -> AsyncIterator[Stored[VolumeRecord]]:
        """Yield all live volumes of all tenants."""
        async for stored in self._registry.volumes.records():
            if not stored.record.is_deleted:
                yield stored

    def _former(self, tenant: str = "") -> AsyncIterator[Stored[TenantKeyRecord]]:
        """Yield the former keys of a tenant, or of all."""
        within = TenantKeyRecord.of(tenant) if tenant else ""
        return self._registry.tenant_keys.records(within=within)

    async def _note(
        self, kind: str, outcome: Literal["granted", "done"], tenant: str, number: int
    ) -> None:
        await self._audit.record(
            kind,
            subject="operator" if outcome == "granted" else "broker",
            outcome=outcome,
            tenant=tenant,
            number=number,
        )
        get_logger().info(kind.replace(".", "_"), outcome=outcome, tenant=tenant, number=number)


def _check_number(record: TenantRecord, tenant: str, number: int) -> None:
    """Raise UsageError `broker.tenant_key.number` unless it is that of the tenant's present key."""
    if record.key_number != number:
        raise UsageError(
            "broker.tenant_key.number",
            f"key {number} of tenant {tenant} isn't its present one: that is key "
            f"{record.key_number}",
        )


def _is_same(record: TenantRecord, each: _Pass) -> bool:
    """Return whether a tenant's rotation is where the pass found it."""
    return (record.key_number, record.key_stage) == (each.number, each.stage)


def _is_exhausted(volume: VolumeRecord, number: int) -> bool:
    """Return whether a volume can't begin a key epoch of its tenant's key of this number."""
    return volume.present_tenant_key != number and not volume.has_key_epochs_left


def _progress(
    tenant: Stored[TenantRecord],
    volumes: Sequence[VolumeRecord],
    former: Sequence[int],
    failure: str,
) -> TenantKeyProgress:
    number = tenant.record.key_number
    exhausted = [volume.volume_id for volume in volumes if _is_exhausted(volume, number)]
    return TenantKeyProgress(
        tenant=tenant.name,
        number=number,
        stage=tenant.record.key_stage,
        volumes=len(volumes),
        ready=sum(volume.next_tenant_key == number for volume in volumes),
        rotated=sum(volume.present_tenant_key == number for volume in volumes),
        exhausted_volumes=len(exhausted),
        exhausted=tuple(exhausted[:EXHAUSTED_SHOWN]),
        former=tuple(former),
        failure=failure,
    )
