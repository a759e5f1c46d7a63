"""Start epochs and heads: no arena is reused, and a detected rollback is refused."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from brokers import Count, start_broker
from patience import PATIENCE_SECONDS
from sealane.crypto.lease import START_EPOCH_MAX
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.records import HeadRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Compare
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import Error, LeaseError, UnavailableError, VerificationError


class Disk:
    """A store's file and an adversary's copies of it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "b.sqlite"
        self.starts, self.heads = Count(), Count()

    async def start(self, *, node: str = "b", instance: int = 3, commits: int = 0) -> Instance:
        """Start a broker, make a commit, stop."""
        store = SqliteStore(self.path)
        try:
            _, started, registry = await start_broker(
                store, starts=self.starts, heads=self.heads, node=node, instance=instance
            )
            for _ in range(commits):
                await registry.tenant_key(f"t{await store.revision()}", 0)
            await registry.close()
            return started
        finally:
            await store.close()

    async def refused(self, **arguments: object) -> str:
        """Start a broker that must refuse; return the reason."""
        with pytest.raises(Error) as caught:
            await self.start(**arguments)  # type: ignore[arg-type]
        return caught.value.reason


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


async def test_every_start_has_its_own_epoch(disk: Disk) -> None:
    epochs = [(await disk.start()).arena.start_epoch for _ in range(4)]
    assert epochs == [1, 2, 3, 4]


async def test_store_put_back_never_repeats_an_epoch_and_is_refused(disk: Disk) -> None:
    served = [(await disk.start(commits=1)).arena.start_epoch]
    snapshot = disk.path.read_bytes()
    served.append((await disk.start(commits=1)).arena.start_epoch)
    disk.path.write_bytes(snapshot)
    for _ in range(2):
        assert await disk.refused() == "broker.store.rolled_back"
    assert len(set(served)) == 2
    assert disk.starts.value == 2


async def test_store_restored_on_purpose_is_served_under_another_instance(disk: Disk) -> None:
    await disk.start(commits=1)
    snapshot = disk.path.read_bytes()
    old = (await disk.start(commits=1)).arena
    disk.path.write_bytes(snapshot)
    assert await disk.refused() == "broker.store.rolled_back"
    disk.starts, disk.heads = Count(), Count()
    arena = (await disk.start(instance=4, commits=1)).arena
    assert (arena.broker_instance, arena.start_epoch) == (4, 1)
    assert arena.broker_instance != old.broker_instance


async def test_empty_store_in_place_of_the_one_that_was_served_is_refused(disk: Disk) -> None:
    await disk.start()
    disk.path.unlink()
    assert await disk.refused() == "broker.store.rolled_back"


