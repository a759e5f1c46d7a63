"""The `tpm2` driver from its configuration; its own module needs the extra `tpm`."""

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.evidence.driver import Driver
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.daemon.runtime.files import read_file
from sealane.errors import UsageError


def check(config: EnrolmentConfig) -> None:
    """Read the certificates of the endorsement key; UsageError if they are none."""
    _endorsement_certificates(config.tpm2.endorsement_certificates)


def open_driver(config: EnrolmentConfig, *, tcti: str) -> Driver:
    """Open the TPM and make the keys; blocking."""
    settings = config.tpm2
    certificates = _endorsement_certificates(settings.endorsement_certificates)
    tpm = open_tpm(tcti)
    from sealane.daemon.node.evidence.tpm2 import Tpm2Driver  # noqa: PLC0415 - an extra

    try:
        return Tpm2Driver(
            tpm,
            pcrs=settings.pcrs,
            event_log=Path(settings.event_log) if settings.event_log is not None else None,
            ek_kind=settings.endorsement_key,
            ek_certificates=certificates,
        )
    except BaseException:
        tpm.close()
        raise


def _endorsement_certificates(path: str | None) -> list[bytes]:
    """Read the certificates of the endorsement key as DER; UsageError if they are none."""
    if path is None:
        return []
    key = "enrolment.tpm2.endorsement_certificates"
    content = read_file(path, key=key)
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise UsageError(
            "config.value", f"{key} {path}: allowed: certificates in PEM, the EK's first"
        ) from error
    return [certificate.public_bytes(Encoding.DER) for certificate in certificates]
