"""What the health of a store is made of."""

import datetime as dt

import pytest

from sealane.daemon.jobs import Job, JobKind, JobState
from sealane.daemon.store_status import store_status

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
