"""A target whose stores failed: it says so, and ends to open them again."""

import asyncio
import uuid

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.target import health
from sealane.daemon.target.health import end_with_stores
from sealane.errors import UnavailableError

VOLUMES = [uuid.UUID(int=number) for number in range(6)]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STORE_SECONDS", 0.01)


async def test_a_failed_store_is_reported_and_ends_the_process() -> None:
    reports: list[bool] = []

    async def report(is_good: bool) -> None:
        reports.append(is_good)

    found: list[list[uuid.UUID]] = [[], [], VOLUMES]
    with pytest.raises(UnavailableError) as ended:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await end_with_stores(lambda: found.pop(0), report, serving_seconds=0)
    assert ended.value.reason == "store.failed"
    assert ended.value.exit_code == 4
    assert str(VOLUMES[0]) in str(ended.value)
    assert "and 2 more" in str(ended.value)
    assert reports == [True, False]


async def test_a_process_serves_for_a_while_before_it_ends_and_stays_if_the_store_is_gone() -> None:
    reports: asyncio.Queue[bool] = asyncio.Queue()
    failed = VOLUMES[:1]
    ending = asyncio.ensure_future(
        end_with_stores(lambda: [*failed], reports.put, serving_seconds=3600)
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reports.get() is False
        failed.clear()
        assert await reports.get() is True
    assert not ending.done()
    ending.cancel()
