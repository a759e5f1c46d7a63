"""The gateway's calls to brokers: descriptors, keys and leases; every answer is verified."""

import asyncio
import secrets
from collections.abc import Collection
from typing import Final

from google.protobuf.message import DecodeError

from sealane.crypto.exchange import wipe
from sealane.crypto.hpke import REQUEST_ID_BYTES, Context, SignedSecret, open_signed
from sealane.crypto.lease import RETURN_TOKEN_BYTES, CounterRange, Lease
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.brokers import Brokers
from sealane.daemon.node.identity import Identity
from sealane.daemon.runtime.calls import spread
from sealane.daemon.volume.descriptors import open_descriptor
from sealane.errors import LeaseError, UsageError, VerificationError
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2
from sealane.protocol.v1.broker_pb2_grpc import BrokerStub

_CALL_SECONDS: Final = 10.0
_PAGE_SIZE: Final = 1000


class BrokerClient:
    """Client of the brokers for this node's gateway role."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = Brokers(config, identity)
        self._identity = identity

    async def register(
        self,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        mode: str = "",
        third_party: str = "",
        anchor: str = "",
        any_target: bool = False,
    ) -> tuple[broker_pb2.VolumeDescriptor, broker_pb2.RegisterVolumeResponse]:
        """Register a volume; return its verified descriptor and the whole response.

        With `any_target`, a repeated call may return a volume on another target than is named.
        """
        request = broker_pb2.RegisterVolumeRequest(
            request_id=request_id,
            display_name=display_name,
            size_bytes=size_bytes,
            target_node=target_node,
            mode=mode,
            third_party=third_party,
            anchor=anchor,
            any_target=any_target,
        )
        answer = await self._brokers.call(
            lambda channel: BrokerStub(channel).RegisterVolume(request, timeout=_CALL_SECONDS)
        )
        descriptor = open_descriptor(self._identity.anchors, answer.volume)
        is_asked = (descriptor.mode, descriptor.third_party) == (mode, third_party)
        # An earlier call with this request id may have registered it, and others may have grown it
        # since.
        if not is_asked or descriptor.sector_count * SECTOR_BYTES < size_bytes:
            raise _mismatch("the broker described a different volume from the one requested")
        return descriptor, answer

    async def descriptor(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Return the verified descriptor of `volume_id`."""
        request = broker_pb2.GetVolumeDescriptorRequest(volume_id=volume_id)
        return self._described(await self._signed(request), volume_id)

    async def target_of_request(self, request_id: str) -> str:
        """Return the target of the volume that an earlier `register` made; empty: it made none."""
        request = broker_pb2.GetVolumeDescriptorRequest(request_id=request_id)
        try:
            signed = await self._signed(request)
        except UsageError:
            # A broker of an earlier release refuses the request.
            return ""
        return open_descriptor(self._identity.anchors, signed).target_node

    async def _signed(
        self, request: broker_pb2.GetVolumeDescriptorRequest
    ) -> broker_pb2.SignedVolumeDescriptor:
        return await self._brokers.call(
            lambda channel: BrokerStub(channel).GetVolumeDescriptor(request, timeout=_CALL_SECONDS)
        )

    async def descriptors(
        self, *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.VolumeDescriptor], str]:
        """Return a page of verified descriptors and the next page's token."""
        return await self._page(
            broker_pb2.ListVolumeDescriptorsRequest(
                page_size=page_size or _PAGE_SIZE, page_token=page_token
            )
        )

    async def _page(
        self, request: broker_pb2.ListVolumeDescriptorsRequest
    ) -> tuple[list[broker_pb2.VolumeDescriptor], str]:
        page = await self._brokers.call(
            lambda channel: BrokerStub(channel).ListVolumeDescriptors(
                request, timeout=_CALL_SECONDS
            )
        )
        anchors = self._identity.anchors
        opened = [open_descriptor(anchors, v) async for v in spread(page.volumes)]
        return opened, page.next_page_token

    async def descriptors_of(
        self, volume_ids: Collection[str]
    ) -> dict[str, broker_pb2.VolumeDescriptor]:
        """Return the verified descriptors of those of these volumes that this gateway may see."""
        found: dict[str, broker_pb2.VolumeDescriptor] = {}
        request = broker_pb2.ListVolumeDescriptorsRequest(volume_ids=volume_ids)
        while True:
            page, request.page_token = await self._page(request)
            found |= {each.volume_id: each for each in page if each.volume_id in volume_ids}
            if not request.page_token:
                return found

    async def finish_filling(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Report to the broker that all sectors of a volume are sealed; return its descriptor."""
        request = broker_pb2.FinishFillingRequest(volume_id=volume_id)
        signed = await self._brokers.call(
            lambda channel: BrokerStub(channel).FinishFilling(request, timeout=_CALL_SECONDS)
        )
        return self._described(signed, volume_id)

    async def begin_resize(
        self, volume_id: str, *, size_bytes: int
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Begin to grow a volume; return its signed descriptor with the new size."""
        request = broker_pb2.BeginResizeRequest(volume_id=volume_id, size_bytes=size_bytes)
        signed = await self._brokers.call(
            lambda channel: BrokerStub(channel).BeginResize(request, timeout=_CALL_SECONDS)
        )
        self._described(signed, volume_id)
        return signed

    async def finish_resize(
        self, volume_id: str, *, size_bytes: int
    ) -> broker_pb2.VolumeDescriptor:
        """Report to the broker that a volume is stored with its new size; return its descriptor."""
        request = broker_pb2.FinishResizeRequest(volume_id=volume_id, size_bytes=size_bytes)
        signed = await self._brokers.call(
            lambda channel: BrokerStub(channel).FinishResize(request, timeout=_CALL_SECONDS)
        )
        return self._described(signed, volume_id)

    async def share(
        self, volume_id: str, *, tenant: str, read_only: bool
    ) -> broker_pb2.VolumeDescriptor:
        """Share a volume with the gateways of another tenant; return its descriptor."""
        request = broker_pb2.SetVolumeShareRequest(
            volume_id=volume_id,
            share=broker_pb2.VolumeShare(tenant=tenant, read_only=read_only),
        )
        signed = await self._brokers.call(
            lambda channel: BrokerStub(channel).SetVolumeShare(request, timeout=_CALL_SECONDS)
        )
        return self._described(signed, volume_id)

    async def unshare(self, volume_id: str, *, tenant: str) -> broker_pb2.VolumeDescriptor:
        """Stop sharing a volume with a tenant; return its descriptor, in a new key epoch."""
        request = broker_pb2.RemoveVolumeShareRequest(volume_id=volume_id, tenant=tenant)
        signed = await self._brokers.call(
            lambda channel: BrokerStub(channel).RemoveVolumeShare(request, timeout=_CALL_SECONDS)
        )
        return self._described(signed, volume_id)

    async def unregister(self, volume_id: str) -> None:
        """Remove a volume at the broker."""
        request = broker_pb2.UnregisterVolumeRequest(volume_id=volume_id)
        await self._brokers.call(
            lambda channel: BrokerStub(channel).UnregisterVolume(request, timeout=_CALL_SECONDS)
        )

    async def unregister_new(self, volume_id: str, *, revision: int) -> None:
        """Remove a volume that nothing has used since `revision` registered it.

        UsageError `volume.taken_up.state` if something has; another one from a broker of an earlier
        release, which can't tell.
        """
        request = broker_pb2.UnregisterVolumeRequest(new_volume_id=volume_id, revision=revision)
        await self._brokers.call(
            lambda channel: BrokerStub(channel).UnregisterVolume(request, timeout=_CALL_SECONDS)
        )

    async def key(self, descriptor: broker_pb2.VolumeDescriptor, *, key_epoch: int) -> bytearray:
        """Fetch the volume key of one epoch; the caller wipes it."""
        request = broker_pb2.GetVolumeKeyRequest(
            volume_id=descriptor.volume_id,
            key_epoch=key_epoch,
            request_id=secrets.token_bytes(REQUEST_ID_BYTES),
        )
        answer = await self._brokers.call(
            lambda channel: BrokerStub(channel).GetVolumeKey(request, timeout=_CALL_SECONDS)
        )
        return await asyncio.to_thread(
            open_signed,
            SignedSecret(sealed=answer.sealed, signature=answer.signature),
            private_key=self._identity.keys.kem,
            context=self._context("volume key", request),
            signer=self._identity.broker_key,
        )

    async def lease(self, descriptor: broker_pb2.VolumeDescriptor) -> Lease:
        """Lease counters for the descriptor's key epoch; LeaseError if the lease is unusable."""
        request = broker_pb2.GrantLeaseRequest(
            volume_id=descriptor.volume_id,
            key_epoch=descriptor.key_epoch,
            request_id=secrets.token_bytes(REQUEST_ID_BYTES),
        )
        answer = await self._brokers.call(
            lambda channel: BrokerStub(channel).GrantLease(request, timeout=_CALL_SECONDS)
        )
        if answer.broker_instance > 0xFFFF or answer.start_epoch > 0xFF_FFFF:
            raise LeaseError("lease.malformed", "the lease is for an arena that can't exist")
        arena = (answer.broker_instance, answer.start_epoch)
        opened = await asyncio.to_thread(
            open_signed,
            SignedSecret(sealed=answer.sealed, signature=answer.signature),
            private_key=self._identity.keys.kem,
            context=self._context("lease", request, arena),
            signer=self._identity.broker_key,
        )
        try:
            lease = broker_pb2.Lease.FromString(bytes(opened))
        except DecodeError as error:
            raise LeaseError("lease.malformed", "the lease can't be parsed") from error
        finally:
            wipe(opened)
        named = (lease.volume_id, lease.key_epoch, lease.broker_instance, lease.start_epoch)
        if (
            named != (descriptor.volume_id, descriptor.key_epoch, *arena)
            or len(lease.return_token) != RETURN_TOKEN_BYTES
        ):
            raise LeaseError("lease.mismatch", "the lease is not the one that was requested")
        return Lease(
            lease_id=lease.lease_id,
            counters=CounterRange(
                broker_instance=lease.broker_instance,
                start_epoch=lease.start_epoch,
                counter_start=lease.counter_start,
                counter_end=lease.counter_end,
            ),
            return_token=lease.return_token,
        )

    async def return_lease(self, volume_id: str, lease: Lease, touched: int) -> int:
        """Return `lease` from the counter `touched` on; return the number of counters returned."""
        broker_instance, start_epoch = lease.arena
        request = broker_pb2.ReturnLeaseRequest(
            volume_id=volume_id,
            broker_instance=broker_instance,
            start_epoch=start_epoch,
            lease_id=lease.lease_id,
            touched=touched,
            return_token=lease.return_token,
        )
        answer = await self._brokers.call(
            lambda channel: BrokerStub(channel).ReturnLease(request, timeout=_CALL_SECONDS)
        )
        return answer.counters

    def _described(
        self, signed: broker_pb2.SignedVolumeDescriptor, volume_id: str
    ) -> broker_pb2.VolumeDescriptor:
        """Verify that the broker signed a descriptor and that it describes the requested volume."""
        descriptor = open_descriptor(self._identity.anchors, signed)
        if descriptor.volume_id != volume_id:
            raise _mismatch("the broker described a different volume from the one requested")
        return descriptor

    def _context(
        self,
        purpose: str,
        request: broker_pb2.GetVolumeKeyRequest | broker_pb2.GrantLeaseRequest,
        arena: tuple[int, int] | None = None,
    ) -> Context:
        return Context(
            purpose=purpose,
            recipient=self._identity.subject.spiffe_id,
            incarnation=self._identity.keys.incarnation,
            request_id=request.request_id,
            volume_id=request.volume_id,
            key_epoch=request.key_epoch,
            arena=arena,
        )


def _mismatch(message: str) -> VerificationError:
    return VerificationError("volume.descriptor.mismatch", message)
