"""Broker, target and gateway control planes over real mutual TLS, in one process.

Calls of the data path are only recorded; `tests/daemon/test_end_to_end.py` uses the real one.
"""

# ruff: noqa: ARG002 - recorders have the signatures of what they replace

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from brokers import running_broker
from patience import PATIENCE_SECONDS
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import Subject
from sealane.crypto.lease import LEASE_COUNTERS, CounterRange
from sealane.daemon.broker.device_servicer import DevicesServicer
from sealane.daemon.broker.devices import Devices
from sealane.daemon.broker.refusals import SummedAudit
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.servicer import BrokerServicer
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.device.third_party import OpenDevice
from sealane.daemon.gateway.attachments import AttachmentFiles
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import Export, OpenQueue, QueueGrant, VolumeFailure, VolumeKey
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.volumes import VolumeService
from sealane.daemon.node.authorizations import NO_VOLUME, Authorizations
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.authorizers import Authorizer
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import (
    bind_tcp,
    new_server,
    running,
)
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.servicer import StorageServicer
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.daemon.volume.failures import ROLLED_BACK
from sealane.daemon.volume.jobs import Job
from sealane.errors import Error, UsageError, VerificationError
from sealane.protocol.kinds import JobKind, JobOrder, JobState
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.constants import AnaState
from sealane.protocol.v1 import (
    broker_pb2_grpc,
    devices_pb2_grpc,
    storage_pb2,
    storage_pb2_grpc,
)
from trust.results import issued
from trust.world import everybody, running_authorizations

HOST = "nqn.2014-08.org.nvmexpress:uuid:0"


@dataclass
class RecordedEvent:
    kind: str
    reason: str
    lba: int
    detail: str


class RecordedJobs:
    """Jobs that change state only when told."""

    def __init__(self) -> None:
        self.known: dict[JobKind, Job] = {}

    async def start(self, kind: JobKind, *, bytes_per_second: int) -> Job:
        if kind in self.known:
            raise UsageError("volume.job.running", f"a {kind} of this volume is running")
        job = Job(kind=kind, state="running", bytes_per_second=bytes_per_second, started=utc_now())
        self.known[kind] = job
        return job

    async def change(
        self, kind: JobKind, *, order: JobOrder | None, bytes_per_second: int | None
    ) -> Job:
        job = self.known[kind]
        if order == "pause":
            job = job.model_copy(update={"state": JobState.PAUSED})
        if bytes_per_second is not None:
            job = job.model_copy(update={"bytes_per_second": bytes_per_second})
        self.known[kind] = job
        return job

    def list(self) -> Sequence[Job]:
        return [*self.known.values()]


