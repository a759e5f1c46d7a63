"""What the control plane needs of the data path; `sealane.daemon.storage` provides it."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from sealane import _native
from sealane.crypto.lease import CounterRange
from sealane.daemon.jobs import Job, JobKind, JobOrder
from sealane.daemon.volume_device import OpenDevice
from sealane.protocol.nvme.authentication import HostSecret


class NativeEvent(Protocol):
    """An event as the engine reports it."""

    @property
    def kind(self) -> str:
        """Past participle, like "refused"."""

    @property
    def reason(self) -> str:
        """Stable reason id."""

    @property
    def lba(self) -> int:
        """Sector it is about."""

    @property
    def detail(self) -> str:
        """Free text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIncarnation:
    """One start of a peer's process: SPIFFE id and incarnation of the leaf it showed.

    With a `volume_id`: its use of a volume of this target that is another tenant's.
    """

    spiffe_id: str
    incarnation: bytes
    volume_id: str = ""
    is_read_only: bool = False

    @property
    def name(self) -> str:
        """For people and metrics."""
        return f"{self.spiffe_id} at {self.volume_id}" if self.volume_id else self.spiffe_id


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeKey:
    """What a gateway needs to seal and open a volume's sectors: keys by key epoch, all of them."""

    volume_id: uuid.UUID
    generation: int
    sector_count: int
    keys: Mapping[int, bytearray]
    fully_sealed: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGrant:
    """A secure back-end queue the target admits once."""

    ticket: bytes
    secret: bytearray
    association_epoch: int
    target_incarnation: int
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    host_nqn: str
    confirmed: bytes = b""
    """The milestone asked for: the target's store contains it."""
    milestone: bytes = b""
    """How far the target's store has come; empty: it keeps no freshness."""


ROLLED_BACK: Final = "volume.rolled_back"
"""A target's store lacks what it had flushed when it last told the gateway how far it had come."""

UNFLUSHED_LOST: Final = "volume.unflushed_lost"
"""The gateway's process and then the target's ended, with acknowledged, unflushed writes."""

VolumeFailure = Literal["gateway.barred", "volume.withdrawn"]
"""Why the control plane ends a volume: it may not act, or may not use the volume any more."""


