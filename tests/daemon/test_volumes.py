"""Volumes over real mutual TLS: broker, target and gateway control planes in one process.

The data path is recorded here; `test_end_to_end.py` has the real one.
"""

# ruff: noqa: ARG002 - recorders have the signatures of what they stand for

import asyncio
import base64
import contextlib
import ssl
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from sealane.crypto.certificates import Subject
from sealane.crypto.keys import WrappingKey
from sealane.crypto.lease import LEASE_COUNTERS, CounterRange
from sealane.daemon.authorizations import Authorizations
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.servicer import BrokerServicer
from sealane.daemon.broker.store import BrokerStore
from sealane.daemon.broker_client import BrokerClient
from sealane.daemon.calls import Authorizer
from sealane.daemon.clock import utc_now
from sealane.daemon.config import EnrolmentConfig, GatewayConfig
from sealane.daemon.events import Event
from sealane.daemon.identity import Identity, Issued, Keys
from sealane.daemon.metrics import Metrics
from sealane.daemon.ports import (
    Export,
    NativeEvent,
    OpenQueue,
    PeerIncarnation,
    QueueGrant,
    VolumeKey,
)
from sealane.daemon.servers import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    bind_tcp,
    new_server,
    running,
)
from sealane.daemon.storage_control import StorageService, StorageServicer
from sealane.daemon.volumes import Via, VolumeService
from sealane.daemon.volumes_servicer import VolumesServicer
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.status import error_of
from sealane.protocol.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    storage_pb2,
    storage_pb2_grpc,
    volumes_pb2,
)
from trust.world import everybody

HOST = "nqn.2014-08.org.nvmexpress:uuid:0"


@dataclass
class RecordedEvent:
    kind: str
    reason: str
    lba: int
    detail: str


@dataclass
class RecordingTarget:
    volumes: dict[uuid.UUID, int] = field(default_factory=dict)
    admitted: dict[bytes, dict[str, object]] = field(default_factory=dict)
    closed: list[tuple[str, int]] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)
    events: list[NativeEvent] = field(default_factory=list)
    fenced: dict[PeerIncarnation, str] = field(default_factory=dict)
    address: tuple[str, int] = ("127.0.0.1", 4420)

    async def create_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        self.volumes[volume_id] = sector_count

    async def open_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        self.volumes[volume_id] = sector_count

    async def delete_volume(self, volume_id: uuid.UUID) -> None:
        del self.volumes[volume_id]

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
        return {owner for owner in owners if isinstance(owner, PeerIncarnation)} - self.fenced.keys()

    async def fence_gateway(self, gateway: PeerIncarnation, reason: str) -> None:
        self.fenced[gateway] = reason

    def statistics(self, volume_id: uuid.UUID) -> Mapping[str, int]:
        return {"reads": 1}

    def take_events(self, volume_id: uuid.UUID) -> Sequence[NativeEvent]:
        taken, self.events = self.events, []
        return taken


@dataclass
class RecordedAttachment:
    key: bytes
    open_queue: OpenQueue
    ranges: list[CounterRange]
    remaining: int = LEASE_COUNTERS
    unused: list[CounterRange] = field(default_factory=list)
    secret: HostSecret = field(default_factory=lambda: HostSecret(bytes(32)))
    epoch_floor: int = 0
    detached: bool = False
    failed: str = ""
    export: Export = field(
        default_factory=lambda: Export(
            traddr="127.0.0.1", trsvcid=1, subsystem_nqn="nqn.x", namespace_id=1
        )
    )

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        for counters in granted:
            self.ranges.append(counters)
            self.remaining += counters.count

    def take_counters(self) -> list[CounterRange]:
        taken, self.unused = self.unused, []
        return taken

    def counters_remaining(self) -> int:
        return self.remaining

    def statistics(self) -> Mapping[str, int]:
        return {}

    def take_events(self) -> Sequence[NativeEvent]:
        return []

    def fail(self, detail: str) -> None:
        self.failed = detail

    async def detach(self) -> None:
        self.detached = True


@dataclass
class RecordingGateway:
    attached: list[RecordedAttachment] = field(default_factory=list)
    failure: Error | None = None

    async def attach(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        host_nqn: str,
        open_queue: OpenQueue,
        epoch_floor: int = 0,
    ) -> RecordedAttachment:
        if self.failure is not None:
            raise self.failure
        made = RecordedAttachment(
            bytes(volume.key), open_queue, [*counters], epoch_floor=epoch_floor
        )
        self.attached.append(made)
        return made


