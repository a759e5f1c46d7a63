"""A store in an etcd cluster, which several brokers may share.

**Outcomes.** A commit whose answer is lost may have been executed, or may still be. So each commit
also compares and puts a *slot*, a key that only this writer changes. To determine the outcome, the
writer tries to put something else into the slot under the same compare: either that succeeds, and
the commit never will, or the slot holds the commit's mark, and the commit was executed. A writer
has 16 slots, and so up to 16 concurrent commits.

**Fencing.** Opening a writer puts new marks into all its slots. Commits of the previous process,
including those still in flight, then fail.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from sealane.daemon.broker.store.contract import (
    PAGE_ENTRIES_MAX,
    Change,
    Compare,
    Entry,
    Page,
    check_commit,
    check_key,
    check_page,
    end_of,
)
from sealane.daemon.broker.store.etcd_cluster import (
    CALL_SECONDS,
    Cluster,
    UnknownOutcomeError,
)
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.etcd import rpc_pb2

SLOTS: Final = 16

_PROCESS_BYTES: Final = 8
_PAUSE_SECONDS: Final = 0.05
# Entries of one answer: at the largest value size they stay below the message size limit.
_ANSWER_ENTRIES_MAX: Final = 128


@dataclass(slots=True)
class _Slot:
    """`revision` is that of its last change; 0: it doesn't exist; None: unknown at the moment."""

    key: bytes
    revision: int | None = None


