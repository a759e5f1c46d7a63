"""What operators have decided about a card, and the part of it that outlasts the process.

A disabled card has a file of its label in the state directory, and one of its hardware id if the
gateway has attested with it. So a suspect card stays disabled over restarts and under other labels.
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
    """The files that say that the card `label` is disabled: of its label, and of its hardware id.

    A label has no colon and a hardware id has one.
    """

    def __init__(self, state: Path, label: str) -> None:
        self._directory = state / _DIRECTORY
        self._label = label

    def read(self) -> Hold:
        """Return the decision of an earlier process; disabled also if that can't be read."""
        try:
            return Hold.DISABLED if self.has(self._label) else Hold.NONE
        except UnavailableError as error:
            get_logger().error(
                "accelerator_disabled", reason=error.reason, message=str(error.args[0])
            )
            return Hold.DISABLED

    def has(self, name: str) -> bool:
        """Return whether a label or hardware id is disabled; UnavailableError `accelerator.state`.

        Blocks.
        """
        path = self._path(name)
        try:
            path.lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _failed(path, error) from error
        return True

    def write(self, *, is_disabled: bool, card_id: str = "") -> None:
        """Keep a decision, durably; UnavailableError `accelerator.state`. Blocks.

        `card_id` is the card's hardware id; empty if it isn't known.
        """
        for name in (self._label, card_id) if card_id else (self._label,):
            path = self._path(name)
            try:
                if is_disabled:
                    self._directory.mkdir(mode=0o700, exist_ok=True)
                    sync_directory(self._directory.parent)
                    write_durably(path, b"")
                elif self.has(name):
                    path.unlink()
                    sync_directory(self._directory)
            except OSError as error:
                raise _failed(path, error) from error

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.disabled"


def _failed(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError("accelerator.state", f"{path}: {error.strerror}")
