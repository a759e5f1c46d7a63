"""What a daemon sees of the space it writes to: figures, warnings, and their end."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import space
from sealane.daemon.runtime.reserve_file import RESERVE_BYTES
from sealane.daemon.runtime.space import SpaceWatch
from small_disk import fill, small_disk

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "SPACE_SECONDS", 0.01)


async def _ignore(is_good: bool) -> None:
    pass


def _watch(disk: Path, *, warning_percent: int = 50) -> SpaceWatch:
    return SpaceWatch({"state": disk}, warning_percent=warning_percent, report=_ignore)


def _take(disk: Path, mebibytes: int) -> None:
    (disk / "others").write_bytes(bytes(mebibytes * MIB))


def test_figures_are_those_of_the_file_system(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    [found] = watch.look()
    system = os.statvfs(tmp_path)
    assert found.capacity == system.f_blocks * system.f_frsize
    assert found.reserve == RESERVE_BYTES
    assert abs(found.free - system.f_bavail * system.f_frsize) < 256 * MIB
    with (tmp_path / "thin.sectors").open("wb") as thin:
        thin.truncate(64 * MIB)
    [found] = watch.look()
    assert found.promised == 64 * MIB
    assert watch.statistics()[("state",)]["promised_bytes"] == 64 * MIB


def test_a_place_that_does_not_exist_yet_is_left_out(tmp_path: Path) -> None:
    watch = _watch(tmp_path / "later")
    assert not watch.look()
    (tmp_path / "later").mkdir()
    assert len(watch.look()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_each_change_is_one_line_and_ends_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 * MIB) as disk:
        watch = _watch(disk)
        with structlog.testing.capture_logs() as lines:
            states = [watch.look()[0].state]
            _take(disk, 8)
            states += [watch.look()[0].state, watch.look()[0].state]
            fill(disk / "rest")
            states += [watch.look()[0].state, watch.look()[0].state]
            (disk / "rest").unlink()
            states.append(watch.look()[0].state)
            (disk / "others").unlink()
            states += [watch.look()[0].state, watch.look()[0].state]
        assert states == ["good", "low", "low", "full", "full", "low", "good", "good"]
        said = [(line["event"], line["log_level"]) for line in lines]
        assert said == [
            ("space_low", "warning"),
            ("space_full", "error"),
            ("space_low", "warning"),
            ("space_returned", "info"),
        ]
        assert lines[1]["free_bytes"] == 0
        assert lines[1]["reserve_bytes"] == RESERVE_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_use_around_the_limit_is_one_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=100 * MIB) as disk:
        watch = _watch(disk)
        _take(disk, 49)
        assert watch.look()[0].state == "low"
        _take(disk, 48)
        assert watch.look()[0].state == "low"
        _take(disk, 40)
        assert watch.look()[0].state == "good"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_reserve_that_is_not_whole_is_unhealthy_until_there_is_space(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 * MIB) as disk:
        fill(disk / "others")
        reports: asyncio.Queue[bool] = asyncio.Queue()
        watch = SpaceWatch({"state": disk}, warning_percent=90, report=reports.put)
        watch.look()
        keeping = asyncio.ensure_future(watch.keep())
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reports.get() is False
            assert watch.statistics()[("state",)]["is_full"] == 1
            (disk / "others").unlink()
            while not await reports.get():
                pass
        keeping.cancel()
        assert watch.statistics()[("state",)]["is_full"] == 0
        assert watch.statistics()[("state",)]["reserve_bytes"] == RESERVE_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_full_disk_whose_reserve_is_whole_is_healthy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 * MIB) as disk:
        reports: asyncio.Queue[bool] = asyncio.Queue()
        watch = SpaceWatch({"state": disk}, warning_percent=90, report=reports.put)
        watch.look()
        fill(disk / "others")
        assert watch.look()[0].state == "full"
        keeping = asyncio.ensure_future(watch.keep())
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reports.get() is True
        keeping.cancel()


def test_a_file_system_that_counts_no_blocks_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "keep_reserve", lambda _: 0)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([4096, 4096] + [0] * 8))
    [found] = _watch(tmp_path).look()
    assert found.state == "good"
    assert found.is_healthy


def test_a_file_that_vanishes_drops_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        with (tmp_path / name).open("wb") as thin:
            thin.truncate(MIB)
    scan = os.scandir

    @contextlib.contextmanager
    def scan_late(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = [*entries]
        (tmp_path / "first").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", scan_late)
    [found] = _watch(tmp_path).look()
    assert found.promised == MIB


async def test_a_place_that_answers_with_an_error_is_kept_and_unhealthy(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    reports: asyncio.Queue[bool] = asyncio.Queue()
    watch = SpaceWatch({"state": directory}, warning_percent=100, report=reports.put)
    [before] = watch.look()
    directory.rename(tmp_path / "away")
    keeping = asyncio.ensure_future(watch.keep())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await reports.get():
            pass
        [found] = watch.last()
        assert (found.state, found.capacity) == ("unknown", before.capacity)
        assert watch.statistics()[("state",)]["is_unknown"] == 1
        (tmp_path / "away").rename(directory)
        while not await reports.get():
            pass
    keeping.cancel()
    assert watch.last()[0].state == "good"


async def test_a_look_that_hangs_is_unhealthy_and_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    looked = threading.Event()
    places = {"state": tmp_path / "state", "volumes": tmp_path / "volumes"}
    for directory in places.values():
        directory.mkdir()
    reports: asyncio.Queue[bool] = asyncio.Queue()
    watch = SpaceWatch(places, warning_percent=100, report=reports.put)
    watch.look()

    def keep(directory: Path) -> int:
        if directory == places["volumes"]:
            answers.wait(PATIENCE_SECONDS)
        else:
            looked.set()
        return RESERVE_BYTES

    monkeypatch.setattr(space, "keep_reserve", keep)
    monkeypatch.setattr(space, "HANGING_SECONDS", 0.5)
    keeping = asyncio.ensure_future(watch.keep())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await reports.get():
            pass
        assert {found.place: found.state for found in watch.last()}["volumes"] == "unknown"
        assert looked.is_set()
        answers.set()
        while not await reports.get():
            pass
    keeping.cancel()
