"""Checks of requests against the operator's limits, for one session and for one job."""

import itertools
from dataclasses import dataclass

from sealane._native import SharedRegion
from sealane.daemon.fabric.jobs import Job, memory_of
from sealane.daemon.fabric.settings import FabricSettings, JobLimits
from sealane.daemon.fabric.units import UNIT_BYTES_MIN, UNIT_CANDIDATES_MAX
from sealane.daemon.runtime.config_types import peer_address
from sealane.errors import UnavailableError, UsageError

REGION_BYTES_MIN = 4096
DISPLAY_NAME_MAX = 200
_SHOWN_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Checks of one fabric; each error names the configuration key to raise."""

    settings: FabricSettings

    def check_name(self, display_name: str) -> None:
        """UsageError for an empty or too long name."""
        if not 1 <= len(display_name) <= DISPLAY_NAME_MAX:
            raise UsageError(
                "session.display_name.length",
                f"display name of {len(display_name)} characters; allowed: 1 to {DISPLAY_NAME_MAX}",
            )

    def region(self, job: Job, *, region_bytes: int, region_of: str) -> int | SharedRegion:
        """Return the size in bytes of a new region, or the region of the job's session to share.

        The session for which the region was created may have ended, if the region is in use.

        UsageError for a size that no session may have, or if the job has no such session.
        """
        if region_of:
            shared = job.regions.get(region_of, job.created.get(region_of))
            if shared is None:
                raise UsageError(
                    "session.region.absent",
                    f"this job has no session {region_of[:_SHOWN_MAX]!r} whose region another "
                    "could share",
                )
            if region_bytes not in (0, shared.size_bytes):
                raise UsageError(
                    "session.region.range",
                    f"region of {region_bytes} bytes; the one to share has {shared.size_bytes}",
                )
            return shared
        if not REGION_BYTES_MIN <= region_bytes <= self.settings.region_bytes_max:
            raise UsageError(
                "session.region.range",
                f"region of {region_bytes} bytes; allowed: {REGION_BYTES_MIN} to "
                f"{self.settings.region_bytes_max} (fabric.region_bytes_max)",
            )
        return region_bytes

    def check_peer_address(self, address: str) -> None:
        """UsageError unless it is host and port: a job must not make the fabric call others."""
        try:
            peer_address(address)
        except ValueError as error:
            raise UsageError(
                "session.peer_address.malformed", f"{address[:_SHOWN_MAX]!r}; allowed: {error}"
            ) from error

    def units_among(self, units: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Return the peer's candidates that this fabric accepts, `most` bytes at most.

        UsageError if there are none, or if they are malformed.
        """
        is_falling = all(larger > smaller for larger, smaller in itertools.pairwise(units))
        if not (1 <= len(units) <= UNIT_CANDIDATES_MAX and is_falling):
            raise UsageError(
                "session.establish.malformed",
                f"units of {units} bytes; allowed: 1 to {UNIT_CANDIDATES_MAX} sizes in descending "
                "order",
            )
        fixed = self.settings.unit_bytes
        least = UNIT_BYTES_MIN if fixed is None else fixed
        most = max(most, UNIT_BYTES_MIN) if fixed is None else fixed
        found = tuple(unit for unit in units if least <= unit <= most)
        if not found:
            raise UsageError(
                "session.unit.range",
                f"units of {units} bytes; allowed: {least} to {most} (fabric.unit_bytes)",
            )
        return found

    def check_rate(self, rate_bits_per_second: int) -> None:
        """UsageError for a rate above the fabric's."""
        if not 8 <= rate_bits_per_second <= self.settings.rate_max_bits_per_second:
            raise UsageError(
                "session.rate.range",
                f"rate of {rate_bits_per_second} bit/s; allowed: 8 to "
                f"{self.settings.rate_max_bits_per_second} (fabric.rate_max_bits_per_second)",
            )

    def check_share(self, rate_bits_per_second: int) -> None:
        """UsageError for a rate above one job's or one user's share of the fabric's rate."""
        for owner, key, limits in (
            ("job", "fabric.limits", self.settings.limits),
            ("user", "fabric.jobs.limits", self.settings.user_limits),
        ):
            if limits is not None and rate_bits_per_second > self.settings.rate_of(limits):
                raise UsageError(
                    "session.limit.rate_share",
                    f"rate of {rate_bits_per_second} bit/s; allowed for one {owner}: "
                    f"{self.settings.rate_of(limits)} ({key}.rate_share = {limits.rate_share:g})",
                )

    def check_count(self, open_count: int) -> None:
        """UnavailableError if the fabric has the maximum number of sessions."""
        if open_count >= self.settings.sessions_max:
            raise UnavailableError(
                "session.count.limit",
                f"{self.settings.sessions_max} sessions are open or waiting for a peer: close "
                "one, or raise fabric.sessions_max",
            )

    def check_job(self, job: Job, *, region: int | SharedRegion) -> None:
        """UnavailableError if the sessions of the job or its user leave no room for another.

        `region`: the size of a new one in bytes, or one to share. The latter counts if no session
        has it any more.
        """
        _check_owner(
            job.name,
            [*job.regions.values()],
            self.settings.limits,
            region=region,
            key="fabric.limits",
        )
        if self.settings.user_limits is not None:
            _check_owner(
                f"user {job.user.uid}",
                job.user.regions,
                self.settings.user_limits,
                region=region,
                key="fabric.jobs.limits",
            )


def _check_owner(
    owner: str,
    regions: list[SharedRegion],
    limits: JobLimits,
    *,
    region: int | SharedRegion,
    key: str,
) -> None:
    if len(regions) >= limits.sessions:
        raise UnavailableError(
            "session.limit.sessions",
            f"{owner} has {limits.sessions} sessions open or waiting for a peer: close "
            f"one, or raise {key}.sessions",
        )
    used = memory_of(regions)
    more = region if isinstance(region, int) else memory_of([*regions, region]) - used
    if used + more > limits.region_bytes:
        raise UnavailableError(
            "session.limit.region_bytes",
            f"{owner} has regions of {used} bytes and asks for {more} more; "
            f"allowed: {limits.region_bytes} in all ({key}.region_bytes)",
        )
