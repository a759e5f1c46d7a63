"""Which counter a configuration means. TPM modules are imported only where one is configured."""

from pathlib import Path
from typing import TYPE_CHECKING

from sealane.daemon.anchors.counter import FileCounter, MonotonicCounter
from sealane.daemon.logs import get_logger
from sealane.errors import UsageError

if TYPE_CHECKING:
    from sealane.daemon.tpm import Tpm


def open_tpm(tcti: str) -> "Tpm":
    """Connect to the TPM; UsageError `tpm.library`, UnavailableError `tpm.command`. Blocking."""
    try:
        from sealane.daemon.tpm import Tpm  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UsageError(
            "tpm.library",
            f"a TPM is configured, but tpm2-pytss can't be imported ({error}): install "
            "sealane[tpm], which needs libtss2",
        ) from error
    return Tpm(tcti)


def open_counter(*, tpm: "Tpm | None", index: int, path: Path) -> MonotonicCounter:
    """Return the counter at NV `index` of `tpm`; without a TPM the one in `path`, with a warning.

    The caller closes `tpm`.
    """
    if tpm is None:
        get_logger().warning(
            "development_counter",
            path=str(path),
            message="a counter is kept in a file: who can put back an older copy of it rolls it "
            "back; for development only",
        )
        return FileCounter(path)
    from sealane.daemon.anchors.tpm_counter import TpmCounter  # noqa: PLC0415 - an extra

    return TpmCounter(tpm, index=index)
