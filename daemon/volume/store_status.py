"""The status of a volume's store, for operators."""

from collections.abc import Mapping, Sequence
from typing import Final

from sealane.daemon.volume.jobs import Job, job_message
from sealane.protocol.kinds import JobKind, JobState, StoreHealth
from sealane.protocol.v1 import storage_pb2

_FIGURES: Final = {
    "anchor_number": "anchor_number",
    "anchor_age_ms": "anchor_age_ms",
    "pending": "pending_entries",
    "pending_max": "pending_max",
    "log_pages_used": "log_pages_used",
    "log_pages_max": "log_pages_max",
    "root_commits": "root_commits",
    "epoch": "epoch",
    "leaf_cache_pages": "leaf_cache_pages",
    "leaf_cache_hits": "leaf_cache_hits",
    "leaf_cache_misses": "leaf_cache_misses",
    "recovery_ms": "recovery_ms",
    "recovered_changes": "recovered_changes",
    "recovered_log_pages": "recovered_log_pages",
    "sectors_written": "sectors_written",
}
"""Engine statistic for each field of the message."""


def store_status(
    *,
    kind: str,
    layout: str,
    anchor: str,
    statistics: Mapping[str, int],
    jobs: Sequence[Job],
) -> storage_pb2.StoreStatus:
    """Return a store's status; without freshness, it has neither `layout` nor `anchor`."""
    figures = {f: statistics[name] for f, name in _FIGURES.items() if name in statistics}
    return storage_pb2.StoreStatus(
        kind=kind,
        layout=layout,
        anchor=anchor if layout else "",
        jobs=[job_message(job) for job in jobs],
        health=_health(statistics, jobs) if layout else "",
        **figures,
    )


def opening_status(kind: str, *, done: int, expected: int) -> storage_pb2.StoreStatus:
    """Return the status of a store being opened: pages and records processed, and expected."""
    return storage_pb2.StoreStatus(
        kind=kind, health=StoreHealth.OPENING, opening_done=done, opening_expected=expected
    )


def _health(statistics: Mapping[str, int], jobs: Sequence[Job]) -> StoreHealth:
    if statistics.get("failed"):
        return StoreHealth.FAILED
    scrub = next((job for job in jobs if job.kind == JobKind.SCRUB), None)
    if statistics.get("orphaned_sets") or any(job.found > job.repaired for job in jobs):
        # Faults found by reads only fail those reads. A later scrub that doesn't find a fault shows
        # that the sector was rewritten since.
        return StoreHealth.DAMAGED
    is_whole = scrub is not None and scrub.state == JobState.FINISHED
    return StoreHealth.GOOD if is_whole else StoreHealth.UNKNOWN
