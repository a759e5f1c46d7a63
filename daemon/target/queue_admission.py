"""Admission of a gateway's I/O queue: its secret, the fence of older epochs, its ticket."""

import asyncio
import secrets
import uuid
from typing import Final

from sealane.crypto.certificates import Subject
from sealane.crypto.kem import KemKey
from sealane.crypto.queue import TICKET_BYTES, VERSION, GroupClaim, QueueOffer
from sealane.daemon.node.authorizations import Authorizations
from sealane.daemon.node.drain import refuse_new
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.fail_over import FailOver, Key
from sealane.daemon.target.queue_exchange import exchange
from sealane.daemon.volume.failures import UNFLUSHED_LOST
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import storage_pb2

_QUEUE_ID_MAX: Final = 65534
_UNSAID: Final = 0
"""Version in requests of releases that didn't state it; it was 3."""


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
        """Admit queues to `target`, whose attested KEM key is `kem`."""
        self._target = target
        self._node = node
        self._kem = kem
        self._authorizations = authorizations
        self.known: set[tuple[uuid.UUID, str]] | None = None
        """During a drain, the volumes and gateways that may still open queues; else None."""
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Start a new incarnation, at the start and when closed stores have been reopened.

        Gateways then resend all unflushed changes, as to a restarted process, since the outcome of
        their last commands before that is unknown.
        """
        # An incarnation only needs to be nonzero and different each time. It is also why epochs
        # needn't be remembered: keys and tickets of an older incarnation are useless, whatever
        # their epoch, and its queues ended with its process or its stores.
        self.incarnation = secrets.randbits(63) + 1

    async def open_queue(
        self,
        caller: Subject,
        request: storage_pb2.OpenQueueRequest,
        *,
        volume_id: uuid.UUID,
        gateway: PeerIncarnation,
        fail_over: FailOver,
    ) -> storage_pb2.OpenQueueResponse:
        """Derive the queue's secret and admit one Connect with a new ticket.

        The caller must be allowed to use the volume, by the authorization of `gateway`. UsageError
        `queue.version`, `queue.id`; VerificationError `queue.host_nqn`, `queue.association.stale`,
        `volume.rolled_back`; UnavailableError `queue.incarnation`, `queue.gateways`,
        `node.draining`; errors of `FailOver`, if the queue is for a fail-over group.
        """
        host_nqn = gateway_nqn(caller.node)
        self._check_known(volume_id, host_nqn)
        self._check(request, host_nqn)
        incarnation = self.incarnation
        claim = claim_of(request.claim) if request.HasField("claim") else None
        if claim is not None:
            key: Key = (caller.tenant, claim.group)
            if not claim.is_take_over:
                # Before its epoch, which a fence has ended, too: it must learn that it stands by.
                fail_over.require(key, host_nqn, claim.term)
        self._check_epoch(request, volume_id, host_nqn)
        # The store's milestone enters the secret, so only the attested target can vouch for it.
        self._target.require_milestone(volume_id, request.milestone)
        term = 0
        if claim is not None:
            term = claim.term
            if claim.is_take_over:
                await self._check_take_over(claim, gateway, incarnation)
                term = await fail_over.take_over(key, host_nqn, claim)
            fail_over.require(key, host_nqn, term)
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
            claim=claim,
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
        # The fence: returns once older queues are drained, even if an earlier call didn't wait for
        # that. If a newer epoch comes or the volume is deleted meanwhile, the ticket is refused.
        await self._target.close_older_queues(volume_id, host_nqn, request.association_epoch)
        # The authorization may have expired while we waited. From here on, nothing awaits until the
        # ticket is registered: losing the authorization voids it from then on.
        await self._authorizations.require(gateway)
        self._check_known(volume_id, host_nqn)
        if claim is not None:
            # Another gateway may have taken over meanwhile; it doesn't know of this ticket.
            fail_over.require(key, host_nqn, term)
            if claim.incarnation == incarnation and not claim.is_take_over:
                fail_over.confirm(key, host_nqn, term)
        if incarnation != self.incarnation:
            raise UnavailableError(
                "queue.incarnation", "the volume's store was reopened meanwhile; try again"
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

    async def _check_take_over(
        self, claim: GroupClaim, peer: PeerIncarnation, incarnation: int
    ) -> None:
        """Check that a gateway may fence another, and that nothing it acknowledged is lost."""
        await self._authorizations.require(peer)
        if claim.incarnation not in {0, incarnation} and not claim.accepts_loss:
            raise VerificationError(
                UNFLUSHED_LOST,
                "the target has restarted since the gateway acknowledged its last writes: some may "
                "be lost",
            )

    def _check_known(self, volume_id: uuid.UUID, host_nqn: str) -> None:
        if self.known is not None and (volume_id, host_nqn) not in self.known:
            raise refuse_new("gateways")

    def _check(self, request: storage_pb2.OpenQueueRequest, host_nqn: str) -> None:
        if request.version not in {_UNSAID, VERSION}:
            raise UsageError(
                "queue.version",
                f"version {request.version} of a queue's key agreement; allowed: {VERSION}: "
                "upgrade this target before its gateways",
            )
        if not 1 <= request.queue_id <= _QUEUE_ID_MAX:
            raise UsageError("queue.id", f"queue id {request.queue_id}; allowed: 1…{_QUEUE_ID_MAX}")
        if request.host_nqn != host_nqn:
            # Epochs and fences are kept by this name: no gateway may touch another's.
            raise VerificationError(
                "queue.host_nqn",
                f"the host NQN is not the caller's; allowed: {host_nqn}",
            )

    def _check_epoch(
        self, request: storage_pb2.OpenQueueRequest, volume_id: uuid.UUID, host_nqn: str
    ) -> None:
        oldest = max(self._target.newest_epoch(volume_id, host_nqn), 1)
        if request.association_epoch < oldest:
            raise VerificationError(
                "queue.association.stale",
                f"association epoch {request.association_epoch}; allowed: {oldest} and up",
            )


def claim_of(message: storage_pb2.GroupClaim) -> GroupClaim:
    """Return a gateway's claim; ProtocolError `queue.group.malformed`."""
    return GroupClaim(
        group=message.group,
        term=message.term,
        is_take_over=message.take_over,
        accepts_loss=message.accept_loss,
        incarnation=message.incarnation,
        by_operator=message.operator,
    )
