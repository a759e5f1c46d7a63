"""A store, brokers on it and records in it, for tests of the record key's replacement."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from broker.test_rewrapping_model import Stopping
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.records import ClockRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError, UsageError, VerificationError

OLD, NEW = bytes(32), bytes([1]) * 32


class Site:
    """A store and brokers on it."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.brokers: list[Registry] = []

    async def broker(self, *keks: bytes) -> Registry:
        keys = [WrappingKey(kek) for kek in keks or (OLD,)]
        made = await Registry.open(Stopping(self.store), *keys, node="b")
        self.brokers.append(made)
        return made

    async def entries(self) -> dict[str, bytes]:
        return {
            entry.key: entry.value async for page in self.store.scan() for entry in page.entries
        }


@contextlib.asynccontextmanager
async def site_at(root: Path) -> AsyncIterator[Site]:
    """Open a site in a directory; close its brokers and its store at the end."""
    made = Site(SqliteStore(root / "broker.sqlite"))
    yield made
    for each in made.brokers:
        await each.close()
    await made.store.close()


def clock(count: int) -> ClockRecord:
    return ClockRecord(reset_count=count, restart_count=0, millis=0)


async def fill(registry: Registry, count: int = 5) -> None:
    for number in range(count):
        assert await registry.commit(puts=registry.clocks.sealed(f"n{number}", clock(number)))


async def value_of(registry: Registry, name: str) -> int:
    stored = await registry.clocks.get(name)
    assert stored is not None
    return stored.record.reset_count


async def refused(call: Awaitable[Any], reason: str) -> None:
    with pytest.raises((UsageError, VerificationError, UnavailableError)) as caught:
        await call
    assert caught.value.reason == reason
