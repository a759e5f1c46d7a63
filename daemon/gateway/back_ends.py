"""Where a gateway's volumes are stored: namespaces of Sealane targets, or third parties.

Creates and removes them, and opens the back end of a volume to be attached or filled.
"""

import asyncio
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sealane.crypto.exchange import wipe
from sealane.crypto.keys import derive_store_key
from sealane.daemon.device.anchors.authentic import AuthenticAnchor
from sealane.daemon.device.anchors.broker import BrokerAnchor
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.device.third_party import OpenDevice, VolumeDevice
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import OpenQueue, QueueGrant
from sealane.daemon.gateway.queue_opening import QueueOpening
from sealane.daemon.gateway.targets import Place, Targets
from sealane.daemon.gateway.third_party import ThirdPartyStores, ThirdPartyVolume
from sealane.daemon.node.identity import Identity
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import AnchorKind, StoreHealth, VolumeMode
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import broker_pb2, storage_pb2, storage_pb2_grpc

CALL_SECONDS: Final = 10.0
_RELEASE_SECONDS: Final = 3.0
RESIZE_SECONDS: Final = 60.0
"""Timeout of a resize: pending changes are merged first, and queues drained."""
# A store outlives key rotations, so its key derives from the first epoch's volume key, which the
# broker releases for the whole life of the volume.
_STORE_KEY_EPOCH: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Via:
    """Data-path address to use instead of the one that the target announces; empty: none."""

    traddr: str = ""
    trsvcid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeBackEnd:
    """An open back end: the function that opens queues, and what must be closed afterwards."""

    open_queue: OpenQueue
    epoch_floor: int = 0
    third_party: ThirdPartyVolume | None = None
    place: Place | None = None
    """The target that queues are opened at; None: it is on a third party."""

    async def close(self) -> None:
        """Disconnect from the third party, if the volume is on one."""
        if self.third_party is not None:
            await self.third_party.close()


def storage_of(descriptor: broker_pb2.VolumeDescriptor) -> str:
    """Return a name of the target or third party that has a volume: one may be away alone."""
    return f"{descriptor.target_node}/{descriptor.third_party}"


