"""A store whose records are checked against what brokers left: detects rollback of any record.

`CheckedStore` implements `Store` on top of another one. All records together are bound by one state
record (sealane.daemon.broker.store.state), which every commit replaces in the same transaction.

How it works:

* **Opening**: one scan at one revision; the state record must match the sum of the records.
* **Memory**: a hash of each record, as of a verified state. It only moves forward, one state at a
  time: by an own commit that succeeded, or by another broker's commit from the watch.
* **Commit**: the state record is compared with the revision in memory, so the commit happens in
  exactly the state that the memory describes. Concurrent commits are merged into one. If the state
  has moved on, the memory follows and the commit is evaluated again.
* **A lost answer** (`broker.store.outcome_unknown`): the memory stays as it is; if the commit
  happened, the watch shows it like another broker's.
* **Read**: what was read must match the memory. If it doesn't, the state record is read. If that is
  newer than the memory, the read waits for the memory and starts over; if not, no broker made the
  change.
* **Watch**: a change without the state that follows it was not made by a broker.
* **Compacted history**: a scan replaces the memory; its state must not be older than the memory's.
* **Another record key** (`replace_key`): one commit replaces the key and the state, whose tag and
  hashes are under the new key from then on. Who makes it has scanned all entries under both keys
  and followed each change since. Another broker that meets such a commit, which must follow the
  state in its memory, scans everything under the new key.

A change by anyone but a broker is fatal: the store fails with `broker.store.rolled_back`, as does
every later call, and the broker ends.
"""

import asyncio
import contextlib
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sealane.daemon.broker.store.batch import Batch, Commit
from sealane.daemon.broker.store.contract import (
    PAGE_ENTRIES_MAX,
    STATE_KEY,
    Change,
    Compare,
    Entry,
    Page,
    Store,
    check_commit,
    check_key,
    check_page,
    end_of,
)
from sealane.daemon.broker.store.rebinding import Rebinding
from sealane.daemon.broker.store.record_keys import KeyNaming, NamedKeys, RecordKeys
from sealane.daemon.broker.store.state import Known, SetHash, State, without_state
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.transport.tasks import TaskOwner

FOLLOW_SECONDS: Final = 10.0
"""How long a call waits for the watch to reach a state that the store already has."""
UNFOLLOWED_COMMITS_MAX: Final = 1 << 16
"""Own commits that the watch hasn't shown yet; at this limit nothing is committed."""
REBINDING_TRIES_MAX: Final = 8
"""Tries to commit a rebinding that other brokers' commits overtake, while own ones wait."""
INSPECTED_ENTRIES: Final = 10_000
"""Entries that one inspection reads; the next inspection continues from there."""

_PAUSE_SECONDS: Final = 0.5
_NAMED_KEYS_MAX: Final = 4

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """All entries as of `revision`; `digests` are those under the key of a rebinding, if any."""

    known: dict[str, Known]
    state: State
    revision: int
    named: NamedKeys
    digests: dict[str, int]


