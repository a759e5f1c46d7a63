"""The `file` anchor: durable, and rolled back by whoever puts an older file back. Development."""

from pathlib import Path
from uuid import UUID

from sealane.daemon.anchors.anchor import (
    Anchored,
    Record,
    RecordFile,
    closed_on_failure,
    failed,
    missing,
)
from sealane.daemon.anchors.lock import OwnerLock
from sealane.daemon.logs import get_logger
from sealane.errors import UsageError

# Nothing secret: it tells a torn or foreign file, not a forged one.
_KEY = b"sealane file anchor"


class FileAnchor:
    """Use `initialise` once in the life of a device, then `open`."""

    def __init__(self, path: Path, *, device_id: UUID) -> None:
        self._lock = OwnerLock(path.with_name(path.name + ".lock"))
        self._device_id = device_id
        self._file = RecordFile(path, device_id=device_id, key=_KEY)
        self._record: Record | None = None
        get_logger().warning(
            "development_anchor",
            path=str(path),
            message="an anchor is kept in a file: who can put back an older copy of it and of the "
            "device rolls the device back; for development only",
        )

    @classmethod
    def initialise(cls, path: Path, *, device_id: UUID, state: Anchored) -> "FileAnchor":
        """Anchor a new device's first state; UsageError `anchor.exists` if there is a record."""
        anchor = cls(path, device_id=device_id)
        with closed_on_failure(anchor):
            if anchor._file.read() is not None:
                raise UsageError("anchor.exists", f"{path}: device {device_id} has an anchor")
            anchor._write(Record(count=1, state=state))
        return anchor

    @classmethod
    def open(cls, path: Path, *, device_id: UUID) -> "FileAnchor":
        """Read the record; VerificationError `anchor.missing` or `anchor.record`."""
        anchor = cls(path, device_id=device_id)
        with closed_on_failure(anchor):
            anchor._record = anchor._file.read()
            if anchor._record is None:
                raise missing(device_id)
        return anchor

    @property
    def state(self) -> Anchored:
        """What is anchored."""
        return self._current().state

    def advance(self, state: Anchored) -> None:
        """Replace the record."""
        current = self._current()
        current.state.check_successor(state)
        self._write(Record(count=current.count + 1, state=state))

    def close(self) -> None:
        """Let the next owner have it."""
        self._lock.release()

    def _current(self) -> Record:
        if self._record is None:
            raise failed(self._device_id)
        return self._record

    def _write(self, record: Record) -> None:
        self._record = None
        self._file.write(record)
        self._record = record
