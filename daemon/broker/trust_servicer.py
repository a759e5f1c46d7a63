"""gRPC services of the membership: `Trust` (mutual TLS) and `Membership` (Unix socket)."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

import datetime as dt

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf import empty_pb2, timestamp_pb2

from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.membership import Member, Membership
from sealane.daemon.node.authorizations import peer_from
from sealane.daemon.node.peers import ServedDevice
from sealane.daemon.runtime.authorizers import Authorizer, Context
from sealane.daemon.runtime.calls import parse_uuid
from sealane.protocol.v1 import trust_pb2, trust_pb2_grpc


class TrustServicer(trust_pb2_grpc.TrustServicer):
    """Calls of attested nodes about their peers."""

    def __init__(
        self, membership: Membership, authorities: Authorities, authorizer: Authorizer
    ) -> None:
        self._membership = membership
        self._authorities = authorities
        self._caller = authorizer.caller

    async def GetPeer(self, request: trust_pb2.GetPeerRequest, context: Context) -> trust_pb2.Peer:
        """Return the leaves that a peer may show."""
        caller = self._caller(context)
        leaves = await self._membership.leaves(request.spiffe_id, caller=caller)
        return trust_pb2.Peer(
            certificate_pem=[leaf.public_bytes(Encoding.PEM).decode() for leaf in leaves]
        )

    async def AuthorizePeers(
        self, request: trust_pb2.AuthorizePeersRequest, context: Context
    ) -> trust_pb2.SignedAuthorization:
        """Return which peers may act."""
        authorization = await self._membership.authorize(
            self._caller(context),
            nonce=request.nonce,
            peers=[*map(peer_from, request.peers)],
            device=_device(request),
        )
        return trust_pb2.SignedAuthorization(
            authorization=authorization,
            signature=self._authorities.signing.sign_authorization(authorization),
        )


class MembershipServicer(trust_pb2_grpc.MembershipServicer):
    """Calls of the broker's operator about nodes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def ListNodes(
        self, request: trust_pb2.ListNodesRequest, context: Context
    ) -> trust_pb2.ListNodesResponse:
        """Return a page of nodes."""
        members, token = await self._membership.members(
            page_size=request.page_size, page_token=request.page_token
        )
        return trust_pb2.ListNodesResponse(
            nodes=[_message(member) for member in members], next_page_token=token
        )

    async def RevokeNode(
        self, request: trust_pb2.RevokeNodeRequest, context: Context
    ) -> empty_pb2.Empty:
        """Revoke a node."""
        await self._membership.revoke(
            request.node, request.role, reason=request.reason, unseen=request.unseen
        )
        return empty_pb2.Empty()

    async def RestoreNode(
        self, request: trust_pb2.RestoreNodeRequest, context: Context
    ) -> empty_pb2.Empty:
        """Undo a revocation."""
        await self._membership.restore(request.node, request.role)
        return empty_pb2.Empty()


def _device(request: trust_pb2.AuthorizePeersRequest) -> ServedDevice | None:
    if not request.HasField("device"):
        return None
    return ServedDevice(
        device_id=parse_uuid(request.device.device_id, what="device"),
        fencing_epoch=request.device.fencing_epoch,
    )


def _message(member: Member) -> trust_pb2.Member:
    record = member.record
    message = trust_pb2.Member(
        node=record.node,
        role=record.role,
        tenant=record.tenant,
        incarnation=record.incarnation,
        state=member.state,
        version=member.stated.version,
        clock_skew_ms=member.stated.clock_skew_ms,
        addresses=member.stated.addresses,
        call_address=member.call_address,
    )
    if record.attested_at is not None:
        message.attest_time.CopyFrom(_timestamp(record.attested_at))
        leaf = x509.load_der_x509_certificate(record.leaf)
        message.expire_time.CopyFrom(_timestamp(leaf.not_valid_after_utc))
    if record.revocation is not None:
        message.reason = record.revocation.reason
        message.revoke_time.CopyFrom(_timestamp(record.revocation.revoked_at))
    return message


def _timestamp(moment: dt.datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp
