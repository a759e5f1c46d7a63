"""Connects to the configured TPM. Its library is imported only then."""

from typing import TYPE_CHECKING

from sealane.errors import UsageError

if TYPE_CHECKING:
    from sealane.daemon.node.tpm import Tpm


def open_tpm(tcti: str) -> "Tpm":
    """Connect to the TPM; UsageError `tpm.library`, UnavailableError `tpm.command`. Blocking."""
    try:
        from sealane.daemon.node.tpm import Tpm  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UsageError(
            "tpm.library",
            f"a TPM is configured, but tpm2-pytss can't be imported ({error}): install "
            "sealane[tpm], which needs libtss2",
        ) from error
    return Tpm(tcti)
