"""State of a volume's store, and its background jobs."""

import datetime as dt
from dataclasses import dataclass

from sealane.protocol.kinds import JobState
from sealane.protocol.v1 import storage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinding:
    """A fault that a job found; `lba` None: in a page that belongs to no single sector."""

    lba: int | None
    reason: str
    detail: str
    repairable: bool
    """True if the store has the right content, which it writes at the job's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeJob:
    """A background job; positions and counts are of sectors.

    `state` is "running", "paused", "finished", "cancelled", "interrupted" or "failed" (`detail`
    says why). `checked`: written sectors that were read; `unchecked`: sectors that can't be
    checked, because their leaf page is damaged; `refreshed`: sectors with a current fast-path MAC.
    `found` counts all faults, `repaired` those that were repaired; `findings` has the first 64.
    `yields`: how often the job paused for hosts' commands.
    """

    kind: str
    state: str
    detail: str
    position: int
    sector_count: int
    checked: int
    unchecked: int
    refreshed: int
    found: int
    repaired: int
    findings: tuple[JobFinding, ...]
    bytes_moved: int
    bytes_per_second: int
    """Limit of the rate; 0: none."""
    active_seconds: float
    """Without pauses."""
    yields: int
    interruptions: int
    started: dt.datetime
    ended: dt.datetime | None
    seconds_left: float | None
    """At the average rate since its store was opened; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeStore:
    """State of a store; without a `layout` it keeps no freshness.

    `anchor_age_seconds` is the time since the anchor last advanced in this opening.
    `recovery_seconds` is how long the last opening took, `recovered_changes` the changes that it
    read from `recovered_log_pages` pages of log. `health` is "good", "unknown" (no complete scrub
    yet), "damaged", "failed" (it refuses commands until it is opened again) or "opening": then
    `opening_done` of `opening_expected` pages and records are read, and nothing else is known.
    """

    kind: str
    health: str
    opening_done: int
    opening_expected: int
    sectors_written: int
    layout: str
    anchor: str
    anchor_number: int
    anchor_age_seconds: float | None
    pending: int
    pending_max: int
    log_pages_used: int
    log_pages_max: int
    root_commits: int
    epoch: int
    leaf_cache_pages: int
    leaf_cache_hits: int
    leaf_cache_misses: int
    recovery_seconds: float
    recovered_changes: int
    recovered_log_pages: int
    jobs: tuple[VolumeJob, ...]
    """The latest of each kind."""


def job_of(message: storage_pb2.VolumeJob) -> VolumeJob:
    """Convert from the wire."""
    findings = tuple(
        JobFinding(
            lba=found.lba if found.HasField("lba") else None,
            reason=found.reason,
            detail=found.detail,
            repairable=found.repairable,
        )
        for found in message.findings
    )
    ended = message.end_time.ToDatetime(tzinfo=dt.UTC) if message.HasField("end_time") else None
    return VolumeJob(
        kind=message.kind,
        state=message.state,
        detail=message.detail,
        position=message.position,
        sector_count=message.sector_count,
        checked=message.checked,
        unchecked=message.unchecked,
        refreshed=message.refreshed,
        found=message.found,
        repaired=message.repaired,
        findings=findings,
        bytes_moved=message.bytes_moved,
        bytes_per_second=message.bytes_per_second,
        active_seconds=message.active_ms / 1000,
        yields=message.yields,
        interruptions=message.interruptions,
        started=message.start_time.ToDatetime(tzinfo=dt.UTC),
        ended=ended,
        seconds_left=_seconds_left(message),
    )


def _seconds_left(message: storage_pb2.VolumeJob) -> float | None:
    done = message.position - message.run_position
    if message.state != JobState.RUNNING or done <= 0:
        return None
    left = message.sector_count - message.position
    return left * message.run_active_ms / 1000 / done


def store_of(message: storage_pb2.StoreStatus) -> VolumeStore:
    """Convert from the wire."""
    age = message.anchor_age_ms / 1000 if message.HasField("anchor_age_ms") else None
    return VolumeStore(
        kind=message.kind,
        health=message.health,
        opening_done=message.opening_done,
        opening_expected=message.opening_expected,
        sectors_written=message.sectors_written,
        layout=message.layout,
        anchor=message.anchor,
        anchor_number=message.anchor_number,
        anchor_age_seconds=age,
        pending=message.pending,
        pending_max=message.pending_max,
        log_pages_used=message.log_pages_used,
        log_pages_max=message.log_pages_max,
        root_commits=message.root_commits,
        epoch=message.epoch,
        leaf_cache_pages=message.leaf_cache_pages,
        leaf_cache_hits=message.leaf_cache_hits,
        leaf_cache_misses=message.leaf_cache_misses,
        recovery_seconds=message.recovery_ms / 1000,
        recovered_changes=message.recovered_changes,
        recovered_log_pages=message.recovered_log_pages,
        jobs=tuple(map(job_of, message.jobs)),
    )
