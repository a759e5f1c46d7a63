"""A gateway's side of opening a secure queue: its exchange of keys (docs/secure-queue.md §2)."""

import secrets
import uuid

from sealane.crypto.exchange import Exchange
from sealane.crypto.queue import NONCE_BYTES, TICKET_BYTES, QueueTranscript, derive_queue_secret
from sealane.daemon.ports import QueueGrant
from sealane.errors import ProtocolError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import storage_pb2


class QueueOpening:
    """One exchange: `request` goes to the target, its answer to `grant`, once."""

    def __init__(
        self,
        *,
        volume_id: uuid.UUID,
        target_node: str,
        gateway_node: str,
        queue_id: int,
        association_epoch: int,
        read_only: bool = False,
    ) -> None:
        self._own = Exchange()
        self._volume_id = volume_id
        self._target_node = target_node
        self._gateway_node = gateway_node
        self.request = storage_pb2.OpenQueueRequest(
            volume_id=str(volume_id),
            host_nqn=gateway_nqn(gateway_node),
            queue_id=queue_id,
            public_key=self._own.public_key,
            nonce=secrets.token_bytes(NONCE_BYTES),
            association_epoch=association_epoch,
            read_only=read_only,
        )

    def grant(self, answer: storage_pb2.OpenQueueResponse) -> QueueGrant:
        """Derive the queue's secret. ProtocolError for a ticket of another length."""
        if len(answer.ticket) != TICKET_BYTES:
            raise ProtocolError("queue.ticket.malformed", f"a ticket has {TICKET_BYTES} bytes")
        request = self.request
        secret = derive_queue_secret(
            self._own,
            peer_key=answer.public_key,
            transcript=QueueTranscript(
                volume_id=self._volume_id,
                host_nqn=request.host_nqn,
                target_node=self._target_node,
                gateway_node=self._gateway_node,
                queue_id=request.queue_id,
                association_epoch=request.association_epoch,
                target_incarnation=answer.target_incarnation,
                gateway_nonce=request.nonce,
                target_nonce=answer.nonce,
                gateway_key=request.public_key,
                target_key=answer.public_key,
            ),
        )
        return QueueGrant(
            ticket=answer.ticket,
            secret=secret,
            association_epoch=request.association_epoch,
            target_incarnation=answer.target_incarnation,
            traddr=answer.traddr,
            trsvcid=answer.trsvcid,
            subsystem_nqn=answer.subsystem_nqn,
            host_nqn=request.host_nqn,
        )
