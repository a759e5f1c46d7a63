"""gRPC service `Volumes` of the gateway, on the Unix socket."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Final

from google.protobuf import empty_pb2

from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.back_ends import Via
from sealane.daemon.gateway.supply import is_read_only
from sealane.daemon.gateway.volumes import VolumeService
from sealane.daemon.runtime.authorizers import Context
from sealane.daemon.runtime.traces import opened
from sealane.daemon.volume.events import event_message
from sealane.errors import UsageError
from sealane.protocol.kinds import AnchorKind, Freshness, VolumeMode
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2, storage_pb2, volumes_pb2, volumes_pb2_grpc

# docs/operate/third-party.md explains why the other claims don't hold there, and the limits of C4.
_CLAIMS: Final = {
    ("", False): ("C1", "C2", "C3", "C4 while the target runs", "C5", "C7", "C8"),
    (VolumeMode.LOCAL, True): (
        "C1",
        "C2",
        "C3",
        "C4 while attached",
        "C7 as far as its flush holds",
        "C8",
    ),
    (VolumeMode.OFF, False): ("C1", "C2", "C3", "C5", "C7", "C8"),
    (VolumeMode.OFF, True): ("C1", "C2", "C3", "C7 as far as its flush holds", "C8"),
}
_ANCHORED_CLAIMS: Final = ("C1", "C2", "C3", "C4", "C6", "C7 as far as its flush holds", "C8")
_FRESHNESS: Final = {
    "": Freshness.TREE,
    VolumeMode.LOCAL: f"{Freshness.TREE} of the gateway",
    VolumeMode.OFF: f"{Freshness.NONE}: an older sector from the store is not detected",
}


class VolumesServicer(volumes_pb2_grpc.VolumesServicer):
    """Converts between gRPC messages and `VolumeService`."""

    def __init__(self, service: VolumeService) -> None:
        self._service = service

    async def CreateVolume(
        self, request: volumes_pb2.CreateVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Create a volume."""
        descriptor = await self._service.create(
            request_id=request.request_id,
            display_name=request.display_name,
            size_bytes=request.size_bytes,
            target_node=request.target_node,
            third_party=request.third_party,
            mode=request.mode,
            anchor=request.anchor,
        )
        return self._volume(descriptor)

    async def GetVolume(
        self, request: volumes_pb2.GetVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Return a volume."""
        volume_id = volume_id_of(request.name)
        descriptor = await self._service.get(volume_id)
        (volume,) = await self._volumes([descriptor], with_store=request.with_store)
        return volume

    async def ListVolumes(
        self, request: volumes_pb2.ListVolumesRequest, context: Context
    ) -> volumes_pb2.ListVolumesResponse:
        """Return a page of volumes."""
        if request.page_size < 0:
            raise UsageError("page.size", f"page size {request.page_size}; allowed: 0 and up")
        descriptors, token = await self._service.list(
            page_size=request.page_size, page_token=request.page_token
        )
        volumes = await self._volumes(descriptors, with_store=request.with_store)
        return volumes_pb2.ListVolumesResponse(volumes=volumes, next_page_token=token)

    async def DeleteVolume(
        self, request: volumes_pb2.DeleteVolumeRequest, context: Context
    ) -> empty_pb2.Empty:
        """Delete a volume."""
        await self._service.delete(volume_id_of(request.name))
        return empty_pb2.Empty()

    async def AttachVolume(
        self, request: volumes_pb2.AttachVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Attach a volume."""
        if request.via_trsvcid > 65535:
            raise UsageError(
                "volume.via", f"via port {request.via_trsvcid}; allowed: 0 (none) to 65535"
            )
        descriptor = await self._service.attach(
            volume_id_of(request.name),
            host_nqn=request.host_nqn,
            via=Via(traddr=request.via_traddr, trsvcid=request.via_trsvcid),
            fail_over=request.fail_over,
        )
        volume = self._volume(descriptor)
        attached = self._service.attached(descriptor.volume_id)
        if attached is not None:
            # Only in this response: the caller that attached the volume passes the secret on to the
            # host.
            volume.attachment.dhchap_secret = str(attached.port.secret)
        return volume

    async def TakeOverVolume(
        self, request: volumes_pb2.TakeOverVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Serve a volume's host from this gateway of its fail-over group."""
        descriptor = await self._service.take_over(
            volume_id_of(request.name), accepts_loss=request.accept_loss
        )
        return self._volume(descriptor)

    async def DetachVolume(
        self, request: volumes_pb2.DetachVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Detach a volume."""
        return self._volume(await self._service.detach(volume_id_of(request.name)))

    async def ShareVolume(
        self, request: volumes_pb2.ShareVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Share a volume with another tenant."""
        descriptor = await self._service.share(
            volume_id_of(request.name),
            tenant=request.share.tenant,
            read_only=request.share.read_only,
        )
        return self._volume(descriptor)

    async def UnshareVolume(
        self, request: volumes_pb2.UnshareVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Stop sharing a volume with a tenant."""
        descriptor = await self._service.unshare(volume_id_of(request.name), tenant=request.tenant)
        return self._volume(descriptor)

    async def StartVolumeJob(
        self, request: volumes_pb2.StartVolumeJobRequest, context: Context
    ) -> storage_pb2.VolumeJob:
        """Start a background job."""
        return await self._service.stores.start_job(volume_id_of(request.name), request.start)

    async def ChangeVolumeJob(
        self, request: volumes_pb2.ChangeVolumeJobRequest, context: Context
    ) -> storage_pb2.VolumeJob:
        """Pause, resume or cancel a background job, or set its rate."""
        return await self._service.stores.change_job(volume_id_of(request.name), request.change)

    async def ResizeVolume(
        self, request: volumes_pb2.ResizeVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Make a volume larger."""
        descriptor = await self._service.resize(
            volume_id_of(request.name), size_bytes=request.size_bytes
        )
        return self._volume(descriptor)

    async def CloneVolume(
        self, request: volumes_pb2.CloneVolumeRequest, context: Context
    ) -> volumes_pb2.Volume:
        """Refuse to clone a volume: docs/formats/stores.md §5."""
        raise UsageError(
            "volume.clone.unsupported",
            f"{request.name[:80]}: sealed sectors are bound to their volume, so a clone can't "
            "share them; create a volume and copy",
        )

    async def WatchVolume(
        self, request: volumes_pb2.WatchVolumeRequest, context: Context
    ) -> AsyncIterator[storage_pb2.VolumeEvent]:
        """Stream the volume's events, those of the gateway and of the target."""
        volume_id = volume_id_of(request.name)
        await self._service.get(volume_id)
        with self._service.events.subscribed(volume_id) as events:
            # The metadata signals that events from here on are not missed.
            await context.send_initial_metadata(())
            opened()
            async for event in events:
                yield event_message(event)

    async def _volumes(
        self, descriptors: Sequence[broker_pb2.VolumeDescriptor], *, with_store: bool
    ) -> list[volumes_pb2.Volume]:
        """Return the volumes; what the broker knows even if their stores can't be asked."""
        tenant = self._service.tenant
        volumes = [self._volume(descriptor, tenant) for descriptor in descriptors]
        if with_store:
            statuses = await self._service.stores.statuses(descriptors)
            for volume, descriptor in zip(volumes, descriptors, strict=True):
                status = statuses[descriptor.volume_id]
                if isinstance(status, storage_pb2.StoreStatus):
                    volume.store.CopyFrom(status)
                else:
                    volume.store_unknown = status
        return volumes

    def _volume(
        self, descriptor: broker_pb2.VolumeDescriptor, tenant: str | None = None
    ) -> volumes_pb2.Volume:
        """Return a volume as the gateway's tenant sees it, by default as of now."""
        tenant = tenant or self._service.tenant
        attached = self._service.attached(descriptor.volume_id)
        is_local = descriptor.mode == VolumeMode.LOCAL
        is_anchored = is_local and bool(descriptor.device_id)
        claims = _CLAIMS.get((descriptor.mode, bool(descriptor.third_party)), ())
        volume = volumes_pb2.Volume(
            name=f"volumes/{descriptor.volume_id}",
            display_name=descriptor.display_name,
            size_bytes=descriptor.sector_count * SECTOR_BYTES,
            target_node=descriptor.target_node,
            state=volumes_pb2.Volume.AVAILABLE,
            mode=descriptor.mode or VolumeMode.REMOTE,
            freshness=_FRESHNESS.get(descriptor.mode, ""),
            anchor=(AnchorKind.BROKER if is_anchored else AnchorKind.NONE) if is_local else "",
            key_epoch=descriptor.key_epoch,
            third_party=descriptor.third_party,
            claims=_ANCHORED_CLAIMS if is_anchored else claims,
            tenant=descriptor.tenant,
            shares=descriptor.shares,
            read_only=is_read_only(descriptor, tenant),
        )
        if descriptor.filling_gateway:
            volume.state = volumes_pb2.Volume.FILLING
            volume.filled_bytes = self._service.filled_bytes(descriptor.volume_id)
        if self._service.is_returning(descriptor.volume_id):
            volume.state = volumes_pb2.Volume.REATTACHING
        if attached is not None:
            volume.state = volumes_pb2.Volume.ATTACHED
            volume.attachment.CopyFrom(_attachment(attached, tenant))
        return volume


def volume_id_of(name: str) -> str:
    """Return the volume id in a resource name `volumes/{uuid}`; UsageError for anything else."""
    prefix, _, text = name.partition("/")
    try:
        parsed = str(uuid.UUID(text)) if prefix == "volumes" else ""
    except ValueError:
        parsed = ""
    if not parsed or parsed != text:
        raise UsageError("volume.name", f"volume name {name[:80]!r}; allowed: volumes/<UUID>")
    return parsed


def _attachment(attached: Attached, tenant: str) -> volumes_pb2.Attachment:
    statistics = attached.port.statistics()
    export, member = attached.export, attached.member
    return volumes_pb2.Attachment(
        traddr=export.traddr,
        trsvcid=export.trsvcid,
        subsystem_nqn=export.subsystem_nqn,
        namespace_id=export.namespace_id,
        host_nqn=attached.host_nqn,
        sectors_sealed=statistics.get("sectors_sealed", 0),
        sectors_opened=statistics.get("sectors_opened", 0),
        counters_used=statistics.get("counters_used", 0),
        counters_leased=attached.leases.leased,
        refusals=statistics.get("refusals", 0),
        fail_over="" if member is None else member.state,
        fail_over_group="" if member is None else member.group_of(tenant),
    )
