"""Wraps all keys in the store again under another key encryption key, while brokers run.

The order of events (docs/operate/rotation.md; tests/broker/test_rewrapping_model.py):

1. **Held**: a broker writes which keys it has, in a commit that compares the authority's record. It
   serves only if it has the keys which that record names.
2. **Begun**: one commit wraps the authority's own keys under the other key and names that key, and
   the one before. It compares the record of held keys: every broker has the other key by then. From
   here on no new key is wrapped under the one before, because each commit that stores a newly
   wrapped key compares the authority's record.
3. **Rewrapped**: records are wrapped again one by one; each commit compares the record that was
   read, and the authority's. Any broker may do this, several at once, and again after a crash.
4. **Finished**: after a pass that found no record under another key, one commit names the key
   before as retired. Heads cover the commits of 2 and 4: a store from before them is refused as
   rolled back.

The other key is the one that a broker has and the authority's record doesn't name. So two operators
with two other keys can't both begin: for the second, another rotation is in progress.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KeyWrapper
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authority import (
    authority_entry,
    check_has,
    rewrapped_authority,
    same_authority,
)
from sealane.daemon.broker.continuing import Continuing
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.keyring import UNNAMED
from sealane.daemon.broker.records import (
    LAST_RESTORE,
    RETIRED_KEYS_MAX,
    AuthorityRecord,
    HeldKeysRecord,
    Stored,
    Table,
    TenantKeyRecord,
    TenantRecord,
    instance_name,
)
from sealane.daemon.broker.registry import (
    DEVICE_PURPOSE,
    TENANT_PURPOSE,
    Registry,
    tenant_key_owner,
)
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError, UsageError, VerificationError

BATCH_RECORDS: Final = 32
"""Records that one commit wraps again."""

_HELD: Final = "brokers"


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A wrapped key in a record."""

    table: Table[Any]
    stored: Stored[Any]
    field: str
    purpose: str
    owner: str

    @property
    def key(self) -> str:
        return self.table.key(self.stored.name)

    @property
    def wrapped(self) -> bytes:
        return bytes(getattr(self.stored.record, self.field))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Which keys are in use; `left` records are still under another one than `key_id`.

    `held` has each broker's node and keys, by instance; `failure` is why this broker's last attempt
    ended, if it failed.
    """

    key_id: bytes
    previous_key_id: bytes
    own: Sequence[bytes]
    retired: Sequence[bytes]
    records: int
    left: int
    held: Mapping[str, tuple[str, Sequence[bytes]]]
    failure: str


def _owner_of_present(stored: Stored[TenantRecord]) -> str:
    return tenant_key_owner(stored.name, stored.record.key_number)


def _owner_of_former(stored: Stored[TenantKeyRecord]) -> str:
    return tenant_key_owner(stored.record.tenant, stored.record.number)


class Rewrapping:
    """Begins and continues rotations of the key encryption key, as one of the store's brokers."""

    def __init__(
        self, registry: Registry, *, instance: int, cover: Cover, audit: Audit, metrics: Metrics
    ) -> None:
        self._registry = registry
        self._name = instance_name(instance)
        self._cover = cover
        self._audit = audit
        self._left = metrics.broker.records_under_previous_key
        self._changing = asyncio.Lock()
        self._continuing = Continuing(self.proceed, event="keys_not_rewrapped")

    async def announce(self, keys: Sequence[KeyWrapper] | None = None) -> None:
        """Write down which keys this broker has, and have only `keys` from now on, if given.

        UsageError `broker.key.missing`: the store needs another one; nothing was changed.
        """
        ids = self._registry.keys.ids if keys is None else sorted(key.key_id for key in keys)

        async def attempt() -> int | None:
            authority = await self._registry.authority_record()
            record = authority.record
            check_has(ids, [self._registry.current_key(record), record.previous_key_id])
            held = await self._registry.held_keys.get(_HELD)
            before = {} if held is None else held.record.brokers
            if before.get(self._name) == tuple(ids):
                return 0
            after = HeldKeysRecord(brokers={**before, self._name: tuple(ids)})
            return await self._registry.commit(
                [same_authority(authority), self._registry.held_keys.unchanged(_HELD, held)],
                self._registry.held_keys.sealed(_HELD, after),
            )

        revision = await self._registry.settle(attempt)
        if keys is not None:
            self._registry.keys.replace(keys)
        if revision:
            await self._cover(revision)

    async def begin(self, *, gone: Collection[int] = ()) -> None:
        """Begin to wrap all keys under this broker's other key; idempotent.

        Brokers whose instances are `gone` needn't have it. UsageError `broker.key.next`: there is
        no other key; `broker.key.retired`: it was in use before; `broker.key.rotating`: another
        rotation is in progress; `broker.key.record_key_rotating`: a replacement of the record key
        is; `broker.key.not_held`: a broker doesn't have it.
        """
        authority = await self._registry.authority_record()
        intended = self._other_key(authority.record)
        begun = await self._registry.settle(lambda: self._attempt_begin(intended, gone))
        await self._cover(begun)
        self._continuing.want()

    def _other_key(self, record: AuthorityRecord) -> bytes:
        """Return the id of the key to rotate to: the current one if a rotation is in progress.

        UsageError `broker.key.next`, `broker.key.rotating`, `broker.key.retired`.
        """
        current, previous = self._registry.current_key(record), record.previous_key_id
        others = [key_id for key_id in self._registry.keys.ids if key_id != current]
        if not others or others == [previous]:
            if previous != UNNAMED:
                return current
            raise UsageError(
                "broker.key.next",
                f"this broker has no other key than {current.hex()}, which is in use, or only a "
                "retired one: make one, configure it as broker.next_key on every broker, and "
                "reload them",
            )
        other = others[0]
        if previous != UNNAMED:
            raise UsageError(
                "broker.key.rotating",
                f"keys are being wrapped under {current.hex()}; {other.hex()} can follow when that "
                "has ended",
            )
        if other in record.retired_key_ids:
            raise UsageError(
                "broker.key.retired",
                f"key encryption key {other.hex()} was in use before and is retired: make a new "
                "one, or, if this is what remains of a rotation, remove the old key from the "
                "configuration",
            )
        return other

    async def _attempt_begin(self, intended: bytes, gone: Collection[int]) -> int | None:
        registry = self._registry
        authority = await registry.authority_record()
        record = authority.record
        # By this rotation or another broker's, which may even have ended since the last attempt.
        # It may not be covered yet.
        if intended == registry.current_key(record):
            return authority.revision
        other = self._other_key(record)
        if record.wrapped_previous_record_key:
            raise UsageError(
                "broker.key.record_key_rotating",
                f"record key {record.record_key_number - 1} is still being replaced: key "
                f"encryption key {other.hex()} must never wrap it",
            )
        held = await registry.held_keys.get(_HELD)
        await self._check_held(other, held, gone)
        after = await asyncio.to_thread(rewrapped_authority, record, registry.keys, key_id=other)
        # Recorded first: no key comes into use without a record, after a conflict or crash again.
        await self._note("granted", after)
        return await registry.commit(
            [same_authority(authority), registry.held_keys.unchanged(_HELD, held)],
            authority_entry(after),
        )

    async def _check_held(
        self, key_id: bytes, held: Stored[HeldKeysRecord] | None, gone: Collection[int]
    ) -> None:
        names = {instance_name(instance) for instance in gone}
        brokers = {} if held is None else held.record.brokers
        nodes = await self._nodes()
        lacking = [
            f"{int(name)} ({nodes.get(name, 'unknown')})"
            for name in sorted({*nodes, *brokers} - names)
            if key_id not in brokers.get(name, ())
        ]
        if lacking:
            raise UsageError(
                "broker.key.not_held",
                f"broker instances {', '.join(lacking)} don't have key encryption key "
                f"{key_id.hex()}: configure it as their broker.next_key and reload them; those "
                "that will never start again are named by --gone",
            )

    async def _nodes(self) -> dict[str, str]:
        """Return the nodes of all broker instances that may still start, by name."""
        restored = await self._registry.restores.get(LAST_RESTORE)
        retired = () if restored is None else restored.record.retired
        found: dict[str, str] = {}
        async for stored in self._registry.instances.records():
            found[stored.name] = stored.record.node
        for instance in retired:
            found.pop(instance_name(instance), None)
        return found

    async def keep(self) -> None:
        """Wrap records again whenever a rotation is in progress; ends with VerificationError only.

        A broker that starts, or that another one left alone, continues what it finds.
        """
        await self._continuing.keep()

    async def proceed(self) -> None:
        """Wrap all records again if a rotation is in progress, and finish it.

        UnavailableError `broker.key.unread`: some can't be decrypted; the others were wrapped.
        """
        async with self._changing:
            while True:
                authority = await self._registry.authority_record()
                self._forget_retired(authority.record)
                if authority.record.previous_key_id == UNNAMED:
                    self._left.set(0)
                    return
                if await self._pass(authority):
                    await self._finish(authority)

    def _forget_retired(self, record: AuthorityRecord) -> None:
        for key_id in self._registry.keys.ids:
            if key_id in record.retired_key_ids:
                get_logger().warning(
                    "retired_key_configured",
                    key_id=key_id.hex(),
                    message="this key encryption key is no longer used: remove it from the "
                    "configuration, and destroy it",
                )
                self._registry.keys.drop(key_id)

    async def _pass(self, authority: Stored[AuthorityRecord]) -> bool:
        """Wrap again what is under another key; return whether nothing was.

        UnavailableError `broker.key.unread`.
        """
        key_id = authority.record.key_id
        batch: list[_Wrapped] = []
        unread: list[str] = []
        found = 0
        left = (await self._count(key_id))[1]
        self._left.set(left)
        async for each in self._wrapped_keys():
            if each.stored.record.key_id == key_id:
                continue
            found += 1
            batch.append(each)
            if len(batch) == BATCH_RECORDS:
                unread += await self._rewrap(batch, authority)
                left -= len(batch)
                self._left.set(max(left, 0))
                batch = []
        unread += await self._rewrap(batch, authority)
        if unread:
            self._left.set(len(unread))
            raise UnavailableError(
                "broker.key.unread",
                f"{len(unread)} records can't be decrypted, and stay under the key encryption key "
                f"before: {', '.join(unread[:4])}",
            )
        return not found

    async def _rewrap(
        self, batch: Sequence[_Wrapped], authority: Stored[AuthorityRecord]
    ) -> list[str]:
        """Wrap a batch again in one commit, or, if one was changed meanwhile, each by itself.

        Returns those that can't be decrypted. Those that were changed are left to the next pass.
        """
        changed: list[tuple[_Wrapped, dict[str, bytes]]] = []
        unread: list[str] = []
        for each in batch:
            try:
                put = await asyncio.to_thread(self._rewrapped, each, authority.record.key_id)
            except VerificationError as error:
                get_logger().error("key_not_rewrapped", record=each.key, reason=error.reason)
                unread.append(each.key)
            else:
                changed.append((each, put))
        if changed and not await self._store(changed, authority):
            for one in changed:
                await self._store([one], authority)
        return unread

    def _rewrapped(self, each: _Wrapped, key_id: bytes) -> dict[str, bytes]:
        keys, record = self._registry.keys, each.stored.record
        secret, _ = keys.unwrap(
            each.wrapped, key_id=record.key_id, purpose=each.purpose, owner=each.owner
        )
        try:
            wrapped = keys.key(key_id).wrap(secret, purpose=each.purpose, owner=each.owner)
        finally:
            wipe(secret)
        update = {each.field: wrapped, "key_id": key_id}
        return each.table.sealed(each.stored.name, record.model_copy(update=update))

    async def _store(
        self,
        changed: Sequence[tuple[_Wrapped, Mapping[str, bytes]]],
        authority: Stored[AuthorityRecord],
    ) -> bool:
        compares = [each.table.unchanged(each.stored.name, each.stored) for each, _ in changed]
        puts = {key: value for _, put in changed for key, value in put.items()}
        return await self._registry.commit([*compares, same_authority(authority)], puts) is not None

    async def _finish(self, authority: Stored[AuthorityRecord]) -> None:
        before = authority.record
        retired = (*before.retired_key_ids, before.previous_key_id)[-RETIRED_KEYS_MAX:]
        after = before.model_copy(update={"previous_key_id": UNNAMED, "retired_key_ids": retired})
        await self._note("done", before)
        revision = await self._registry.commit([same_authority(authority)], authority_entry(after))
        if revision is not None:
            await self._cover(revision)

    async def _wrapped_keys(self) -> AsyncIterator[_Wrapped]:
        registry = self._registry
        # A key moves from the first table to the second when its tenant gets another. In this order
        # a pass meets it under one name or the other.
        tables: tuple[tuple[Table[Any], str, str, Callable[[Any], str]], ...] = (
            (registry.tenants, "wrapped_key", TENANT_PURPOSE, _owner_of_present),
            (registry.tenant_keys, "wrapped_key", TENANT_PURPOSE, _owner_of_former),
            (registry.devices, "wrapped_secret", DEVICE_PURPOSE, lambda stored: stored.name),
        )
        for table, field, purpose, owner in tables:
            async for stored in table.records():
                each = _Wrapped(table, stored, field, purpose, owner(stored))
                if each.wrapped:  # a forgotten device has none
                    yield each

    async def _count(self, key_id: bytes) -> tuple[int, int]:
        records = left = 0
        async for each in self._wrapped_keys():
            records += 1
            left += each.stored.record.key_id != key_id
        return records, left

    async def progress(self) -> Progress:
        """Return which keys are in use, and how far a rotation is."""
        record = (await self._registry.authority_record()).record
        held = await self._registry.held_keys.get(_HELD)
        brokers = {} if held is None else held.record.brokers
        nodes = await self._nodes()
        records, left = await self._count(record.key_id)
        return Progress(
            key_id=self._registry.current_key(record),
            previous_key_id=record.previous_key_id,
            own=self._registry.keys.ids,
            retired=record.retired_key_ids,
            records=records,
            left=left if record.previous_key_id != UNNAMED else 0,
            held={
                name: (nodes.get(name, ""), brokers.get(name, ()))
                for name in sorted({*nodes, *brokers})
            },
            failure=self._continuing.failure,
        )

    async def _note(self, outcome: Literal["granted", "done"], record: AuthorityRecord) -> None:
        await self._audit.record(
            "encryption_key.rotate",
            subject="operator" if outcome == "granted" else "broker",
            outcome=outcome,
            key_id=record.key_id,
            previous_key_id=record.previous_key_id,
        )
        get_logger().info(
            "encryption_key_rotation",
            outcome=outcome,
            key_id=record.key_id.hex(),
            previous_key_id=record.previous_key_id.hex(),
        )
