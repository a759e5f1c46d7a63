"""The operator's limits for sessions of this fabric."""

from dataclasses import dataclass, field
from pathlib import Path

from sealane.daemon.config import UNIT_BYTES
from sealane.daemon.fabric.steering import Steering


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Limits of one job, over all of its sessions; or of one user, over all of its jobs."""

    sessions: int = 16
    """Sessions and waiting listeners; a session has a queue pair in each direction."""
    region_bytes: int = 1 << 30
    """Shared memory of all of them, in bytes."""
    receives: int = 4096
    """Posted receives that have not ended."""
    sends: int = 4096
    """Posted sends and streams that have not ended."""
    rate_share: float = 1.0
    """Share of the fabric's rate, even if the fabric is otherwise idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSettings:
    """Limits and addresses; other parameters of a session are chosen by its two ends."""

    ring_socket: Path
    """Path of the Unix socket from which jobs fetch their rings."""
    rate_max_bits_per_second: int
    """For all sessions together, in wire bits per second, including headers and retransmissions."""
    region_bytes_max: int
    """Limit of one session's shared memory, in bytes."""
    sessions_max: int
    """Limit of sessions and waiting listeners together."""
    limits: JobLimits = field(default_factory=JobLimits)
    user_limits: JobLimits | None = None
    """Limits of all jobs of one user together; None: those of the fabric."""
    listen_data: tuple[str, ...] = ("127.0.0.1",)
    """Numeric addresses to bind data sockets to, each on a free port."""
    paths: int = 1
    """Limit of a session's paths between each of these addresses and the peer's at the same
    position."""
    idle_timeout_seconds: float = 60.0
    """A session ends if the peer is silent for this long."""
    reordering_micros: int = 0
    """Known skew of the paths: a packet may arrive this much later than one sent after it."""
    wires: tuple[str, ...] = ("udp",)
    """What carries packets: `udp`, `verbs` (RDMA devices that have an address of listen_data)."""
    verbs_mode: str = "send"
    """How peers bring packets to queue pairs: `send` into posted slots, or `write` to a ring."""
    pinned_bytes_max: int = 1 << 26
    """Limit of memory that RDMA devices may use for all sessions, in bytes."""
    path_threads: int = 0
    """Threads beside a session's own that seal, send, receive and open for its paths."""
    steering: Steering = field(default_factory=Steering)
    """Congestion control of sessions, and what jobs may choose."""
    establish_timeout_seconds: float = 10.0
    """Time limit from OpenSession until the path is validated."""
    drain_timeout_seconds: float = 10.0
    """Time limit for operations in flight when the fabric stops."""
    grant_timeout_seconds: float = 30.0
    """Time limit from a grant until the job has fetched its rings."""
    assumed_loss: float = 1e-5
    """Assumed share of packets that a path loses, until it has been measured."""
    plan_objective: str = "auto"
    """Which measure of a message's completion time to minimise: an `Objective` of the planner."""
    unit_bytes: int | None = UNIT_BYTES
    """Payload of a packet in bytes; None: as large as the path allows."""
    chunk_units: int = 16
    slots: int = 64
    ring_entries: int = 256

    @property
    def job_rate_bits_per_second(self) -> int:
        """Return the rate limit of one job."""
        return self.rate_of(self.limits)

    def rate_of(self, limits: JobLimits) -> int:
        """Return a limit of the rate, in bits per second on the wire."""
        return round(self.rate_max_bits_per_second * limits.rate_share)