class OpenQueue(Protocol):
    """Opens a queue. The first of an association epoch fences all older ones."""

    async def __call__(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Return what the target grants.

        VerificationError `volume.rolled_back` if its store doesn't contain `milestone`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Where the plain namespace of an attached volume is."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int


class AttachedPort(Protocol):
    """An attached volume of the gateway's data path."""

    @property
    def export(self) -> Export:
        """Where hosts connect."""

    @property
    def secret(self) -> HostSecret:
        """What the host must prove to know; made for this attachment."""

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        """Give the volume more counters; used in this order, after those it has."""

    def add_key(self, key_epoch: int, key: bytearray) -> None:
        """Give the volume the key of a newer epoch, which seals from now on; wipes it."""

    def replace_counters(self, granted: Sequence[CounterRange] = ()) -> list[CounterRange]:
        """Put other counters in the place of those that no queue was given; returns these."""

    def counters_remaining(self) -> int:
        """Counters not yet handed to a queue."""

    def statistics(self) -> Mapping[str, int]:
        """Counters of the engine."""

    def take_events(self) -> Sequence[NativeEvent]:
        """Events since the last call."""

    def fail(self, reason: VolumeFailure, detail: str) -> None:
        """End every command that is or will be under way with an error."""

    def settled_incarnation(self) -> int | None:
        """Return which process of the target alone can lose what is acknowledged from now on.

        None: something acknowledged before isn't durable, or no target is connected.
        """

    async def detach(self) -> bool:
        """Stop the export and its queues; whether everything that was acknowledged is durable."""

    async def wipe(self) -> None:
        """Wipe the keys and give back all memory, once it is detached and its counters taken."""


class GatewayPort(Protocol):
    """The gateway's data path."""

    async def attach(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        host_nqn: str,
        secret: HostSecret,
        open_queue: OpenQueue,
        epoch_floor: int = 0,
    ) -> AttachedPort:
        """Export `volume` to `host_nqn`, which must prove to know `secret`; wipes the keys."""

    def expect(self, volume_id: str) -> None:
        """Ask hosts of a volume that isn't exported to come again; until `attach` or `forget`."""

    def forget(self, volume_id: str) -> None:
        """Send hosts of a volume that isn't exported away."""

    async def open_filling(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        open_queue: OpenQueue,
        epoch_floor: int = 0,
    ) -> "FillingPort":
        """Open `volume` to be filled; wipes the key."""


class FillingPort(Protocol):
    """A volume that is being filled, exported to nobody."""

    async def write_zeroes(self, lba: int, sectors: int) -> None:
        """Write sealed zeros."""

    async def flush(self) -> None:
        """Make them durable."""

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        """Give the volume more counters."""

    def counters_remaining(self) -> int:
        """Counters not yet handed to a queue."""

    def take_counters(self) -> list[CounterRange]:
        """Take what is left of the counters, once it is closed."""

    def take_events(self) -> Sequence[NativeEvent]:
        """Events since the last call."""

    async def close(self) -> None:
        """Leave the target."""

    async def wipe(self) -> None:
        """Wipe the keys and give back all memory, once it is closed and its counters taken."""


class JobsPort(Protocol):
    """The background jobs of one volume."""

    async def start(self, kind: JobKind, *, bytes_per_second: int) -> Job:
        """Start a job. UsageError `volume.job.running`, `volume.job.unsupported`."""

    async def change(
        self, kind: JobKind, *, order: JobOrder | None, bytes_per_second: int | None
    ) -> Job:
        """Set a job's rate, then give it an order; UsageError `volume.job.over`."""

    def list(self) -> Sequence[Job]:
        """Return the last job of each kind."""


class ThirdPartyVolumePort(Protocol):
    """An attached volume's back end on a target that isn't ours."""

    @property
    def jobs(self) -> JobsPort:
        """Its background jobs."""

    @property
    def layout(self) -> str:
        """How its store lays sectors out; empty: it keeps no freshness."""

    def statistics(self) -> Mapping[str, int]:
        """Counters of the store; none while it is being opened again."""

    async def open_queue(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Admit a queue; the first one of a newer epoch fences all older ones."""

    def take_events(self) -> Sequence[NativeEvent]:
        """Events since the last call."""

    async def close(self) -> None:
        """Make everything durable and leave the third party."""


class ThirdPartyPort(Protocol):
    """Targets that aren't ours, by the names that the operator gave them."""

    async def create(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        store_key: bytearray,
        freshness: bool = True,
        open_device: OpenDevice | None = None,
    ) -> None:
        """Lay out an empty volume, authenticated under `store_key`; again is harmless.

        With `open_device` it is anchored.
        """

    async def resize(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        larger_sector_count: int,
        store_key: bytearray,
        open_device: OpenDevice | None = None,
    ) -> None:
        """Make a volume of `sector_count` larger that isn't attached."""

    async def delete(self, name: str, volume_id: uuid.UUID) -> None:
        """Take a volume off its namespace."""

    async def attach(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        store_key: bytearray,
        freshness: bool = True,
        open_device: OpenDevice | None = None,
    ) -> ThirdPartyVolumePort:
        """Open a volume for this gateway alone."""


class TargetPort(Protocol):
    """The target's data path."""

    @property
    def address(self) -> tuple[str, int]:
        """Where the NVMe/TCP listener is."""

    async def create_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        """Make the sector store of a volume."""

    async def open_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        """Open the sector store that an earlier process made."""

    def opening_progress(self, volume_id: uuid.UUID) -> tuple[int, int]:
        """Return pages and records that its opening went through, and of how many."""

    async def close_volume(self, volume_id: uuid.UUID) -> None:
        """Close its queues and let its store go; what wasn't flushed may be lost."""

    async def resize_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        """Make the sector store larger; every queue of it ends."""

    async def discard_store(self, volume_id: uuid.UUID) -> None:
        """Remove the store of a volume that isn't open, if there is one."""

    def subsystem_nqn(self, volume_id: uuid.UUID) -> str:
        """Name of the volume's secure subsystem."""

    def admit_queue(
        self,
        ticket: bytes,
        *,
        volume_id: uuid.UUID,
        host_nqn: str,
        queue_id: int,
        secret: bytearray,
        association_epoch: int,
        incarnation: int,
        gateway: PeerIncarnation | None,
        permit: _native.Permit | None,
        is_read_only: bool = False,
    ) -> None:
        """Admit one Connect with `ticket` within 30 s; wipes the secret.

        Commands that change sectors are refused on the queue if it `is_read_only`. `gateway` is
        whose queue it is, and `permit` until when it may act: None if nobody's
        authorization can end it.
        """

    def gateways(self) -> Iterable[PeerIncarnation]:
        """Gateways that have a queue or a ticket here."""

    async def fence_gateway(self, gateway: PeerIncarnation, reason: str) -> None:
        """End a gateway's tickets and queues; return when nothing of them is in flight."""

    def newest_epoch(self, volume_id: uuid.UUID, host_nqn: str) -> int:
        """Newest association epoch of a gateway; 0 if it has none."""

    async def close_older_queues(
        self, volume_id: uuid.UUID, host_nqn: str, association_epoch: int
    ) -> None:
        """Stop and drain every queue of a gateway's older association epochs."""

    def statistics(self, volume_id: uuid.UUID) -> Mapping[str, int]:
        """Counters of the engine."""

    def milestone(self, volume_id: uuid.UUID) -> bytes:
        """How far its store has come; empty: it keeps no freshness."""

    def require_milestone(self, volume_id: uuid.UUID, milestone: bytes) -> None:
        """VerificationError `volume.rolled_back` if its store doesn't contain `milestone`."""

    def layout(self, volume_id: uuid.UUID) -> str:
        """How its store lays sectors out; empty: it keeps no freshness."""

    def jobs(self, volume_id: uuid.UUID) -> JobsPort:
        """Its background jobs."""

    async def observe_jobs(self) -> Sequence[tuple[uuid.UUID, Job]]:
        """Keep how far all jobs are, report those that have ended and return them."""

    def take_events(self, volume_id: uuid.UUID) -> Sequence[NativeEvent]:
        """Events since the last call."""