@dataclass
class RecordingTarget:
    volumes: dict[uuid.UUID, int] = field(default_factory=dict)
    freshness: dict[uuid.UUID, bool] = field(default_factory=dict)
    milestones: dict[uuid.UUID, bytes] = field(default_factory=dict)
    admitted: dict[bytes, dict[str, object]] = field(default_factory=dict)
    closed: list[tuple[str, int]] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)
    events: list[StorageEvent] = field(default_factory=list)
    fenced: dict[PeerIncarnation, str] = field(default_factory=dict)
    fencing: asyncio.Event = field(default_factory=asyncio.Event)
    address: tuple[str, int] = ("127.0.0.1", 4420)
    recorded_jobs: RecordedJobs = field(default_factory=RecordedJobs)

    def milestone(self, volume_id: uuid.UUID) -> bytes:
        return self.milestones.get(volume_id, b"")

    def require_milestone(self, volume_id: uuid.UUID, milestone: bytes) -> None:
        if milestone not in {b"", self.milestone(volume_id)}:
            raise VerificationError(ROLLED_BACK, "the store lacks flushed writes")

    async def create_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        self.volumes[volume_id] = sector_count
        self.freshness[volume_id] = freshness

    async def open_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        self.volumes[volume_id] = sector_count

    async def close_volume(self, volume_id: uuid.UUID) -> None:
        del self.volumes[volume_id]

    async def resize_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        self.volumes[volume_id] = sector_count

    async def discard_store(self, volume_id: uuid.UUID) -> None:
        raise AssertionError("only with a catalogue")

    def subsystem_nqn(self, volume_id: uuid.UUID) -> str:
        return f"nqn.2026-11.dev.sealane:volume:{volume_id}"

    def admit_queue(self, ticket: bytes, **values: object) -> None:
        self.admitted[ticket] = values

    def newest_epoch(self, volume_id: uuid.UUID, host_nqn: str) -> int:
        return self.epochs.get(host_nqn, 0)

    async def close_older_queues(
        self, volume_id: uuid.UUID, host_nqn: str, association_epoch: int
    ) -> None:
        self.closed.append((host_nqn, association_epoch))
        self.epochs[host_nqn] = association_epoch

    def gateways(self) -> set[PeerIncarnation]:
        owners = (values["gateway"] for values in self.admitted.values())
        known = {owner for owner in owners if isinstance(owner, PeerIncarnation)}
        return known - self.fenced.keys()

    async def fence_gateway(self, gateway: PeerIncarnation, reason: str) -> None:
        self.fenced[gateway] = reason
        self.fencing.set()

    def opening_progress(self, volume_id: uuid.UUID) -> tuple[int, int]:
        return (1, 4)

    def statistics(self, volume_id: uuid.UUID) -> Mapping[str, int]:
        return {"reads": 1, "pending_entries": 7, "epoch": 3}

    def layout(self, volume_id: uuid.UUID) -> str:
        return "out of place"

    def jobs(self, volume_id: uuid.UUID) -> RecordedJobs:
        return self.recorded_jobs

    async def observe_jobs(self) -> Sequence[tuple[uuid.UUID, Job]]:
        raise AssertionError("nothing looks after jobs here")

    def take_events(self, volume_id: uuid.UUID) -> Sequence[StorageEvent]:
        taken, self.events = self.events, []
        return taken


@dataclass
class RecordedAttachment:
    keys: dict[int, bytes]
    open_queue: OpenQueue
    ranges: list[CounterRange]
    remaining: int = LEASE_COUNTERS
    unused: list[CounterRange] = field(default_factory=list)
    secret: HostSecret = field(default_factory=lambda: HostSecret(bytes(32)))
    epoch_floor: int = 0
    host_nqn: str = ""
    sector_count: int = 0
    detached: asyncio.Event = field(default_factory=asyncio.Event)
    is_wiped: bool = False
    is_durable: bool = True
    settled: int | None = None
    failed: str = ""
    is_suspended: bool = False
    suspending: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: a suspension waits for it, as for a target that doesn't answer."""
    detaching: asyncio.Event = field(default_factory=asyncio.Event)
    unflushed: str = ""
    idle_seconds: float | None = None
    unanswered: int = 0
    export: Export = field(
        default_factory=lambda: Export(
            traddr="127.0.0.1", trsvcid=1, subsystem_nqn="nqn.x", namespace_id=1
        )
    )

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        for counters in granted:
            self.ranges.append(counters)
            self.remaining += counters.count

    def add_key(self, key_epoch: int, key: bytearray) -> None:
        self.keys[key_epoch] = bytes(key)

    def replace_counters(self, granted: Sequence[CounterRange] = ()) -> list[CounterRange]:
        taken, self.unused = self.unused, [*granted]
        self.ranges += granted
        return taken

    def counters_remaining(self) -> int:
        return self.remaining

    def statistics(self) -> Mapping[str, int]:
        return {}

    def take_events(self) -> Sequence[StorageEvent]:
        return []

    def fail(self, reason: VolumeFailure, detail: str) -> None:
        self.failed = f"{reason}: {detail}"

    def settled_incarnation(self) -> int | None:
        return self.settled

    def __post_init__(self) -> None:
        self.suspending.set()
        self.detaching.set()

    async def suspend(self) -> str:
        self.is_suspended = True
        await self.suspending.wait()
        return self.unflushed

    def resume(self) -> None:
        self.is_suspended = False

    async def detach(self, *, patience_seconds: float = 0) -> bool:
        self.detached.set()
        await self.detaching.wait()
        return self.is_durable

    async def wipe(self) -> None:
        assert self.detached.is_set()
        self.is_wiped = True


