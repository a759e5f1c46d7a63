"""A target's reports of findings to the broker: sent once, and retried until answered."""

import datetime as dt
import uuid

from sealane.daemon.target.finding_reports import FindingReports
from sealane.daemon.volume.jobs import Job
from sealane.errors import Error, UnavailableError, VerificationError

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
VOLUME, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)


def scrub(found: int) -> Job:
    return Job(kind="scrub", state="finished", started=NOW, found=found)


class Broker:
    def __init__(self) -> None:
        self.told: list[tuple[uuid.UUID, int]] = []
        self.error: Error | None = None

    async def record(self, volume_id: uuid.UUID, job: Job) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((volume_id, job.found))


async def test_findings_are_told_once_and_jobs_without_any_never() -> None:
    broker = Broker()
    reports = FindingReports(broker.record)
    reports.note(VOLUME, scrub(2))
    reports.note(OTHER, scrub(0))
    await reports.send()
    await reports.send()
    assert broker.told == [(VOLUME, 2)]


async def test_a_broker_that_gives_no_answer_is_told_the_latest_later() -> None:
    broker = Broker()
    broker.error = UnavailableError("broker.unreachable", "silent")
    reports = FindingReports(broker.record)
    reports.note(VOLUME, scrub(2))
    await reports.send()
    reports.note(VOLUME, scrub(3))
    await reports.send()
    broker.error = None
    await reports.send()
    assert broker.told == [(VOLUME, 3)]


async def test_what_the_broker_refuses_is_left() -> None:
    broker = Broker()
    broker.error = VerificationError("device.fenced", "another opening has it")
    reports = FindingReports(broker.record)
    reports.note(VOLUME, scrub(2))
    await reports.send()
    broker.error = None
    await reports.send()
    assert broker.told == []
