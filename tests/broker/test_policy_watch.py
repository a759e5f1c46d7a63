"""A policy applied at one broker is in force at the others within a second."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.policy_owners import new_keys, owners_of, signed_owners, signed_policy
from broker.virtual import in_virtual_time
from brokers import MemoryAudit, not_covered
from patience import PATIENCE_SECONDS
from sealane.crypto.attestation.policy import Policy
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import policy_keeper
from sealane.daemon.broker.owners import Owners
from sealane.daemon.broker.owners_keeper import OwnersKeeper
from sealane.daemon.broker.policy_keeper import PolicyKeeper
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError, VerificationError


class Broker:
    """The policy keeper of a broker, and the changes that it noticed."""

    def __init__(self, registry: Registry, configured: Owners | None = None) -> None:
        self.registry = registry
        self.heard: asyncio.Queue[int] = asyncio.Queue()
        audit = MemoryAudit()
        owners = OwnersKeeper(registry, configured=configured, cover=not_covered, audit=audit)
        self.keeper = PolicyKeeper(registry, owners=owners, audit=audit, changed=self._changed)

    def _changed(self, policy: Policy) -> None:
        self.heard.put_nowait(policy.version)

    async def apply(self, version: int) -> None:
        document = f"version = {version}\n".encode()
        await self.keeper.apply(document, b"", source="p", subject="operator")

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.keeper.keep_refreshed())
            yield
            task.cancel()


@contextlib.asynccontextmanager
async def brokers(*stores: Store) -> AsyncIterator[list[Broker]]:
    opened = [await Registry.open(each, WrappingKey(bytes(32)), node="b") for each in stores]
    yield [Broker(registry) for registry in opened]
    for registry in opened:
        # Only what follows the store, which others may use.
        await registry.store._tasks.close()


@pytest.fixture
async def other_client(store: Store, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The store as opened by a second broker; SQLite supports only one process."""
    if not isinstance(store, EtcdStore):
        yield store
        return
    endpoints = request.getfixturevalue("etcd").endpoints
    other = await EtcdStore.open(
        endpoints, writer="other", credentials=None, prefix=store._data.removesuffix("data/")
    )
    yield other
    await other.close()


async def test_other_brokers_hear_of_a_policy_without_looking(
    store: Store, other_client: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Disable periodic checks for the duration of this test.
    monkeypatch.setattr(policy_keeper, "REFRESH_SECONDS", 3600)
    async with brokers(store, other_client) as (first, second):
        await first.apply(1)
        async with second.following():
            assert await asyncio.wait_for(second.heard.get(), PATIENCE_SECONDS) == 1
            for version in (2, 3):
                await first.apply(version)
                assert await asyncio.wait_for(second.heard.get(), PATIENCE_SECONDS) == version
            assert second.heard.empty()
        assert second.keeper.policy.version == 3


async def test_a_watch_that_is_lost_costs_the_time_until_the_next_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_keeper, "REFRESH_SECONDS", 0.05)

    async def lost(prefix: str, *, from_revision: int) -> AsyncIterator[object]:
        raise UnavailableError("broker.store.compacted", f"{prefix} {from_revision}")
        yield

    async with brokers(store, store) as (first, second), second.following():
        monkeypatch.setattr(store, "watch", lost)
        await first.apply(1)
        assert await asyncio.wait_for(second.heard.get(), PATIENCE_SECONDS) == 1


@in_virtual_time
async def test_a_policy_is_in_force_at_other_brokers_within_a_second(tmp_path: Path) -> None:
    # Time passes only in waits of the product, and in store operations, up to 2 ms each.
    store = SqliteStore(tmp_path / "b.sqlite")
    loop = asyncio.get_running_loop()
    async with brokers(store, store) as (first, second), second.following():
        for version in range(1, 21):
            # At various moments between two checks.
            await asyncio.sleep(0.37)
            await first.apply(version)
            applied = loop.time()
            assert await second.heard.get() == version
            assert loop.time() - applied < 1
    await store.close()


@pytest.mark.slow
@in_virtual_time
async def test_without_a_watch_a_policy_is_in_force_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(prefix: str, *, from_revision: int) -> AsyncIterator[object]:
        raise UnavailableError("broker.store.compacted", f"{prefix} {from_revision}")
        yield

    store = SqliteStore(tmp_path / "b.sqlite")
    monkeypatch.setattr(store, "watch", lost)
    loop = asyncio.get_running_loop()
    late = []
    async with brokers(store, store) as (first, second), second.following():
        for version in range(1, 21):
            await asyncio.sleep(0.37)
            await first.apply(version)
            applied = loop.time()
            assert await second.heard.get() == version
            late.append(loop.time() - applied)
    await store.close()

    assert max(late) < policy_keeper.REFRESH_SECONDS + 1
    assert max(late) > 1, "what the test above holds the watch to"


async def test_other_brokers_follow_a_change_of_owners(store: Store, other_client: Store) -> None:
    keys = new_keys(4)
    before = owners_of(*keys[:3], threshold=2)
    after = owners_of(*keys[1:], threshold=2, version=1)
    async with brokers(store, other_client) as plain:
        first, second = [Broker(each.registry, before) for each in plain]
        await first.keeper.apply(*signed_policy(1, *keys[:2]), source="p", subject="o")
        await second.keeper.refresh()
        await first.keeper.owners.replace(*signed_owners(after, *keys[1:3]), subject="o")
        for broker in (first, second):
            with pytest.raises(VerificationError) as caught:
                await broker.keeper.apply(*signed_policy(2, *keys[:2]), source="p", subject="o")
            assert caught.value.reason == "policy.signature"
        async with first.following():
            await second.keeper.apply(*signed_policy(2, *keys[2:]), source="p", subject="o")
            while await asyncio.wait_for(first.heard.get(), PATIENCE_SECONDS) != 2:
                pass
        assert first.keeper.owners_version == 1
