"""Scrub and refresh of a target's volumes: findings, and continuation after a restart."""

import asyncio
import datetime as dt
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import pytest

from attacks.disk import read_slot
from patience import PATIENCE_SECONDS
from sealane.cli.demo.adversary import block_start
from sealane.daemon.config import ScrubConfig
from sealane.daemon.device.catalogue import Catalogue
from sealane.daemon.runtime.reserve_file import RESERVE_NAME
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.openings import Openings
from sealane.daemon.target.scrub_schedule import due_volume, keep_jobs
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.kept_jobs import VolumeJobs
from sealane.daemon.volume.store_status import store_status
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import JobKind
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.tasks import TaskOwner
from target.pair import World, make_world

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
SECTORS = 4096


@pytest.fixture
async def inline_world(tmp_path: Path) -> AsyncIterator[World]:
    async with make_world(tmp_path / "store", store_kind="inline") as made:
        yield made


def running(directory: Path) -> Target:
    return Target(traddr="127.0.0.1", trsvcid=0, store_kind="inline", directory=directory)


def files(directory: Path) -> list[Path]:
    """Return the target's files, except the one that reserves space."""
    return [path for path in directory.iterdir() if path.name != RESERVE_NAME]


async def ended(jobs: VolumeJobs, kind: JobKind = "scrub") -> Job:
    """Wait until a job has ended and is saved as ended, so that no later opening continues it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await jobs.observe()
            job = next(job for job in jobs.list() if job.kind == kind)
            if job.ended is not None:
                return job
            await asyncio.sleep(0.002)


async def moved(jobs: VolumeJobs, is_far: Callable[[Job], bool]) -> Job:
    """Wait until a job has reached this point."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if is_far(job := jobs.list()[0]):
                return job
            await asyncio.sleep(0.002)


async def test_scrub_finds_older_sectors_nobody_read_and_tells_of_them(inline_world: World) -> None:
    world = inline_world
    assert world.path is not None
    async with world.queue() as queue:
        for lba in (5, 700):
            await queue.write(lba, bytes(4096))
        older = {lba: read_slot(world.path, lba).block for lba in (5, 700)}
        for lba in (5, 700, 701):
            await queue.write(lba, bytes(4096))
        await queue.flush()
    with world.path.open("r+b") as file:
        for lba, block in older.items():
            file.seek(block_start(world.path, lba))
            file.write(block)
    jobs = world.target.jobs(world.volume_id)
    await jobs.start("scrub", bytes_per_second=0)
    job = await ended(jobs)
    assert (job.state, job.found, job.checked) == ("finished", 2, 3)
    assert [(f.lba, f.reason) for f in job.findings] == [
        (5, "sector.stale"),
        (700, "sector.stale"),
    ]
    await world.event(lambda e: e.kind == "found" and e.lba == 700, at_target=True)
    figures = world.target.statistics(world.volume_id)
    assert (figures["scrub_found"], figures["scrub_running"]) == (2, 0)
    assert figures["scrub_ended_seconds"] > 1_700_000_000


@pytest.mark.parametrize("kind", ["file", "inline"])
async def test_sector_that_only_a_write_mends_is_an_error_until_it_is_written(
    tmp_path: Path, kind: Literal["file", "inline"]
) -> None:
    async with make_world(tmp_path / "store", store_kind=kind) as world, world.queue() as queue:
        assert world.path is not None
        await queue.write(8, bytes(4096))
        before = world.path.read_bytes()
        await queue.write(5, bytes(4096))
        await queue.flush()
        if kind == "file":
            # Slots come last in the file.
            changed = last_change(before, world.path.read_bytes())
        else:
            changed = block_start(world.path, 5) + 4096 + 16
        with world.path.open("r+b") as file:
            file.seek(changed)
            file.write(b"\0" * 12)
        scrubbed = await scrub_of(world)
        assert [(f.lba, f.repairable) for f in scrubbed.findings] == [(5, False)]
        assert (scrubbed.found, scrubbed.repaired, health(world)) == (1, 0, "damaged")
        content = bytearray(4096)
        with pytest.raises(NvmeStatusError):
            await queue.read(5, content)
        assert (await scrub_of(world)).found == 1
        await queue.write(5, b"1" * 4096)
        await queue.read(5, content)
        assert content == b"1" * 4096
        assert ((await scrub_of(world)).found, health(world)) == (0, "good")


@pytest.mark.parametrize("kind", ["file", "inline"])
async def test_pages_of_nodes_and_log_that_are_wrong_are_written_again_before_an_opening_needs_them(
    tmp_path: Path, kind: Literal["file", "inline"]
) -> None:
    unit = 4096 if kind == "file" else 4160
    async with make_world(tmp_path, store_kind=kind) as world:
        assert world.path is not None
        async with world.queue() as queue:
            await queue.write(5, b"1" * 4096)
            await queue.flush()
        with world.path.open("r+b") as file:
            # The superblock, and pages of the log.
            for page in (0, 3, 4):
                file.seek(page * unit + 30)
                file.write(b"\xff" * 8)
        scrubbed = await scrub_of(world)
        assert {f.reason for f in scrubbed.findings} == {"store.damaged"}
        assert (scrubbed.repaired, health(world)) == (scrubbed.found, "good")
        assert scrubbed.found >= 2
        await world.event(lambda e: e.kind == "repaired", at_target=True)
    target = Target(traddr="127.0.0.1", trsvcid=0, store_kind=kind, directory=tmp_path)
    await target.start()
    try:
        await target.open_volume(world.volume_id, sector_count=8192)
        await target.jobs(world.volume_id).start("scrub", bytes_per_second=0)
        job = await ended(target.jobs(world.volume_id))
        assert (job.checked, job.found) == (1, 0)
    finally:
        await target.stop()