@dataclass
class RecordingThirdPartyVolume:
    is_closed: bool = False

    async def open_queue(self, queue_id: int, association_epoch: int) -> QueueGrant:
        raise AssertionError("nobody opens a queue of it here")

    def take_events(self) -> list[NativeEvent]:
        return []

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class RecordingThirdParties:
    volumes: dict[str, uuid.UUID] = field(default_factory=dict)
    attached: list[RecordingThirdPartyVolume] = field(default_factory=list)
    failure: Error | None = None

    async def create(self, name: str, volume_id: uuid.UUID, *, sector_count: int) -> None:
        assert sector_count
        if self.failure is not None:
            raise self.failure
        self.volumes[name] = volume_id

    async def delete(self, name: str, volume_id: uuid.UUID) -> None:
        assert self.volumes.pop(name) == volume_id

    async def attach(
        self, name: str, volume_id: uuid.UUID, *, sector_count: int
    ) -> RecordingThirdPartyVolume:
        assert sector_count
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

    async def namespace(
        self, identity: Identity, volume_id: str, *, node: str = "s", role: str = "target"
    ) -> storage_pb2.Namespace:
        """Ask the target for a namespace, as `identity`, expecting `role` of `node` there."""
        request = storage_pb2.GetNamespaceRequest(volume_id=volume_id)
        async with identity.channel(self.addresses["target"], node, role) as channel:
            return await storage_pb2_grpc.StorageStub(channel).GetNamespace(request, timeout=5)


