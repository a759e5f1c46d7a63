"""Statistics of a fabric's sessions and jobs, for the metrics, and what the log says of them.

The metrics' thread reads them while the event loop changes the originals, hence the copies.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from sealane.daemon.fabric.jobs import Job, Jobs, memory_of
from sealane.daemon.fabric.session import Session
from sealane.daemon.runtime.logs import get_logger

RATE_CUTS_SECONDS: Final = 1.0
"""Time between two looks for circuit breakers that tripped."""


class Statistics:
    """Counters of one fabric, as of each call."""

    def __init__(self, sessions: dict[str, Session], jobs: Jobs) -> None:
        self._living = sessions
        self._jobs = jobs

    def sessions(self) -> dict[str, dict[str, int]]:
        """Return the statistics of the open sessions, by name."""
        return {name: session.statistics() for name, session in self._living.copy().items()}

    def paths(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return them by session and path number, for sessions with several paths."""
        return path_statistics(self._living.copy())

    def jobs(self) -> dict[str, dict[str, int]]:
        """Return what each job uses, by name."""
        return {job.name: job_usage(job) for job in self._jobs.list()}

    async def log_rate_cuts(self) -> None:
        """Log each circuit breaker that tripped, until cancelled."""
        before = self.sessions()
        while True:
            await asyncio.sleep(RATE_CUTS_SECONDS)
            after = self.sessions()
            for name in rate_cuts(before, after):
                get_logger().warning(
                    "session_rate_cut",
                    session=name,
                    rate_bits_per_second=8 * after[name]["rate_bytes_per_second"],
                )
            before = after


def job_usage(job: Job) -> dict[str, int]:
    """Return what a job uses and has used, by metric name."""
    regions = [*job.regions.values()]
    return {
        "sessions": len(regions),
        "region_bytes": memory_of(regions),
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
    """Return the sessions whose circuit breaker cut the rate between two looks."""

    def trips(look: Mapping[str, Mapping[str, int]], name: str) -> int:
        # A session has no statistics before its worker starts.
        return look.get(name, {}).get("breaker_trips", 0)

    return [name for name in after if trips(after, name) > trips(before, name)]
