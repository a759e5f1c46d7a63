"""Replacement of the record key: what each broker accepts and writes at each step."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.record_keys import NEW, OLD, Site, clock, fill, refused, site_at, value_of
from broker.restoring import Place
from broker.test_checked import change
from broker.test_restore import NAME, VOLUME, filled_store
from broker.test_rewrapping_model import Stopping
from brokers import MemoryAudit, record_key_rotation_of, rewrapping_of
from control_plane import short_directory
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import record_key_rotation
from sealane.daemon.broker.authority import (
    AUTHORITY_KEY,
    RECORD_KEY,
    authority_entry,
    new_record_key,
    opened_record_keys,
    parse_authority,
)
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import STATE_KEY, Entry, Page
from sealane.daemon.broker.store.state import SetHash
from sealane.errors import UnavailableError, VerificationError


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as made:
        yield made


async def test_all_records_come_under_the_new_key_and_the_old_one_is_deleted(site: Site) -> None:
    here, there = await site.broker(), await site.broker()
    await fill(here)
    before = await site.entries()
    audit = MemoryAudit()
    rotation = record_key_rotation_of(here, audit=audit)
    await rotation.begin(0)
    progress = await rotation.progress()
    assert (progress.number, progress.is_replacing) == (1, True)
    assert progress.left >= 5
    # Halfway, both read what is under either key.
    await fill(there, 2)
    assert [await value_of(each, f"n{n}") for each in (here, there) for n in range(5)] == [
        *range(5),
        *range(5),
    ]
    await rotation.proceed()
    progress = await rotation.progress()
    assert (progress.number, progress.is_replacing, progress.left) == (1, False, 0)
    authority = (await here.authority_record()).record
    assert authority.wrapped_previous_record_key == b""
    for broker in (here, there, await site.broker()):
        assert [await value_of(broker, f"n{n}") for n in range(5)] == [*range(5)]
        for key in ("clocks/n4", "clocks/n1"):
            with pytest.raises(VerificationError) as caught:
                broker.clocks.opened(Entry(key, before[key], 1))
            assert caught.value.reason == "broker.store.record.forged"
    assert [(record["kind"], record["outcome"]) for record in audit.records] == [
        ("record_key.rotate", "granted"),
        ("record_key.rotate", "done"),
    ]


async def test_what_was_sealed_before_is_stored_under_the_new_key(site: Site) -> None:
    here, there = await site.broker(), await site.broker()
    prepared = there.clocks.sealed("late", clock(7))
    await record_key_rotation_of(here).begin(0)
    assert await there.commit(puts=prepared) is not None
    stored = (await site.entries())["clocks/late"]
    assert here.store.record_keys.is_present("clocks/late", stored)
    assert await value_of(here, "late") == 7


async def test_what_was_sealed_under_a_deleted_key_is_not_stored(site: Site) -> None:
    here, there = await site.broker(), await site.broker()
    prepared = there.clocks.sealed("late", clock(7))
    rotation = record_key_rotation_of(here)
    await rotation.begin(0)
    await rotation.proceed()
    await there.store.inspect()
    await refused(there.commit(puts=prepared), "broker.store.contended")
    assert await here.clocks.get("late") is None
    assert await there.commit(puts=there.clocks.sealed("late", clock(8))) is not None
    assert await value_of(here, "late") == 8


async def test_begin_is_idempotent_and_names_the_key_that_it_replaces(site: Site) -> None:
    here = await site.broker()
    rotation = record_key_rotation_of(here)
    await refused(rotation.begin(1), "broker.record_key.number")
    await rotation.begin(0)
    await rotation.begin(0)
    await refused(rotation.begin(1), "broker.record_key.rotating")
    await rotation.proceed()
    await rotation.begin(0)
    assert (await rotation.progress()).number == 1
    await rotation.begin(1)
    await refused(rotation.begin(0), "broker.record_key.number")
    assert (await rotation.progress()).number == 2


async def test_key_encryption_key_can_be_replaced_before_and_after(site: Site) -> None:
    """In the middle the old record key would come under the next key encryption key."""
    here = await site.broker(OLD, NEW)
    await fill(here)
    rotation, wrapping = record_key_rotation_of(here), rewrapping_of(here)
    await wrapping.announce()
    await rotation.begin(0)
    await refused(wrapping.begin(), "broker.key.record_key_rotating")
    await rotation.proceed()
    await wrapping.begin()
    # Not the other way round: that rotation may wait for a record that can't be decrypted.
    await rotation.begin(1)
    await wrapping.proceed()
    alone = await site.broker(NEW)
    assert await value_of(alone, "n3") == 3
    await record_key_rotation_of(alone).proceed()
    assert await value_of(here, "n4") == 4
    progress = await rotation.progress()
    assert (progress.number, progress.is_replacing) == (2, False)


Step = Callable[[Registry], Awaitable[None]]


async def _begin(registry: Registry) -> None:
    await record_key_rotation_of(registry).begin(0)


async def _finish(registry: Registry) -> None:
    await _begin(registry)
    await record_key_rotation_of(registry).proceed()


@pytest.mark.parametrize("uses", ["reads", "starts"])
@pytest.mark.parametrize("step", [_begin, _finish])
@pytest.mark.parametrize("key", ["clocks/n2", AUTHORITY_KEY, STATE_KEY])
async def test_single_older_record_is_refused(site: Site, key: str, step: Step, uses: str) -> None:
    here = await site.broker()
    await fill(here)
    before = await site.entries()
    assert await here.commit(puts=here.clocks.sealed("n2", clock(9)))
    await step(here)
    await change(site.store, key, before[key])
    if uses == "starts":
        await refused(site.broker(), "broker.store.rolled_back")
    else:
        await refused(here.store.inspect(), "broker.store.rolled_back")


async def test_records_from_before_are_not_bound_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the store shows the replacement an older copy of all of it."""
    here = await site.broker()
    await fill(here)
    older = [page async for page in site.store.scan()]
    await fill(here)

    async def scan() -> AsyncIterator[Page]:
        for page in older:
            yield page

    monkeypatch.setattr(here.store._inner, "scan", scan)
    await refused(record_key_rotation_of(here).begin(0), "broker.store.rolled_back")


