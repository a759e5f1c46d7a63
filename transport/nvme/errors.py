"""Errors that a controller returns."""

from sealane import _native
from sealane.errors import Error, foreign_reason

_VERIFICATION_STATUSES = {0x282, 0x283, 0x284}


class NvmeStatusError(Error):
    """A controller answered a command with an error. `status` is status code type and code.

    `is_final`: according to the controller, repeating the command will not succeed ("do not
    retry").
    """

    exit_code = 1

    def __init__(self, status: int, *, lba: int | None = None, is_final: bool = True) -> None:
        name = _native.status_name(status) or "unknown status"
        place = "" if lba is None else f" at LBA {lba}"
        super().__init__(foreign_reason(f"nvme.status.{status:03x}"), f"{name}{place}")
        self.status = status
        self.lba = lba
        self.is_final = is_final

    @property
    def is_verification_failure(self) -> bool:
        """Whether the data at this place is not what was written: it must never be used."""
        return self.status in _VERIFICATION_STATUSES
