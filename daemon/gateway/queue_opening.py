"""The gateway's side of the key exchange for a secure queue (secure-queue.md §2)."""

import secrets
import uuid

from sealane.crypto.certificates import Subject
from sealane.crypto.exchange import Exchange
from sealane.crypto.kem import KemKey
from sealane.crypto.queue import (
    NONCE_BYTES,
    TICKET_BYTES,
    VERSION,
    GroupClaim,
    QueueOffer,
    QueueTranscript,
    derive_queue_secret,
)
from sealane.crypto.share import new_share, open_share, seal_share
from sealane.daemon.gateway.grants import QueueGrant
from sealane.errors import ProtocolError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import storage_pb2


class QueueOpening:
    """One exchange: send `request` to the attested `target`, and pass the answer to `grant`.

    `kem` is this gateway's attested KEM key.
    """

    def __init__(
        self,
        *,
        volume_id: uuid.UUID,
        target: Subject,
        gateway_node: str,
        kem: KemKey,
        queue_id: int,
        association_epoch: int,
        read_only: bool = False,
        milestone: bytes = b"",
        claim: GroupClaim | None = None,
    ) -> None:
        self._own = Exchange()
        self._kem = kem
        self._share = new_share()
        self._offer = QueueOffer(
            volume_id=volume_id,
            host_nqn=gateway_nqn(gateway_node),
            target_node=target.node,
            gateway_node=gateway_node,
            queue_id=queue_id,
            association_epoch=association_epoch,
            is_read_only=read_only,
            nonce=secrets.token_bytes(NONCE_BYTES),
            public_key=self._own.public_key,
            milestone=milestone,
            claim=claim,
        )
        self.request = storage_pb2.OpenQueueRequest(
            volume_id=str(volume_id),
            host_nqn=self._offer.host_nqn,
            queue_id=queue_id,
            public_key=self._offer.public_key,
            nonce=self._offer.nonce,
            association_epoch=association_epoch,
            read_only=read_only,
            milestone=milestone,
            version=VERSION,
            sealed_share=seal_share(
                self._share,
                self._offer,
                kem_algorithm=target.kem_algorithm,
                public_key=target.kem_public_key,
            ),
            claim=None if claim is None else _claim_message(claim),
        )

    def grant(self, answer: storage_pb2.OpenQueueResponse) -> QueueGrant:
        """Derive the queue's secret, once. Blocks as long as the KEM key does.

        ProtocolError for a ticket of the wrong length, VerificationError `secret.sealed` for a
        share that the target didn't seal to this gateway for this queue. Only a target whose store
        contains the requested milestone can seal it.
        """
        if len(answer.ticket) != TICKET_BYTES:
            raise ProtocolError("queue.ticket.malformed", f"a ticket has {TICKET_BYTES} bytes")
        transcript = QueueTranscript(
            offer=self._offer,
            target_incarnation=answer.target_incarnation,
            nonce=answer.nonce,
            public_key=answer.public_key,
            milestone=answer.milestone,
        )
        secret = derive_queue_secret(
            self._own,
            peer_key=answer.public_key,
            gateway_share=self._share,
            target_share=open_share(answer.sealed_share, transcript, key=self._kem),
            transcript=transcript,
        )
        return QueueGrant(
            ticket=answer.ticket,
            secret=secret,
            association_epoch=self._offer.association_epoch,
            target_incarnation=answer.target_incarnation,
            traddr=answer.traddr,
            trsvcid=answer.trsvcid,
            subsystem_nqn=answer.subsystem_nqn,
            host_nqn=self._offer.host_nqn,
            confirmed=self._offer.milestone,
            milestone=answer.milestone,
        )


def _claim_message(claim: GroupClaim) -> storage_pb2.GroupClaim:
    return storage_pb2.GroupClaim(
        group=claim.group,
        term=claim.term,
        take_over=claim.is_take_over,
        accept_loss=claim.accepts_loss,
        incarnation=claim.incarnation,
        operator=claim.by_operator,
    )
