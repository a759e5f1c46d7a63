"""A node's requests to the broker about its peers: their leaves, and whether they may act."""

from collections.abc import Sequence
from typing import Final

from cryptography import x509
from google.protobuf.message import DecodeError

from sealane.crypto.certificates import spiffe_id, verify_authorization
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.authorizations import peer_message, peer_of
from sealane.daemon.node.brokers import Brokers
from sealane.daemon.node.channels import UNATTESTED
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.peers import PeerIncarnation, ServedDevice
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.v1 import trust_pb2
from sealane.protocol.v1.trust_pb2_grpc import TrustStub

# Authorizations count from the request, so a slower answer would be of little use.
_CALL_SECONDS: Final = 5.0
_LEAVES_MAX: Final = 2


class TrustClient:
    """Calls the broker for one role of this node; verifies every answer."""

    def __init__(self, config: EnrolmentConfig, identity: Identity) -> None:
        self._brokers = Brokers(config, identity)
        self._identity = identity

    async def leaves(self, node: str, role: str) -> Sequence[x509.Certificate]:
        """Return the leaves that `role` of `node` may show now, newest first.

        UnavailableError `peer.unattested` if it has none, or was revoked.
        """
        name = spiffe_id(node, role)
        request = trust_pb2.GetPeerRequest(spiffe_id=name)
        answer = await self._brokers.call(
            lambda channel: TrustStub(channel).GetPeer(request, timeout=_CALL_SECONDS)
        )
        leaves = [_parse(pem) for pem in answer.certificate_pem[:_LEAVES_MAX]]
        if not leaves:
            raise UnavailableError(UNATTESTED, f"the broker knows no certificate for {name}")
        for leaf in leaves:
            subject = self._identity.verified(leaf)
            if subject.spiffe_id != name:
                raise VerificationError(
                    "peer.mismatch", f"the broker answered for {subject.spiffe_id}, not {name}"
                )
        return leaves

    async def authorize(
        self,
        nonce: bytes,
        peers: Sequence[PeerIncarnation],
        *,
        device: ServedDevice | None = None,
    ) -> Sequence[str]:
        """Return for each peer the reason why it may not act; empty if it may.

        VerificationError `device.…` if `device`, which this node serves them from, no longer
        belongs to it; `authorization.signature` or `authorization.mismatch` if the broker did not
        give this answer, or not to this request.
        """
        asked = [*map(peer_message, peers)]
        request = trust_pb2.AuthorizePeersRequest(nonce=nonce, peers=asked)
        if device is not None:
            request.device.device_id = str(device.device_id)
            request.device.fencing_epoch = device.fencing_epoch
        signed = await self._brokers.call(
            lambda channel: TrustStub(channel).AuthorizePeers(request, timeout=_CALL_SECONDS)
        )
        self._identity.anchors.issuing.checked(
            lambda anchor: verify_authorization(
                anchor, authorization=signed.authorization, signature=signed.signature
            )
        )
        try:
            answer = trust_pb2.Authorization.FromString(signed.authorization)
        except DecodeError as error:
            raise VerificationError(
                "authorization.malformed", "the authorization can't be parsed"
            ) from error
        we = peer_message(peer_of(self._identity.subject))
        if (answer.subject, answer.nonce) != (we, nonce) or [
            verdict.peer for verdict in answer.verdicts
        ] != asked:
            raise VerificationError(
                "authorization.mismatch", "the authorization does not answer this request"
            )
        return [verdict.refusal for verdict in answer.verdicts]


def _parse(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise VerificationError(
            "certificate.profile", "the broker's answer holds no certificate"
        ) from error
