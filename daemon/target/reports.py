"""Reports to the broker's audit log: what jobs found, and which gateways took over."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError

WAITING_MAX: Final = 4096
"""Most reports that wait for a broker; later ones are only logged."""
LAST_SECONDS: Final = 2.0
"""Longest time that an orderly stop waits for a broker to answer the queued reports."""


class Recorder(Protocol):
    """Has a broker record something; UnavailableError: to be repeated later."""

    async def findings(self, volume_id: uuid.UUID, job: Job) -> None:
        """Record what a job found."""

    async def take_over(self, volume_id: uuid.UUID, take_over: TakeOver) -> None:
        """Record that a gateway took over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    send: Callable[[], Awaitable[None]]
    unrecorded: str
    """Log event of a report that isn't recorded."""
    detail: dict[str, str | int]


class Reports:
    """Keeps reports, in order, until a broker has answered; they end with the process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: dict[Hashable, _Report] = {}

    def note_findings(self, volume_id: uuid.UUID, job: Job) -> None:
        """Queue the report of a job that ended, if it found anything; it replaces an older one."""
        if job.found:
            report = _Report(
                send=partial(self._recorder.findings, volume_id, job),
                unrecorded="findings_not_recorded",
                detail={"volume_id": str(volume_id), "job": job.kind},
            )
            self._add((volume_id, job.kind), report)

    def note_take_over(self, volume_id: uuid.UUID, take_over: TakeOver) -> None:
        """Queue the report of a take-over."""
        report = _Report(
            send=partial(self._recorder.take_over, volume_id, take_over),
            unrecorded="take_over_not_recorded",
            detail={
                "volume_id": str(volume_id),
                "tenant": take_over.tenant,
                "gateway": take_over.host_nqn,
                "term": take_over.term,
            },
        )
        self._add((volume_id, take_over), report)

    async def send(self) -> None:
        """Send the queued reports; those that the broker refuses are logged and dropped."""
        for key, report in [*self._waiting.items()]:
            try:
                await report.send()
            except UnavailableError:
                return
            except Error as error:
                self._unrecorded(report, error.reason, str(error))
            if self._waiting.get(key) is report:
                del self._waiting[key]

    async def send_last(self) -> None:
        """Send the queued reports before the process ends, if a broker answers soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self.send()

    def _add(self, key: Hashable, report: _Report) -> None:
        if key not in self._waiting and len(self._waiting) >= WAITING_MAX:
            self._unrecorded(report, "report.limit", f"{WAITING_MAX} reports wait for a broker")
        else:
            self._waiting[key] = report

    def _unrecorded(self, report: _Report, reason: str, detail: str) -> None:
        get_logger().warning(report.unrecorded, **report.detail, reason=reason, detail=detail)
