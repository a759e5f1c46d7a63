"""Replaces the key for the MACs of the store's records, while brokers run.

The order of events (docs/operate/rotation.md; tests/broker/test_record_keys_model.py):

1. **Begun**: one commit puts a new record key into the authority's record, beside the one before,
   and the state record under the new key. So from here on the store as a whole is bound by the new
   key alone. No broker writes a record under the one before: its commit is made on the state in its
   memory, so it has met this one, and then makes each MAC under the new key.
2. **Made again**: the MACs of records are made again, a few records at a time; each commit compares
   the records that were read, and the authority's. Any broker may do this, several at once, and
   again after a crash. Records under either key are accepted.
3. **Finished**: after a pass that found no record under the key before, one commit deletes that
   key. A broker that meets it forgets the key, and refuses records under it from then on.

Heads cover the commits of 1 and 3: a store from before them is refused as rolled back.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.authority import (
    AUTHORITY_KEY,
    authority_entry,
    new_record_key,
    same_authority,
)
from sealane.daemon.broker.continuing import Continuing
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.records import AuthorityRecord, Stored
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import (
    COMMIT_BYTES_MAX,
    PAGE_ENTRIES_MAX,
    Compare,
    Entry,
)
from sealane.daemon.broker.store.record_keys import NamedKeys
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError

BATCH_RECORDS: Final = 32
"""Records whose MACs one commit makes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKeyProgress:
    """The number of the record key; `left` records are still under the one before.

    They are counted once for each pass, from which this broker's own work is subtracted.
    `failure` is why this broker's last attempt ended, if it failed.
    """

    number: int
    is_replacing: bool
    left: int
    failure: str


