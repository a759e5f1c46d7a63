"""Connection to the daemon on this machine, over its Unix socket (asyncio).

    async with sealane.client.connect() as client:
        volume = await client.volumes.create(size_bytes=1 << 30, display_name="checkpoints")
        volume = await client.volumes.attach(volume.name, host_nqn=my_nqn)

Every failure is a `sealane.errors.Error` with the daemon's reason id.
"""

import asyncio
import contextlib
import datetime as dt
import uuid
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from sealane.client.disk import Disk
from sealane.client.disk_queues import FrontEnd
from sealane.client.grants import listen_session, open_session
from sealane.client.sayable import sayable
from sealane.client.session import Session
from sealane.client.volume_store import VolumeJob, VolumeStore, job_of, store_of
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.status import error_of
from sealane.protocol.v1 import (
    broker_pb2,
    devices_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    operator_pb2_grpc,
    policy_pb2_grpc,
    sessions_pb2_grpc,
    storage_pb2,
    subsystems_pb2_grpc,
    trust_pb2_grpc,
    volumes_pb2,
    volumes_pb2_grpc,
)

DEFAULT_SOCKET: Final = "/run/sealane/sealaned.sock"
_CONNECT_SECONDS: Final = 5.0
_REQUEST_RANGE: Final = "volume.request.range"
_CALL_SECONDS: Final = 60.0
_RESIZE_SECONDS: Final = 120.0
_PAGE_SIZE: Final = 1000
_FILL_POLL_SECONDS: Final = 0.5
_JOB_POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Where an attached volume's plain namespace is, and what went through it."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
    host_nqn: str
    sectors_sealed: int
    sectors_opened: int
    counters_used: int
    counters_leased: int
    refusals: int
    dhchap_secret: str = field(default="", repr=False)
    """The host's DH-HMAC-CHAP secret; only in what `attach` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeShare:
    """Another tenant whose gateways may use a volume."""

    tenant: str
    is_read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume; `state` is "available", "attached" or "filling", of which `filled_bytes` are done.

    `mode` is "remote", "local" on a `third_party` of the gateway `target_node`, or "off" on either;
    `claims` are those of the threat model that hold in it. `tenant` is whose it is; of another
    tenant's volume `shares` has only what this gateway's tenant may do.
    """

    name: str
    display_name: str
    size_bytes: int
    target_node: str
    state: str
    mode: str
    freshness: str
    key_epoch: int
    attachment: Attachment | None
    third_party: str = ""
    claims: tuple[str, ...] = ()
    filled_bytes: int = 0
    tenant: str = ""
    shares: tuple[VolumeShare, ...] = ()
    is_read_only: bool = False
    anchor: str = ""
    """Of mode "local": "broker", or "none"; else empty: its target has it."""
    store: VolumeStore | None = None
    """What its store says of itself, if that was asked for."""
    store_unknown: str = ""
    """Why it could not be asked: a reason id."""


