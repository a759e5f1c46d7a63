"""Restores the attachments of an earlier process of this gateway, with one task for each.

Until a volume is reattached, its host is asked to connect later and is not refused. An attachment
is dropped only if it certainly can't be restored; an unreachable broker, target or third party is
waited for.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final

from sealane.daemon.gateway.attachments import AttachmentFiles, SealedAttachment
from sealane.daemon.gateway.back_ends import storage_of
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.volume.events import EventLog
from sealane.errors import Error, VerificationError, reason_of
from sealane.protocol.v1 import broker_pb2
from sealane.transport.tasks import TaskOwner

REATTACHED_AT_ONCE_MAX: Final = 16
"""Volumes of one target that are reattached concurrently; further ones wait."""
RETRY_SECONDS_MIN: Final = 0.2
RETRY_SECONDS_MAX: Final = 5.0
# The broker no longer knows the volume for this tenant, or the saved attachment is unusable.
_FINAL: Final = {"volume.not_found"}
_FINAL_FAMILY: Final = "attachment."

Find = Callable[[str], Awaitable[broker_pb2.VolumeDescriptor]]
Reattach = Callable[[SealedAttachment, broker_pb2.VolumeDescriptor], Awaitable[None]]


class Reattaching:
    """Attachments that are not restored yet."""

    def __init__(
        self,
        files: AttachmentFiles,
        *,
        gateway: Gateway,
        find: Find,
        reattach: Reattach,
        events: EventLog,
        serving: asyncio.Event,
    ) -> None:
        """Restore with `reattach`, which exports one volume; it is retried until a final error.

        `find` returns a volume's descriptor: those of a target that is away wait for each other
        only. No attempt begins while `serving` is clear.
        """
        self._files = files
        self._gateway = gateway
        self._find = find
        self._reattach = reattach
        self._events = events
        self._serving = serving
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._finding = asyncio.Semaphore(REATTACHED_AT_ONCE_MAX)
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, REATTACHED_AT_ONCE_MAX)
        )
        self._tasks = TaskOwner()

    def __contains__(self, volume_id: str) -> bool:
        """Return whether a volume is being reattached."""
        return volume_id in self._pending

    def __iter__(self) -> Iterator[str]:
        """Iterate over the volumes that are being reattached."""
        return iter([*self._pending])

    def start(self, kept: Iterable[SealedAttachment]) -> None:
        """Start to restore these attachments."""
        for each in kept:
            self._pending[each.volume_id] = self._tasks.start(
                self._run(each), name=f"reattach-{each.volume_id}"
            )

    async def give_up(self, volume_id: str) -> None:
        """Stop restoring a volume; on return nothing of it is in progress."""
        task = self._pending.pop(volume_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._gateway.forget(volume_id)

    async def close(self) -> None:
        """Stop; the next process of this gateway continues."""
        await self._tasks.close()

    async def _run(self, kept: SealedAttachment) -> None:
        volume_id, delay, reported = kept.volume_id, RETRY_SECONDS_MIN, ""
        while True:
            try:
                await self._serving.wait()
                async with self._finding:
                    storage = storage_of(await self._find(volume_id))
                async with self._turns[storage]:
                    # While it waited for its turn, it may have changed or moved.
                    descriptor = await self._find(volume_id)
                    if storage_of(descriptor) != storage or not self._serving.is_set():
                        continue
                    await self._reattach(kept, descriptor)
            except (Error, OSError, TimeoutError) as error:
                reason = reason_of(error, otherwise="connection.lost")
                if _is_final(error):
                    break
                if reason != reported:
                    reported = reason
                    self._events.report(
                        volume_id, "reattach_delayed", reason=reason, detail=str(error)
                    )
            else:
                self._pending.pop(volume_id, None)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)
        # If it can't be removed now, the next process drops it again.
        with contextlib.suppress(Error):
            await self._files.remove(volume_id)
        self._pending.pop(volume_id, None)
        self._gateway.forget(volume_id)
        self._events.report(volume_id, "attachment_dropped", reason=reason)


def _is_final(error: Exception) -> bool:
    """Return whether the volume can never be restored from this attachment."""
    return isinstance(error, Error) and (
        error.reason in _FINAL
        or (isinstance(error, VerificationError) and error.reason.startswith(_FINAL_FAMILY))
    )