class VolumeBackEnds:
    """Targets and third parties of one gateway."""

    def __init__(
        self,
        targets: Targets,
        *,
        identity: Identity,
        broker: BrokerClient,
        devices: DeviceClient,
        third_parties: ThirdPartyStores,
    ) -> None:
        self._targets = targets
        self._identity = identity
        self._broker = broker
        self._devices = devices
        self._third_parties = third_parties

    async def create(self, registered: broker_pb2.RegisterVolumeResponse) -> None:
        """Create a volume's namespace at its target, or lay it out on a third party. Idempotent."""
        descriptor = broker_pb2.VolumeDescriptor.FromString(registered.volume.descriptor)
        if not descriptor.third_party:
            async with self._targets.channel(descriptor.target_node) as channel:
                await storage_pb2_grpc.StorageStub(channel).CreateNamespace(
                    storage_pb2.CreateNamespaceRequest(descriptor=registered.volume),
                    timeout=CALL_SECONDS,
                )
            return
        store_key = await self._store_key(descriptor)
        try:
            await self._third_parties.create(
                descriptor.third_party,
                uuid.UUID(descriptor.volume_id),
                sector_count=descriptor.sector_count,
                store_key=store_key,
                freshness=descriptor.mode != VolumeMode.OFF,
                open_device=self._device_of(descriptor),
            )
        finally:
            wipe(store_key)

    async def resize(
        self, before: broker_pb2.VolumeDescriptor, larger: broker_pb2.SignedVolumeDescriptor
    ) -> None:
        """Make a volume larger where it is stored. Idempotent."""
        if not before.third_party:
            async with self._targets.channel(before.target_node) as channel:
                await storage_pb2_grpc.StorageStub(channel).ResizeNamespace(
                    storage_pb2.ResizeNamespaceRequest(descriptor=larger), timeout=RESIZE_SECONDS
                )
            return
        self._check_ours(before)
        descriptor = broker_pb2.VolumeDescriptor.FromString(larger.descriptor)
        store_key = await self._store_key(before)
        try:
            await self._third_parties.resize(
                before.third_party,
                uuid.UUID(before.volume_id),
                sector_count=before.sector_count,
                larger_sector_count=descriptor.sector_count,
                store_key=store_key,
                open_device=self._device_of(before),
            )
        finally:
            wipe(store_key)

    async def delete(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        """Remove a volume's namespace, or make its sectors on a third party unreachable."""
        if descriptor.third_party:
            self._check_ours(descriptor)
            await self._third_parties.delete(
                descriptor.third_party, uuid.UUID(descriptor.volume_id)
            )
        else:
            await self.delete_namespace(descriptor)

    async def delete_namespace(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        """Remove a volume's namespace at its target, if it exists."""
        request = storage_pb2.DeleteNamespaceRequest(volume_id=descriptor.volume_id)
        try:
            async with self._targets.channel(descriptor.target_node) as channel:
                await storage_pb2_grpc.StorageStub(channel).DeleteNamespace(
                    request, timeout=CALL_SECONDS
                )
        except UsageError as error:
            # The target may have lost it already; the broker's record is removed in any case.
            if error.reason != "namespace.not_found":
                raise

    async def open(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        *,
        via: Via,
        read_only: bool = False,
        member: GroupMember | None = None,
    ) -> VolumeBackEnd:
        """Open a volume's back end; the caller closes it.

        UsageError `volume.fail_over.place`, `volume.fail_over.target` if there can't be a `member`
        of a fail-over group.
        """
        if member is not None and descriptor.third_party:
            raise UsageError(
                "volume.fail_over.place",
                "a volume on a third party belongs to one gateway: it has no fail-over",
            )
        if descriptor.third_party:
            return await self._open_third_party(descriptor, via=via)
        place = Place(descriptor.target_node)
        # A restarted target may have lost the volume: report that now, not at the first read.
        async with self._targets.channel(place.node) as channel:
            namespace = await storage_pb2_grpc.StorageStub(channel).GetNamespace(
                storage_pb2.GetNamespaceRequest(volume_id=descriptor.volume_id),
                timeout=CALL_SECONDS,
            )
        if namespace.status.health == StoreHealth.OPENING:
            raise UnavailableError(
                "namespace.opening", f"the target is still opening volume {descriptor.volume_id}"
            )
        if member is not None and not namespace.fail_over:
            raise UsageError(
                "volume.fail_over.target",
                f"target {place.node} can't fence gateways: update it first",
            )
        if member is not None:
            member.look = partial(self._look, descriptor, place, member)
            member.leave = partial(self._release, descriptor, place, member)
        return VolumeBackEnd(
            open_queue=partial(
                self._open_queue,
                descriptor=descriptor,
                place=place,
                via=via,
                read_only=read_only,
                member=member,
            ),
            epoch_floor=namespace.association_epoch,
            place=place,
        )

    async def _open_third_party(
        self, descriptor: broker_pb2.VolumeDescriptor, *, via: Via
    ) -> VolumeBackEnd:
        self._check_ours(descriptor)
        if via != Via():
            raise UsageError(
                "volume.via",
                "only a volume on a Sealane target takes another address; a third party's is in "
                "the gateway's configuration",
            )
        store_key = await self._store_key(descriptor)
        try:
            third_party = await self._third_parties.attach(
                descriptor.third_party,
                uuid.UUID(descriptor.volume_id),
                sector_count=descriptor.sector_count,
                store_key=store_key,
                freshness=descriptor.mode != VolumeMode.OFF,
                open_device=self._device_of(descriptor),
            )
        finally:
            wipe(store_key)
        return VolumeBackEnd(open_queue=third_party.open_queue, third_party=third_party)

    def _device_of(self, descriptor: broker_pb2.VolumeDescriptor) -> OpenDevice | None:
        """Return the function that opens a volume as a device, if brokers keep its anchor."""
        if not descriptor.device_id:
            return None
        return partial(self._open_device, uuid.UUID(descriptor.device_id))

    async def _open_device(self, device_id: uuid.UUID) -> VolumeDevice:
        opened = await self._devices.open(device_id, anchor=AnchorKind.BROKER, found=())
        served = opened.served
        try:
            anchor = AuthenticAnchor(
                BrokerAnchor(
                    opened.records,
                    floor=opened.floor,
                    advance=partial(self._devices.advance, served),
                ),
                device_id=device_id,
                kind=AnchorKind.BROKER,
                secret=opened.secret,
            )
        finally:
            # The store has a key of its own, derived from the volume's key.
            wipe(opened.secret)
        return VolumeDevice(
            anchor,
            is_believed=opened.is_initial,
            tell_anchored=partial(self._devices.confirm, served),
            tell_closed=partial(self._devices.close, served),
        )

    async def _store_key(self, descriptor: broker_pb2.VolumeDescriptor) -> bytearray:
        """Derive the key that authenticates a store on a third party; the caller wipes it."""
        key = await self._broker.key(descriptor, key_epoch=_STORE_KEY_EPOCH)
        try:
            return derive_store_key(key, volume_id=uuid.UUID(descriptor.volume_id))
        finally:
            wipe(key)

    def _check_ours(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        """Raise unless this gateway owns the volume."""
        if descriptor.target_node != self._identity.node:
            raise UsageError(
                "volume.owner",
                f"volume {descriptor.volume_id} belongs to gateway {descriptor.target_node!r}: no "
                "other gateway can use it",
            )

    async def _look(
        self, descriptor: broker_pb2.VolumeDescriptor, place: Place, member: GroupMember
    ) -> None:
        """Have `member` know who serves its group, and in which term."""
        request = storage_pb2.GetNamespaceRequest(
            volume_id=descriptor.volume_id, fail_over_group=member.group
        )
        async with self._targets.channel(place.node) as channel:
            namespace = await storage_pb2_grpc.StorageStub(channel).GetNamespace(
                request, timeout=CALL_SECONDS
            )
        member.observe(
            term=namespace.fail_over_term,
            serving_nqn=namespace.fail_over_host_nqn,
            own_nqn=gateway_nqn(self._identity.node),
        )

    async def _release(
        self, descriptor: broker_pb2.VolumeDescriptor, place: Place, member: GroupMember
    ) -> None:
        request = storage_pb2.ReleaseFailOverGroupRequest(
            volume_id=descriptor.volume_id, group=member.group, term=member.term
        )
        async with self._targets.channel(place.node) as channel:
            await storage_pb2_grpc.StorageStub(channel).ReleaseFailOverGroup(
                request, timeout=_RELEASE_SECONDS
            )

    async def _open_queue(
        self,
        queue_id: int,
        association_epoch: int,
        milestone: bytes = b"",
        *,
        descriptor: broker_pb2.VolumeDescriptor,
        place: Place,
        via: Via,
        read_only: bool,
        member: GroupMember | None,
    ) -> QueueGrant:
        """Exchange keys with the target for one secure queue; `member` may take over by it."""
        identity = self._identity
        async with self._targets.connection(place.node) as connection:
            target = storage_pb2_grpc.StorageStub(connection.channel)
            claim = None if member is None else member.claim()
            opening = QueueOpening(
                volume_id=uuid.UUID(descriptor.volume_id),
                target=identity.verified(connection.pins[0]),
                gateway_node=identity.node,
                kem=identity.keys.kem,
                queue_id=queue_id,
                association_epoch=association_epoch,
                read_only=read_only,
                milestone=milestone,
                claim=claim,
            )
            answer = await target.OpenQueue(opening.request, timeout=CALL_SECONDS)
        grant = await asyncio.to_thread(opening.grant, answer)
        if member is not None and claim is not None:
            member.serve(claim, incarnation=grant.target_incarnation)
        return replace(
            grant, traddr=via.traddr or grant.traddr, trsvcid=via.trsvcid or grant.trsvcid
        )
