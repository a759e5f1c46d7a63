"""Reports of jobs' findings, from a target to the broker's audit log."""

import uuid
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.jobs import Job
from sealane.errors import Error, UnavailableError
from sealane.protocol.kinds import JobKind

Report: TypeAlias = Callable[[uuid.UUID, Job], Awaitable[None]]


class FindingReports:
    """Keeps unreported findings: the last job of each kind of each volume."""

    def __init__(self, report: Report) -> None:
        """Report by `report`; if it raises UnavailableError, the report is sent again later."""
        self._report = report
        self._waiting: dict[tuple[uuid.UUID, JobKind], Job] = {}

    def note(self, volume_id: uuid.UUID, job: Job) -> None:
        """Queue the report of a job that ended, if it found anything."""
        if job.found:
            self._waiting[volume_id, job.kind] = job

    async def send(self) -> None:
        """Send the queued reports; those that the broker refuses are logged and dropped."""
        for key, job in [*self._waiting.items()]:
            volume_id, kind = key
            try:
                await self._report(volume_id, job)
            except UnavailableError:
                return
            except Error as error:
                get_logger().warning(
                    "findings_not_recorded",
                    volume_id=str(volume_id),
                    job=kind,
                    reason=error.reason,
                    detail=str(error),
                )
            if self._waiting.get(key) is job:
                del self._waiting[key]
