"""Snapshots of the counters of a fabric's sessions and jobs, for readers on other threads."""

import asyncio
from collections.abc import Mapping

from sealane.daemon.fabric.jobs import Job, Jobs, memory_of
from sealane.daemon.fabric.session import Session
from sealane.daemon.runtime.logs import get_logger

INTERVAL_SECONDS = 1.0
"""Time between two snapshots."""


class Snapshots:
    """Counters of one fabric; each snapshot is replaced as a whole, never modified."""

    def __init__(self, sessions: Mapping[str, Session], jobs: Jobs) -> None:
        self._living = sessions
        self._living_jobs = jobs
        self.sessions: dict[str, dict[str, int]] = {}
        """Statistics by session."""
        self.paths: dict[tuple[str, ...], dict[str, int]] = {}
        """The same by session and path number, for sessions with several paths."""
        self.jobs: dict[str, dict[str, int]] = {}
        """The same by job."""

    async def keep(self) -> None:
        """Take a snapshot every second until cancelled; log circuit breakers that tripped."""
        while True:
            before = self.sessions
            self.sessions = {
                name: dict(session.statistics()) for name, session in self._living.items()
            }
            self.paths = path_statistics(self._living)
            self.jobs = {job.name: job_usage(job) for job in self._living_jobs.list()}
            for name in rate_cuts(before, self.sessions):
                get_logger().warning(
                    "session_rate_cut",
                    session=name,
                    rate_bits_per_second=8 * self.sessions[name]["rate_bytes_per_second"],
                )
            await asyncio.sleep(INTERVAL_SECONDS)


def job_usage(job: Job) -> dict[str, int]:
    """Return what a job uses and has used, by metric name."""
    return {
        "sessions": len(job.regions),
        "region_bytes": memory_of(job.regions.values()),
        **job.account.usage(),
    }


def path_statistics(sessions: Mapping[str, Session]) -> dict[tuple[str, ...], dict[str, int]]:
    """Return the counters of each path of sessions with several, by session and path number."""
    several = {name: paths for name, each in sessions.items() if len(paths := each.paths()) > 1}
    return {
        (name, str(number)): path.statistics | {"validated": int(path.state == "validated")}
        for name, paths in several.items()
        for number, path in enumerate(paths)
    }


def rate_cuts(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Return the sessions whose circuit breaker cut the rate between two snapshots."""

    def trips(snapshot: Mapping[str, Mapping[str, int]], name: str) -> int:
        # A session has no statistics before its worker starts.
        return snapshot.get(name, {}).get("breaker_trips", 0)

    return [name for name in after if trips(after, name) > trips(before, name)]