async def _forged(site: Site, registry: Registry, older: dict[str, bytes]) -> dict[str, bytes]:
    """Return the entries of a later state, made by someone who knows the key that was replaced."""
    authority = parse_authority(Entry(AUTHORITY_KEY, older[AUTHORITY_KEY], 0))
    hashes = SetHash(opened_record_keys(authority, Keyring([WrappingKey(OLD)])).present)
    state = json.loads((await site.entries())[STATE_KEY][32:])
    entries = {key: value for key, value in older.items() if key != STATE_KEY}
    sealed = b""
    present = hashes.state_of(older, revision=1)
    while json.loads(sealed[32:] or b'{"number": 0}')["number"] <= state["number"]:
        present, sealed = hashes.next(present, removed=(), added=(), growth=0)
    assert registry.store.failure is None
    return {**entries, STATE_KEY: sealed}


async def test_running_broker_does_not_go_back_to_a_replaced_key(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thief makes a later state under it; the store's history is gone."""
    here = await site.broker()
    await fill(here)
    older = await site.entries()
    await _finish(here)
    forged = await _forged(site, here, older)

    async def scan() -> AsyncIterator[Page]:
        entries = tuple(Entry(key, value, 10_000) for key, value in sorted(forged.items()))
        yield Page(entries=entries, has_more=False, revision=10_000)

    monkeypatch.setattr(here.store._inner, "scan", scan)
    await refused(here.store._read_all(), "broker.store.rolled_back")


async def test_key_that_does_not_follow_the_present_one_is_refused(site: Site) -> None:
    """Even from someone who has the key encryption key: no broker skips a number."""
    here = await site.broker()
    stored = await here.authority_record()
    named = here.store.record_keys.named
    wrapping = WrappingKey(OLD)
    jump = stored.record.model_copy(
        update={
            "wrapped_record_key": new_record_key(wrapping, 2)[1],
            "wrapped_previous_record_key": wrapping.wrap(
                named.present, purpose=RECORD_KEY, owner="broker 1"
            ),
            "record_key_number": 2,
        }
    )
    await site.store.commit(
        puts={**authority_entry(jump), STATE_KEY: SetHash(bytes(32)).first(authority_entry(jump))}
    )
    await refused(here.store.inspect(), "broker.store.rolled_back")


async def test_copy_in_the_middle_is_one_state(site: Site) -> None:
    here, there = await site.broker(), await site.broker()
    await fill(here)
    await record_key_rotation_of(here).begin(0)
    entries, state = await there.store.copy()
    assert entries == await site.entries()
    assert state.count == len(entries) - 1


async def test_crash_at_each_batch_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_key_rotation, "BATCH_RECORDS", 1)
    here = await site.broker()
    await fill(here)
    await _begin(here)
    left = (await record_key_rotation_of(here).progress()).left
    for _ in range(20):
        last = site.brokers[-1]
        view = last.store._inner
        assert isinstance(view, Stopping)
        writes = 0
        commit = view.commit

        async def once(*arguments: Any, **options: Any) -> int | None:
            nonlocal writes
            writes += 1
            if writes > 1:
                raise UnavailableError("broker.store.failed", "crashed")
            return await commit(*arguments, **options)  # noqa: B023 - called in this turn only

        view.commit = once  # type: ignore[method-assign]
        try:
            await record_key_rotation_of(last).proceed()
        except UnavailableError:
            await site.broker()
        else:
            break
        now = (await record_key_rotation_of(site.brokers[-1]).progress()).left
        assert now == left - 1
        left = now
    assert left == 0
    assert not (await site.brokers[-1].authority_record()).record.wrapped_previous_record_key


async def test_snapshot_from_the_middle_is_restored_and_goes_on() -> None:
    with short_directory() as root:
        place = Place(root)
        async with place.opened() as opened:
            await filled_store(opened)
            registry, rotation = opened.service.registry, opened.record_keys
            await rotation.begin(0)
            under_previous = [entry async for entry in rotation._under_previous()]
            again, left = under_previous[::2], under_previous[1::2]
            await rotation._make_again(again, await registry.authority_record())
            snapshot = await place.snapshot(opened)
        place.lose()
        await place.restore(snapshot)
        async with place.opened() as opened:
            registry, rotation = opened.service.registry, opened.record_keys
            progress = await rotation.progress()
            assert (progress.number, progress.is_replacing) == (1, True)
            assert 0 < progress.left <= len(left)
            assert (await registry.volume(VOLUME)).record.display_name == NAME
            await rotation.proceed()
            progress = await rotation.progress()
            assert (progress.number, progress.is_replacing, progress.left) == (1, False, 0)
            assert (await registry.volume(VOLUME)).record.display_name == NAME
            for entry in left:
                with pytest.raises(VerificationError) as caught:
                    registry.store.record_keys.opened(entry.key, entry.value)
                assert caught.value.reason == "broker.store.record.forged"
        async with place.opened() as opened:
            assert (await opened.record_keys.progress()).number == 1