def front_end_of(volume: Volume) -> FrontEnd:
    """Where an attached volume is read and written; UsageError if it isn't attached."""
    a = volume.attachment
    if a is None or not a.dhchap_secret:
        raise UsageError(
            "volume.secret", f"{volume.name}: use what `attach` returned, which has the secret"
        )
    return FrontEnd(
        traddr=a.traddr,
        trsvcid=a.trsvcid,
        subsystem_nqn=a.subsystem_nqn,
        namespace_id=a.namespace_id,
        host_nqn=a.host_nqn,
        secret=a.dhchap_secret,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeEvent:
    """Something that happened to a volume; `reason` is a stable id, `origin` a node."""

    time: dt.datetime
    volume_id: str
    kind: str
    reason: str
    lba: int
    detail: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What the daemon is."""

    node: str
    version: str
    roles: tuple[str, ...]
    evidence_driver: str
    is_development: bool
    certificate_expires: dt.datetime | None
    addresses: Mapping[str, str]
    started: dt.datetime


class Volumes:
    """Calls about volumes; `name` is always "volumes/<UUID>"."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = volumes_pb2_grpc.VolumesStub(channel)

    async def create(
        self,
        *,
        size_bytes: int,
        display_name: str = "",
        target_node: str = "",
        third_party: str = "",
        mode: str = "",
        anchor: str = "",
        request_id: str = "",
    ) -> Volume:
        """Create a volume of `size_bytes`, a multiple of 4096.

        `third_party`: on the target of that name in the gateway's configuration, in mode "local";
        `anchor` "none": a roll-back of the whole namespace while detached is not noticed there.
        `mode` "off": without freshness (docs/threat-model.md); such a volume is filled in the
        background before it can be attached, see `wait_filled`.
        """
        # A request id of our own makes gRPC's transparent retries harmless.
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.CreateVolumeRequest(
                request_id=request_id or str(uuid.uuid4()),
                display_name=display_name,
                size_bytes=size_bytes,
                target_node=target_node,
                third_party=third_party,
                mode=mode,
                anchor=anchor,
            )
        with translated():
            return _volume(await self._stub.CreateVolume(request, timeout=_CALL_SECONDS))

    async def get(self, name: str, *, with_store: bool = False) -> Volume:
        """Return one volume; `with_store`: also what its store says, asked where it is."""
        request = volumes_pb2.GetVolumeRequest(name=name, with_store=with_store)
        with translated():
            return _volume(await self._stub.GetVolume(request, timeout=_CALL_SECONDS))

    async def wait_filled(
        self, name: str, *, progress: Callable[[Volume], None] | None = None
    ) -> Volume:
        """Wait while the volume is being filled; `progress` sees it twice a second."""
        while True:
            volume = await self.get(name)
            if volume.state != "filling":
                return volume
            if progress is not None:
                progress(volume)
            await asyncio.sleep(_FILL_POLL_SECONDS)

    async def list(self, *, with_store: bool = False) -> list[Volume]:
        """Return every volume of this tenant; `with_store`: also what their stores say."""
        volumes: list[Volume] = []
        token = ""
        with translated():
            while True:
                request = volumes_pb2.ListVolumesRequest(
                    page_size=_PAGE_SIZE, page_token=token, with_store=with_store
                )
                page = await self._stub.ListVolumes(request, timeout=_CALL_SECONDS)
                volumes += [_volume(v) for v in page.volumes]
                token = page.next_page_token
                if not token:
                    return volumes

    async def delete(self, name: str) -> None:
        """Delete a detached volume and all its data."""
        request = volumes_pb2.DeleteVolumeRequest(name=name)
        with translated():
            await self._stub.DeleteVolume(request, timeout=_CALL_SECONDS)

    async def attach(
        self, name: str, *, host_nqn: str, via_traddr: str = "", via_trsvcid: int = 0
    ) -> Volume:
        """Export the volume to `host_nqn`; `via_…` replaces the target's data-path address."""
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.AttachVolumeRequest(
                name=name, host_nqn=host_nqn, via_traddr=via_traddr, via_trsvcid=via_trsvcid
            )
        with translated():
            return _volume(await self._stub.AttachVolume(request, timeout=_CALL_SECONDS))

    async def detach(self, name: str) -> Volume:
        """Stop the export."""
        request = volumes_pb2.DetachVolumeRequest(name=name)
        with translated():
            return _volume(await self._stub.DetachVolume(request, timeout=_CALL_SECONDS))

    async def share(self, name: str, *, tenant: str, read_only: bool = False) -> Volume:
        """Let gateways of another tenant use the volume; again: change what they may do."""
        with sayable(_REQUEST_RANGE):
            share = broker_pb2.VolumeShare(tenant=tenant, read_only=read_only)
            request = volumes_pb2.ShareVolumeRequest(name=name, share=share)
        with translated():
            return _volume(await self._stub.ShareVolume(request, timeout=_CALL_SECONDS))

    async def unshare(self, name: str, *, tenant: str) -> Volume:
        """End that: within 30 s their gateways have no access; the volume gets a new key epoch."""
        request = volumes_pb2.UnshareVolumeRequest(name=name, tenant=tenant)
        with translated():
            return _volume(await self._stub.UnshareVolume(request, timeout=_CALL_SECONDS))

    async def start_job(self, name: str, kind: str, *, bytes_per_second: int = 0) -> VolumeJob:
        """Start to "scrub" or "refresh" the volume where it is stored; a rate of 0 is no limit."""
        with sayable(_REQUEST_RANGE):
            start = storage_pb2.JobStart(kind=kind, bytes_per_second=bytes_per_second)
            request = volumes_pb2.StartVolumeJobRequest(name=name, start=start)
        with translated():
            return job_of(await self._stub.StartVolumeJob(request, timeout=_CALL_SECONDS))

    async def change_job(
        self, name: str, kind: str, *, order: str = "", bytes_per_second: int | None = None
    ) -> VolumeJob:
        """Give a job the order "pause", "resume" or "cancel", or another rate."""
        with sayable(_REQUEST_RANGE):
            change = storage_pb2.JobChange(
                kind=kind, order=order, bytes_per_second=bytes_per_second
            )
            request = volumes_pb2.ChangeVolumeJobRequest(name=name, change=change)
        with translated():
            return job_of(await self._stub.ChangeVolumeJob(request, timeout=_CALL_SECONDS))

    async def wait_job(
        self, name: str, kind: str, *, progress: Callable[[VolumeJob], None] | None = None
    ) -> VolumeJob:
        """Wait until a job has ended; `progress` sees it twice a second."""
        while True:
            volume = await self.get(name, with_store=True)
            jobs = () if volume.store is None else volume.store.jobs
            job = next((job for job in jobs if job.kind == kind), None)
            if job is not None:
                if progress is not None:
                    progress(job)
                # Its daemon writes down the end of a job a moment after the job's last step.
                if job.ended is not None or job.state == "interrupted":
                    return job
            elif volume.store is not None:
                raise UsageError("volume.job.over", f"no {kind} of {name} is under way")
            # Without a word from the store: it may be opening.
            await asyncio.sleep(_JOB_POLL_SECONDS)

    async def resize(self, name: str, *, size_bytes: int) -> Volume:
        """Make a volume larger: `size_bytes` in all, a multiple of 4096; again is harmless.

        What it gains reads as zeros. Hosts see it when the volume is attached next; until then
        those that have it attached see a pause. UsageError `volume.resize.smaller`,
        `volume.resize.mode`, `volume.resize.refused`; UnavailableError `store.extend`: there is no
        room for it where it is stored.
        """
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.ResizeVolumeRequest(name=name, size_bytes=size_bytes)
        with translated():
            return _volume(await self._stub.ResizeVolume(request, timeout=_RESIZE_SECONDS))

    async def clone(self, name: str, *, display_name: str = "") -> Volume:
        """UsageError `volume.clone.unsupported`."""
        request = volumes_pb2.CloneVolumeRequest(name=name, display_name=display_name)
        with translated():
            return _volume(await self._stub.CloneVolume(request, timeout=_CALL_SECONDS))

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[AsyncIterator[VolumeEvent]]:
        """Subscribe to the volume's events; none is missed once the block is entered."""
        request = volumes_pb2.WatchVolumeRequest(name=name)
        call = self._stub.WatchVolume(request)
        try:
            with translated():
                await _metadata_of(call)
                if call.done():
                    # A refusal also ends the wait for metadata; it is in the status.
                    await anext(aiter(call), None)
            yield _events(call)
        finally:
            call.cancel()


class Client:
    """An open connection.

    `sessions` is the stub that `sealane.client.session` builds on, `subsystems` that of a target's
    plain subsystems, `operator` that of a broker's keys and leases, `devices` that of its devices,
    `membership` that of its nodes, `policies` and `audit_log` those of its verifier.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.volumes = Volumes(channel)
        self.sessions = sessions_pb2_grpc.SessionsStub(channel)
        self.subsystems = subsystems_pb2_grpc.SubsystemsStub(channel)
        self.operator = operator_pb2_grpc.OperatorStub(channel)
        self.devices = devices_pb2_grpc.DeviceRegistryStub(channel)
        self.policies = policy_pb2_grpc.PoliciesStub(channel)
        self.audit_log = policy_pb2_grpc.AuditLogStub(channel)
        self.membership = trust_pb2_grpc.MembershipStub(channel)
        self._nodes = nodes_pb2_grpc.NodesStub(channel)

    def open(self, volume: Volume, *, queue_count: int = 2, timeout_seconds: float = 60.0) -> Disk:
        """Read and write a volume that `attach` returned: `async with client.open(volume) as disk`.

        `timeout_seconds` is how long one command may take, and how long a call waits for a front
        end that is gone.
        """
        return Disk(front_end_of(volume), queue_count=queue_count, timeout_seconds=timeout_seconds)

    def open_session(
        self,
        display_name: str,
        *,
        region_bytes: int,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        via_addresses: Sequence[str] = (),
        wait_seconds: float = 0.0,
    ) -> contextlib.AbstractAsyncContextManager[Session]:
        """Open a session to a listener at another fabric, as `sealane.client.open_session`."""
        return open_session(
            self.sessions,
            display_name,
            region_bytes=region_bytes,
            peer_node=peer_node,
            peer_address=peer_address,
            rate_bits_per_second=rate_bits_per_second,
            via_addresses=via_addresses,
            wait_seconds=wait_seconds,
        )

    def listen_session(
        self, display_name: str, *, region_bytes: int
    ) -> contextlib.AbstractAsyncContextManager[Session]:
        """Wait for a session of that name, as `sealane.client.listen_session`."""
        return listen_session(self.sessions, display_name, region_bytes=region_bytes)

    async def node(self) -> nodes_pb2.Node:
        """Return what the daemon is, and what its roles show to their peers."""
        with translated():
            return await self._nodes.GetNode(nodes_pb2.GetNodeRequest(), timeout=_CALL_SECONDS)

    async def status(self) -> NodeStatus:
        """Return what the daemon is."""
        node = await self.node()
        expires = None
        if node.HasField("certificate_expire_time"):
            expires = node.certificate_expire_time.ToDatetime(tzinfo=dt.UTC)
        return NodeStatus(
            node=node.node,
            version=node.version,
            roles=tuple(node.roles),
            evidence_driver=node.evidence_driver,
            is_development=node.development,
            certificate_expires=expires,
            addresses=dict(node.addresses),
            started=node.start_time.ToDatetime(tzinfo=dt.UTC),
        )


@contextlib.asynccontextmanager
async def connect(socket: str = DEFAULT_SOCKET) -> AsyncIterator[Client]:
    """Connect to the daemon at `socket`; UnavailableError `daemon.unreachable` if there is none."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_unix_connection(socket)
    except OSError as error:
        why = "time-out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UnavailableError(
            "daemon.unreachable", f"{socket}: no sealaned answers there: {why}"
        ) from error
    writer.close()
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        yield Client(channel)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn a failed call inside the block into the Sealane error it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer="sealaned") from error


