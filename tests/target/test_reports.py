"""A target's reports to the broker: each sent once, and retried until answered."""

import asyncio
import datetime as dt
import uuid
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from sealane.daemon.target import reports as reports_module
from sealane.daemon.target.reports import Reports
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.kinds import TakeOverCause

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
VOLUME, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)
TAKEN = TakeOver(
    tenant="acme",
    group=bytes(32),
    host_nqn="h",
    fenced="g",
    term=1,
    cause=TakeOverCause.HOST,
    accepts_loss=False,
)
AGAIN = replace(TAKEN, host_nqn="g", fenced="h", term=2)


def scrub(found: int) -> Job:
    return Job(kind="scrub", state="finished", started=NOW, found=found)


class Broker:
    def __init__(self) -> None:
        self.told: list[tuple[uuid.UUID, int | TakeOver]] = []
        self.error: Error | None = None

    async def findings(self, volume_id: uuid.UUID, job: Job) -> None:
        self.tell(volume_id, job.found)

    async def take_over(self, volume_id: uuid.UUID, take_over: TakeOver) -> None:
        self.tell(volume_id, take_over)

    def tell(self, volume_id: uuid.UUID, what: int | TakeOver) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((volume_id, what))


async def test_findings_are_told_once_and_jobs_without_any_never() -> None:
    broker = Broker()
    reports = Reports(broker)
    reports.note_findings(VOLUME, scrub(2))
    reports.note_findings(OTHER, scrub(0))
    await reports.send()
    await reports.send()
    assert broker.told == [(VOLUME, 2)]


async def test_a_broker_that_gives_no_answer_is_told_the_latest_later() -> None:
    broker = Broker()
    broker.error = UnavailableError("broker.unreachable", "silent")
    reports = Reports(broker)
    reports.note_findings(VOLUME, scrub(2))
    await reports.send()
    reports.note_findings(VOLUME, scrub(3))
    await reports.send()
    broker.error = None
    await reports.send()
    assert broker.told == [(VOLUME, 3)]


async def test_every_take_over_is_told_in_order_once_the_broker_is_back() -> None:
    broker = Broker()
    broker.error = UnavailableError("broker.unreachable", "silent")
    reports = Reports(broker)
    reports.note_take_over(VOLUME, TAKEN)
    await reports.send()
    reports.note_take_over(VOLUME, AGAIN)
    broker.error = None
    await reports.send()
    await reports.send()
    assert broker.told == [(VOLUME, TAKEN), (VOLUME, AGAIN)]


async def test_what_the_broker_refuses_is_left() -> None:
    broker = Broker()
    broker.error = VerificationError("device.fenced", "another opening has it")
    reports = Reports(broker)
    reports.note_findings(VOLUME, scrub(2))
    with capture_logs() as logs:
        await reports.send()
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("findings_not_recorded", "device.fenced")
    ]
    broker.error = None
    await reports.send()
    assert broker.told == []


async def test_a_stop_tells_what_waits_and_does_not_wait_for_a_silent_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker()
    reports = Reports(broker)
    reports.note_take_over(VOLUME, TAKEN)
    await reports.send_last()
    assert broker.told == [(VOLUME, TAKEN)]

    async def silent(volume_id: uuid.UUID, take_over: TakeOver) -> None:
        broker.told.append((volume_id, take_over))
        await asyncio.Event().wait()

    monkeypatch.setattr(broker, "take_over", silent)
    monkeypatch.setattr(reports_module, "LAST_SECONDS", 0.01)
    reports.note_take_over(VOLUME, AGAIN)
    async with asyncio.timeout(1):
        await reports.send_last()
    assert broker.told[1:] == [(VOLUME, AGAIN)]


async def test_only_so_many_reports_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "WAITING_MAX", 1)
    broker = Broker()
    reports = Reports(broker)
    reports.note_take_over(VOLUME, TAKEN)
    with capture_logs() as logs:
        reports.note_take_over(VOLUME, AGAIN)
    assert [line["event"] for line in logs] == ["take_over_not_recorded"]
    await reports.send()
    assert broker.told == [(VOLUME, TAKEN)]
