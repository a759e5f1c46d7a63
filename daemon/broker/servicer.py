"""gRPC services of the broker: `Attestation` (server TLS only) and `Broker` (mutual TLS)."""

# ruff: noqa: N802 - names and arguments are those of the generated base classes

import contextlib
from collections.abc import Awaitable
from typing import Protocol

from cryptography.hazmat.primitives import serialization
from google.protobuf import empty_pb2, timestamp_pb2

from sealane.crypto.audit import Detail
from sealane.crypto.certificates import Subject
from sealane.daemon.broker.peers import address_of
from sealane.daemon.broker.refusals import refusals_recorded
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.stated import stated_in
from sealane.daemon.broker.verifier import VerifierService
from sealane.daemon.node.kept_anchors import succession_message
from sealane.daemon.runtime.authorizers import Authorizer, Context
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.errors import UsageError
from sealane.protocol.v1 import (
    attestation_pb2,
    attestation_pb2_grpc,
    broker_pb2,
    broker_pb2_grpc,
)


class _Resize(Protocol):
    def __call__(
        self, caller: Subject, volume_id: str, *, size_bytes: int
    ) -> Awaitable[broker_pb2.SignedVolumeDescriptor]: ...


class AttestationServicer(attestation_pb2_grpc.AttestationServicer):
    """Challenges nodes and certifies their attested keys."""

    def __init__(self, service: VerifierService) -> None:
        self._service = service

    async def GetChallenge(
        self,
        request: attestation_pb2.GetChallengeRequest,
        context: Context,
    ) -> attestation_pb2.Challenge:
        """Return a nonce."""
        challenge = await self._service.challenge(
            node=request.node,
            role=request.role,
            evidence_types=request.evidence_types,
            introduction=request.introduction,
            address=address_of(context.peer() or ""),
        )
        expires = timestamp_pb2.Timestamp()
        seconds = (challenge.expires_ns - monotonic_ns()) / 1e9
        expires.FromSeconds(int(utc_now().timestamp() + seconds))
        return attestation_pb2.Challenge(
            session_id=challenge.session_id,
            nonce=challenge.nonce,
            audience=self._service.verifier.audience,
            expire_time=expires,
            activation=challenge.introduced.activation,
            required_evidence_types=self._service.verifier.required_types(challenge),
            optional_evidence_types=self._service.verifier.optional_types(challenge),
        )

    async def Attest(
        self,
        request: attestation_pb2.AttestRequest,
        context: Context,
    ) -> attestation_pb2.AttestationResult:
        """Appraise evidence; issue a certificate and the attestation result for it."""
        issued = await self._service.attest(
            session_id=request.session_id,
            runtime_data=request.runtime_data,
            evidence=request.evidence,
            state=lambda: stated_in(request, now=utc_now()),
            address=address_of(context.peer() or ""),
        )
        expires = timestamp_pb2.Timestamp()
        expires.FromDatetime(issued.certificate.not_valid_after_utc)
        result = attestation_pb2.AttestationResult(
            certificate_pem=issued.certificate.public_bytes(serialization.Encoding.PEM).decode(),
            trust_anchor_pem=issued.authority.public_bytes(serialization.Encoding.PEM).decode(),
            expire_time=expires,
            token=issued.token,
            verifier_certificate=issued.verifier_certificate.public_bytes(
                serialization.Encoding.DER
            ),
        )
        if issued.succession is not None:
            result.succession.CopyFrom(succession_message(issued.succession))
        result.retired_authorities.extend(
            each.public_bytes(serialization.Encoding.DER) for each in issued.retired
        )
        return result