class RecordKeyRotation:
    """Begins and continues replacements of the record key, as one of the store's brokers."""

    def __init__(self, registry: Registry, *, cover: Cover, audit: Audit) -> None:
        self._registry = registry
        self._cover = cover
        self._audit = audit
        self._beginning = asyncio.Lock()
        self._proceeding = asyncio.Lock()
        self._continuing = Continuing(self.proceed, event="record_key_not_replaced")
        # Of the replacement that ends with the key of this number.
        self._counted = self._left = 0

    async def begin(self, number: int) -> None:
        """Begin to replace record key `number`; idempotent, also after the end.

        UsageError `broker.record_key.number`: it isn't the present one; `.rotating`: another
        replacement is in progress.
        """
        async with self._beginning:
            begun = await self._registry.settle(lambda: self._attempt_begin(number))
        await self._cover(begun)
        self._continuing.want()

    async def _attempt_begin(self, number: int) -> int | None:
        registry = self._registry
        stored = await registry.authority_record()
        present = registry.store.record_keys.named
        record = stored.record
        if record.record_key_number == number + 1:
            # By this call, or by another that named the same key: it may not be covered yet.
            return stored.revision
        if record.record_key_number != number:
            raise UsageError(
                "broker.record_key.number",
                f"record key {number} isn't in use: it is number {record.record_key_number}",
            )
        if record.wrapped_previous_record_key:
            raise UsageError(
                "broker.record_key.rotating",
                f"records still come under record key {number}: another one can follow when that "
                "has ended",
            )
        wrapping = registry.keys.key(registry.current_key(record))
        key, wrapped = await asyncio.to_thread(new_record_key, wrapping, number + 1)
        after = record.model_copy(
            update={
                "wrapped_record_key": wrapped,
                "wrapped_previous_record_key": record.wrapped_record_key,
                "record_key_number": number + 1,
            }
        )
        # Recorded first: no key comes into use without a record, after a conflict or crash again.
        await self._note("granted", after)
        return await registry.store.replace_key(
            NamedKeys(present=key, previous=present.present, number=number + 1),
            compares=[same_authority(stored)],
            puts=authority_entry(after),
        )

    async def keep(self) -> None:
        """Continue a replacement whenever one is in progress; ends with VerificationError only."""
        await self._continuing.keep()

    async def proceed(self) -> None:
        """Make all MACs again if a replacement is in progress, and finish it."""
        async with self._proceeding:
            while True:
                authority = await self._registry.authority_record()
                if not authority.record.wrapped_previous_record_key:
                    return
                if await self._pass(authority):
                    await self._finish(authority)

    async def _pass(self, authority: Stored[AuthorityRecord]) -> bool:
        """Make the MACs again that are under the key before; return whether there were none.

        False also if the authority's record is another one by now: nothing more can be stored then.
        """
        batch: list[Entry] = []
        size = found = 0
        await self._count(authority.record.record_key_number)
        async for entry in self._under_previous():
            found += 1
            if len(batch) == BATCH_RECORDS or size + len(entry.value) > COMMIT_BYTES_MAX:
                if not await self._make_again(batch, authority):
                    return False
                batch, size = [], 0
            batch.append(entry)
            size += len(entry.value)
        await self._make_again(batch, authority)
        return not found

    async def _under_previous(self) -> AsyncIterator[Entry]:
        has_more, after = True, ""
        while has_more:
            page = await self._registry.store.range("", after=after, limit=PAGE_ENTRIES_MAX)
            has_more = page.has_more
            for entry in page.entries:
                keys = self._registry.store.record_keys
                if entry.key != AUTHORITY_KEY and not keys.is_present(entry.key, entry.value):
                    yield entry
            after = page.entries[-1].key if page.entries else after

    async def _make_again(self, batch: Sequence[Entry], authority: Stored[AuthorityRecord]) -> bool:
        """Make a batch's MACs again in one commit, or, if a record was changed, each by itself.

        What was changed meanwhile is left to the next pass. False: the authority's record was.
        """
        self._left = max(0, self._left - len(batch))
        if not batch or await self._store(batch, authority):
            return True
        if (await self._registry.authority_record()).revision != authority.revision:
            return False
        for each in batch:
            await self._store([each], authority)
        return True

    async def _store(self, batch: Sequence[Entry], authority: Stored[AuthorityRecord]) -> bool:
        keys = self._registry.store.record_keys
        if keys.named.previous is None or keys.named.number != authority.record.record_key_number:
            return False  # another broker has finished, so the batch may be under no key in use
        compares = [Compare(entry.key, entry.revision) for entry in batch]
        puts = {
            entry.key: keys.sealed(entry.key, keys.opened(entry.key, entry.value))
            for entry in batch
        }
        return await self._registry.commit([*compares, same_authority(authority)], puts) is not None

    async def _finish(self, authority: Stored[AuthorityRecord]) -> None:
        after = authority.record.model_copy(update={"wrapped_previous_record_key": b""})
        await self._note("done", after)
        revision = await self._registry.commit([same_authority(authority)], authority_entry(after))
        if revision is not None:
            await self._cover(revision)

    async def progress(self) -> RecordKeyProgress:
        """Return which record key is in use, and how far a replacement is."""
        record = (await self._registry.authority_record()).record
        is_replacing = bool(record.wrapped_previous_record_key)
        if is_replacing and self._counted != record.record_key_number:
            await self._count(record.record_key_number)
        return RecordKeyProgress(
            number=record.record_key_number,
            is_replacing=is_replacing,
            left=self._left if is_replacing else 0,
            failure=self._continuing.failure,
        )

    async def _count(self, number: int) -> None:
        left = 0
        async for _ in self._under_previous():
            left += 1
        self._counted, self._left = number, left

    async def _note(self, outcome: Literal["granted", "done"], record: AuthorityRecord) -> None:
        await self._audit.record(
            "record_key.rotate",
            subject="operator" if outcome == "granted" else "broker",
            outcome=outcome,
            number=record.record_key_number,
        )
        get_logger().info("record_key_rotation", outcome=outcome, number=record.record_key_number)
