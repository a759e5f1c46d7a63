"""What who knows a record key that was replaced, and can write to the store, can't do."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.record_keys import OLD, Site, clock, fill, refused, site_at
from brokers import record_key_rotation_of
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.authority import (
    AUTHORITY_KEY,
    authority_entry,
    opened_record_keys,
    parse_authority,
)
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.records import AuthorityRecord, Tables
from sealane.daemon.broker.store.contract import STATE_KEY, Entry
from sealane.daemon.broker.store.record_keys import NamedKeys, RecordKeys
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.store.state import SetHash, State


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as made:
        yield made


def authority_in(entries: dict[str, bytes]) -> AuthorityRecord:
    return parse_authority(Entry(AUTHORITY_KEY, entries[AUTHORITY_KEY], 0))


def bound(entries: dict[str, bytes], record_key: bytes) -> dict[str, bytes]:
    """Return a store's entries with the state that follows theirs, under that key."""
    number = json.loads(entries[STATE_KEY][32:])["number"]
    others = {key: value for key, value in entries.items() if key != STATE_KEY}
    hashes = SetHash(record_key)
    _, sealed = hashes.next(
        State(number=number, count=0, total=0, tag=bytes(32), revision=0),
        removed=(),
        added=[hashes.digest(key, value) for key, value in others.items()],
        growth=len(others),
    )
    return {**others, STATE_KEY: sealed}


@pytest.mark.parametrize("is_finished", [False, True])
async def test_replaced_key_is_not_named_again(site: Site, is_finished: bool) -> None:
    """Exchanged with its successor, it would be the key that follows."""
    here = await site.broker()
    await fill(here)
    before = authority_in(await site.entries())
    stolen = opened_record_keys(before, Keyring([WrappingKey(OLD)])).present
    rotation = record_key_rotation_of(here)
    await rotation.begin(0)
    if is_finished:
        await rotation.proceed()
    entries = await site.entries()
    present = authority_in(entries)
    exchanged = present.model_copy(
        update={
            "wrapped_record_key": before.wrapped_record_key,
            "wrapped_previous_record_key": present.wrapped_record_key,
            "record_key_number": present.record_key_number + 1,
        }
    )
    thief = Tables(None, keys=RecordKeys(NamedKeys(present=stolen)))  # type: ignore[arg-type]
    forged = authority_entry(exchanged) | thief.clocks.sealed("n2", clock(666))
    state = bound(entries | forged, stolen)[STATE_KEY]
    await site.store.commit(puts={**forged, STATE_KEY: state})
    await refused(here.store.inspect(), "key.wrap.invalid")
    await refused(site.broker(), "key.wrap.invalid")


async def test_branch_with_a_replacement_of_its_own_is_refused(site: Site, tmp_path: Path) -> None:
    """Another broker was shown a copy of the store, and there began by itself."""
    here = await site.broker()
    await fill(here)
    copy = Site(SqliteStore(tmp_path / "copy.sqlite"))
    await copy.store.commit(puts=await site.entries())
    there = await copy.broker()
    await record_key_rotation_of(here).begin(0)
    await record_key_rotation_of(there).begin(0)
    assert here.store.record_keys.named.number == there.store.record_keys.named.number
    await fill(there, 40)
    here.store._inner.scan = copy.store.scan  # type: ignore[method-assign]
    await refused(here.store._read_all(), "broker.store.rolled_back")
    await there.close()
    await copy.store.close()


async def test_branch_with_as_many_states_is_not_bound(site: Site, tmp_path: Path) -> None:
    """Its number says that it isn't older than the memory, but it is another history."""
    here = await site.broker()
    await fill(here)
    copy = Site(SqliteStore(tmp_path / "copy.sqlite"))
    await copy.store.commit(puts=await site.entries())
    there = await copy.broker()
    assert await there.commit(puts=there.clocks.sealed("n2", clock(666)))
    assert await here.commit(puts=here.clocks.sealed("n2", clock(9)))
    here.store._inner.scan = copy.store.scan  # type: ignore[method-assign]
    await refused(record_key_rotation_of(here).begin(0), "broker.store.rolled_back")
    await there.close()
    await copy.store.close()