class EtcdStore:
    """One writer of an etcd cluster. All its keys begin with `prefix`."""

    def __init__(self, cluster: Cluster, *, prefix: str, writer: str) -> None:
        self._cluster = cluster
        self._data = f"{prefix}data/"
        self._process = secrets.token_bytes(_PROCESS_BYTES)
        self._marks = itertools.count(1)
        self._slots_prefix = f"{prefix}slots/{writer}/"
        self._slots = [_Slot(f"{self._slots_prefix}{i:02}".encode()) for i in range(SLOTS)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()

    @classmethod
    async def open(
        cls,
        endpoints: Sequence[str],
        *,
        writer: str,
        credentials: grpc.ChannelCredentials | None,
        prefix: str = "/sealane/",
    ) -> "EtcdStore":
        """Connect to one of `endpoints` (host:port) and take over from the previous `writer`."""
        store = cls(Cluster(endpoints, credentials=credentials), prefix=prefix, writer=writer)
        try:
            await store._take_slots()
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """See `Store`."""
        await self._cluster.close()

    @property
    def failure(self) -> Error | None:
        """See `Store`."""
        return self._cluster.failure

    async def get(self, key: str) -> Entry | None:
        """See `Store`."""
        check_key(key)
        answer = await self._cluster.range(rpc_pb2.RangeRequest(key=self._key(key)))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def revision(self) -> int:
        """See `Store`."""
        answer = await self._cluster.range(rpc_pb2.RangeRequest(key=self._key("-")))
        return answer.header.revision

    async def range(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Page:
        """See `Store`."""
        check_page(prefix, after, limit)
        while True:
            try:
                return await self._page(prefix, after, limit)
            except UnavailableError as error:
                # The revision of the page was compacted meanwhile: start over.
                if error.reason != "broker.store.compacted":
                    raise

    async def scan(self) -> AsyncIterator[Page]:
        """See `Store`."""
        after, revision, has_more = "", 0, True
        while has_more:
            page = await self._page("", after, PAGE_ENTRIES_MAX, revision=revision)
            revision, has_more = page.revision, page.has_more
            yield page
            after = page.entries[-1].key if page.entries else after

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        """See `Store`."""
        puts = puts or {}
        check_commit(compares, puts, deletes)
        conditions = [_unchanged(self._key(c.key), c.revision) for c in compares]
        changes = [_put(self._key(key), value) for key, value in puts.items()]
        changes += [
            rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=self._key(key)))
            for key in deletes
        ]
        slot = await self._free.get()
        try:
            return await self._commit(slot, conditions, changes)
        finally:
            self._free.put_nowait(slot)

    async def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[tuple[Change, ...]]:
        """See `Store`."""
        check_page(prefix, "", 1)
        following = max(from_revision, 1)
        while True:
            # A rolled-back cluster would otherwise stay silent until it reached the known revision.
            await self.revision()
            with contextlib.suppress(UnknownOutcomeError):
                async for commit in self._watched(prefix, following):
                    following = commit[0].revision + 1
                    yield commit
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _watched(self, prefix: str, following: int) -> AsyncIterator[tuple[Change, ...]]:
        """Watch at one member until the connection is lost (UnknownOutcomeError)."""
        member = self._cluster.member
        call = self._cluster.watch(member)
        create = rpc_pb2.WatchCreateRequest(
            key=self._key(prefix), range_end=self._end(prefix), start_revision=following
        )
        try:
            await call.write(rpc_pb2.WatchRequest(create_request=create))
            async for answer in call:
                if answer.compact_revision:
                    raise UnavailableError(
                        "broker.store.compacted",
                        f"etcd: changes before revision {answer.compact_revision} have been "
                        "compacted",
                    )
                if answer.canceled:
                    self._cluster.leave(member)
                    raise UnknownOutcomeError(answer.cancel_reason)
                for commit in self._changes(answer.events):
                    yield commit
            raise UnknownOutcomeError(f"etcd at {member.endpoint} ended the watch")
        except grpc.aio.AioRpcError as error:
            raise self._cluster.explained(error, member) from error
        finally:
            call.cancel()

    def _changes(self, events: Iterable[rpc_pb2.Event]) -> Iterator[tuple[Change, ...]]:
        for revision, group in itertools.groupby(events, lambda e: e.kv.mod_revision):
            yield tuple(
                Change(
                    self._name(event.kv.key),
                    event.kv.value if event.type == rpc_pb2.Event.PUT else None,
                    revision,
                )
                for event in group
            )

    async def _page(self, prefix: str, after: str, limit: int, *, revision: int = 0) -> Page:
        """Read a page as of `revision`; 0: as of the last commit."""
        start = self._key(after) + b"\0" if after > prefix else self._key(prefix)
        has_more = True
        entries: list[Entry] = []
        while has_more and len(entries) < limit:
            answer = await self._cluster.range(
                rpc_pb2.RangeRequest(
                    key=start,
                    range_end=self._end(prefix),
                    limit=min(limit - len(entries), _ANSWER_ENTRIES_MAX),
                    revision=revision,
                )
            )
            revision = revision or answer.header.revision
            entries += map(self._entry, answer.kvs)
            has_more = answer.more
            if answer.kvs:
                start = answer.kvs[-1].key + b"\0"
        return Page(tuple(entries), revision, has_more)

    async def _commit(
        self,
        slot: _Slot,
        conditions: Sequence[rpc_pb2.Compare],
        changes: Sequence[rpc_pb2.RequestOp],
    ) -> int | None:
        deadline = asyncio.get_running_loop().time() + CALL_SECONDS
        while True:
            if slot.revision is None:
                await self._recover(slot, deadline)
            mark, known = self._mark(), slot.revision
            request = rpc_pb2.TxnRequest(
                compare=[_unchanged(slot.key, known), *conditions],
                success=[_put(slot.key, mark), *changes],
                failure=[_get(slot.key)],
            )
            # Also if this task is cancelled: the outcome must then be determined.
            slot.revision = None
            try:
                answer = await self._cluster.txn(request)
            except UnknownOutcomeError:
                executed = await self._recover(slot, deadline, mark=mark)
                if executed is not None:
                    return executed
                continue
            except UnavailableError:
                slot.revision = known
                raise
            if answer.succeeded:
                slot.revision = answer.header.revision
                return slot.revision
            self._own(slot, answer, known=known)
            slot.revision = known
            return None

    async def _recover(self, slot: _Slot, deadline: float, *, mark: bytes = b"") -> int | None:
        """Make sure that no earlier commit of this slot can still be executed.

        Return the revision of the commit with `mark` if it was executed. UnavailableError
        `broker.store.outcome_unknown` if there is no answer in time.
        """
        while True:
            try:
                found = await self._cluster.range(rpc_pb2.RangeRequest(key=slot.key))
                self._check_mark(slot, found.kvs)
                entry = found.kvs[0]
                if mark and entry.value == mark:
                    slot.revision = entry.mod_revision
                    return slot.revision
                answer = await self._cluster.txn(
                    rpc_pb2.TxnRequest(
                        compare=[_unchanged(slot.key, entry.mod_revision)],
                        success=[_put(slot.key, self._mark())],
                    )
                )
                if answer.succeeded:
                    slot.revision = answer.header.revision
                    return None
            except (UnknownOutcomeError, UnavailableError) as error:
                self._cluster.check()
                if asyncio.get_running_loop().time() >= deadline:
                    raise UnavailableError(
                        "broker.store.outcome_unknown",
                        f"a commit may have been executed, but etcd does not answer: {error}",
                    ) from error
            await asyncio.sleep(_PAUSE_SECONDS)

    def _own(self, slot: _Slot, answer: rpc_pb2.TxnResponse, *, known: int | None) -> None:
        """Check that a failed transaction found this writer's slot unchanged."""
        found = answer.responses[0].response_range.kvs
        self._check_mark(slot, found)
        if found[0].mod_revision != known:
            raise self._cluster.fail(_put_back(slot))

    def _check_mark(self, slot: _Slot, found: Sequence[rpc_pb2.KeyValue]) -> None:
        if not found:
            raise self._cluster.fail(_put_back(slot))
        if not found[0].value.startswith(self._process):
            raise self._cluster.fail(
                UnavailableError(
                    "broker.store.fenced",
                    f"etcd: {slot.key.decode()} belongs to another process: a broker with this "
                    "instance number was started after this one, or the store was rolled back",
                )
            )

    async def _take_slots(self) -> None:
        """Put this process's marks into all slots, whoever held them."""
        deadline = asyncio.get_running_loop().time() + CALL_SECONDS
        while True:
            found = await self._cluster.range(
                rpc_pb2.RangeRequest(
                    key=self._slots_prefix.encode(), range_end=end_of(self._slots_prefix).encode()
                )
            )
            before = {entry.key: entry.mod_revision for entry in found.kvs}
            mark = self._mark()
            request = rpc_pb2.TxnRequest(
                compare=[_unchanged(slot.key, before.get(slot.key, 0)) for slot in self._slots],
                success=[_put(slot.key, mark) for slot in self._slots],
            )
            with contextlib.suppress(UnknownOutcomeError):
                answer = await self._cluster.txn(request)
                if answer.succeeded:
                    break
            # No answer: the next round finds these marks, or makes their put fail and puts new
            # ones.
            if asyncio.get_running_loop().time() >= deadline:
                raise UnavailableError(
                    "broker.store.timeout", f"etcd: no answer in {CALL_SECONDS:.0f} s"
                )
            await asyncio.sleep(_PAUSE_SECONDS)
        for slot in self._slots:
            slot.revision = answer.header.revision
            self._free.put_nowait(slot)

    def _mark(self) -> bytes:
        return self._process + next(self._marks).to_bytes(8, "big")

    def _key(self, key: str) -> bytes:
        return (self._data + key).encode("ascii")

    def _end(self, prefix: str) -> bytes:
        return end_of(self._data + prefix).encode("ascii")

    def _name(self, key: bytes) -> str:
        return key.decode("ascii", errors="replace").removeprefix(self._data)

    def _entry(self, found: rpc_pb2.KeyValue) -> Entry:
        return Entry(self._name(found.key), found.value, found.mod_revision)


def _unchanged(key: bytes, revision: int | None) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL,
        target=rpc_pb2.Compare.MOD,
        key=key,
        mod_revision=revision or 0,
    )


def _put(key: bytes, value: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))


def _get(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def _put_back(slot: _Slot) -> VerificationError:
    return VerificationError(
        "broker.store.rolled_back",
        f"etcd: {slot.key.decode()} is not as this broker left it: the store was rolled back",
    )
