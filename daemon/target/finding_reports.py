"""Reports of what jobs found wrong, from a target to the broker's audit log."""

import uuid
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.jobs import Job
from sealane.errors import Error, UnavailableError
from sealane.protocol.kinds import JobKind

Report: TypeAlias = Callable[[uuid.UUID, Job], Awaitable[None]]


class FindingReports:
    """Keeps what wasn't reported yet: of each volume the last job of each kind."""

    def __init__(self, report: Report) -> None:
        """`report` has the broker record a job's findings; UnavailableError: it is asked again."""
        self._report = report
        self._waiting: dict[tuple[uuid.UUID, JobKind], Job] = {}

    def note(self, volume_id: uuid.UUID, job: Job) -> None:
        """Have a job that ended reported, if it found anything."""
        if job.found:
            self._waiting[volume_id, job.kind] = job

    async def send(self) -> None:
        """Report what waits; what the broker refuses is logged and left."""
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
