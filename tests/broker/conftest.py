"""Fixtures: the stores that every contract test runs on, and a broker's registry on each."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from brokers import Count, start_broker
from etcd_server import Cluster, etcd_cluster
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.sqlite import SqliteStore


@pytest.fixture(scope="session")
def etcd() -> Iterator[Cluster]:
    """One etcd member shared by all tests, each with its own prefix."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened: Store
    if request.param == "sqlite":
        opened = SqliteStore(tmp_path / "b.sqlite")
    else:
        endpoints = request.getfixturevalue("etcd").endpoints
        opened = await EtcdStore.open(
            endpoints, writer="test", credentials=None, prefix=f"/{uuid.uuid4()}/"
        )
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def registry(store: Store) -> AsyncIterator[Registry]:
    """The registry of a broker that was started on `store`."""
    _, _, started = await start_broker(store, starts=Count(), heads=Count())
    yield started
    await started.close()
