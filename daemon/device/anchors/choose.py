"""Chooses the configured counter. TPM modules are imported only if one is configured."""

from pathlib import Path
from typing import TYPE_CHECKING

from sealane.daemon.device.anchors.counter import FileCounter, MonotonicCounter
from sealane.daemon.runtime.logs import get_logger

if TYPE_CHECKING:
    from sealane.daemon.node.tpm import Tpm


def open_counter(*, tpm: "Tpm | None", index: int, path: Path) -> MonotonicCounter:
    """Return the counter at NV `index` of `tpm`; without a TPM, the file `path`, with a warning.

    The caller closes `tpm`.
    """
    if tpm is None:
        get_logger().warning(
            "development_counter",
            path=str(path),
            message="a counter is kept in a file: anyone who can restore an older copy of it rolls "
            "it back; for development only",
        )
        return FileCounter(path)
    from sealane.daemon.device.anchors.tpm_counter import TpmCounter  # noqa: PLC0415 - an extra

    return TpmCounter(tpm, index=index)