def last_change(before: bytes, after: bytes) -> int:
    """Return the offset of the last 4 KiB page that differs."""
    starts = range(len(before) - len(before) % 4096, -1, -4096)
    return next(at for at in starts if before[at : at + 4096] != after[at : at + 4096])


async def scrub_of(world: World) -> Job:
    jobs = world.target.jobs(world.volume_id)
    await jobs.start("scrub", bytes_per_second=0)
    return await ended(jobs)


def health(world: World) -> str:
    status = store_status(
        kind="file",
        layout=world.target.layout(world.volume_id),
        anchor="none",
        statistics=world.target.statistics(world.volume_id),
        jobs=world.target.jobs(world.volume_id).list(),
    )
    return status.health


async def test_end_of_a_job_is_told(inline_world: World) -> None:
    jobs = inline_world.target.jobs(inline_world.volume_id)
    await jobs.start("refresh", bytes_per_second=0)
    await moved(jobs, lambda job: job.is_over)
    await inline_world.target.observe_jobs()
    await inline_world.event(
        lambda e: (
            (e.kind, e.detail) == ("job_finished", "refresh: 0 sectors checked, 0 found wrong")
        ),
        at_target=True,
    )
    await inline_world.target.observe_jobs()
    assert inline_world.target.take_events(inline_world.volume_id) == []


async def test_job_goes_on_at_its_place_when_the_target_starts_again(tmp_path: Path) -> None:
    async with make_world(tmp_path, store_kind="inline") as world:
        volume_id, count = world.volume_id, 0
        async with world.queue() as queue:
            for lba in range(0, SECTORS, 256):
                await queue.write(lba, bytes(4096))
                count += 1
        jobs = world.target.jobs(volume_id)
        # One piece immediately, the next one in hours.
        await jobs.start("scrub", bytes_per_second=1)
        first = await moved(jobs, lambda job: job.position > 0)
        assert first.checked == 1
    kept = json.loads((tmp_path / f"{volume_id}.jobs").read_text())
    assert (kept[0]["state"], kept[0]["position"]) == ("running", first.position)
    target = running(tmp_path)
    await target.start()
    try:
        await target.open_volume(volume_id, sector_count=8192)
        jobs = target.jobs(volume_id)
        resumed = jobs.list()[0]
        assert (resumed.state, resumed.interruptions) == ("running", 1)
        assert resumed.started == first.started
        await jobs.change("scrub", order="pause", bytes_per_second=None)
    finally:
        await target.stop()
    target = running(tmp_path)
    await target.start()
    try:
        await target.open_volume(volume_id, sector_count=8192)
        jobs = target.jobs(volume_id)
        assert (jobs.list()[0].state, jobs.list()[0].interruptions) == ("paused", 2)
        await jobs.change("scrub", order="resume", bytes_per_second=0)
        job = await ended(jobs)
        assert (job.state, job.checked, job.found) == ("finished", count, 0)
        assert job.position == job.sector_count == 8192
    finally:
        await target.stop()
    # Ended jobs stay listed.
    target = running(tmp_path)
    await target.start()
    try:
        await target.open_volume(volume_id, sector_count=8192)
        assert target.jobs(volume_id).list() == [job]
    finally:
        await target.stop()


async def test_cancelled_job_ends_and_another_may_begin(inline_world: World) -> None:
    async with inline_world.queue() as queue:
        await queue.write(0, bytes(4096))
        await queue.write(SECTORS, bytes(4096))
    jobs = inline_world.target.jobs(inline_world.volume_id)
    await jobs.start("scrub", bytes_per_second=1)
    with pytest.raises(UsageError, match="already running") as caught:
        await jobs.start("scrub", bytes_per_second=0)
    assert caught.value.reason == "volume.job.running"
    await jobs.change("scrub", order="cancel", bytes_per_second=None)
    assert (await moved(jobs, lambda job: job.is_over)).state == "cancelled"
    await inline_world.target.observe_jobs()
    await inline_world.event(lambda e: e.kind == "job_cancelled", at_target=True)
    with pytest.raises(UsageError) as caught:
        await jobs.change("scrub", order="resume", bytes_per_second=None)
    assert caught.value.reason == "volume.job.over"
    await jobs.start("scrub", bytes_per_second=0)
    assert (await ended(jobs)).state == "finished"


