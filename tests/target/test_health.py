"""A target whose stores failed: it says so, and ends to open them again."""

import asyncio
import uuid
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.target import health
from sealane.daemon.target.health import SERVING_SECONDS, Serving, end_with_stores
from sealane.errors import UnavailableError

VOLUMES = [uuid.UUID(int=number) for number in range(6)]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STORE_SECONDS", 0.01)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return Serving(opening_seconds=0, endings=tmp_path / "failed-stores.json")


async def test_a_failed_store_is_reported_and_ends_the_process(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SERVING_SECONDS", 0)
    reports: list[bool] = []

    async def report(is_good: bool) -> None:
        reports.append(is_good)

    found: list[list[uuid.UUID]] = [[], [], VOLUMES]
    with pytest.raises(UnavailableError) as ended:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await end_with_stores(lambda: found.pop(0), report, unopened=list, serving=serving)
    assert ended.value.reason == "store.failed"
    assert ended.value.exit_code == 4
    assert str(VOLUMES[0]) in str(ended.value)
    assert "and 2 more" in str(ended.value)
    assert reports == [True, False]
    last = serving.last()
    assert last is not None
    assert last.volumes == {*VOLUMES}


async def test_a_process_serves_for_a_while_before_it_ends_and_stays_if_the_store_is_gone(
    serving: Serving,
) -> None:
    reports: asyncio.Queue[bool] = asyncio.Queue()
    failed = VOLUMES[:1]
    ending = asyncio.ensure_future(
        end_with_stores(lambda: [*failed], reports.put, unopened=list, serving=serving)
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reports.get() is False
        failed.clear()
        assert await reports.get() is True
    assert not ending.done()
    ending.cancel()


async def test_a_store_that_could_not_be_opened_is_unhealthy_and_ends_nothing(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SERVING_SECONDS", 0)
    reports: asyncio.Queue[bool] = asyncio.Queue()
    unopened = VOLUMES[:1]
    ending = asyncio.ensure_future(
        end_with_stores(list, reports.put, unopened=lambda: [*unopened], serving=serving)
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await reports.get() is False
        unopened.clear()
        assert await reports.get() is True
    assert not ending.done()
    ending.cancel()


def test_the_same_store_lets_each_process_serve_twice_as_long_up_to_an_hour(
    serving: Serving,
) -> None:
    served = []
    for _ in range(9):
        seconds = serving.seconds(VOLUMES[:2], serving.last())
        serving.end(VOLUMES[:2], seconds)
        served.append(seconds)
    assert served == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    last = serving.last()
    assert serving.seconds(VOLUMES[1:2], last) == 3600
    assert serving.seconds(VOLUMES[2:], last) == SERVING_SECONDS
    # Only the last process counts.
    assert serving.last() is None


def test_a_target_that_opens_slowly_serves_longer(serving: Serving) -> None:
    slow = Serving(opening_seconds=300, endings=serving.endings)
    assert slow.seconds(VOLUMES[:1], None) == 6000
    slow.end(VOLUMES[:1], 6000)
    assert slow.seconds(VOLUMES[:1], slow.last()) == 6000


def test_an_ending_that_can_not_be_read_or_noted_is_none(serving: Serving) -> None:
    serving.endings.write_text("{")
    assert serving.last() is None
    assert not serving.endings.exists()
    serving.endings.mkdir()
    serving.end(VOLUMES, 60)
    assert serving.last() is None
