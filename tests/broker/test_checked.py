"""Records changed by an adversary: detected at each use, on both stores."""

import asyncio
import contextlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.broker.store import checked as module
from sealane.daemon.broker.store.checked import CheckedStore
from sealane.daemon.broker.store.contract import (
    COMMIT_CHANGES_MAX,
    STATE_KEY,
    Compare,
    Entry,
    Store,
)
from sealane.daemon.broker.store.record_keys import FixedKey
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.store.state import SetHash
from sealane.errors import UnavailableError, UsageError, VerificationError

KEY = secrets.token_bytes(32)
Opener = Callable[[], Awaitable[CheckedStore]]


async def change(store: Store, key: str, value: bytes | None) -> None:
    """Change a record as an adversary with write access but no key."""
    if not isinstance(store, SqliteStore):
        await store.commit(puts={} if value is None else {key: value}, deletes=[key] * (not value))
        return

    def write(db: sqlite3.Connection) -> None:
        # Bypass the store: no revision changes, and no watch is notified.
        db.execute("DELETE FROM entries WHERE key = ?", (key,))
        if value is not None:
            db.execute("INSERT INTO entries VALUES (?, ?, 1)", (key, value))

    await store._run(write)


@pytest.fixture
async def opened(store: Store) -> AsyncIterator[Opener]:
    first = {"a": b"0"}
    made = await store.commit(
        [Compare(STATE_KEY, 0)], first | {STATE_KEY: SetHash(KEY).first(first)}
    )
    assert made is not None
    async with contextlib.AsyncExitStack() as stack:

        async def open_one() -> CheckedStore:
            made = await CheckedStore.open(store, FixedKey(KEY))
            stack.push_async_callback(made._tasks.close)
            return made

        yield open_one


async def rolled_back(call: Awaitable[Any]) -> str:
    with pytest.raises(VerificationError) as caught:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await call
    assert caught.value.reason == "broker.store.rolled_back"
    return str(caught.value.args[0])


async def test_what_brokers_commit_is_read_by_all_of_them(opened: Opener) -> None:
    here, there = await opened(), await opened()
    for number in range(5):
        revision = await here.commit(puts={"a": bytes([number]), f"n{number}": b""})
        assert await there.get("a") == Entry("a", bytes([number]), revision or 0)
        assert len((await there.range("n")).entries) == number + 1
        await there.commit(deletes=[f"n{number - 1}"] if number else [], puts={"b": b"x"})
        assert await here.get("b") == await there.get("b")
        await here.commit(puts={f"n{number - 1}": b"again"} if number else {"c": b""})
    assert await here.revision() == await there.revision()
    late = await opened()
    assert late.entry_count == here.entry_count == there.entry_count
    for each in (here, there, late):
        await each.inspect()
        assert each.failure is None


async def test_rivals_lose_no_commit_and_agree(opened: Opener) -> None:
    stores = [await opened() for _ in range(3)]

    async def count(store: CheckedStore, which: int) -> None:
        for _ in range(20):
            # These commits conflict only on the state record.
            assert await store.commit(puts={f"mine{which}": b"x"}) is not None
            while True:
                entry = await store.get("a")
                assert entry is not None
                value = (int(entry.value) + 1).to_bytes(4, "big")
                value = str(int.from_bytes(value, "big")).encode()
                if await store.commit([Compare("a", entry.revision)], {"a": value}) is not None:
                    break

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(count(each, which) for which, each in enumerate(stores)))
    found = await (await opened()).get("a")
    assert found is not None
    assert found.value == b"60"


async def test_commits_that_wait_are_made_as_one_and_conflict_each_for_itself(
    opened: Opener,
) -> None:
    store = await opened()
    entry = await store.get("a")
    assert entry is not None
    many = [store.commit(puts={f"k{n:03}": bytes([n])}) for n in range(2 * COMMIT_CHANGES_MAX)]
    rivals = [store.commit([Compare("a", entry.revision)], {"a": bytes([n])}) for n in range(4)]
    revisions = await asyncio.gather(*rivals, *many)
    assert [r is None for r in revisions[:4]] == [False, True, True, True]
    assert None not in revisions[4:]
    assert len(set(revisions[4:])) < 10
    assert len((await store.range("k")).entries) == 2 * COMMIT_CHANGES_MAX
    (await opened()).entry_count  # noqa: B018 - it opens


async def test_state_is_the_stores_own(opened: Opener) -> None:
    store = await opened()
    for call in (store.commit(puts={STATE_KEY: b""}), store.commit(deletes=[STATE_KEY])):
        with pytest.raises(UsageError):
            await call
    assert STATE_KEY not in {entry.key for entry in (await store.range("")).entries}


Changed = tuple[str, bytes | None]
ATTACKS: list[Changed] = [("a", b"0"), ("b", None), ("ab", b"0"), (STATE_KEY, None)]


@pytest.mark.parametrize("attack", ATTACKS, ids=["older", "removed", "added", "stateless"])
@pytest.mark.parametrize("use", ["get", "range", "commit", "inspect", "open"])
async def test_changed_record_is_noticed_at_its_use(
    opened: Opener, store: Store, attack: Changed, use: str
) -> None:
    key, value = attack
    broker = await opened()
    await broker.commit(puts={"a": b"1", "b": b"1"})
    known = {name: await broker.get(name) for name in ("a", "b")}
    await change(store, key, value)
    entry = known.get(key)
    uses: dict[str, Callable[[], Awaitable[Any]]] = {
        "get": lambda: broker.get(key),
        "range": lambda: broker.range(""),
        "commit": lambda: broker.commit([Compare(key, entry.revision if entry else 0)], {"c": b""}),
        "inspect": broker.inspect,
        "open": opened,
    }
    if key == STATE_KEY and use in {"get", "range"}:
        # No record depends on it: the watch, the next commit or an inspection notices.
        use = "inspect"
    text = await rolled_back(uses[use]())
    if use in {"get", "range"}:
        assert key in text
    if use != "open":
        await rolled_back(broker.get("a"))
        assert broker.failure is not None


