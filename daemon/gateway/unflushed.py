"""Which process of the target may hold acknowledged writes that nobody flushed, kept on disk.

A living gateway has these in its journal and sends them again to a target that restarted. Its next
process has no journal: then only the same process of the target can have them. If that has ended,
too, they may be lost, and a host that still runs would never hear of it. So the volume fails.
"""

import asyncio
from dataclasses import replace

from sealane.daemon.gateway.attachments import AttachmentFiles, SealedAttachment
from sealane.daemon.gateway.grants import OpenQueue, QueueGrant
from sealane.daemon.volume.failures import UNFLUSHED_LOST
from sealane.errors import UnavailableError, VerificationError


class Unflushed:
    """Opens the queues of one attached volume, and keeps its file true; an `OpenQueue`."""

    def __init__(
        self, open_queue: OpenQueue, *, files: AttachmentFiles, kept: SealedAttachment
    ) -> None:
        """`kept` is what the file says, or will say before the first queue is opened."""
        self._open_queue = open_queue
        self._files = files
        self._kept = kept
        self._is_first = True
        self._is_over = False
        self._turn = asyncio.Lock()

    @property
    def kept(self) -> SealedAttachment:
        """What the file says."""
        return self._kept

    async def __call__(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Open a queue.

        VerificationError `volume.unflushed_lost`: the process of the target that may have had
        writes of this gateway's last process has ended.
        """
        grant = await self._open_queue(queue_id, association_epoch, milestone)
        known = self._kept.target_incarnation
        if self._is_first and known not in {0, grant.target_incarnation}:
            raise VerificationError(
                UNFLUSHED_LOST,
                "the gateway and then the target ended, with acknowledged writes that nobody had "
                "flushed: some may be lost; attach the volume again to go on without them",
            )
        self._is_first = False
        if not known:
            # Before anything can be acknowledged.
            await self._keep(grant.target_incarnation)
        return grant

    async def settle(self, target_incarnation: int | None) -> None:
        """Note that everything acknowledged before this process of the target is durable."""
        if target_incarnation not in {None, self._kept.target_incarnation} and not self._is_first:
            await self._keep(target_incarnation or 0)

    async def clear(self) -> None:
        """Note that everything acknowledged is durable, and nothing more comes."""
        # Without a queue nothing of an earlier process has become durable, either.
        if not self._is_first:
            await self._keep(0)

    async def forget(self) -> None:
        """Remove the file, for good: no queue that is being opened writes it again."""
        async with self._turn:
            await self._files.remove(self._kept.volume_id)
            self._is_over = True

    async def _keep(self, target_incarnation: int) -> None:
        async with self._turn:
            if self._is_over:
                raise UnavailableError("volume.detached", "the volume was detached meanwhile")
            kept = replace(self._kept, target_incarnation=target_incarnation)
            await self._files.put(kept)
            self._kept = kept
