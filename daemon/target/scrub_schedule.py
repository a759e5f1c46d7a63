"""Automatic scrubs of a target's volumes: each volume after an interval, one at a time."""

import asyncio
import datetime as dt
import uuid
from collections.abc import Callable, Mapping, Sequence

from sealane.daemon.config import ScrubConfig
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.reports import Reports
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.kept_jobs import JOBS_SECONDS
from sealane.errors import Error
from sealane.protocol.kinds import JobKind, JobState


def due_volume(
    scrubs: Mapping[uuid.UUID, Job | None], *, interval: dt.timedelta, now: dt.datetime
) -> uuid.UUID | None:
    """Return the volume to scrub next; None if none is due or a scrub is running.

    `scrubs` has each volume's last scrub, or None. A cancelled scrub counts, too, so that no other
    one starts right after it. A paused scrub stays paused.
    """
    if any(job is not None and job.state == JobState.RUNNING for job in scrubs.values()):
        return None
    oldest = dt.datetime.min.replace(tzinfo=dt.UTC)
    ended = {
        volume_id: oldest if job is None else job.ended or job.started
        for volume_id, job in scrubs.items()
        if job is None or job.is_over
    }
    # An end in the future was written by somebody else or under another clock: it doesn't count.
    due = [volume_id for volume_id, end in ended.items() if not now - interval < end <= now]
    return min(due, key=lambda volume_id: (ended[volume_id], volume_id), default=None)


async def keep_jobs(
    target: Target,
    *,
    volume_ids: Callable[[], Sequence[uuid.UUID]],
    config: ScrubConfig | None,
    reports: Reports | None = None,
) -> None:
    """Until cancelled: record the progress of jobs, send reports, start scrubs that are due."""
    while True:
        for volume_id, job in await target.observe_jobs():
            if reports is not None:
                reports.note_findings(volume_id, job)
        if reports is not None:
            await reports.send()
        if config is not None:
            await _scrub_due(target, volume_ids(), config)
        await asyncio.sleep(JOBS_SECONDS)


async def _scrub_due(target: Target, volume_ids: Sequence[uuid.UUID], config: ScrubConfig) -> None:
    scrubs = {
        volume_id: next(
            (job for job in target.jobs(volume_id).list() if job.kind == JobKind.SCRUB), None
        )
        for volume_id in volume_ids
        if target.layout(volume_id)
    }
    interval = dt.timedelta(hours=config.interval_hours)
    volume_id = due_volume(scrubs, interval=interval, now=utc_now())
    if volume_id is None:
        return
    try:
        await target.jobs(volume_id).start(JobKind.SCRUB, bytes_per_second=config.bytes_per_second)
    except Error as error:
        get_logger().warning(
            "scrub_not_started", volume_id=str(volume_id), reason=error.reason, detail=str(error)
        )
