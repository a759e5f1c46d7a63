"""The stores that every test of the contract runs on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.sqlite import SqliteStore


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = SqliteStore(tmp_path / "b.sqlite")
    yield opened
    await opened.close()