class CheckedStore:
    """One broker's checked view of `inner`, which it closes. Made by `open`."""

    def __init__(self, inner: Store, naming: KeyNaming, named: NamedKeys) -> None:
        self._inner = inner
        self._naming = naming
        self.record_keys = RecordKeys(named)
        """The keys for the MACs of records, as of the state in memory."""
        self._hashes = SetHash(named.present)
        self._rebinding: Rebinding | None = None
        self._known: dict[str, Known] = {}
        self._keys: list[str] = []  # of `_known`, sorted
        self._state = State(number=0, count=0, total=0, tag=b"", revision=0)
        self._followed = 0
        # Revisions of own commits that are in memory but not yet shown by the watch.
        self._own: set[int] = set()
        self._inspected = ""
        self._moved = asyncio.Event()
        self._failed = asyncio.Event()
        self._trouble = asyncio.Event()
        self._failure: Error | None = None
        self._waiting: deque[Commit] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._tasks = TaskOwner()

    @classmethod
    async def open(cls, inner: Store, naming: KeyNaming) -> "CheckedStore":
        """Read and check all of `inner`, under the record key that `naming` finds in it.

        VerificationError `broker.store.rolled_back`: its records are not what brokers left; and the
        errors of `KeyNaming.named`.
        """
        entry = await inner.get(naming.key)
        store = cls(inner, naming, await naming.named(b"" if entry is None else entry.value))
        await store._read_all()
        store._tasks.start(store._follow(), name="store-watch")
        return store

    @property
    def failure(self) -> Error | None:
        """See `Store`."""
        return self._failure or self._inner.failure

    async def failed(self) -> Error:
        """Wait until no later call can succeed; return the reason."""
        await self._failed.wait()
        assert self._failure is not None  # noqa: S101 - `_fail` sets both
        return self._failure

    @property
    def is_troubled(self) -> bool:
        """Whether the last call got no answer."""
        return self._trouble.is_set()

    async def troubled(self) -> None:
        """Wait until a call gets no answer."""
        await self._trouble.wait()

    @property
    def entry_count(self) -> int:
        """Number of records."""
        return self._state.count

    async def close(self) -> None:
        """See `Store`."""
        await self._tasks.close()
        await self._inner.close()

    async def get(self, key: str) -> Entry | None:
        """See `Store`; VerificationError `broker.store.rolled_back`."""
        check_key(key)

        def matches(entry: Entry | None) -> str | None:
            return None if self._is_known(key, entry) else key

        return await self._checked(lambda: self._inner.get(key), matches)

    async def range(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Page:
        """See `Store`; VerificationError `broker.store.rolled_back`."""
        check_page(prefix, after, limit)
        behind = max(after, STATE_KEY) if STATE_KEY.startswith(prefix) else after

        def matches(page: Page) -> str | None:
            start = max(bisect_left(self._keys, prefix), bisect_right(self._keys, behind))
            end = max(start, bisect_left(self._keys, end_of(prefix)))
            expected = self._keys[start : min(end, start + limit)]
            found = {entry.key: entry for entry in page.entries}
            for key in [*expected, *found]:
                if not self._is_known(key, found.get(key)):
                    return key
            return None if page.has_more == (end - start > limit) else prefix

        return await self._checked(
            lambda: self._inner.range(prefix, after=behind, limit=limit), matches
        )

    async def revision(self) -> int:
        """Return the revision of the last commit that changed a record."""
        await self._catch_up(self._state)
        return self._state.revision

    async def scan(self) -> AsyncIterator[Page]:
        """See `Store`."""
        async for page in self._inner.scan():
            yield page

    async def copy(self) -> tuple[dict[str, bytes], State]:
        """Return all entries as of one revision, the state record first, and their state.

        VerificationError `broker.store.rolled_back`: they are not what brokers left.
        """
        self._check()
        least = self._state.number
        while True:
            entries: dict[str, bytes] = {}
            revision = 0
            try:
                async for page in self._inner.scan():
                    revision = page.revision
                    entries |= {entry.key: entry.value for entry in page.entries}
                    await asyncio.sleep(0)
            except UnavailableError as error:
                if error.reason != "broker.store.compacted":
                    raise
                continue
            # The record key may have been replaced before the scan or since.
            named = await self._naming.named(entries.get(self._naming.key, b""))
            hashes = SetHash(named.present)
            # Some 5 µs for each record, too long for one turn of the event loop.
            state = await asyncio.to_thread(hashes.state_of, entries, revision=revision)
            if state.number < least:
                raise self._fail(_rolled_back(STATE_KEY))
            return entries, state

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        """See `Store`."""
        return await self._commit(compares, puts, deletes)

    async def replace_key(
        self, named: NamedKeys, *, compares: Sequence[Compare], puts: Mapping[str, bytes]
    ) -> int | None:
        """Commit `puts`, which name these keys, and bind all records by the present one from then.

        None: a compare failed, or too much has changed meanwhile; nothing was changed. One call at
        a time.
        """
        self._check()
        rebinding = self._rebinding = Rebinding(named)
        rebinding.move(self._state)
        try:
            scan = await self._scanned(rebinding)
            await self._reach(scan.state.revision)
            if self._rebinding is not rebinding:
                return None  # the memory was replaced
            if not rebinding.was_at(scan.state):
                raise _rolled_back(STATE_KEY)
            rebinding.fill(scan.digests, revision=scan.state.revision)
            return await self._commit(compares, puts, (), rebinding)
        except VerificationError as error:
            raise self._fail(error) from None
        except UnavailableError as error:
            if error.reason != "broker.store.compacted":
                raise
            return None
        finally:
            if self._rebinding is rebinding:
                self._rebinding = None

    async def _commit(
        self,
        compares: Sequence[Compare],
        puts: Mapping[str, bytes] | None,
        deletes: Sequence[str],
        rebinding: Rebinding | None = None,
    ) -> int | None:
        puts = dict(puts or {})
        check_commit(compares, puts, deletes)
        if STATE_KEY in puts or STATE_KEY in deletes:
            raise UsageError("broker.store.key", f"{STATE_KEY} is reserved for the store")
        self._check()
        outcome = asyncio.get_running_loop().create_future()
        self._waiting.append(Commit(tuple(compares), puts, tuple(deletes), outcome, rebinding))
        if self._writing is None or self._writing.done():
            # In a task of its own: cancelling one caller must not cancel others' commits.
            self._writing = self._tasks.start(self._write(), name="store-commits")
        result: int | None = await outcome
        return result

    async def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[tuple[Change, ...]]:
        """See `Store`; a commit is shown once its state is verified."""
        async for commit in self._inner.watch(prefix, from_revision=from_revision):
            await self._reach(commit[0].revision)
            for change in commit:
                known = self._known.get(change.key)
                if (
                    change.value is not None
                    and known is not None
                    and known.revision == change.revision
                    and known.digest != self._hashes.digest(change.key, change.value)
                ):
                    raise self._fail(_rolled_back(change.key))
            shown = tuple(change for change in commit if change.key != STATE_KEY)
            if shown:
                yield shown

    async def inspect(self) -> None:
        """Check the state record and some of the entries; successive calls cover all of them.

        VerificationError `broker.store.rolled_back`.
        """
        await self._catch_up(self._state)
        left = INSPECTED_ENTRIES
        while left > 0:
            page = await self.range("", after=self._inspected, limit=min(left, PAGE_ENTRIES_MAX))
            left -= PAGE_ENTRIES_MAX
            self._inspected = page.entries[-1].key if page.has_more else ""
            if not page.has_more:
                return

    # Reads

    async def _checked(
        self, read: Callable[[], Awaitable[_Read]], mismatch: Callable[[_Read], str | None]
    ) -> _Read:
        """Return the result of `read` once it matches the memory."""
        while True:
            seen = self._state
            found = await self._ask(read())
            differing = mismatch(found)
            if differing is None:
                return found
            await self._catch_up(seen)
            if self._state is seen:
                raise self._fail(_rolled_back(differing))

    def _is_known(self, key: str, entry: Entry | None) -> bool:
        known = self._known.get(key)
        if known is None or entry is None:
            return known is None and entry is None
        return known == Known(revision=entry.revision, digest=self._hashes.digest(key, entry.value))

    async def _catch_up(self, seen: State) -> None:
        """Wait until the memory has the store's current state."""
        entry = await self._ask(self._inner.get(STATE_KEY))
        if entry is None or entry.revision < seen.revision:
            raise self._fail(_rolled_back(STATE_KEY))
        if (
            entry.revision == self._state.revision
            and entry.value[: len(self._state.tag)] != self._state.tag
        ):
            raise self._fail(_rolled_back(STATE_KEY))
        await self._reach(entry.revision)

    async def _reach(self, revision: int) -> None:
        try:
            async with asyncio.timeout(FOLLOW_SECONDS):
                while self._state.revision < revision:
                    self._check()
                    await self._moved.wait()
        except TimeoutError:
            raise UnavailableError(
                "broker.store.timeout",
                f"the store is at revision {revision}, but its watch has shown nothing after "
                f"{self._state.revision} for {FOLLOW_SECONDS:.0f} s",
            ) from None
        self._check()

    # Commits

    async def _write(self) -> None:
        while self._waiting:
            try:
                await self._write_some()
            except Error as error:
                self._answer_all(error)
            except BaseException:
                self._answer_all(
                    UnavailableError("broker.store.outcome_unknown", "the store was closed")
                )
                raise

    async def _write_some(self) -> None:
        first = self._waiting[0]
        if not self._holds(first):
            # The caller may have seen more than the memory has.
            await self._catch_up(self._state)
            if not self._holds(first):
                self._waiting.popleft().answer(None)
                return
        batch = self._next_batch()
        if not batch.changes:
            for _ in batch.commits:
                self._waiting.popleft().answer(self._state.revision)
            return
        before, rebinding = self._state, first.rebinding
        changes = batch.changes
        if rebinding is None:
            added, after, sealed = self._next(changes)
        else:
            added, after, sealed = rebinding.next(before, changes)
        if len(self._own) >= UNFOLLOWED_COMMITS_MAX:
            raise UnavailableError(
                "broker.store.timeout", f"the watch is {len(self._own)} commits behind"
            )
        revision = await self._ask(
            self._inner.commit(
                [Compare(STATE_KEY, before.revision), *batch.compares.values()],
                {STATE_KEY: sealed, **{k: v for k, v in changes.items() if v is not None}},
                [key for key, value in changes.items() if value is None],
            )
        )
        if revision is None:
            await self._overtaken(batch, before)
            return
        if revision > self._state.revision:
            self._own.add(revision)
            if rebinding is not None:
                self._rebind(rebinding)
            self._apply(changes, added, after, revision)
        for _ in batch.commits:
            self._waiting.popleft().answer(revision)

    async def _overtaken(self, batch: Batch, before: State) -> None:
        """Follow another broker's commit, after which the first waiting one may be tried again."""
        await self._catch_up(before)
        if self._state is before:
            # The state is unchanged, so a record was changed without it.
            raise self._fail(_rolled_back(", ".join([*batch.compares][:_NAMED_KEYS_MAX])))
        first = self._waiting[0]
        first.lost += 1
        if first.rebinding is not None and first.lost == REBINDING_TRIES_MAX:
            self._waiting.popleft().answer(None)

    def _renewed(self, key: str, value: bytes) -> bytes:
        """Return a value to put under the present record key, which callers may not know yet."""
        if key == self._naming.key:
            return value
        return self.record_keys.renewed(key, value)

    def _next(self, changes: Mapping[str, bytes | None]) -> tuple[dict[str, int], State, bytes]:
        """Return the digests of what is put, the state after the changes, and its record."""
        removed = [known for key in changes if (known := self._known.get(key)) is not None]
        added = {k: self._hashes.digest(k, v) for k, v in changes.items() if v is not None}
        after, sealed = self._hashes.next(
            self._state, removed=removed, added=added.values(), growth=len(added) - len(removed)
        )
        return added, after, sealed

    def _rebind(self, rebinding: Rebinding) -> None:
        """Have in memory what the commit of a rebinding has made true, but for its changes."""
        self._rebinding = None
        self._hashes = rebinding.hashes
        self.record_keys.replace(rebinding.named)
        self._known = {
            key: Known(revision=known.revision, digest=rebinding.digests[key])
            for key, known in self._known.items()
        }

    def _next_batch(self) -> Batch:
        batch = Batch()
        for commit in self._waiting:
            if batch.commits and not (batch.takes(commit) and self._holds(commit)):
                break
            try:
                puts = {key: self._renewed(key, value) for key, value in commit.puts.items()}
            except UnavailableError as error:
                if not batch.commits:
                    self._waiting.popleft().fail(error)
                break
            deletes = [key for key in commit.deletes if key in self._known]
            batch.add(commit, puts=puts, deletes=deletes)
        return batch

    def _holds(self, commit: Commit) -> bool:
        if commit.rebinding is not None and commit.rebinding is not self._rebinding:
            return False  # the memory was replaced, and the rebinding has not followed
        for compare in commit.compares:
            known = self._known.get(compare.key)
            if compare.revision != (0 if known is None else known.revision):
                return False
        return True

    def _answer_all(self, error: Error) -> None:
        """Fail all waiting commits: after a commit of unknown outcome, theirs are unknown, too."""
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _apply(
        self,
        changes: Mapping[str, bytes | None],
        added: Mapping[str, int],
        state: State,
        revision: int,
    ) -> None:
        if self._rebinding is not None:
            self._rebinding.change(changes, revision)
        naming = changes.get(self._naming.key)
        if naming is not None and not self._naming.names_previous(naming):
            self.record_keys.forget_previous()
        for key in changes:
            digest = added.get(key)
            if digest is None:
                if self._known.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]
                continue
            if key not in self._known:
                insort(self._keys, key)
            self._known[key] = Known(revision=revision, digest=digest)
        self._move(state, revision)

    def _move(self, state: State, revision: int) -> None:
        self._state = State(
            number=state.number,
            count=state.count,
            total=state.total,
            tag=state.tag,
            revision=revision,
        )
        if self._rebinding is not None:
            self._rebinding.move(self._state)
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    # The watch

    async def _follow(self) -> None:
        while self._failure is None:
            try:
                commits = self._inner.watch("", from_revision=self._followed + 1)
                async with contextlib.aclosing(commits):  # type: ignore[type-var]
                    async for commit in commits:
                        try:
                            self._take_over(commit)
                        except VerificationError:
                            named = await self._next_key(commit)
                            if named is None:
                                raise
                            await self._read_all(named)
                            break
                        self._followed = commit[0].revision
            except UnavailableError as error:
                if self._inner.failure is not None:
                    self._fail(self._inner.failure)
                elif error.reason == "broker.store.compacted":
                    await self._begin_again()
                else:
                    get_logger().error(
                        "store_not_watched", reason=error.reason, message=error.args[0]
                    )
                    await asyncio.sleep(_PAUSE_SECONDS)
            except VerificationError as error:
                self._fail(error)

    def _take_over(self, commit: Sequence[Change]) -> None:
        """Apply a commit to the memory; VerificationError if no broker made it."""
        revision = commit[0].revision
        if revision in self._own:
            self._own.discard(revision)
            return
        changes = {change.key: change.value for change in commit}
        sealed = changes.pop(STATE_KEY, None)
        added, state, expected = self._next(changes)
        # It has no state, a foreign one, or one not newer than the memory's.
        if sealed != expected:
            raise _rolled_back(", ".join([*changes][:_NAMED_KEYS_MAX]))
        self._apply(changes, added, state, revision)

    async def _next_key(self, commit: Sequence[Change]) -> NamedKeys | None:
        """Return the next record key if a commit names it: then everything is to be read again.

        Only that shows whether brokers made it: its state is under a key that no digest in memory
        was made with.
        """
        value = next((each.value for each in commit if each.key == self._naming.key), None)
        if value is None:
            return None
        named = await self._naming.named(value)
        if commit[0].revision <= self._state.revision:
            return named  # an own one, whose answer has come meanwhile
        present = self.record_keys.named
        follows = named.number == present.number + 1 and named.previous == present.present
        return named if follows else None

    async def _begin_again(self) -> None:
        try:
            await self._read_all()
        except UnavailableError as error:
            get_logger().error("store_not_watched", reason=error.reason, message=error.args[0])
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _read_all(self, expected: NamedKeys | None = None) -> None:
        """Read and check everything, and use it as the memory unless the memory is newer by now.

        The store is first read under the keys `expected`, if given.
        """
        while True:
            try:
                scan = await self._scanned(expected=expected)
            except UnavailableError as error:
                if error.reason != "broker.store.compacted":
                    raise
                continue
            state = scan.state
            if state.revision < self._state.revision:
                if state.number > self._state.number:
                    raise _rolled_back(STATE_KEY)
                continue  # an own commit happened meanwhile
            same = state.number == self._state.number
            if state.number < self._state.number or (same and state.tag != self._state.tag):
                raise _rolled_back(STATE_KEY)
            self._known, self._keys, self._followed = scan.known, sorted(scan.known), scan.revision
            self._own = {each for each in self._own if each > scan.revision}
            self._hashes, self._rebinding = SetHash(scan.named.present), None
            self.record_keys.replace(scan.named)
            self._move(state, state.revision)
            return

    async def _scanned(
        self, rebinding: Rebinding | None = None, expected: NamedKeys | None = None
    ) -> _Scan:
        """Read and check all entries as of one revision, under the record key that they name.

        VerificationError `broker.store.rolled_back`.
        """
        least = self.record_keys.named
        guess = expected or least
        while True:
            hashes = SetHash(guess.present)
            known: dict[str, Known] = {}
            digests: dict[str, int] = {}
            sealed: Entry | None = None
            naming = b""
            revision = 0
            async for page in self._inner.scan():
                revision = page.revision
                for entry in page.entries:
                    if entry.key == STATE_KEY:
                        sealed = entry
                        continue
                    if entry.key == self._naming.key:
                        naming = entry.value
                    digest = hashes.digest(entry.key, entry.value)
                    known[entry.key] = Known(revision=entry.revision, digest=digest)
                    if rebinding is not None:
                        digests[entry.key] = rebinding.hashes.digest(entry.key, entry.value)
                await asyncio.sleep(0)
            if sealed is None:
                raise without_state(len(known))
            named = await self._naming.named(naming)
            if named.number < least.number:
                raise _rolled_back(self._naming.key)
            if named.number == least.number and named.present != least.present:
                raise _rolled_back(self._naming.key)  # a branch with a replacement of its own
            if named.present != guess.present:
                guess = named  # replaced since: the digests are to be made again
                continue
            state = hashes.check(sealed.value, known.values(), revision=sealed.revision)
            return _Scan(known=known, state=state, revision=revision, named=named, digests=digests)

    # Failure

    async def _ask(self, work: Awaitable[_Read]) -> _Read:
        """Return the inner store's answer; a permanent failure of it ends this store."""
        if self._failure is not None:
            if asyncio.iscoroutine(work):
                work.close()
            self._check()
        try:
            answer = await work
        except Error as error:
            if isinstance(error, VerificationError) or self._inner.failure is not None:
                self._fail(error)
            if not isinstance(error, UsageError):
                self._trouble.set()
            raise
        self._trouble.clear()
        return answer

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.reason, self._failure.args[0])

    def _fail(self, error: Error) -> Error:
        if self._failure is None:
            self._failure = error
            get_logger().error("store_failed", reason=error.reason, message=error.args[0])
            self._failed.set()
            self._wake()
        return error


def _rolled_back(what: str) -> VerificationError:
    return VerificationError(
        "broker.store.rolled_back",
        f"{what}: not as the brokers left it: it was added, removed or replaced by an older "
        "record, and not by a broker",
    )