async def test_kinds_that_a_store_has_no_use_for_are_refused(world: World) -> None:
    jobs = world.target.jobs(world.volume_id)
    with pytest.raises(UsageError) as caught:
        await jobs.start("refresh", bytes_per_second=0)
    assert caught.value.reason == "volume.job.unsupported"
    with pytest.raises(UsageError) as caught:
        await jobs.change("refresh", order="pause", bytes_per_second=None)
    assert caught.value.reason == "volume.job.over"
    async with make_world(None, store_kind="memory") as memory:
        jobs = memory.target.jobs(memory.volume_id)
        with pytest.raises(UsageError) as caught:
            await jobs.start("scrub", bytes_per_second=0)
        assert caught.value.reason == "volume.job.unsupported"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" + b"1," * 1000,
        b'[{"kind":"scrub","state":"running","started":"2026-11-22T00:00:00Z","position":-1}]',
        b'[{"kind":"scrub","state":"running","started":"2026-11-22T00:00:00Z","more":1}]',
        b'[{"kind":"scrub","state":"running","started":"9999-12-31T23:59:59Z"}]',
        b'[{"kind":"scrub","state":"running","started":"0001-01-01T00:00:00+14:00"}]',
        b'[{"kind":"scrub","state":"running","started":"2026-11-22T00:00:00"}]',
        b'[{"kind":"dance","state":"running","started":"2026-11-22T00:00:00Z"}]',
        b" " * ((1 << 20) + 1),
    ],
)
async def test_file_of_jobs_that_is_not_in_form_is_left_aside(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "x.jobs"
    path.write_bytes(content)
    jobs = VolumeJobs(path)
    await jobs.load()
    assert jobs.list() == []
    with pytest.raises(UnavailableError) as caught:
        await jobs.start("scrub", bytes_per_second=0)
    assert caught.value.reason == "volume.job.closed"


def scrub(*, state: str, days: int) -> Job:
    end = None if state in {"running", "paused"} else NOW - dt.timedelta(days=days)
    return Job.model_validate(
        {"kind": "scrub", "state": state, "started": NOW - dt.timedelta(days=days), "ended": end}
    )


def test_scrubs_are_due_after_their_interval_the_oldest_first_and_one_at_a_time() -> None:
    a, b, c = (uuid.UUID(int=n) for n in (1, 2, 3))
    week = dt.timedelta(days=7)

    def due(**scrubs: Job | None) -> uuid.UUID | None:
        volumes = {"a": a, "b": b, "c": c}
        by_volume = {volumes[name]: job for name, job in scrubs.items()}
        return due_volume(by_volume, interval=week, now=NOW)

    finished = scrub(state="finished", days=8)
    assert due() is None
    assert due(a=scrub(state="finished", days=6)) is None
    assert due(a=finished, b=scrub(state="finished", days=9)) == b
    assert due(a=finished, b=None) == b, "never scrubbed"
    assert due(a=finished, b=scrub(state="running", days=0)) is None
    assert due(a=finished, b=scrub(state="paused", days=30)) == a
    assert due(a=scrub(state="cancelled", days=1)) is None
    assert due(a=scrub(state="finished", days=-400)) == a, "that is not true"


async def test_target_scrubs_by_itself_what_is_due(inline_world: World) -> None:
    world = inline_world
    jobs = world.target.jobs(world.volume_id)

    async def scrubs_for(config: ScrubConfig | None, *, until: Callable[[], bool]) -> None:
        tasks = TaskOwner()
        keeping = keep_jobs(world.target, volume_ids=lambda: [world.volume_id], config=config)
        tasks.start(keeping, name="jobs")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await asyncio.sleep(0.002)
                if until():
                    break
        await tasks.close()

    await scrubs_for(ScrubConfig(bytes_per_second=1 << 30), until=lambda: bool(jobs.list()))
    job = await ended(jobs)
    assert (job.kind, job.state, job.bytes_per_second) == ("scrub", "finished", 1 << 30)
    looks = 0

    def have_looked() -> bool:
        nonlocal looks
        looks += 1
        return looks > 5

    # It isn't due again; without a schedule, no job ever is.
    await scrubs_for(ScrubConfig(), until=have_looked)
    assert jobs.list()[0].started == job.started


async def test_opening_is_shown_while_it_lasts() -> None:
    openings, volume_id = Openings(), uuid.uuid4()
    with openings.shown(volume_id):
        assert openings.statistics() == {(str(volume_id),): {"done": 0, "expected": 0}}
    assert openings.statistics() == {}


async def test_file_of_jobs_goes_with_its_volume_and_is_no_stray(tmp_path: Path) -> None:
    async with make_world(tmp_path, store_kind="inline") as world:
        await world.target.jobs(world.volume_id).start("scrub", bytes_per_second=0)
        path = tmp_path / f"{world.volume_id}.jobs"
        assert path.exists()
        assert Catalogue(tmp_path).scan().strays == [
            (f"{world.volume_id}.sectors", "a store without a descriptor")
        ]
        await world.attached.detach()
        await world.target.close_volume(world.volume_id)
        await world.target.discard_store(world.volume_id)
        assert files(tmp_path) == []