async def _metadata_of(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Wait until a stream's server has taken the call, or has refused it."""
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            await call.initial_metadata()
    except TimeoutError as error:
        raise UnavailableError(
            "peer.deadline_exceeded", f"sealaned said nothing within {_CALL_SECONDS:.0f} s"
        ) from error


async def _events(call: AsyncIterable[storage_pb2.VolumeEvent]) -> AsyncIterator[VolumeEvent]:
    with translated():
        async for message in call:
            yield _event(message)


def _event(message: storage_pb2.VolumeEvent) -> VolumeEvent:
    return VolumeEvent(
        time=message.time.ToDatetime(tzinfo=dt.UTC),
        volume_id=message.volume_id,
        kind=message.kind,
        reason=message.reason,
        lba=message.lba,
        detail=message.detail,
        origin=message.origin,
    )


def _volume(message: volumes_pb2.Volume) -> Volume:
    attachment = None
    if message.HasField("attachment"):
        a = message.attachment
        attachment = Attachment(
            traddr=a.traddr,
            trsvcid=a.trsvcid,
            subsystem_nqn=a.subsystem_nqn,
            namespace_id=a.namespace_id,
            host_nqn=a.host_nqn,
            sectors_sealed=a.sectors_sealed,
            sectors_opened=a.sectors_opened,
            counters_used=a.counters_used,
            counters_leased=a.counters_leased,
            refusals=a.refusals,
            dhchap_secret=a.dhchap_secret,
        )
    return Volume(
        name=message.name,
        display_name=message.display_name,
        size_bytes=message.size_bytes,
        target_node=message.target_node,
        state=volumes_pb2.Volume.State.Name(message.state).lower(),
        mode=message.mode,
        freshness=message.freshness,
        key_epoch=message.key_epoch,
        attachment=attachment,
        third_party=message.third_party,
        anchor=message.anchor,
        claims=tuple(message.claims),
        filled_bytes=message.filled_bytes,
        tenant=message.tenant,
        shares=tuple(
            VolumeShare(tenant=share.tenant, is_read_only=share.read_only)
            for share in message.shares
        ),
        is_read_only=message.read_only,
        store=store_of(message.store) if message.HasField("store") else None,
        store_unknown=message.store_unknown,
    )
