"""Brings the attachments that an earlier process of this gateway had back, one task for each.

Until a volume is back its host is asked to come again, not sent away. An attachment is given up
only when it is certain that it can't come back; a broker, target or third party that is away is
waited for.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

from sealane.daemon.gateway.attachments import AttachmentFiles, SealedAttachment
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.volume.events import EventLog
from sealane.errors import Error, VerificationError
from sealane.transport.tasks import TaskOwner

REATTACHED_AT_ONCE_MAX: Final = 16
"""Volumes that are being brought back at a time; more wait."""
RETRY_SECONDS_MIN: Final = 0.2
RETRY_SECONDS_MAX: Final = 5.0
# The broker no longer knows the volume for this tenant, or what is kept can't be used.
_FINAL: Final = {"volume.not_found"}
_FINAL_FAMILY: Final = "attachment."

Reattach = Callable[[SealedAttachment], Awaitable[None]]


class Reattaching:
    """The attachments that are not back yet."""

    def __init__(
        self,
        files: AttachmentFiles,
        *,
        gateway: Gateway,
        reattach: Reattach,
        events: EventLog,
    ) -> None:
        """`reattach` exports one volume; whatever it raises is tried again, unless it is final."""
        self._files = files
        self._gateway = gateway
        self._reattach = reattach
        self._events = events
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(REATTACHED_AT_ONCE_MAX)
        self._tasks = TaskOwner()

    def __contains__(self, volume_id: str) -> bool:
        """Whether a volume is on its way back."""
        return volume_id in self._pending

    def __iter__(self) -> Iterator[str]:
        """Return the volumes that are on their way back."""
        return iter([*self._pending])

    def start(self, kept: Iterable[SealedAttachment]) -> None:
        """Bring these back."""
        for each in kept:
            self._pending[each.volume_id] = self._tasks.start(
                self._run(each), name=f"reattach-{each.volume_id}"
            )

    async def give_up(self, volume_id: str) -> None:
        """Stop bringing a volume back; nothing of it is under way when this returns."""
        task = self._pending.pop(volume_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._gateway.forget(volume_id)

    async def close(self) -> None:
        """Stop; the next process of this gateway goes on."""
        await self._tasks.close()

    async def _run(self, kept: SealedAttachment) -> None:
        volume_id, delay, reported = kept.volume_id, RETRY_SECONDS_MIN, ""
        while True:
            try:
                async with self._turns:
                    await self._reattach(kept)
            except (Error, OSError, TimeoutError) as error:
                reason = error.reason if isinstance(error, Error) else "connection.lost"
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
        # What can't be removed is dropped by the next process again.
        with contextlib.suppress(Error):
            await self._files.remove(volume_id)
        self._pending.pop(volume_id, None)
        self._gateway.forget(volume_id)
        self._events.report(volume_id, "attachment_dropped", reason=reason)


def _is_final(error: Exception) -> bool:
    """Whether the volume can't come back as this attachment, whatever is waited for."""
    return isinstance(error, Error) and (
        error.reason in _FINAL
        or (isinstance(error, VerificationError) and error.reason.startswith(_FINAL_FAMILY))
    )