class BrokerServicer(broker_pb2_grpc.BrokerServicer):
    """Volumes, keys and leases, for attested callers."""

    def __init__(self, broker: BrokerService, authorizer: Authorizer) -> None:
        self._broker = broker
        self._caller = authorizer.caller

    async def RegisterVolume(
        self,
        request: broker_pb2.RegisterVolumeRequest,
        context: Context,
    ) -> broker_pb2.RegisterVolumeResponse:
        """Register a volume."""
        caller = self._caller(context)
        async with self._recorded(
            "volume.register", caller, target_node=request.target_node, mode=request.mode
        ):
            return await self._broker.register_volume(
                caller,
                request_id=request.request_id,
                display_name=request.display_name,
                size_bytes=request.size_bytes,
                target_node=request.target_node,
                mode=request.mode,
                third_party=request.third_party,
                anchor=request.anchor,
                any_target=request.any_target,
            )

    async def GetVolumeDescriptor(
        self,
        request: broker_pb2.GetVolumeDescriptorRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Return one descriptor."""
        caller = self._caller(context)
        if request.request_id and not request.volume_id:
            return await self._broker.descriptor_by_request(caller, request.request_id)
        return await self._broker.descriptor(caller, request.volume_id)

    async def ListVolumeDescriptors(
        self,
        request: broker_pb2.ListVolumeDescriptorsRequest,
        context: Context,
    ) -> broker_pb2.ListVolumeDescriptorsResponse:
        """Return a page of descriptors, or those asked for."""
        caller = self._caller(context)
        if request.volume_ids:
            found = await self._broker.descriptors_of(caller, request.volume_ids)
            return broker_pb2.ListVolumeDescriptorsResponse(volumes=found)
        volumes, token = await self._broker.descriptors(
            caller, page_size=request.page_size, page_token=request.page_token
        )
        return broker_pb2.ListVolumeDescriptorsResponse(volumes=volumes, next_page_token=token)

    async def UnregisterVolume(
        self,
        request: broker_pb2.UnregisterVolumeRequest,
        context: Context,
    ) -> empty_pb2.Empty:
        """Remove a volume."""
        caller = self._caller(context)
        volume_id, registered_at = request.volume_id, 0
        if not volume_id:
            volume_id, registered_at = request.new_volume_id, request.revision
            if registered_at <= 0:
                raise UsageError(
                    "request.malformed",
                    f"revision {registered_at}; allowed: that of a registration",
                )
        async with self._recorded("volume.unregister", caller, volume_id=volume_id):
            await self._broker.unregister_volume(caller, volume_id, registered_at=registered_at)
        return empty_pb2.Empty()

    async def SetVolumeShare(
        self,
        request: broker_pb2.SetVolumeShareRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Share a volume with another tenant."""
        caller = self._caller(context)
        tenant, read_only = request.share.tenant, request.share.read_only
        async with self._recorded(
            "volume.share", caller, volume_id=request.volume_id, shared_with=tenant
        ):
            return await self._broker.share_volume(
                caller, request.volume_id, tenant=tenant, read_only=read_only
            )

    async def RemoveVolumeShare(
        self,
        request: broker_pb2.RemoveVolumeShareRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Stop sharing a volume with a tenant."""
        caller = self._caller(context)
        async with self._recorded(
            "volume.unshare", caller, volume_id=request.volume_id, shared_with=request.tenant
        ):
            return await self._broker.unshare_volume(
                caller, request.volume_id, tenant=request.tenant
            )

    async def BeginResize(
        self,
        request: broker_pb2.BeginResizeRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Begin to grow a volume."""
        return await self._resized(request, context, self._broker.begin_resize)

    async def FinishResize(
        self,
        request: broker_pb2.FinishResizeRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Record that a volume has grown."""
        return await self._resized(request, context, self._broker.finish_resize)

    async def _resized(
        self,
        request: broker_pb2.BeginResizeRequest | broker_pb2.FinishResizeRequest,
        context: Context,
        change: _Resize,
    ) -> broker_pb2.SignedVolumeDescriptor:
        caller = self._caller(context)
        async with self._recorded("volume.resize", caller, volume_id=request.volume_id):
            return await change(caller, request.volume_id, size_bytes=request.size_bytes)

    async def FinishFilling(
        self,
        request: broker_pb2.FinishFillingRequest,
        context: Context,
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Record that a volume is filled."""
        return await self._broker.finish_filling(self._caller(context), request.volume_id)

    async def GetVolumeKey(
        self,
        request: broker_pb2.GetVolumeKeyRequest,
        context: Context,
    ) -> broker_pb2.SealedVolumeKey:
        """Release the key of one key epoch."""
        caller = self._caller(context)
        async with self._recorded(
            "key.release", caller, volume_id=request.volume_id, key_epoch=request.key_epoch
        ):
            secret = await self._broker.release_key(
                caller,
                volume_id=request.volume_id,
                key_epoch=request.key_epoch,
                request_id=request.request_id,
            )
        return broker_pb2.SealedVolumeKey(sealed=secret.sealed, signature=secret.signature)

    async def ReturnLease(
        self,
        request: broker_pb2.ReturnLeaseRequest,
        context: Context,
    ) -> broker_pb2.ReturnLeaseResponse:
        """End a lease."""
        caller = self._caller(context)
        async with self._recorded(
            "lease.return",
            caller,
            volume_id=request.volume_id,
            broker_instance=request.broker_instance,
            start_epoch=request.start_epoch,
            lease_id=request.lease_id,
        ):
            counters = await self._broker.leases.take_back(
                caller,
                volume_id=request.volume_id,
                arena=(request.broker_instance, request.start_epoch),
                lease_id=request.lease_id,
                touched=request.touched,
                return_token=request.return_token,
            )
        return broker_pb2.ReturnLeaseResponse(counters=counters)

    async def GrantLease(
        self,
        request: broker_pb2.GrantLeaseRequest,
        context: Context,
    ) -> broker_pb2.SealedLease:
        """Lease counters."""
        caller = self._caller(context)
        async with self._recorded(
            "lease.grant", caller, volume_id=request.volume_id, key_epoch=request.key_epoch
        ):
            lease = await self._broker.leases.grant(
                caller,
                volume_id=request.volume_id,
                key_epoch=request.key_epoch,
                request_id=request.request_id,
            )
        return broker_pb2.SealedLease(
            sealed=lease.secret.sealed,
            signature=lease.secret.signature,
            broker_instance=lease.broker_instance,
            start_epoch=lease.start_epoch,
        )

    def _recorded(
        self, kind: str, caller: Subject, **detail: Detail
    ) -> contextlib.AbstractAsyncContextManager[None]:
        return refusals_recorded(
            self._broker.audit,
            kind,
            subject=caller.spiffe_id,
            tenant=caller.tenant,
            incarnation=caller.incarnation,
            **detail,
        )
