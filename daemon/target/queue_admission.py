"""Admission of a gateway's I/O queue: secret, fence of older epochs, single-use ticket."""

import asyncio
import secrets
import uuid
from typing import Final

from sealane.crypto.certificates import Subject
from sealane.crypto.kem import KemKey
from sealane.crypto.queue import TICKET_BYTES, QueueOffer
from sealane.daemon.node.authorizations import Authorizations
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.queue_exchange import exchange
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import storage_pb2

_QUEUE_ID_MAX: Final = 65534


class QueueAdmission:
    """Admits queues to the namespaces of one target process."""

    def __init__(
        self,
        target: Target,
        *,
        node: str,
        kem: KemKey,
        authorizations: Authorizations,
    ) -> None:
        """Admit to `target`, whose attested KEM key is `kem`."""
        self._target = target
        self._node = node
        self._kem = kem
        self._authorizations = authorizations
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Take another incarnation: at the start, and when stores that were closed are open again.

        Gateways then send what they have not flushed, as to a process that restarted: what an
        earlier life of the stores did with their last commands nobody can tell any more.
        """
        # Never zero, and another one each time: that is all an incarnation has to be. It also is
        # why epochs needn't be remembered: keys and tickets of an older incarnation open nothing,
        # whatever their epoch, and their queues died with their process or their stores.
        self.incarnation = secrets.randbits(63) + 1

    async def open_queue(
        self,
        caller: Subject,
        request: storage_pb2.OpenQueueRequest,
        *,
        volume_id: uuid.UUID,
        gateway: PeerIncarnation,
    ) -> storage_pb2.OpenQueueResponse:
        """Derive the queue's secret and admit one Connect with a fresh ticket.

        The caller may use the volume, under the authorization of `gateway`. UsageError `queue.id`;
        VerificationError `queue.host_nqn`, `queue.association.stale`.
        """
        host_nqn = gateway_nqn(caller.node)
        self._check(request, volume_id, host_nqn)
        incarnation = self.incarnation
        # What is said of the store is part of the secret: only who may answer for it can say so.
        self._target.require_milestone(volume_id, request.milestone)
        milestone = self._target.milestone(volume_id)
        offer = QueueOffer(
            volume_id=volume_id,
            host_nqn=host_nqn,
            target_node=self._node,
            gateway_node=caller.node,
            queue_id=request.queue_id,
            association_epoch=request.association_epoch,
            is_read_only=request.read_only,
            nonce=request.nonce,
            public_key=request.public_key,
            milestone=request.milestone,
        )
        exchanged = await asyncio.to_thread(
            exchange,
            offer,
            caller,
            sealed_share=request.sealed_share,
            incarnation=incarnation,
            milestone=milestone,
            kem=self._kem,
        )
        # The fence: returns when they are drained, also if an earlier call didn't wait for it. A
        # newer epoch may come meanwhile, or the volume be deleted: then the ticket is refused.
        await self._target.close_older_queues(volume_id, host_nqn, request.association_epoch)
        # Waiting for that may have taken longer than the authorization lasts. From here on nothing
        # waits until the ticket is known, which losing the authorization voids.
        await self._authorizations.require(gateway)
        if incarnation != self.incarnation:
            raise UnavailableError(
                "queue.incarnation", "the volume's store was opened again meanwhile: ask again"
            )
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._target.admit_queue(
            ticket,
            volume_id=volume_id,
            host_nqn=host_nqn,
            queue_id=request.queue_id,
            secret=exchanged.secret,
            association_epoch=request.association_epoch,
            incarnation=incarnation,
            gateway=gateway,
            permit=self._authorizations.permit(gateway),
            is_read_only=request.read_only,
        )
        traddr, trsvcid = self._target.address
        return storage_pb2.OpenQueueResponse(
            ticket=ticket,
            public_key=exchanged.public_key,
            nonce=exchanged.nonce,
            sealed_share=exchanged.sealed_share,
            target_incarnation=incarnation,
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self._target.subsystem_nqn(volume_id),
            milestone=milestone,
        )

    def _check(
        self, request: storage_pb2.OpenQueueRequest, volume_id: uuid.UUID, host_nqn: str
    ) -> None:
        if not 1 <= request.queue_id <= _QUEUE_ID_MAX:
            raise UsageError("queue.id", f"queue id {request.queue_id}; allowed: 1…{_QUEUE_ID_MAX}")
        if request.host_nqn != host_nqn:
            # Epochs and fences are kept by this name: nobody has a say in another's.
            raise VerificationError(
                "queue.host_nqn", f"the host NQN is another gateway's; the caller's is {host_nqn}"
            )
        oldest = max(self._target.newest_epoch(volume_id, host_nqn), 1)
        if request.association_epoch < oldest:
            raise VerificationError(
                "queue.association.stale",
                f"association epoch {request.association_epoch}; allowed: {oldest} and up",
            )
