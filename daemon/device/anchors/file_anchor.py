"""The `file` anchor: durable, but restoring an older file rolls it back. Development only."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import UUID

from sealane.daemon.device.anchors.anchor import (
    Anchored,
    Change,
    changed,
    failed,
    missing,
)
from sealane.daemon.device.anchors.lock import OwnerLock
from sealane.daemon.device.anchors.record_file import Content, RecordFile, RecordKeeper
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError

# Not secret: it detects a torn or foreign file, not a forged one.
_KEY = b"sealane file anchor"


class FileAnchor(RecordKeeper):
    """Use `initialise` once in the life of a device, then `open`; both block."""

    def __init__(self, path: Path, *, device_id: UUID) -> None:
        self._lock = OwnerLock(path.with_name(path.name + ".lock"))
        self._device_id = device_id
        self._file = RecordFile(path, device_id=device_id, key=_KEY)
        self._content: Content | None = None
        get_logger().warning(
            "development_anchor",
            path=str(path),
            message="an anchor is kept in a file: anyone who can restore older copies of it and of "
            "the device rolls the device back; for development only",
        )

    @classmethod
    def initialise(cls, path: Path, *, device_id: UUID) -> "FileAnchor":
        """Create it without records; UsageError `anchor.exists` if there is a file."""
        anchor = cls(path, device_id=device_id)
        with contextlib.ExitStack() as stack:
            stack.callback(anchor.release)
            if anchor._file.read() is not None:
                raise UsageError(
                    "anchor.exists", f"{path}: device {device_id} already has an anchor"
                )
            anchor._write(Content(count=1, records={}))
            stack.pop_all()
        return anchor

    @classmethod
    def open(cls, path: Path, *, device_id: UUID) -> "FileAnchor":
        """Read the file; VerificationError `anchor.missing` or `anchor.record`."""
        anchor = cls(path, device_id=device_id)
        with contextlib.ExitStack() as stack:
            stack.callback(anchor.release)
            anchor._content = anchor._file.read()
            if anchor._content is None:
                raise missing(device_id)
            stack.pop_all()
        return anchor

    @property
    def records(self) -> Mapping[str, Anchored]:
        """See `Anchor.records`."""
        return self._current().records

    @property
    def floor(self) -> int:
        """See `Anchor.floor`."""
        return self._current().floor

    async def advance(self, changes: Sequence[Change]) -> None:
        """Replace the file."""
        current = self._current()
        records, floor = changed(current.records, changes, floor=current.floor)
        after = Content(count=current.count + 1, records=records, floor=floor)
        await asyncio.to_thread(self._write, after)

    async def close(self) -> None:
        """Release the anchor for its next owner."""
        self.release()

    def release(self) -> None:
        """Release the anchor for its next owner."""
        self._lock.release()

    def _current(self) -> Content:
        if self._content is None:
            raise failed(self._device_id)
        return self._content

    def _write(self, content: Content) -> None:
        self._replace(content)
        self._content = content