@dataclass
class RecordedFilling:
    """Fills up to a limit, then waits or fails."""

    sealed: bool
    limit: int
    failure: Error | None
    zeroed: int = 0
    flushed: int = 0
    closed: bool = False
    limit_raised: asyncio.Event = field(default_factory=asyncio.Event)

    async def write_zeroes(self, lba: int, sectors: int) -> None:
        assert lba == self.zeroed
        if lba + sectors > self.limit:
            if self.failure is not None:
                raise self.failure
            await self.limit_raised.wait()
        self.zeroed = lba + sectors

    async def flush(self) -> None:
        self.flushed = self.zeroed

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        raise AssertionError("one lease is enough here")

    def counters_remaining(self) -> int:
        return LEASE_COUNTERS

    def take_counters(self) -> list[CounterRange]:
        return []

    def take_events(self) -> Sequence[StorageEvent]:
        return []

    async def close(self) -> None:
        self.closed = True

    async def wipe(self) -> None:
        assert self.closed


@dataclass
class RecordingGateway:
    attached: list[RecordedAttachment] = field(default_factory=list)
    failure: Error | None = None
    fillings: list[RecordedFilling] = field(default_factory=list)
    fill_limit: int = 1 << 40
    fill_failure: Error | None = None
    expected: set[str] = field(default_factory=set)
    access: AnaState = AnaState.OPTIMIZED

    def set_access(self, ana_state: AnaState) -> None:
        self.access = ana_state

    def idle_seconds(self, attached: RecordedAttachment) -> float | None:
        return attached.idle_seconds

    def unanswered(self, attached: RecordedAttachment) -> int:
        return attached.unanswered

    async def open_filling(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        open_queue: OpenQueue,
        epoch_floor: int = 0,
    ) -> RecordedFilling:
        made = RecordedFilling(volume.fully_sealed, self.fill_limit, self.fill_failure)
        self.fillings.append(made)
        self.fill_failure = None
        self.fill_limit = 1 << 40
        return made

    async def attach(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        host_nqn: str,
        secret: HostSecret,
        open_queue: OpenQueue,
        epoch_floor: int = 0,
        member: GroupMember | None = None,
    ) -> RecordedAttachment:
        assert member is None, "fail-over needs a real gateway"
        if self.failure is not None:
            raise self.failure
        made = RecordedAttachment(
            {epoch: bytes(key) for epoch, key in volume.keys.items()},
            open_queue,
            [*counters],
            epoch_floor=epoch_floor,
            secret=secret,
            host_nqn=host_nqn,
            sector_count=volume.sector_count,
        )
        self.attached.append(made)
        self.forget(str(volume.volume_id))
        return made

    def expect(self, volume_id: str) -> None:
        self.expected.add(volume_id)

    def forget(self, volume_id: str) -> None:
        self.expected.discard(volume_id)


