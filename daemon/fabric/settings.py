"""What the operator allows sessions of this fabric to use."""

from dataclasses import dataclass, field
from pathlib import Path

from sealane.daemon.config import UNIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job may use, over all of its sessions."""

    sessions: int = 16
    """Sessions and waiting listeners; each is a queue pair each way."""
    region_bytes: int = 1 << 30
    """Shared memory of all of them."""
    receives: int = 4096
    """Posted and not ended."""
    sends: int = 4096
    """Sends and streams posted and not ended."""
    rate_share: float = 1.0
    """Of the fabric's rate, however idle it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSettings:
    """Limits and addresses; the rest of a session's parameters come from its two ends."""

    ring_socket: Path
    """Unix socket where jobs fetch their rings."""
    rate_max_bits_per_second: int
    """Of all sessions together, in wire bits, headers and retransmissions included."""
    region_bytes_max: int
    """Shared memory of one session."""
    sessions_max: int
    """Sessions and waiting listeners together."""
    limits: JobLimits = field(default_factory=JobLimits)
    listen_data: tuple[str, ...] = ("127.0.0.1",)
    """Numeric addresses that data sockets bind to, each on a free port."""
    paths: int = 1
    """Of a session between each of those and the peer's of the same place, at most."""
    idle_timeout_seconds: float = 60.0
    """Silence of the peer after which a session ends."""
    reordering_micros: int = 0
    """Known skew of the paths: a packet may come this much later than one sent after it."""
    establish_timeout_seconds: float = 10.0
    """From Open until the path is validated."""
    drain_timeout_seconds: float = 10.0
    """What a stopping fabric gives what is under way."""
    grant_timeout_seconds: float = 30.0
    """From a grant until the job has fetched its rings."""
    assumed_loss: float = 1e-5
    """Share of packets that a path is taken to lose before it has shown what it does."""
    plan_objective: str = "mean"
    """What of a message's completion time is to be small: an `Objective` of the planner."""
    unit_bytes: int | None = UNIT_BYTES
    """Payload of a packet; None: as large as the path carries."""
    chunk_units: int = 16
    slots: int = 64
    ring_entries: int = 256

    @property
    def job_rate_bits_per_second(self) -> int:
        """What a job may have of the rate."""
        return round(self.rate_max_bits_per_second * self.limits.rate_share)
