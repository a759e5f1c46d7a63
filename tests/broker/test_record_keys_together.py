"""Replacement of the record key while other brokers and callers are at work."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.record_keys import NEW, OLD, Site, clock, fill, site_at, value_of
from brokers import MemoryAudit, record_key_rotation_of, rewrapping_of
from sealane.daemon.broker import record_key_rotation
from sealane.daemon.broker.authority import AUTHORITY_KEY, authority_entry
from sealane.daemon.broker.record_key_rotation import RecordKeyRotation
from sealane.daemon.broker.records import AuthorityRecord, Stored
from sealane.daemon.broker.rewrapping import Rewrapping
from sealane.daemon.broker.store.checked import REBINDING_TRIES_MAX
from sealane.daemon.broker.store.contract import Entry, Page
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as made:
        yield made


async def test_late_pass_does_not_end_its_broker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker has finished, and the key of what this one has read is gone."""
    here, there = await site.broker(), await site.broker()
    await fill(here)
    await record_key_rotation_of(here).begin(0)
    await there.store.inspect()
    late, quick = record_key_rotation_of(there), record_key_rotation_of(here)
    make_again = late._make_again

    async def overtaken(batch: Sequence[Entry], authority: Stored[AuthorityRecord]) -> bool:
        await quick.proceed()
        await there.store.inspect()
        return await make_again(batch, authority)

    monkeypatch.setattr(late, "_make_again", overtaken)
    await late.proceed()
    assert there.store.failure is None
    assert await value_of(there, "n3") == 3


@pytest.mark.parametrize("count", [2, 3])
async def test_brokers_make_again_at_the_same_time(site: Site, count: int) -> None:
    brokers = [await site.broker() for _ in range(count)]
    await fill(brokers[0], 100)
    rotations = [record_key_rotation_of(each) for each in brokers]
    await rotations[0].begin(0)
    await asyncio.gather(*(each.proceed() for each in rotations))
    assert [await value_of(each, "n77") for each in brokers] == [77] * count
    assert not (await rotations[-1].progress()).is_replacing


async def test_pass_ends_when_the_authority_was_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of trying each record by itself, which can't succeed."""
    monkeypatch.setattr(record_key_rotation, "BATCH_RECORDS", 10)
    here = await site.broker()
    await fill(here, 50)
    rotation = record_key_rotation_of(here)
    await rotation.begin(0)
    store, sizes = rotation._store, list[int]()

    async def changed(batch: Sequence[Entry], authority: Stored[AuthorityRecord]) -> bool:
        if not sizes:
            now = await here.authority_record()
            await here.commit(puts=authority_entry(now.record))
        sizes.append(len(batch))
        return await store(batch, authority)

    monkeypatch.setattr(rotation, "_store", changed)
    await rotation.proceed()
    assert 1 not in sizes[:3]
    assert sum(sizes) <= 10 + 55


@pytest.mark.parametrize("kind", [RecordKeyRotation, Rewrapping])
async def test_repeated_begin_is_covered_too(site: Site, kind: type) -> None:
    """The first one's head may have been lost with an error, and the commit stays."""
    here = await site.broker(OLD, NEW)
    covered: list[int] = []
    is_lost = True

    async def cover(revision: int) -> None:
        if is_lost:
            raise UnavailableError("counter.busy", "no head")
        covered.append(revision)

    await rewrapping_of(here).announce()
    rotation: Any
    if kind is RecordKeyRotation:
        rotation = RecordKeyRotation(here, cover=cover, audit=MemoryAudit())
    else:
        rotation = Rewrapping(here, instance=1, cover=cover, audit=MemoryAudit(), metrics=Metrics())
    arguments = [0] if kind is RecordKeyRotation else []
    with pytest.raises(UnavailableError):
        await rotation.begin(*arguments)
    is_lost = False
    await rotation.begin(*arguments)
    assert covered == [(await here.authority_record()).revision]


async def test_stale_value_of_one_caller_fails_only_its_commit(site: Site) -> None:
    here, there = await site.broker(), await site.broker()
    stale = there.clocks.sealed("late", clock(7))
    rotation = record_key_rotation_of(here)
    await rotation.begin(0)
    await rotation.proceed()
    await there.store.inspect()
    first, late, last = await asyncio.gather(
        there.commit(puts=there.clocks.sealed("first", clock(1))),
        there.commit(puts=stale),
        there.commit(puts=there.clocks.sealed("last", clock(2))),
        return_exceptions=True,
    )
    assert isinstance(late, UnavailableError)
    assert late.reason == "broker.store.contended"
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert [await value_of(here, name) for name in ("first", "last")] == [1, 2]


async def test_broker_that_meets_the_replacement_scans_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await site.broker(), await site.broker()
    await fill(here)
    scans = 0
    scan = there.store._inner.scan

    async def counted() -> AsyncIterator[Page]:
        nonlocal scans
        scans += 1
        async for page in scan():
            yield page

    monkeypatch.setattr(there.store._inner, "scan", counted)
    await record_key_rotation_of(here).begin(0)
    await there.store.inspect()
    assert await value_of(there, "n3") == 3
    assert scans == 1


async def test_own_commits_do_not_wait_for_ever_behind_a_replacement(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker overtakes each of its tries; then it begins again, behind what waited."""
    here, there = await site.broker(), await site.broker()
    await fill(here)
    inner, commit = here.store._inner, here.store._inner.commit
    tries = 0
    waiting: asyncio.Future[int | None] | None = None

    async def overtaken(*arguments: Any) -> int | None:
        nonlocal tries, waiting
        if AUTHORITY_KEY in arguments[1]:
            if waiting is None:
                own = here.clocks.sealed("own", clock(4))
                waiting = asyncio.ensure_future(here.commit(puts=own))
            tries += 1
            # Without a bound there would be no end.
            if not waiting.done() and tries < 3 * REBINDING_TRIES_MAX:
                await there.commit(puts=there.clocks.sealed("busy", clock(tries)))
        return await commit(*arguments)

    monkeypatch.setattr(inner, "commit", overtaken)
    await record_key_rotation_of(here).begin(0)
    assert waiting is not None
    assert await waiting is not None
    assert tries == REBINDING_TRIES_MAX + 1
    assert await value_of(there, "own") == 4


async def test_asking_how_far_it_is_reads_the_store_only_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await site.broker()
    await fill(here)
    rotation = record_key_rotation_of(here)
    await rotation.begin(0)
    left = (await rotation.progress()).left
    assert left >= 5
    inner, reads = here.store._inner, 0
    original = inner.range

    async def counted(*arguments: Any, **options: Any) -> Page:
        nonlocal reads
        reads += 1
        return await original(*arguments, **options)

    monkeypatch.setattr(inner, "range", counted)
    assert (await rotation.progress()).left == left
    assert reads == 0
    seen: list[int] = []
    store = rotation._store

    async def asked(batch: Sequence[Entry], authority: Stored[AuthorityRecord]) -> bool:
        seen.append((await rotation.progress()).left)
        return await store(batch, authority)

    monkeypatch.setattr(record_key_rotation, "BATCH_RECORDS", 1)
    monkeypatch.setattr(rotation, "_store", asked)
    await rotation.proceed()
    assert seen == [*reversed(range(left))]
    assert (await rotation.progress()).left == 0
