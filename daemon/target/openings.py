"""Progress of stores being opened, which may take a while for large ones."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Final

from sealane import _native
from sealane.daemon.runtime.logs import get_logger

LOG_SECONDS: Final = 5.0
"""Interval at which the log reports an opening's progress; most end before the first report."""


class Openings:
    """The stores that one target is opening now."""

    def __init__(self) -> None:
        self._openings: dict[uuid.UUID, _native.StoreOpening] = {}

    @contextlib.contextmanager
    def shown(self, volume_id: uuid.UUID) -> Iterator[_native.StoreOpening]:
        """Report the progress of an opening until the block is left."""
        opening = self._openings[volume_id] = _native.StoreOpening()
        self._log_later(volume_id, opening)
        try:
            yield opening
        finally:
            del self._openings[volume_id]

    def progress(self, volume_id: uuid.UUID) -> tuple[int, int]:
        """Return pages and records processed, and expected; zeros if the volume isn't opening."""
        opening = self._openings.get(volume_id)
        return (0, 0) if opening is None else opening.progress()

    def statistics(self) -> Mapping[tuple[str, ...], Mapping[str, int]]:
        """Return the progress of each opening, for the metrics: pages and records, and expected."""
        # Called from the metrics thread: uses a copy, since an opening may end meanwhile.
        found: dict[tuple[str, ...], dict[str, int]] = {}
        for volume_id, opening in self._openings.copy().items():
            done, total = opening.progress()
            found[(str(volume_id),)] = {"done": done, "expected": total}
        return found

    def _log_later(self, volume_id: uuid.UUID, opening: _native.StoreOpening) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(LOG_SECONDS, self._log, volume_id, opening)

    def _log(self, volume_id: uuid.UUID, opening: _native.StoreOpening) -> None:
        if self._openings.get(volume_id) is not opening:
            return
        done, expected = opening.progress()
        get_logger().info("store_opening", volume_id=str(volume_id), done=done, expected=expected)
        self._log_later(volume_id, opening)
