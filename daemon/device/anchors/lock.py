"""An advisory lock file that allows one owner at a time."""

import fcntl
import os
from pathlib import Path

from sealane.errors import UnavailableError


class OwnerLock:
    """Held from creation to `release`, at most for the life of the process."""

    def __init__(self, path: Path) -> None:
        """Take the lock; UnavailableError `anchor.in_use` or `anchor.failed`."""
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError("anchor.failed", f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise UnavailableError("anchor.in_use", f"{path}: in use by another process") from error

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)