async def test_store_put_back_within_one_start_is_refused(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    await store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    snapshot = disk.path.read_bytes()
    # The same start goes on and anchors a head, which must not be rolled back.
    await registry.tenant_key("t", 0)
    await instance.inspect()
    await registry.close()
    disk.path.write_bytes(snapshot)
    assert await disk.refused() == "broker.store.rolled_back"


async def test_crash_between_a_record_and_its_count_is_no_roll_back(disk: Disk) -> None:
    await disk.start()
    for counter in (disk.starts, disk.heads):
        value = counter.value
        counter.increment = _die  # type: ignore[method-assign]
        with pytest.raises(PowerCutError):
            await disk.start()
        assert counter.value == value
        del counter.increment  # type: ignore[method-assign]
        await disk.start()


class PowerCutError(Exception):
    """The broker's machine lost its power."""


def _die() -> int:
    raise PowerCutError


async def test_counter_of_another_machine_is_refused(disk: Disk) -> None:
    for _ in range(3):
        await disk.start()
    disk.starts.value = 0
    assert await disk.refused() == "broker.anchor.rolled_back"
    disk.starts.value = 3
    disk.heads.value -= 2
    assert await disk.refused() == "broker.anchor.rolled_back"


async def test_instance_number_belongs_to_one_node(disk: Disk) -> None:
    await disk.start(node="b")
    starts, heads = disk.starts, disk.heads
    disk.starts, disk.heads = Count(), Count()
    assert await disk.refused(node="other") == "broker.instance.claimed"
    assert (disk.starts.value, disk.heads.value) == (0, 0)
    assert (await disk.start(node="other", instance=4)).arena.broker_instance == 4
    disk.starts, disk.heads = starts, heads
    assert (await disk.start(node="b")).arena.start_epoch == 2


async def test_start_epochs_run_out_loudly(disk: Disk) -> None:
    await disk.start()
    store = SqliteStore(disk.path)
    _, _, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    stored = await registry.instances.get("00003")
    assert stored is not None
    last = stored.record.model_copy(update={"start_epoch": START_EPOCH_MAX})
    await registry.commit(puts=registry.instances.sealed("00003", last))
    await registry.close()
    disk.starts.value = START_EPOCH_MAX
    with pytest.raises(LeaseError) as caught:
        await disk.start()
    assert caught.value.reason == "lease.start_epoch.exhausted"


class UndefinedCount(Count):
    """A TPM's counter, which begins above all that the TPM ever counted."""

    is_defined = False

    def read(self) -> int:
        if not self.is_defined:
            raise VerificationError("counter.missing", "never defined")
        return super().read()

    def increment(self) -> int:
        self.is_defined = True
        return super().increment()


async def test_counter_that_begins_beyond_all_epochs_says_so_at_every_start(disk: Disk) -> None:
    """Not that the store was rolled back, though it knows nothing of these counters."""
    disk.starts, disk.heads = (UndefinedCount(START_EPOCH_MAX) for _ in range(2))
    for _ in range(2):
        assert await disk.refused() == "lease.start_epoch.exhausted"


async def test_head_that_is_gone_ends_the_broker(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    await instance.inspect()
    head = await registry.heads.get("00003")
    assert head is not None
    # A store rolled back while the broker runs has another head of it, or none.
    await registry.commit(puts=registry.heads.sealed("00003", _other(head.record)))
    for call in (instance.inspect(), instance.anchor(), instance.cover(await store.revision())):
        with pytest.raises(VerificationError) as caught:
            await call
        assert caught.value.reason == "broker.store.rolled_back"
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(VerificationError):
            await instance.keep_anchored(seconds=0)
    await registry.close()


def _other(record: HeadRecord) -> HeadRecord:
    return record.model_copy(update={"number": record.number + 5})


async def test_head_may_be_stored_again_with_another_mac(disk: Disk) -> None:
    """Another broker does that when the record key is replaced."""
    _, instance, registry = await start_broker(
        SqliteStore(disk.path), starts=disk.starts, heads=disk.heads
    )
    for work in (instance.inspect, instance.anchor):
        head = await registry.heads.get("00003")
        assert head is not None
        await registry.commit(puts=registry.heads.sealed("00003", head.record))
        await work()
    head = await registry.heads.get("00003")
    assert head is not None
    assert head.record.number == disk.heads.value
    await registry.close()


async def test_head_follows_commits_and_nothing_else(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    counted = disk.heads.value
    for _ in range(3):
        await instance.inspect()
    assert disk.heads.value == counted
    await registry.tenant_key("t", 0)
    await instance.inspect()
    assert disk.heads.value == counted + 1
    # Concurrent callers that wait for a commit to be covered share a head.
    revision = await registry.commit(puts={"x": b""})
    assert revision is not None
    await asyncio.gather(*(instance.cover(revision) for _ in range(10)))
    assert disk.heads.value == counted + 2
    await registry.close()


async def test_caller_that_is_cancelled_does_not_interrupt_a_head(disk: Disk) -> None:
    heads = SlowCount()
    store = SqliteStore(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=heads)
    for call in (instance.anchor, instance.inspect, partial(instance.cover, 1 << 40)):
        await registry.tenant_key(f"t{heads.value}", 0)
        counted = heads.value
        heads.may_end.clear()
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(call())
            await asyncio.to_thread(heads.has_begun.wait, PATIENCE_SECONDS)
            caller.cancel()
            await asyncio.wait({caller})
            assert caller.cancelled()
            tasks.create_task(instance.anchor())
            await asyncio.sleep(0.01)
            heads.may_end.set()
        assert heads.value == counted + 2
    await instance.inspect()
    await registry.close()
    disk.heads = heads
    await disk.start()


class SlowCount(Count):
    """A counter whose increments end only while `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def increment(self) -> int:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_SECONDS)
        self.has_begun.clear()
        return super().increment()


async def test_head_that_was_not_counted_is_never_written_again(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    disk.heads.increment = _full  # type: ignore[method-assign]
    await registry.tenant_key("before", 0)
    with pytest.raises(UnavailableError):
        await instance.inspect()
    del disk.heads.increment  # type: ignore[method-assign]
    # The adversary keeps the store as it is with a head that isn't counted yet.
    await store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    kept = disk.path.read_bytes()
    await registry.tenant_key("after", 0)
    await instance.cover(await store.revision())
    await registry.close()
    disk.path.write_bytes(kept)
    assert await disk.refused() == "broker.store.rolled_back"


def _full() -> int:
    raise UnavailableError("counter.failed", "no space")


async def test_head_whose_commit_had_an_unknown_outcome_is_no_roll_back(disk: Disk) -> None:
    store = Forgetful(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    for call in (instance.inspect, instance.anchor):
        await registry.tenant_key(f"t{disk.heads.value}", 0)
        store.is_forgetful = True
        with pytest.raises(UnavailableError):
            await instance.anchor()
        store.is_forgetful = False
        await call()
    counted = disk.heads.value
    await instance.inspect()
    assert disk.heads.value == counted
    await registry.close()
    await store.close()
    await disk.start()


async def test_head_that_a_store_may_have_lost_is_written_by_the_next_start_only(
    disk: Disk,
) -> None:
    store = Forgetful(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    await registry.tenant_key("t", 0)
    store.is_forgetful, store.is_idle = True, True
    with pytest.raises(UnavailableError):
        await instance.anchor()
    store.is_forgetful, store.is_idle = False, False
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(UnavailableError) as caught:
            await instance.keep_anchored(seconds=0)
    assert caught.value.reason == "broker.store.fenced"
    await registry.close()
    await store.close()
    await disk.start()


async def test_head_of_an_unknown_outcome_must_be_the_one_that_was_attempted(disk: Disk) -> None:
    store = Forgetful(disk.path)
    _, instance, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    head = await registry.heads.get("00003")
    assert head is not None
    store.is_forgetful, store.is_idle = True, True
    with pytest.raises(UnavailableError):
        await instance.anchor()
    store.is_forgetful, store.is_idle = False, False
    await registry.commit(puts=registry.heads.sealed("00003", _other(head.record)))
    for call in (instance.inspect(), instance.anchor()):
        with pytest.raises(VerificationError) as caught:
            await call
        assert caught.value.reason == "broker.store.rolled_back"
    await registry.close()


class Forgetful(SqliteStore):
    """A store that makes commits and loses the answers."""

    is_forgetful = False
    is_idle = False
    """Whether it doesn't even make them."""

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        revision = None if self.is_idle else await super().commit(compares, puts, deletes)
        if self.is_forgetful:
            raise UnavailableError("broker.store.outcome_unknown", "the answer is lost")
        return revision


async def test_counter_that_another_process_uses_stops_the_start(disk: Disk) -> None:
    await disk.start()
    disk.starts.increment = lambda: 9  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as caught:
        await disk.start()
    assert caught.value.reason == "broker.instance.contended"


async def test_forged_and_moved_records_are_refused(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, _, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    await registry.tenant_key("t", 0)
    entry = await store.get("tenants/t")
    assert entry is not None
    forged = bytearray(entry.value)
    forged[-2] ^= 1
    await registry.commit(puts={"tenants/moved": entry.value, "tenants/t": bytes(forged)})
    for name in ("t", "moved"):
        with pytest.raises(VerificationError) as caught:
            await registry.tenants.get(name)
        assert caught.value.reason == "broker.store.record.forged"
    other = registry.volumes.key("t")
    await registry.commit(puts={other: b""})
    with pytest.raises(VerificationError):
        await registry.volumes.get("t")
    await registry.close()


async def test_record_of_another_version_is_refused(disk: Disk) -> None:
    store = SqliteStore(disk.path)
    _, _, registry = await start_broker(store, starts=disk.starts, heads=disk.heads)
    sealed = registry.tenants.sealed("t", await _head(registry))  # type: ignore[arg-type]
    await registry.commit(puts=sealed)
    with pytest.raises(VerificationError) as caught:
        await registry.tenants.get("t")
    assert caught.value.reason == "broker.store.malformed"
    await registry.close()


async def _head(registry: Registry) -> object:
    stored = await registry.heads.get("00003")
    assert stored is not None
    return stored.record


async def test_lost_counter_is_refused_or_repeats_nothing(disk: Disk) -> None:
    # A counter one behind may be due to a crash: the store's epoch is skipped, served or not.
    await disk.start()
    disk.starts = Count()
    assert (await disk.start()).arena.start_epoch == 2
    disk.starts, disk.heads = Count(), Count()
    assert await disk.refused() == "broker.anchor.rolled_back"