async def test_change_that_no_state_follows_ends_a_broker_that_uses_nothing(
    opened: Opener, store: Store
) -> None:
    broker = await opened()
    await broker.commit(puts={"a": b"1"})
    await store.commit(puts={"a": b"0"})
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await broker.failed()).reason == "broker.store.rolled_back"


async def test_state_record_that_was_exchanged_is_noticed(tmp_path: Path) -> None:
    inner = SqliteStore(tmp_path / "b.sqlite")
    await inner.commit(puts={STATE_KEY: SetHash(KEY).first({})})
    store = await CheckedStore.open(inner, FixedKey(KEY))
    older = await inner.get(STATE_KEY)
    assert older is not None
    await store.commit(puts={"a": b"1"})
    await inner._run(
        lambda db: db.execute(
            "UPDATE entries SET value = ? WHERE key = ?", (older.value, STATE_KEY)
        ).fetchall()
    )
    await rolled_back(store.inspect())
    await store.close()


async def test_state_of_another_history_is_refused(opened: Opener, store: Store) -> None:
    broker = await opened()
    older = await store.get(STATE_KEY)
    assert older is not None
    await broker.commit(puts={"a": b"1"})
    # An adversary restores older records together with the older state.
    await store.commit(puts={"a": b"0", STATE_KEY: older.value})
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await broker.failed()).reason == "broker.store.rolled_back"


def test_states_of_two_histories_differ_for_good() -> None:
    hashes = SetHash(KEY)

    def step(state: Any, entry: int) -> Any:
        return hashes.next(state, removed=[], added=[entry], growth=1)[0]

    one, other = hashes.digest("a", b"1"), hashes.digest("b", b"1")
    start = hashes.check(hashes.first({}), [], revision=1)
    here, there = step(step(start, one), other), step(step(start, other), one)
    assert (here.number, here.count, here.total) == (there.number, there.count, there.total)
    assert here.tag != there.tag


class Forgetful(SqliteStore):
    """A store that commits but loses the answer."""

    loses = False

    async def commit(self, *arguments: Any, **named: Any) -> int | None:
        revision = await super().commit(*arguments, **named)
        if self.loses:
            raise UnavailableError("broker.store.outcome_unknown", "nobody can tell")
        return revision


async def test_commit_of_unknown_outcome_is_heard_of_by_the_watch(tmp_path: Path) -> None:
    inner = Forgetful(tmp_path / "b.sqlite")
    await inner.commit(puts={STATE_KEY: SetHash(KEY).first({})})
    store = await CheckedStore.open(inner, FixedKey(KEY))
    inner.loses = True
    with pytest.raises(UnavailableError):
        await store.commit(puts={"a": b"1"})
    inner.loses = False
    async with asyncio.timeout(PATIENCE_SECONDS):
        entry = await store.get("a")
        assert entry is not None
        assert await store.commit([Compare("a", entry.revision)], {"a": b"2"}) is not None
    await store.close()


async def test_history_that_was_forgotten_is_made_up_by_a_scan(
    opened: Opener, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = await opened(), await opened()
    watched = type(store).watch

    async def forgotten(self: Any, prefix: str, *, from_revision: int) -> Any:
        monkeypatch.setattr(type(store), "watch", watched)
        raise UnavailableError("broker.store.compacted", "forgotten")
        yield ()

    await broker._tasks.close()
    monkeypatch.setattr(type(store), "watch", forgotten)
    await other.commit(puts={"a": b"1"})
    broker._tasks.start(broker._follow(), name="again")
    async with asyncio.timeout(PATIENCE_SECONDS):
        entry = await broker.get("a")
        assert entry is not None
        assert entry.value == b"1"
        assert await broker.commit([Compare("a", entry.revision)], {"a": b"2"}) is not None


async def test_store_whose_watch_is_silent_says_so(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLLOW_SECONDS", 0.05)
    broker, other = await opened(), await opened()
    await broker._tasks.close()
    await other.commit(puts={"a": b"1"})
    with pytest.raises(UnavailableError) as caught:
        await broker.get("a")
    assert caught.value.reason == "broker.store.timeout"
    assert broker.failure is None


async def test_commits_end_where_the_watch_is_too_far_behind(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNFOLLOWED_COMMITS_MAX", 3)
    broker = await opened()
    await broker._tasks.close()
    for number in range(3):
        await broker.commit(puts={"a": bytes([number])})
    with pytest.raises(UnavailableError) as caught:
        await broker.commit(puts={"a": b"3"})
    assert caught.value.reason == "broker.store.timeout"


async def test_inspections_take_turns_through_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INSPECTED_ENTRIES", 4)
    inner = SqliteStore(tmp_path / "b.sqlite")
    await inner.commit(puts={STATE_KEY: SetHash(KEY).first({})})
    store = await CheckedStore.open(inner, FixedKey(KEY))
    for number in range(10):
        await store.commit(puts={f"k{number}": b"1"})
    for _ in range(4):
        await store.inspect()
    await change(inner, "k5", b"0")
    assert store._inspected == "k3"
    await rolled_back(store.inspect())
    await store.close()
