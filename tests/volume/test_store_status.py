"""The inputs of a store's health."""

import datetime as dt

import pytest

from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.store_status import store_status
from sealane.protocol.kinds import JobKind, JobState

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)


def job(kind: JobKind = "scrub", state: JobState = "finished", **counts: int) -> Job:
    return Job(kind=kind, state=state, started=NOW, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("jobs", "failed", "health"),
    [
        ([], 0, "unknown"),
        ([job(state="running")], 0, "unknown"),
        ([job(state="cancelled")], 0, "unknown"),
        ([job("refresh")], 0, "unknown"),
        ([job()], 0, "good"),
        ([job(found=3, repaired=3)], 0, "good"),
        ([job(found=3, repaired=2)], 0, "damaged"),
        ([job(state="running", found=1)], 0, "damaged"),
        ([job(), job("refresh", found=1)], 0, "damaged"),
        ([job(found=1)], 1, "failed"),
        ([job()], 1, "failed"),
    ],
)
def test_health_is_that_of_the_last_jobs_and_of_a_store_that_failed(
    jobs: list[Job], failed: int, health: str
) -> None:
    def status(layout: str) -> str:
        statistics = {"failed": failed}
        return store_status(
            kind="file", layout=layout, anchor="none", statistics=statistics, jobs=jobs
        ).health

    assert status("out of place") == health
    assert status("") == "", "it keeps no freshness"


def test_a_store_with_sets_orphaned_since_the_last_scrub_is_damaged() -> None:
    for orphaned, health in ((0, "good"), (1, "damaged")):
        status = store_status(
            kind="file",
            layout="in place",
            anchor="none",
            statistics={"orphaned_sets": orphaned},
            jobs=[job()],
        )
        assert status.health == health
