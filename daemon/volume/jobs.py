"""Background jobs of a volume, which survive restarts of its store."""

import datetime as dt
from typing import Annotated, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from sealane.errors import UsageError
from sealane.protocol.kinds import JobKind, JobOrder, JobState
from sealane.protocol.v1 import storage_pb2

RATE_MAX: Final = 1 << 40
FINDINGS_MAX: Final = 64
REASONS_MAX: Final = 16
"""Distinct reason ids reported for one job."""
REASON_MAX: Final = 80
_TEXT_MAX: Final = 500
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Text = Annotated[str, Field(max_length=_TEXT_MAX)]
# A file may contain anything; within these bounds, arithmetic with times can't overflow.
_Moment = Annotated[
    AwareDatetime,
    Field(ge=dt.datetime(2000, 1, 1, tzinfo=dt.UTC), lt=dt.datetime(2500, 1, 1, tzinfo=dt.UTC)),
]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Finding(_Record):
    """A fault that a job found; `lba` is None for a page that belongs to no single sector."""

    lba: _Count | None
    reason: _Text
    detail: _Text
    repairable: bool = False
    """True if the store knows the right content, and rewrites it at the job's end."""


class Job(_Record):
    """The progress of a job; `position` and counts are in sectors, rates in bytes per second."""

    kind: Annotated[JobKind, Field(strict=False)]
    state: Annotated[JobState, Field(strict=False)]
    detail: _Text = ""
    position: _Count = 0
    sector_count: _Count = 0
    checked: _Count = 0
    unchecked: _Count = 0
    refreshed: _Count = 0
    found: _Count = 0
    repaired: _Count = 0
    findings: Annotated[tuple[Finding, ...], Field(max_length=FINDINGS_MAX)] = ()
    bytes_moved: _Count = 0
    bytes_per_second: Annotated[int, Field(ge=0, le=RATE_MAX)] = 0
    active_ms: _Count = 0
    yields: _Count = 0
    interruptions: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    started: _Moment
    ended: _Moment | None = None
    run_position: _Count = 0
    """`position` when its store was last opened."""
    run_active_ms: _Count = 0

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self.state not in {JobState.RUNNING, JobState.PAUSED}


def clipped(text: str) -> str:
    """Return a text, cut to the length that a record may have."""
    return text[:_TEXT_MAX]


def job_kind(text: str) -> JobKind:
    """Return the kind of that name; UsageError `volume.job.kind`."""
    try:
        return JobKind(text)
    except ValueError:
        raise UsageError(
            "volume.job.kind", f"job {text[:80]!r}; allowed: {', '.join(JobKind)}"
        ) from None


def job_order(text: str) -> JobOrder | None:
    """Return the order of that name, None for none; UsageError `volume.job.order`."""
    if not text:
        return None
    try:
        return JobOrder(text)
    except ValueError:
        raise UsageError(
            "volume.job.order", f"order {text[:80]!r}; allowed: {', '.join(JobOrder)}"
        ) from None


def job_rate(bytes_per_second: int) -> int:
    """Check a rate; UsageError `volume.job.rate`."""
    if not 0 <= bytes_per_second <= RATE_MAX:
        raise UsageError(
            "volume.job.rate",
            f"rate {bytes_per_second}; allowed: 0 (no limit) to {RATE_MAX} bytes/s",
        )
    return bytes_per_second


def job_message(job: Job) -> storage_pb2.VolumeJob:
    """Return a job as a gRPC message."""
    message = storage_pb2.VolumeJob(
        **job.model_dump(exclude={"findings", "started", "ended"}),
        findings=[storage_pb2.JobFinding(**f.model_dump(exclude_none=True)) for f in job.findings],
    )
    message.start_time.FromDatetime(job.started)
    if job.ended is not None:
        message.end_time.FromDatetime(job.ended.astimezone(dt.UTC))
    return message
