"""What operators have decided about a card, and the part of it that outlasts the process.

A disabled card has a file of its name in the state directory. So a suspect card stays disabled over
restarts, and whatever else changes in the configuration.
"""

from enum import StrEnum
from pathlib import Path
from typing import Final

from sealane.daemon.runtime.files import sync_directory, write_durably
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError

_DIRECTORY: Final = "accelerators"


class Hold(StrEnum):
    """A decision about a card: to use it, to stop it until the daemon's next start, or for good.

    In this order: each is stricter than those before it.
    """

    NONE = "none"
    DRAINED = "drained"
    DISABLED = "disabled"


class DisabledCard:
    """The file that says that the card `label` is disabled."""

    def __init__(self, state: Path, label: str) -> None:
        self._path = state / _DIRECTORY / f"{label}.disabled"

    def read(self) -> Hold:
        """Return the decision of an earlier process; disabled also if that can't be read."""
        try:
            return Hold.DISABLED if _is_there(self._path) else Hold.NONE
        except OSError as error:
            failed = self._failed(error)
            get_logger().error(
                "accelerator_disabled", reason=failed.reason, message=str(failed.args[0])
            )
            return Hold.DISABLED

    def write(self, *, is_disabled: bool) -> None:
        """Keep a decision, durably; UnavailableError `accelerator.state`. Blocks."""
        try:
            if is_disabled:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                sync_directory(self._path.parent.parent)
                write_durably(self._path, b"")
            elif _is_there(self._path):
                self._path.unlink()
                sync_directory(self._path.parent)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError("accelerator.state", f"{self._path}: {error.strerror}")


def _is_there(path: Path) -> bool:
    """Return whether a file exists; OSError if that can't be known."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
