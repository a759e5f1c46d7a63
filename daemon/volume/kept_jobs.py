"""The background jobs of one volume: those of the engine, and their record in a file.

When its store is reopened, a job continues from its recorded position. The file is neither secret
nor authenticated: by changing it, an attacker can make a scrub skip a part of the volume, but reads
of that part are checked all the same.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from sealane import _native
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import read_bounded, write_durably
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.jobs import FINDINGS_MAX, Finding, Job, clipped
from sealane.daemon.volume.store_calls import on_store_thread
from sealane.errors import Error, UnavailableError, UsageError, foreign_reason
from sealane.protocol.kinds import JobKind, JobOrder, JobState

JOBS_SECONDS: Final = 1.0
"""Interval at which jobs are observed."""
SAVE_SECONDS: Final = 30.0
"""Interval at which progress is saved: how much work a kill can cost."""
_JOBS: Final = TypeAdapter(tuple[Job, ...])


class VolumeJobs:
    """Jobs of a volume while it is served, during which its store may be reopened."""

    def __init__(self, path: Path | None = None) -> None:
        """Keep the jobs in the file `path`, or in memory only."""
        self._path = path
        self._native: _native.Namespace | None = None
        self._kept: dict[JobKind, Job] = {}
        """Each job without the engine's progress since its store was opened."""
        self._running: set[JobKind] = set()
        self._saved = b""
        self._saved_at = 0.0
        self._saving = asyncio.Lock()

    async def load(self) -> None:
        """Read the file; one that is malformed or unreadable is logged and ignored."""
        if self._path is None:
            return
        try:
            content = await asyncio.to_thread(read_bounded, self._path)
            jobs = _JOBS.validate_json(content)
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            get_logger().warning(
                "jobs_file_refused", path=str(self._path), detail=type(error).__name__
            )
            return
        self._kept = {job.kind: job for job in jobs}
        self._saved = content

    def open(self, native: _native.Namespace) -> None:
        """Resume unfinished jobs on a store that was just opened."""
        self._native = native
        for kind, job in self._kept.items():
            if job.state not in {JobState.RUNNING, JobState.PAUSED, JobState.FAILED}:
                continue
            resumed = job.model_copy(
                update={
                    "state": JobState.PAUSED if job.state == JobState.PAUSED else JobState.RUNNING,
                    "detail": "",
                    "ended": None,
                    "interruptions": job.interruptions + 1,
                    "run_position": job.position,
                }
            )
            try:
                self._begin(native, resumed)
            except Error as error:
                self._kept[kind] = job.model_copy(
                    update={"state": JobState.INTERRUPTED, "detail": clipped(str(error))}
                )

    async def start(self, kind: JobKind, *, bytes_per_second: int) -> Job:
        """Start a job from the beginning.

        UsageError `volume.job.running`, `volume.job.unsupported`; UnavailableError `store.failed`,
        `volume.job.closed`.
        """
        job = Job(
            kind=kind, state=JobState.RUNNING, bytes_per_second=bytes_per_second, started=utc_now()
        )
        self._begin(self._opened(), job)
        await self._save()
        return self._job(kind)

    async def change(
        self, kind: JobKind, *, order: JobOrder | None, bytes_per_second: int | None
    ) -> Job:
        """Set a job's rate, then give it an order.

        UsageError `volume.job.over` if the job isn't running; UnavailableError `volume.job.closed`.
        """
        native = self._opened()
        with _refusals():
            if bytes_per_second is not None:
                native.set_job_rate(kind, bytes_per_second)
            if order is not None:
                native.order_job(kind, order)
        await self._save()
        return self._job(kind)

    def list(self) -> Sequence[Job]:
        """Return the last job of each kind."""
        # A copy, since the metrics thread calls this, too.
        return [self._job(kind) for kind in [*self._kept]]

    async def observe(self) -> Sequence[Job]:
        """Record the progress of all jobs; return those that have ended since the last call."""
        ended = []
        for kind in [*self._running]:
            job = self._job(kind)
            if job.is_over:
                self._running.discard(kind)
                ended.append(self._settle(kind, job))
        if ended or (self._running and time.monotonic() >= self._saved_at + SAVE_SECONDS):
            await self._save()
        return ended

    async def close(self, *, keep: bool) -> None:
        """End the engine's jobs, which continue at the next opening.

        `keep` saves them, so that they continue even in another process.
        """
        native = self._native
        if native is None:
            return
        before = {kind: self._job(kind) for kind in self._running}
        await on_store_thread(native.end_jobs)
        for kind, was in before.items():
            job = self._job(kind)
            if job.state == JobState.INTERRUPTED:
                job = job.model_copy(update={"state": was.state})
            self._settle(kind, job)
        self._running.clear()
        self._native = None
        if keep:
            await self._save()

    def statistics(self) -> dict[str, int]:
        """Return figures for the metrics."""
        figures: dict[str, int] = {}
        for job in self.list():
            figures |= {
                f"{job.kind}_running": int(job.state == JobState.RUNNING),
                f"{job.kind}_position": job.position,
                f"{job.kind}_checked": job.checked,
                f"{job.kind}_found": job.found,
                f"{job.kind}_repaired": job.repaired,
            }
            if job.ended is not None:
                figures[f"{job.kind}_ended_seconds"] = int(job.ended.timestamp())
        return figures

    def _begin(self, native: _native.Namespace, job: Job) -> None:
        with _refusals():
            native.start_job(
                job.kind,
                position=job.position,
                bytes_per_second=job.bytes_per_second,
                paused=job.state == JobState.PAUSED,
            )
        self._kept[job.kind] = job
        self._running.add(job.kind)

    def _opened(self) -> _native.Namespace:
        if self._native is None:
            raise UnavailableError("volume.job.closed", "the volume's store is not open now")
        return self._native

    def _job(self, kind: JobKind) -> Job:
        """Return a job, including the engine's progress since its store was opened."""
        job = self._kept.get(kind)
        if job is None:
            raise UsageError("volume.job.over", f"no {kind} of this volume is running")
        native = self._native
        if native is None or kind not in self._running:
            return job
        done = next(done for done in native.jobs() if done["kind"] == kind)
        return _added(job, done)

    def _settle(self, kind: JobKind, job: Job) -> Job:
        """Record a job that the engine no longer reports."""
        if job.is_over:
            job = job.model_copy(update={"ended": utc_now()})
        self._kept[kind] = job
        return job

    async def _save(self) -> None:
        if self._path is None:
            return
        async with self._saving:
            self._saved_at = time.monotonic()
            content = _JOBS.dump_json(tuple(self.list()))
            if content == self._saved:
                return
            try:
                await asyncio.to_thread(write_durably, self._path, content)
            except OSError as error:
                # The only loss: the job would resume from where it was last saved.
                get_logger().warning(
                    "jobs_file_unwritten", path=str(self._path), detail=error.strerror
                )
            else:
                self._saved = content


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Convert the engine's refusals of jobs to errors of `sealane.errors`."""
    try:
        yield
    except _native.JobRefusedError as error:
        reason, text = foreign_reason(error.args[0]), error.args[1]
        if reason == "store.failed":
            raise UnavailableError(reason, text) from error
        raise UsageError(reason, text) from error


def _added(job: Job, done: "_native.JobStatus") -> Job:
    """Return `job` plus the engine's progress since the store was opened."""
    findings = [
        Finding(lba=lba, reason=reason, detail=clipped(detail), repairable=repairable)
        for lba, reason, detail, repairable in done["findings"]
    ]
    return job.model_copy(
        update={
            "state": JobState(done["state"]),
            "detail": clipped(done["detail"]),
            "position": done["position"],
            "sector_count": done["total"],
            "checked": job.checked + done["checked"],
            "unchecked": job.unchecked + done["unchecked"],
            "refreshed": job.refreshed + done["refreshed"],
            "found": job.found + done["found"],
            "repaired": job.repaired + done["repaired"],
            "findings": (*job.findings, *findings)[:FINDINGS_MAX],
            "bytes_moved": job.bytes_moved + done["bytes"],
            "bytes_per_second": done["bytes_per_second"],
            "active_ms": job.active_ms + done["active_ms"],
            "run_active_ms": done["active_ms"],
            "yields": job.yields + done["yields"],
        }
    )