async def _identity(
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
        leaf = broker.authority.issue(subject, keys.tls.public_key(), now=utc_now())
        return Issued(leaf=leaf)

    identity = Identity(
        node=node,
        role=role,
        anchor=broker.authority.certificate,
        obtain=issue,
        metrics=metrics or Metrics(),
    )
    await identity.renew()
    return identity


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    metrics = Metrics()
    async with contextlib.AsyncExitStack() as stack:
        broker = BrokerService(
            BrokerStore(tmp_path / "b.sqlite"),
            WrappingKey(bytes(32)),
            node="b",
            instance=1,
            metrics=metrics,
        )
        stack.callback(broker.close)
        nodes = {"broker": "b", "target": "s", "gateway": "g", "fabric": "f"}
        identities = {role: await _identity(broker, role, node) for role, node in nodes.items()}
        identities["stranger"] = await _identity(broker, "gateway", "x", tenant="other")

        async def find(node: str, role: str) -> list[x509.Certificate]:
            found = (i for i in identities.values() if (i.node, i.role) == (node, role))
            return [identity.certificate for identity in found]

        for identity in identities.values():
            identity.find_peer = find
            stack.push_async_callback(identity.channels.close)
        refused: dict[str, str] = {}

        async def ask(nonce: bytes, peers: Sequence[PeerIncarnation]) -> list[str]:
            return [refused.get(peer.spiffe_id, "") for peer in peers]

        target = RecordingTarget()
        authorizations = Authorizations(
            ask=ask, uses=target.gateways, lost=target.fence_gateway, fresh_seconds=0.3
        )
        running_authorizations = asyncio.create_task(authorizations.run())
        stack.callback(running_authorizations.cancel)
        authorizer = Authorizer(broker.authority.certificate, admit=everybody)
        storage = StorageService(
            target,
            node="s",
            store="memory",
            anchor=broker.authority.certificate,
            authorizations=authorizations,
        )
        broker_server = new_server(metrics, authorizer)
        broker_pb2_grpc.add_BrokerServicer_to_server(
            BrokerServicer(broker, authorizer), broker_server
        )
        storage_server = new_server(
            metrics, Authorizer(broker.authority.certificate, admit=authorizations.admit)
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
        volumes = VolumeService(
            GatewayConfig(target_node="s", target_address=addresses["target"]),
            identity=identities["gateway"],
            broker=BrokerClient(
                EnrolmentConfig(
                    broker_node="b",
                    broker_address=addresses["broker"],
                    attestation_address="unused:1",
                    trust_anchor="/unused",
                    evidence="software",
                    key_file="/unused",
                ),
                identities["gateway"],
            ),
            gateway=gateway,
            third_parties=third_parties,
        )
        await stack.enter_async_context(volumes.running())
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
        )


async def _create(world: World, request_id: str = "") -> str:
    descriptor = await world.volumes.create(
        request_id=request_id, display_name="d", size_bytes=1 << 20, target_node=""
    )
    return descriptor.volume_id


async def test_created_volume_is_at_broker_and_target(world: World) -> None:
    volume_id = await _create(world)
    assert world.target.volumes == {uuid.UUID(volume_id): 256}
    listed, token = await world.volumes.list(page_size=0, page_token="")
    assert [d.volume_id for d in listed] == [volume_id]
    assert token == ""
    assert (await world.volumes.get(volume_id)).display_name == "d"


async def test_attach_releases_key_and_lease_and_both_ends_derive_one_secret(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    assert len(made.key) == 32
    assert any(made.key)
    assert [r.count for r in made.ranges] == [LEASE_COUNTERS]
    first: QueueGrant = await made.open_queue(1, 7)
    admitted = world.target.admitted[first.ticket]
    assert admitted["secret"] == first.secret
    assert admitted["host_nqn"] == first.host_nqn
    assert (first.traddr, first.trsvcid) == ("127.0.0.1", 4420)
    second = await made.open_queue(2, 7)
    assert second.secret != first.secret
    assert second.association_epoch == first.association_epoch
    assert second.target_incarnation == world.storage.incarnation


async def test_attach_again_gives_the_same_key_and_other_counters(world: World) -> None:
    volume_id = await _create(world)
    for _ in range(2):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        await world.volumes.detach(volume_id)
    first, second = world.gateway.attached
    assert first.detached
    assert first.key == second.key
    assert not first.ranges[0].overlaps(second.ranges[0])


async def test_data_path_address_can_be_replaced(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via(traddr="192.0.2.1", trsvcid=7))
    grant = await world.gateway.attached[0].open_queue(1, 7)
    assert (grant.traddr, grant.trsvcid) == ("192.0.2.1", 7)


async def test_no_log_line_holds_a_key(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    grant = await world.gateway.attached[0].open_queue(1, 7)
    with pytest.raises(UsageError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    logged = "".join(capfd.readouterr())
    assert "key_released" in logged
    for secret in (world.gateway.attached[0].key, bytes(grant.secret), grant.ticket):
        for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
            assert form not in logged


async def test_oversized_calls_are_refused(world: World) -> None:
    gateway = world.identities["gateway"]
    with pytest.raises(UnavailableError) as caught:
        await world.namespace(gateway, "v" * (MESSAGE_BYTES_MAX + 1))
    assert caught.value.reason == "peer.resource_exhausted"
    async with gateway.channel(world.addresses["target"], "s", "target") as channel:
        stub = storage_pb2_grpc.StorageStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetNamespace(
                storage_pb2.GetNamespaceRequest(volume_id="v"),
                metadata=(("x-long", "x" * (2 * METADATA_BYTES_MAX)),),
                timeout=5,
            )
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_text_of_a_caller_comes_back_shortened(world: World) -> None:
    with pytest.raises(UsageError) as caught:
        await world.namespace(world.identities["gateway"], "v" * 100_000)
    assert caught.value.reason == "namespace.not_found"
    assert len(str(caught.value)) < 300


async def test_number_of_namespaces_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.storage_control.NAMESPACES_MAX", 1)
    await _create(world)
    with pytest.raises(UnavailableError) as caught:
        await _create(world)
    assert caught.value.reason == "namespace.limit"
    assert len(world.target.volumes) == 1


async def test_older_association_is_refused_and_its_queues_closed(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    old = world.gateway.attached[0]
    await old.open_queue(1, 7)
    await world.volumes.detach(volume_id)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.gateway.attached[1].epoch_floor == 7
    grant = await world.gateway.attached[1].open_queue(1, 8)
    assert world.target.closed[-1] == (gateway_nqn("g"), grant.association_epoch)
    with pytest.raises(VerificationError) as caught:
        await old.open_queue(2, 7)
    assert caught.value.reason == "queue.association.stale"


async def test_attached_volume_is_neither_attached_twice_nor_deleted(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    for call in (
        world.volumes.attach(volume_id, host_nqn=HOST, via=Via()),
        world.volumes.delete(volume_id),
    ):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason == "volume.attached.state"
    await world.volumes.detach(volume_id)
    await world.volumes.delete(volume_id)
    assert world.target.volumes == {}
    with pytest.raises(UsageError) as caught:
        await world.volumes.get(volume_id)
    assert caught.value.reason == "volume.not_found"


async def test_failed_attach_leaves_nothing_attached(world: World) -> None:
    volume_id = await _create(world)
    world.gateway.failure = UnavailableError("data.path", "no")
    with pytest.raises(UnavailableError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.volumes.attached(volume_id) is None
    world.gateway.failure = None
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())


async def test_failed_namespace_unregisters_the_volume(world: World) -> None:
    async def fail(volume_id: uuid.UUID, *, sector_count: int) -> None:
        raise UnavailableError("store.full", "no room")

    world.target.create_volume = fail  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as caught:
        await _create(world)
    assert caught.value.reason == "store.full"
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_failed_retry_of_create_keeps_the_volume_of_the_first_call(world: World) -> None:
    request_id = str(uuid.uuid4())
    made = await _create(world, request_id)
    world.storage.create = _refuse  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await _create(world, request_id)
    assert (await world.volumes.get(made)).volume_id == made


async def test_create_that_is_given_up_leaves_nothing(world: World) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def create_volume(volume_id: uuid.UUID, *, sector_count: int) -> None:
        # As a thread does it that makes a file: the store is there whether one waits or not.
        world.target.volumes[volume_id] = sector_count
        started.set()
        await go_on.wait()

    really_delete = world.storage.delete

    async def delete(caller: Subject, volume_id: str) -> None:
        # The call that is given up has ended at the target when its clean-up comes.
        go_on.set()
        await really_delete(caller, volume_id)

    world.target.create_volume = create_volume  # type: ignore[method-assign]
    world.storage.delete = delete  # type: ignore[method-assign]
    creating = asyncio.ensure_future(_create(world))
    async with asyncio.timeout(10):
        await started.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    assert world.target.volumes == {}
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def _refuse(caller: Subject, signed: broker_pb2.SignedVolumeDescriptor) -> None:
    raise UnavailableError("store.full", "no room")


async def test_volume_the_target_lost_is_refused_at_attach(world: World) -> None:
    volume_id = await _create(world)
    caller = world.identities["gateway"].subject
    await world.storage.delete(caller, volume_id)
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert caught.value.reason == "namespace.not_found"
    assert "restarted" in str(caught.value)
    assert world.volumes.attached(volume_id) is None


async def test_volume_the_target_loses_while_attached_is_told_once(world: World) -> None:
    volume_id = await _create(world)
    with world.volumes.events.subscribed(volume_id) as events:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        await world.storage.delete(world.identities["gateway"].subject, volume_id)
        # What the target does at its end: the gateway then asks again and hears of the loss.
        world.storage.events.close()
        async with asyncio.timeout(10):
            async for event in events:
                if event.kind == "lost_by_target":
                    break
    assert (event.reason, event.origin) == ("namespace.not_found", "g")


async def test_polls_during_a_delete_find_nothing_to_ask(world: World) -> None:
    volume_id = await _create(world)
    asked: list[uuid.UUID] = []

    async def delete_volume(deleted: uuid.UUID) -> None:
        def take_events(volume: uuid.UUID) -> Sequence[NativeEvent]:
            asked.append(volume)
            raise UsageError("volume.unknown", "gone")

        world.target.take_events = take_events  # type: ignore[method-assign]
        # The poller has had its turn when this task runs again.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await world.storage.poll_events()
        assert world.storage.statistics() == {}

    world.target.delete_volume = delete_volume  # type: ignore[method-assign]
    await world.storage.delete(world.identities["gateway"].subject, volume_id)
    assert asked == []


@pytest.mark.parametrize("host_nqn", ["", "x", "nqn." + "a" * 220])
async def test_impossible_host_is_refused(world: World, host_nqn: str) -> None:
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(str(uuid.uuid4()), host_nqn=host_nqn, via=Via())
    assert caught.value.reason == "volume.host_nqn"


async def test_low_counters_fetch_the_next_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.volumes._REFILL_POLL_SECONDS", 0.01)
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    made = world.gateway.attached[0]
    refilled = asyncio.Event()
    add = made.add_counters

    def record(granted: Iterable[CounterRange]) -> None:
        add(granted)
        refilled.set()

    made.add_counters = record  # type: ignore[method-assign]
    made.remaining = LEASE_COUNTERS // 2 - 1
    async with asyncio.timeout(10):
        await refilled.wait()
    assert not made.ranges[0].overlaps(made.ranges[1])


async def test_target_events_reach_who_watches_at_the_gateway(world: World) -> None:
    volume_id = await _create(world)
    with world.volumes.events.subscribed(volume_id) as events:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(world.storage.poll_events())
            heard: list[Event] = []
            # The gateway's own watch of the target starts in the background: until it is there
            # an event may pass unheard, so the target reports until one arrives.
            reporting = tasks.create_task(_report(world))
            async for event in events:
                heard.append(event)
                if event.kind == "refused":
                    break
            polling.cancel()
            reporting.cancel()
    assert heard[0].kind == "attached"
    assert (heard[-1].reason, heard[-1].lba, heard[-1].origin) == ("sector.mac", 7, "s")


async def _report(world: World) -> None:
    while True:
        world.target.events.append(RecordedEvent("refused", "sector.mac", 7, ""))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("role", ["target", "fabric", "broker"])
async def test_only_gateways_may_call_the_target(world: World, role: str) -> None:
    with pytest.raises(VerificationError) as caught:
        await world.namespace(world.identities[role], "")
    assert caught.value.reason == "call.role.refused"


async def test_only_gateways_get_keys_and_leases(world: World) -> None:
    volume_id = await _create(world)
    async with world.identities["target"].channel(world.addresses["broker"], "b", "broker") as c:
        stub = broker_pb2_grpc.BrokerStub(c)
        listed = await stub.ListVolumeDescriptors(
            broker_pb2.ListVolumeDescriptorsRequest(), timeout=5
        )
        assert len(listed.volumes) == 1
    for method, request in (
        ("GetVolumeKey", broker_pb2.GetVolumeKeyRequest(volume_id=volume_id)),
        ("GrantLease", broker_pb2.GrantLeaseRequest(volume_id=volume_id)),
    ):
        with pytest.raises(VerificationError) as caught:
            async with world.identities["target"].channel(
                world.addresses["broker"], "b", "broker"
            ) as c:
                await getattr(broker_pb2_grpc.BrokerStub(c), method)(request, timeout=5)
        assert caught.value.reason == "call.role.refused"


async def test_other_tenants_gateway_is_refused_by_the_target(world: World) -> None:
    volume_id = await _create(world)
    stranger = world.identities["stranger"]
    with pytest.raises(VerificationError) as caught:
        await world.namespace(stranger, volume_id)
    assert caught.value.reason == "namespace.tenant.refused"


async def test_forged_descriptor_makes_no_namespace(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="s",
    )
    signed = answer.volume
    descriptor = broker_pb2.VolumeDescriptor.FromString(signed.descriptor)
    descriptor.sector_count = 1 << 30
    signed.descriptor = descriptor.SerializeToString()
    with pytest.raises(VerificationError) as caught:
        await world.storage.create(world.identities["gateway"].subject, signed)
    assert caught.value.reason == "volume.descriptor.signature"
    assert world.target.volumes == {}


async def test_descriptor_of_another_target_is_refused(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="elsewhere",
    )
    signed = answer.volume
    with pytest.raises(UsageError) as caught:
        await world.storage.create(world.identities["gateway"].subject, signed)
    assert caught.value.reason == "namespace.target"


async def test_server_of_another_node_or_role_is_not_reached(world: World) -> None:
    gateway = world.identities["gateway"]
    for node, role in (("other", "target"), ("s", "broker")):
        with pytest.raises(VerificationError) as caught:
            await world.namespace(gateway, "", node=node, role=role)
        assert caught.value.reason == "peer.certificate"


async def test_certificate_that_expires_on_a_live_connection_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await _create(world)
    request = storage_pb2.GetNamespaceRequest(volume_id=volume_id)
    gateway = world.identities["gateway"]
    async with gateway.channel(world.addresses["target"], "s", "target") as channel:
        stub = storage_pb2_grpc.StorageStub(channel)
        await stub.GetNamespace(request, timeout=5)
        late = gateway.certificate.not_valid_after_utc
        monkeypatch.setattr("sealane.daemon.calls.utc_now", lambda: late)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetNamespace(request, timeout=5)
    error = error_of(caught.value, peer="target")
    assert isinstance(error, VerificationError)
    assert error.reason == "certificate.expired"


async def test_caller_without_a_certificate_is_not_served(world: World) -> None:
    anchor = world.broker.authority.anchor_pem
    credentials = grpc.ssl_channel_credentials(anchor)
    options = [("grpc.ssl_target_name_override", "s.target.sealane.internal")]
    async with grpc.aio.secure_channel(
        world.addresses["target"], credentials, options=options
    ) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await storage_pb2_grpc.StorageStub(c).GetNamespace(
                storage_pb2.GetNamespaceRequest(), timeout=5
            )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_identity_refuses_a_certificate_for_another_key(world: World) -> None:
    async def issue(keys: Keys) -> Issued:
        return Issued(leaf=world.identities["gateway"].certificate)

    identity = Identity(
        node="g",
        role="gateway",
        anchor=world.broker.authority.certificate,
        obtain=issue,
        metrics=Metrics(),
    )
    with pytest.raises(VerificationError) as caught:
        await identity.renew()
    assert caught.value.reason == "certificate.key.mismatch"


@pytest.mark.parametrize("change", [{"node": "h"}, {"role": "target"}, {"incarnation": bytes(16)}])
async def test_identity_refuses_a_certificate_for_another_subject(
    world: World, change: dict[str, object]
) -> None:
    async def issue(keys: Keys) -> Issued:
        subject = Subject(
            node="g",
            role="gateway",
            tenant="t",
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        leaf = world.broker.authority.issue(
            replace(subject, **change),  # type: ignore[arg-type]
            keys.tls.public_key(),
            now=utc_now(),
        )
        return Issued(leaf=leaf)

    identity = Identity(
        node="g",
        role="gateway",
        anchor=world.broker.authority.certificate,
        obtain=issue,
        metrics=Metrics(),
    )
    with pytest.raises(VerificationError) as caught:
        await identity.renew()
    assert caught.value.reason == "certificate.subject.mismatch"


async def test_renewed_certificate_is_shown_at_the_next_handshake(world: World) -> None:
    target = world.identities["target"]
    before = await _shown(world.addresses["target"])
    assert before == target.certificate
    await target.renew()
    after = await _shown(world.addresses["target"])
    assert after == target.certificate
    assert after.serial_number != before.serial_number
    assert after.public_key() == before.public_key()


async def test_failed_renewal_is_tried_again_until_the_broker_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RENEW_SECONDS", "RETRY_SECONDS", "_SPACING_SECONDS"):
        monkeypatch.setattr(f"sealane.daemon.identity.{name}", 0.0)
    gateway = world.identities["gateway"]
    first = gateway.certificate
    failures = 3
    renewed = asyncio.Event()

    async def issue(keys: Keys) -> Issued:
        nonlocal failures
        if failures:
            failures -= 1
            raise UnavailableError("peer.unreachable", "no broker")
        leaf = world.broker.authority.issue(gateway.subject, keys.tls.public_key(), now=utc_now())
        renewed.set()
        return Issued(leaf=leaf)

    monkeypatch.setattr(gateway, "_obtain", issue)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(gateway.keep_renewed())
        await renewed.wait()
        await asyncio.sleep(0)
        renewing.cancel()
    assert failures == 0
    assert gateway.certificate.serial_number != first.serial_number


async def _shown(address: str) -> x509.Certificate:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der)


async def test_gateway_that_may_not_act_can_neither_open_nor_delete(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    world.refused[world.identities["gateway"].subject.spiffe_id] = "node.revoked"
    await _fenced(world)
    for refused in (made.open_queue(1, 8), world.volumes._delete_namespace(volume_id)):  # noqa: SLF001
        with pytest.raises(VerificationError) as caught:
            await refused
        assert caught.value.reason == "node.revoked"
    assert world.target.volumes


async def test_gateway_that_loses_its_authorization_is_fenced(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    await made.open_queue(1, 7)
    subject = world.identities["gateway"].subject
    (owner,) = world.target.gateways()
    assert (owner.spiffe_id, owner.incarnation) == (subject.spiffe_id, subject.incarnation)
    world.refused[subject.spiffe_id] = "node.revoked"
    await _fenced(world)
    assert world.target.fenced == {owner: "node.revoked"}


async def test_barred_gateway_fails_and_leaves_its_volumes(world: World) -> None:
    volume_id = await _create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    world.volumes.bar("attestation.measurement.unknown")
    assert "attestation.measurement.unknown" in made.failed
    async with asyncio.timeout(5):
        while not made.detached or world.volumes.attached(volume_id) is not None:
            await asyncio.sleep(0.01)


async def _fenced(world: World) -> None:
    """Wait until the target has asked the broker again."""
    gateway = world.identities["gateway"].subject.spiffe_id
    async with asyncio.timeout(5):
        while True:
            try:
                await world.namespace(world.identities["gateway"], "none")
            except VerificationError:
                break
            except UsageError:
                await asyncio.sleep(0.01)
    assert gateway in world.refused
    async with asyncio.timeout(5):
        while world.target.gateways():
            await asyncio.sleep(0.01)


async def _create_local(world: World) -> str:
    descriptor = await world.volumes.create(
        request_id="", display_name="d", size_bytes=1 << 20, target_node="", third_party="disks"
    )
    return descriptor.volume_id


async def test_volume_on_a_third_party_is_described_as_such_and_not_at_the_target(
    world: World,
) -> None:
    volume_id = await _create_local(world)
    assert world.third_parties.volumes == {"disks": uuid.UUID(volume_id)}
    assert not world.target.volumes
    shown = await VolumesServicer(world.volumes).GetVolume(
        volumes_pb2.GetVolumeRequest(name=f"volumes/{volume_id}"),
        None,  # type: ignore[arg-type]
    )
    assert (shown.mode, shown.third_party, shown.target_node) == ("local", "disks", "g")
    assert "C5" not in shown.claims
    assert "roll-back while detached is not noticed" in shown.freshness
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.gateway.attached[0].open_queue == world.third_parties.attached[0].open_queue
    await world.volumes.detach(volume_id)
    assert world.third_parties.attached[0].is_closed
    await world.volumes.delete(volume_id)
    assert not world.third_parties.volumes


async def test_third_party_is_left_when_an_attach_fails(world: World) -> None:
    volume_id = await _create_local(world)
    world.gateway.failure = UnavailableError("gateway.full", "no room")
    with pytest.raises(UnavailableError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.third_parties.attached[0].is_closed
    assert world.volumes.attached(volume_id) is None


async def test_volume_that_a_third_party_has_no_room_for_is_not_registered(world: World) -> None:
    world.third_parties.failure = UsageError("third_party.occupied", "something else is there")
    with pytest.raises(UsageError):
        await _create_local(world)
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_job_cannot_choose_the_address_of_a_third_party(world: World) -> None:
    volume_id = await _create_local(world)
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via(traddr="192.0.2.1"))
    assert caught.value.reason == "volume.via"


async def test_another_gateway_of_the_tenant_gets_neither_key_nor_lease_of_a_local_volume(
    world: World,
) -> None:
    volume_id = await _create_local(world)
    other = Subject(
        node="g2",
        role="gateway",
        tenant="t",
        incarnation=b"i" * 16,
        kem_public_key=world.identities["gateway"].keys.kem_public,
    )
    for call in (world.broker.release_key, world.broker.grant_lease):
        with pytest.raises(VerificationError) as caught:
            await call(other, volume_id=volume_id, key_epoch=1, request_id=b"r" * 16)
        assert caught.value.reason == "volume.owner.refused"


@pytest.mark.parametrize(
    ("mode", "third_party", "node"),
    [("off", "disks", "g"), ("local", "", "g"), ("", "disks", "g"), ("local", "disks", "other")],
)
async def test_broker_registers_no_other_mode_and_no_other_owner(
    world: World, mode: str, third_party: str, node: str
) -> None:
    with pytest.raises(UsageError):
        await world.broker.register_volume(
            world.identities["gateway"].subject,
            request_id=str(uuid.uuid4()),
            display_name="",
            size_bytes=4096,
            target_node=node,
            mode=mode,
            third_party=third_party,
        )


async def test_target_takes_no_volume_of_another_mode(world: World) -> None:
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="g",
        mode="local",
        third_party="disks",
    )
    with pytest.raises(UsageError) as caught:
        await world.storage.create(world.identities["gateway"].subject, answer.volume)
    assert caught.value.reason == "namespace.mode"