@dataclass
class RecordingThirdPartyVolume:
    is_closed: bool = False
    jobs: RecordedJobs = field(default_factory=RecordedJobs)
    layout: str = "in place"

    def statistics(self) -> Mapping[str, int]:
        return {"sectors_written": 5}

    async def open_queue(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        raise AssertionError("nobody opens a queue of it here")

    def take_events(self) -> list[StorageEvent]:
        return []

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class RecordingThirdParties:
    volumes: dict[str, uuid.UUID] = field(default_factory=dict)
    attached: list[RecordingThirdPartyVolume] = field(default_factory=list)
    resized: list[int] = field(default_factory=list)
    failure: Error | None = None
    freshness: bool = True

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
        assert sector_count
        assert any(store_key)
        if self.failure is not None:
            raise self.failure
        self.volumes[name] = volume_id
        if open_device is not None:
            device = await open_device()
            assert device.is_believed
            await device.confirm()
            await device.close()

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
        assert self.volumes[name] == volume_id
        assert sector_count < larger_sector_count
        assert any(store_key)
        if self.failure is not None:
            raise self.failure
        self.resized.append(larger_sector_count)

    async def delete(self, name: str, volume_id: uuid.UUID) -> None:
        assert self.volumes.pop(name) == volume_id

    async def attach(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        store_key: bytearray,
        freshness: bool = True,
        open_device: OpenDevice | None = None,
    ) -> RecordingThirdPartyVolume:
        assert sector_count
        assert any(store_key)
        self.freshness = freshness
        assert self.volumes[name] == volume_id
        self.attached.append(RecordingThirdPartyVolume())
        return self.attached[-1]


@dataclass
class World:
    broker: BrokerService
    storage: StorageService
    volumes: VolumeService
    target: RecordingTarget
    gateway: RecordingGateway
    identities: dict[str, Identity]
    addresses: dict[str, str]
    third_parties: "RecordingThirdParties"
    refused: dict[str, str]
    """Why the broker authorizes a peer no more, by SPIFFE id."""
    refusals: SummedAudit
    make_volumes: Callable[[RecordingGateway], VolumeService]
    life: contextlib.AsyncExitStack

    async def end_gateway(self) -> None:
        """End the gateway's process cleanly."""
        await self.life.aclose()

    async def start_gateway(self) -> None:
        """Start another one, which has only the files of its predecessor."""
        self.gateway = RecordingGateway()
        self.volumes = self.make_volumes(self.gateway)
        await self.life.enter_async_context(self.volumes.running())

    async def namespace(
        self, identity: Identity, volume_id: str, *, node: str = "s", role: str = "target"
    ) -> storage_pb2.Namespace:
        """Request a namespace from the target, as `identity`, expecting `role` of `node`."""
        request = storage_pb2.GetNamespaceRequest(volume_id=volume_id)
        async with identity.channel(self.addresses["target"], node, role) as channel:
            return await storage_pb2_grpc.StorageStub(channel).GetNamespace(
                request, timeout=PATIENCE_SECONDS
            )


async def identity(
    broker: BrokerService, role: str, node: str, tenant: str = "t", metrics: Metrics | None = None
) -> Identity:
    async def issue(keys: Keys) -> Issued:
        subject = Subject(
            node=node,
            role=role,
            tenant=tenant,
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        now = utc_now()
        leaf = broker.authority.issue(subject, keys.tls.public_key(), now=now)
        return issued(broker.authority, subject, leaf, now=now)

    identity = Identity(
        node=node,
        role=role,
        anchors=TrustAnchors(broker.authority.certificate),
        obtain=issue,
        metrics=metrics or Metrics(),
    )
    await identity.renew()
    return identity


async def _covered(revision: int) -> None:
    """Do nothing: no store is rolled back here."""


@contextlib.asynccontextmanager
async def volume_world(directory: Path) -> AsyncIterator[World]:
    metrics = Metrics()
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(directory / "b.sqlite", instance=1, metrics=metrics)
        )
        nodes = {"broker": "b", "target": "s", "gateway": "g", "fabric": "f"}
        identities = {role: await identity(broker, role, node) for role, node in nodes.items()}
        identities["stranger"] = await identity(broker, "gateway", "x", tenant="other")

        async def find(node: str, role: str) -> list[x509.Certificate]:
            found = (i for i in identities.values() if (i.node, i.role) == (node, role))
            return [each.certificate for each in found]

        for each in identities.values():
            each.find_peer = find
            stack.push_async_callback(each.channels.close)
        refused: dict[str, str] = {}

        async def volume_refusal(peer: PeerIncarnation) -> str:
            stored = await broker.registry.volumes.get(peer.volume_id) if peer.volume_id else None
            tenant = next(
                each.subject.tenant
                for each in identities.values()
                if each.subject.spiffe_id == peer.spiffe_id
            )
            allowed = stored is not None and stored.record.allows(
                tenant, writing=not peer.is_read_only
            )
            return "" if allowed or not peer.volume_id else NO_VOLUME

        async def ask(nonce: bytes, peers: Sequence[PeerIncarnation]) -> list[str]:
            return [refused.get(peer.spiffe_id, "") or await volume_refusal(peer) for peer in peers]

        target = RecordingTarget()
        # An answer that arrives later than `fresh_seconds` authorizes nothing: enough for a machine
        # that stalls the event loop. Peers in use are asked about at a third of it.
        authorizations = Authorizations(
            ask=ask, uses=target.gateways, lost=target.fence_gateway, fresh_seconds=6
        )
        await stack.enter_async_context(running_authorizations(authorizations))
        refusals = SummedAudit(broker.audit)
        stack.push_async_callback(refusals.close)
        authorizer = Authorizer(
            TrustAnchors(broker.authority.certificate),
            server=identities["broker"].spiffe_id,
            admit=everybody,
            metrics=metrics,
            refused=refusals.refused_call,
        )
        storage = StorageService(
            target,
            node="s",
            store="memory",
            anchors=TrustAnchors(broker.authority.certificate),
            kem=identities["target"].keys.kem,
            authorizations=authorizations,
        )
        broker_server = new_server(metrics, authorizer)
        broker_pb2_grpc.add_BrokerServicer_to_server(
            BrokerServicer(broker, authorizer), broker_server
        )
        devices_pb2_grpc.add_DevicesServicer_to_server(
            DevicesServicer(
                Devices(
                    broker.registry,
                    init="first-come",
                    cover=_covered,
                    audit=broker.audit,
                    metrics=metrics,
                ),
                authorizer,
            ),
            broker_server,
        )
        storage_server = new_server(
            metrics,
            Authorizer(
                TrustAnchors(broker.authority.certificate),
                server=identities["target"].spiffe_id,
                admit=authorizations.admit,
                metrics=metrics,
            ),
        )
        storage_pb2_grpc.add_StorageServicer_to_server(
            StorageServicer(storage, authorizer), storage_server
        )
        addresses = {}
        for name, server in (("broker", broker_server), ("target", storage_server)):
            credentials = identities[name].server_credentials(mutual=True)
            addresses[name] = bind_tcp(server, "127.0.0.1:0", credentials, key=name)
            await stack.enter_async_context(running(server))
        gateway = RecordingGateway()
        third_parties = RecordingThirdParties()
        config = EnrolmentConfig(
            broker_node="b",
            broker_address=addresses["broker"],
            attestation_address="unused:1",
            trust_anchor="/unused",
            evidence="software",
            key_file="/unused",
        )

        def make_volumes(gateway: RecordingGateway) -> VolumeService:
            return VolumeService(
                Targets({"s": addresses["target"]}, identity=identities["gateway"]),
                identity=identities["gateway"],
                broker=BrokerClient(config, identities["gateway"]),
                devices=DeviceClient(config, identities["gateway"]),
                gateway=gateway,
                third_parties=third_parties,
                files=AttachmentFiles(*gateway_directories(directory)),
            )

        volumes = make_volumes(gateway)
        life = await stack.enter_async_context(contextlib.AsyncExitStack())
        await life.enter_async_context(volumes.running())
        yield World(
            broker,
            storage,
            volumes,
            target,
            gateway,
            identities,
            addresses,
            third_parties,
            refused,
            refusals,
            make_volumes,
            life,
        )


def gateway_directories(directory: Path) -> tuple[Path, Path]:
    """Return state and run directory of the gateway."""
    made = directory / "g", directory / "g-run"
    for each in made:
        each.mkdir(mode=0o700, exist_ok=True)
    return made


async def create(world: World, request_id: str = "", *, size_bytes: int = 1 << 20) -> str:
    descriptor = await world.volumes.create(
        request_id=request_id, display_name="d", size_bytes=size_bytes, target_node=""
    )
    return descriptor.volume_id
