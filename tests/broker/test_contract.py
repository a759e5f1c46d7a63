"""The contract of stores (sealane.daemon.broker.store.contract), tested on each store."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.broker.store import contract
from sealane.daemon.broker.store.contract import Change, Compare, Entry, Store
from sealane.errors import UsageError


async def put(store: Store, key: str, value: bytes) -> int:
    revision = await store.commit(puts={key: value})
    assert revision is not None
    return revision


async def collect(watch: AsyncIterator[tuple[Change, ...]], until: int) -> list[tuple[Change, ...]]:
    """Collect commits from a watch up to revision `until`."""
    commits = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for commit in watch:
            commits.append(commit)
            if commit[0].revision >= until:
                break
    return commits


async def test_entry_has_the_revision_of_its_last_change(store: Store) -> None:
    assert await store.get("a") is None
    first = await put(store, "a", b"1")
    await put(store, "b", b"2")
    assert await store.get("a") == Entry("a", b"1", first)
    second = await put(store, "a", b"3")
    assert second > first
    assert await store.get("a") == Entry("a", b"3", second)
    assert await store.revision() >= second


async def test_commit_changes_all_keys_at_one_revision(store: Store) -> None:
    await put(store, "gone", b"x")
    revision = await store.commit([Compare("a", 0)], {"a": b"1", "b": b"2"}, ["gone"])
    assert revision is not None
    assert await store.get("a") == Entry("a", b"1", revision)
    assert await store.get("b") == Entry("b", b"2", revision)
    assert await store.get("gone") is None


async def test_commit_whose_compare_fails_changes_nothing(store: Store) -> None:
    revision = await put(store, "a", b"1")
    other = await put(store, "b", b"1")
    for compares in (
        [Compare("a", 0)],
        [Compare("a", revision + 1)],
        [Compare("a", revision), Compare("b", other + 1)],
        [Compare("missing", 1)],
    ):
        assert await store.commit(compares, {"a": b"2", "c": b"2"}, ["b"]) is None
    assert await store.get("a") == Entry("a", b"1", revision)
    assert await store.get("b") == Entry("b", b"1", other)
    assert await store.get("c") is None


async def test_key_made_again_has_another_revision(store: Store) -> None:
    first = await put(store, "a", b"1")
    await store.commit(deletes=["a"])
    await put(store, "a", b"1")
    assert await store.commit([Compare("a", first)], {"a": b"2"}) is None


async def test_values_may_be_empty_and_any_bytes(store: Store) -> None:
    every = bytes(range(256))
    await store.commit(puts={"empty": b"", "every": every})
    empty, full = await store.get("empty"), await store.get("every")
    assert empty is not None
    assert full is not None
    assert (empty.value, full.value) == (b"", every)


async def test_range_is_ordered_bounded_and_only_what_lies_under_the_prefix(store: Store) -> None:
    names = ["p", "p/", "p/1", "p/10", "p/2", "p/~", "p0", "o/9", "q/1"]
    await store.commit(puts={name: name.encode() for name in names})
    page = await store.range("p/")
    assert [e.key for e in page.entries] == ["p/", "p/1", "p/10", "p/2", "p/~"]
    assert not page.has_more
    assert page.revision >= page.entries[0].revision
    first = await store.range("p/", limit=2)
    assert ([e.key for e in first.entries], first.has_more) == (["p/", "p/1"], True)
    rest = await store.range("p/", after="p/1", limit=3)
    assert ([e.key for e in rest.entries], rest.has_more) == (["p/10", "p/2", "p/~"], False)
    assert [e.key for e in (await store.range("", limit=1)).entries] == ["o/9"]
    assert (await store.range("nothing/")).entries == ()


async def test_large_range_comes_in_pages_that_leave_nothing_out(store: Store) -> None:
    names = [f"large/{i:05}" for i in range(2500)]
    for start in range(0, len(names), contract.COMMIT_CHANGES_MAX):
        await store.commit(
            puts={name: bytes(200) for name in names[start : start + contract.COMMIT_CHANGES_MAX]}
        )
    found: list[str] = []
    has_more = True
    while has_more:
        page = await store.range("large/", after=found[-1] if found else "")
        found += [e.key for e in page.entries]
        has_more = page.has_more
    assert found == names


async def test_largest_commit_goes_through(store: Store) -> None:
    size = contract.COMMIT_BYTES_MAX // contract.COMMIT_CHANGES_MAX - 16
    puts = {f"k{i:03}": bytes(size) for i in range(contract.COMMIT_CHANGES_MAX)}
    compares = [Compare(f"absent{i}", 0) for i in range(contract.COMMIT_CHANGES_MAX)]
    assert await store.commit(compares, puts) is not None
    assert len((await store.range("k")).entries) == contract.COMMIT_CHANGES_MAX


@pytest.mark.parametrize("key", ["", "ü", "a b", "a\n", "x" * 513])
async def test_impossible_key_is_refused(store: Store, key: str) -> None:
    for call in (store.get(key), store.commit(puts={key: b""}), store.commit([Compare(key, 0)])):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason in {"broker.store.key", "broker.store.commit"}


async def test_impossible_commit_is_refused(store: Store) -> None:
    many = {f"k{i}": b"" for i in range(contract.COMMIT_CHANGES_MAX + 1)}
    compares = [Compare(key, 0) for key in many]
    value = bytes(contract.VALUE_BYTES_MAX + 1)
    total = {f"k{i}": bytes(contract.VALUE_BYTES_MAX) for i in range(5)}
    for call in (
        store.commit(),
        store.commit(puts=many),
        store.commit(compares, {"a": b""}),
        store.commit(puts={"a": b""}, deletes=["a"]),
        store.commit(deletes=["a", "a"]),
        store.commit(puts={"a": value}),
        store.commit(puts=total),
        store.range("a", limit=0),
        store.range("a", limit=contract.PAGE_ENTRIES_MAX + 1),
    ):
        with pytest.raises(UsageError):
            await call
    assert (await store.range("")).entries == ()


async def test_exactly_one_of_many_rivals_wins(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.commit([Compare("one", 0)], {"one": b"%d" % i}) for i in range(40))
    )
    winners = [i for i, revision in enumerate(outcomes) if revision is not None]
    assert len(winners) == 1
    stored = await store.get("one")
    assert stored == Entry("one", b"%d" % winners[0], outcomes[winners[0]] or 0)


async def test_increments_with_conflict_and_retry_lose_nothing(store: Store) -> None:
    async def increment() -> None:
        while True:
            entry = await store.get("count")
            value, revision = (0, 0) if entry is None else (int(entry.value), entry.revision)
            if await store.commit([Compare("count", revision)], {"count": b"%d" % (value + 1)}):
                return

    async with asyncio.timeout(60):
        await asyncio.gather(*(increment() for _ in range(24)))
    entry = await store.get("count")
    assert entry is not None
    assert entry.value == b"24"


async def test_transfers_keep_their_sum_in_every_page_seen(store: Store) -> None:
    accounts = [f"account/{i}" for i in range(5)]
    await store.commit(puts=dict.fromkeys(accounts, b"100"))
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)

    async def transfer(pair: list[str], amount: int) -> None:
        while True:
            a, b = [await store.get(name) for name in pair]
            assert a is not None
            assert b is not None
            done = await store.commit(
                [Compare(a.key, a.revision), Compare(b.key, b.revision)],
                {a.key: b"%d" % (int(a.value) - amount), b.key: b"%d" % (int(b.value) + amount)},
            )
            if done:
                return

    async def look() -> None:
        page = await store.range("account/")
        assert sum(int(e.value) for e in page.entries) == 500

    moves = [transfer(draw.sample(accounts, 2), draw.randrange(50)) for _ in range(20)]
    async with asyncio.timeout(60):
        await asyncio.gather(*moves, *(look() for _ in range(20)))
    await look()


async def test_watch_yields_every_commit_once_in_order(store: Store) -> None:
    await put(store, "other", b"")
    start = await put(store, "w/a", b"1")
    revisions = [start]
    watching = asyncio.ensure_future(collect(store.watch("w/", from_revision=start), start + 30))
    for i in range(30):
        await put(store, "elsewhere" if i % 3 else "w/b", b"%d" % i)
        revision = await store.commit(puts={"w/a": b"x", "w/c": b"%d" % i}, deletes=["w/b"])
        revisions.append(revision or 0)
    last = await put(store, "w/end", b"")
    commits = await collect(store.watch("w/", from_revision=start), last)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        seen = await watching
        assert seen == commits[: len(seen)]
    order = [commit[0].revision for commit in commits]
    assert order == sorted(set(order))
    assert all(len({change.revision for change in commit}) == 1 for commit in commits)
    assert set(revisions) <= set(order)
    both = next(c for c in commits if c[0].revision == revisions[1])
    assert sorted((c.key, c.value) for c in both) == [
        ("w/a", b"x"),
        ("w/b", None),
        ("w/c", b"0"),
    ]


async def test_watch_sees_what_is_committed_while_it_waits(store: Store) -> None:
    start = await store.revision() + 1
    watch = store.watch("w/", from_revision=start)
    for i in range(5):
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        revision = await put(store, "w/a", b"%d" % i)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await waiting == (Change("w/a", b"%d" % i, revision),)


async def test_watch_resumes_behind_what_was_seen(store: Store) -> None:
    first = await put(store, "w/a", b"1")
    await put(store, "w/b", b"2")
    last = await put(store, "w/c", b"3")
    seen = await collect(store.watch("w/", from_revision=first), first)
    rest = await collect(store.watch("w/", from_revision=seen[-1][0].revision + 1), last)
    assert [change.key for commit in rest for change in commit] == ["w/b", "w/c"]


async def test_many_watches_and_commits_at_once(store: Store) -> None:
    start = await store.revision() + 1
    writers = 8

    async def follow() -> dict[str, bytes]:
        state: dict[str, bytes] = {}
        async for commit in store.watch("w/", from_revision=start):
            for change in commit:
                assert change.value is not None
                state[change.key] = change.value
            if len(state) == writers and set(state.values()) == {b"9"}:
                return state
        raise AssertionError("a watch has no end")

    async def write(which: int) -> None:
        for i in range(10):
            await put(store, f"w/{which}", b"%d" % i)

    async with asyncio.timeout(60):
        states = await asyncio.gather(
            *(follow() for _ in range(5)), *(write(i) for i in range(writers))
        )
    assert states[0] == states[4]


async def test_cancelled_commit_happens_whole_or_not_at_all(store: Store) -> None:
    for i in range(20):
        task = asyncio.ensure_future(store.commit(puts={f"c/{i}/a": b"", f"c/{i}/b": b""}))
        for _ in range(i % 5):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await put(store, "after", b"")
    for i in range(20):
        page = await store.range(f"c/{i}/")
        assert len(page.entries) in {0, 2}
