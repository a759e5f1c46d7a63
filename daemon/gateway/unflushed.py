"""Record on disk of the target process that may hold acknowledged but unflushed writes.

A running gateway has these writes in its journal and resends them to a target that restarted. The
next process of the gateway has no journal: only the same target process still has the writes. If
that has ended as well, they may be lost, and a host that is still running would not learn of it. So
the volume fails.
"""

import asyncio
from dataclasses import replace

from sealane.daemon.gateway.attachments import AttachmentFiles, SealedAttachment
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.grants import OpenQueue, QueueGrant
from sealane.daemon.volume.failures import UNFLUSHED_LOST
from sealane.errors import UnavailableError, VerificationError


class Unflushed:
    """Opens the queues of one attached volume and keeps its file up to date; an `OpenQueue`."""

    def __init__(
        self,
        open_queue: OpenQueue,
        *,
        files: AttachmentFiles,
        kept: SealedAttachment,
        member: GroupMember | None = None,
    ) -> None:
        """Start with `kept`: what the file says, or will say before the first queue is opened.

        A take-over by another `member` of a fail-over group has flushed this gateway's writes.
        """
        self._member = member
        self._open_queue = open_queue
        self._files = files
        self._kept = kept
        self._is_first = True
        self._is_over = False
        self._turn = asyncio.Lock()

    @property
    def kept(self) -> SealedAttachment:
        """Content of the file."""
        return self._kept

    async def __call__(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Open a queue.

        VerificationError `volume.unflushed_lost` if the target process that may have held writes of
        this gateway's last process has ended.
        """
        if self._member is not None and self._is_first:
            self._member.holder = self._kept.target_incarnation
        grant = await self._open_queue(queue_id, association_epoch, milestone)
        known = self._kept.target_incarnation
        member = self._member if self._is_first else None
        if member is not None and (member.follows_another or member.accepts_loss):
            # Its writes are durable, or an operator has accepted their loss.
            known = 0
        if self._is_first and known not in {0, grant.target_incarnation}:
            raise VerificationError(
                UNFLUSHED_LOST,
                "the gateway and then the target ended while acknowledged writes were not yet "
                "flushed: some may be lost; attach the volume again to continue without them",
            )
        self._is_first = False
        if not known:
            # Must happen before any write can be acknowledged.
            await self._keep(grant.target_incarnation)
        return grant

    async def settle(self, target_incarnation: int | None) -> None:
        """Record that everything acknowledged before this target process is durable."""
        if target_incarnation not in {None, self._kept.target_incarnation} and not self._is_first:
            await self._keep(target_incarnation or 0)

    async def clear(self) -> None:
        """Record that everything acknowledged is durable, and no more writes follow."""
        # Without a queue, nothing of an earlier process has become durable.
        if not self._is_first:
            await self._keep(0)

    async def fence(self) -> SealedAttachment:
        """Record that another gateway has taken over; return the content of the file."""
        await self._keep(0)
        return self._kept

    async def forget(self) -> None:
        """Remove the file permanently: a queue that is being opened doesn't write it again."""
        async with self._turn:
            await self._files.remove(self._kept.volume_id)
            self._is_over = True

    async def _keep(self, target_incarnation: int) -> None:
        async with self._turn:
            if self._is_over:
                raise UnavailableError(
                    "volume.detached", "the volume has been detached in the meantime"
                )
            kept = replace(self._kept, target_incarnation=target_incarnation)
            await self._files.put(kept)
            self._kept = kept
