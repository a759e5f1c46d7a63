"""Chooses the configured driver. Modules for hardware are imported only if configured."""

from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.evidence.software import SoftwareKey
from sealane.daemon.config import EnrolmentConfig, Tpm2EvidenceConfig
from sealane.daemon.node.evidence.driver import Driver, SecondarySource
from sealane.daemon.node.evidence.secondary import CommandSource
from sealane.daemon.node.evidence.software import SoftwareDriver
from sealane.daemon.node.evidence.tsm import ReportTree, TsmDriver
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.daemon.runtime.files import read_file, read_secret
from sealane.errors import UsageError


def open_driver(config: EnrolmentConfig, *, tcti: str) -> Driver:
    """Open the driver of `enrolment.evidence`; blocking. The caller closes it.

    UsageError if the configured hardware doesn't exist here, UnavailableError if it doesn't answer.
    """
    if config.evidence == "tpm2":
        return _open_tpm2(config.tpm2, tcti)
    if config.evidence == "tsm":
        return TsmDriver(ReportTree(Path(config.tsm.reports)))
    return software_driver(config)


def software_driver(config: EnrolmentConfig) -> SoftwareDriver:
    """Read the attestation key; UsageError if the file has none or is accessible to others."""
    path = str(config.key_file)
    key = read_secret(path, key="enrolment.key_file")
    return SoftwareDriver(SoftwareKey.parse(key, source=f"enrolment.key_file {path}"))


def open_sources(config: EnrolmentConfig) -> Sequence[SecondarySource]:
    """Return the sources of `enrolment.secondary`."""
    return [CommandSource(each) for each in config.secondary]


def _open_tpm2(config: Tpm2EvidenceConfig, tcti: str) -> Driver:
    certificates = endorsement_certificates(config.endorsement_certificates)
    tpm = open_tpm(tcti)
    from sealane.daemon.node.evidence.tpm2 import Tpm2Driver  # noqa: PLC0415 - an extra

    try:
        return Tpm2Driver(
            tpm,
            pcrs=config.pcrs,
            event_log=Path(config.event_log) if config.event_log is not None else None,
            ek_kind=config.endorsement_key,
            ek_certificates=certificates,
        )
    except BaseException:
        tpm.close()
        raise


def endorsement_certificates(path: str | None) -> list[bytes]:
    """Read the certificates of the endorsement key as DER; UsageError if there are none."""
    if path is None:
        return []
    key = "enrolment.tpm2.endorsement_certificates"
    content = read_file(path, key=key)
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise UsageError(
            "config.value",
            f"{key} {path}: allowed: certificates in PEM, the EK's certificate first",
        ) from error
    return [certificate.public_bytes(Encoding.DER) for certificate in certificates]
