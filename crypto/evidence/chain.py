"""Certificate chains and revocation lists of hardware vendors (RFC 5280, as far as they use it).

Implemented here because `cryptography.x509.verification` refuses AMD's RSA-PSS. A chain is checked
from the pinned root downwards, so no key is used that the vendor has not signed.
"""

import datetime as dt
import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtensionOID, NameOID

from sealane.errors import VerificationError
from sealane.reasons import ReasonId

# The longest chain in use is NVIDIA's, with five certificates; the largest certificate is AMD's,
# with 1.7 kB.
CERTIFICATES_MAX: Final = 8
CERTIFICATE_BYTES_MAX: Final = 8 << 10

_PEM: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\r\n]+-----END CERTIFICATE-----\s*"
)
# An alternative name is critical if the subject is empty, as in certificates of TPM makers. A
# leaf's name is not used here.
_UNDERSTOOD: Final = {
    ExtensionOID.BASIC_CONSTRAINTS,
    ExtensionOID.KEY_USAGE,
    ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
}

# AMD's VCEKs and VLEKs have the serial number 0, which RFC 5280 forbids. Set once, because filters
# are process-wide and verification runs on several threads.
warnings.filterwarnings(
    "ignore", "Parsed a serial number which wasn't positive", CryptographyDeprecationWarning
)

# Exceptions of the library for bytes that are not a certificate or list.
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)

RevocationLists = Mapping[bytes, x509.CertificateRevocationList]
ChainKind = Literal["card", "collateral", "nvidia", "snp", "tdx", "tpm2"]
"""Whose chain it is: the third word of its reason ids."""


class _Reasons(NamedTuple):
    certificate: ReasonId
    chain: ReasonId
    expired: ReasonId
    revoked: ReasonId
    collateral_expired: ReasonId


_REASONS: Final[Mapping[ChainKind, _Reasons]] = {
    "card": _Reasons(
        certificate="attestation.card.certificate",
        chain="attestation.card.chain",
        expired="attestation.card.expired",
        revoked="attestation.card.revoked",
        collateral_expired="attestation.card.collateral_expired",
    ),
    "collateral": _Reasons(
        certificate="attestation.collateral.certificate",
        chain="attestation.collateral.chain",
        expired="attestation.collateral.expired",
        revoked="attestation.collateral.revoked",
        collateral_expired="attestation.collateral.collateral_expired",
    ),
    "nvidia": _Reasons(
        certificate="attestation.nvidia.certificate",
        chain="attestation.nvidia.chain",
        expired="attestation.nvidia.expired",
        revoked="attestation.nvidia.revoked",
        collateral_expired="attestation.nvidia.collateral_expired",
    ),
    "snp": _Reasons(
        certificate="attestation.snp.certificate",
        chain="attestation.snp.chain",
        expired="attestation.snp.expired",
        revoked="attestation.snp.revoked",
        collateral_expired="attestation.snp.collateral_expired",
    ),
    "tdx": _Reasons(
        certificate="attestation.tdx.certificate",
        chain="attestation.tdx.chain",
        expired="attestation.tdx.expired",
        revoked="attestation.tdx.revoked",
        collateral_expired="attestation.tdx.collateral_expired",
    ),
    "tpm2": _Reasons(
        certificate="attestation.tpm2.certificate",
        chain="attestation.tpm2.chain",
        expired="attestation.tpm2.expired",
        revoked="attestation.tpm2.revoked",
        collateral_expired="attestation.tpm2.collateral_expired",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedChain:
    """Result of verifying a chain.

    `valid_until` is the earliest end among its certificates and the lists that were used;
    `revocation_checked` is true if some certificate's vendor publishes a list (the certificate
    names a distribution point), and a current list was available for each such certificate.
    """

    valid_until: dt.datetime
    revocation_checked: bool


def parse_certificate(encoded: bytes, *, kind: ChainKind) -> x509.Certificate:
    """Parse one certificate in DER or PEM; VerificationError `attestation.<kind>.certificate`."""
    certificates = parse_certificates(encoded, kind=kind)
    if len(certificates) != 1:
        raise _fault(_REASONS[kind].certificate, f"{len(certificates)} certificates; allowed: one")
    return certificates[0]


def parse_certificates(encoded: bytes, *, kind: ChainKind) -> list[x509.Certificate]:
    """Parse one certificate in DER, or several in PEM, limited in number and size.

    Raises VerificationError `attestation.<kind>.certificate`. White space and zero bytes may follow
    the PEM; nothing else may be between or after certificates.
    """
    if not encoded.startswith(b"-----"):
        parts = [encoded]
    else:
        text = encoded.rstrip(b"\0")
        parts = _PEM.findall(text)
        if b"".join(parts) != text:
            raise _fault(_REASONS[kind].certificate, "text between the certificates")
    if not 0 < len(parts) <= CERTIFICATES_MAX:
        raise _fault(_REASONS[kind].certificate, f"{len(parts)} certificates")
    return [_load(part, kind) for part in parts]


def _load(encoded: bytes, kind: ChainKind) -> x509.Certificate:
    is_pem = encoded.startswith(b"-----")
    if len(encoded) > CERTIFICATE_BYTES_MAX:
        raise _fault(_REASONS[kind].certificate, f"a certificate of {len(encoded)} bytes")
    try:
        if is_pem:
            certificate = x509.load_pem_x509_certificate(encoded)
        else:
            certificate = x509.load_der_x509_certificate(encoded)
        # The library parses lazily: access everything, so that malformed parts are detected here.
        _ = certificate.extensions, certificate.subject, certificate.issuer
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        certificate.public_key()
    except _UNREADABLE as error:
        raise _fault(_REASONS[kind].certificate, f"not a certificate: {error}") from error
    return certificate


def issuing_root(
    certificate: x509.Certificate, roots: Iterable[x509.Certificate], *, kind: ChainKind
) -> x509.Certificate:
    """Return the trusted root that issued it; VerificationError `attestation.<kind>.chain`."""
    root = next((root for root in roots if _is_issued(certificate, root)), None)
    if root is None:
        raise _fault(
            _REASONS[kind].chain,
            f"no trusted root issued {certificate.subject.rfc4514_string()!r}",
        )
    return root


def _is_issued(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def key_sha256(certificate: x509.Certificate) -> bytes:
    """Return SHA-256 of the certificate's SubjectPublicKeyInfo, the key for its revocation list."""
    encoded = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(encoded).digest()


def common_name(name: x509.Name) -> str:
    """Return the common name; empty unless there is exactly one."""
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def verify_chain(
    certificates: Sequence[x509.Certificate],
    *,
    root: x509.Certificate,
    revocation_lists: RevocationLists,
    kind: ChainKind,
    now: dt.datetime,
) -> VerifiedChain:
    """Check `certificates`, leaf first, without the root, against the pinned `root` at `now`.

    `revocation_lists` are verified lists by `key_sha256` of their issuer. Raises VerificationError
    `attestation.<kind>.` plus `chain` (not issued by the next one, or by one that may not issue),
    `expired`, `revoked` or `collateral_expired` (a list that is no longer current).
    """
    valid_until = _end_of_validity(root, kind, now)
    checked: list[bool] = []
    issuer = root
    for depth, certificate in enumerate(reversed(certificates)):
        _check_issued(certificate, issuer, below=len(certificates) - 1 - depth, kind=kind)
        valid_until = min(valid_until, _end_of_validity(certificate, kind, now))
        revocation_list = revocation_lists.get(key_sha256(issuer))
        if revocation_list is not None:
            valid_until = min(
                valid_until, _check_revocation(certificate, revocation_list, kind, now)
            )
        if _is_listed(certificate):
            checked.append(revocation_list is not None)
        issuer = certificate
    return VerifiedChain(valid_until=valid_until, revocation_checked=bool(checked) and all(checked))


def _check_issued(
    certificate: x509.Certificate, issuer: x509.Certificate, *, below: int, kind: ChainKind
) -> None:
    """Check signature and names, and that an issuer may have `below` authorities below it."""
    name = certificate.subject.rfc4514_string()
    try:
        constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise _fault(
            _REASONS[kind].chain, f"{name} is not issued by {issuer.subject.rfc4514_string()}"
        ) from error
    if not constraints.ca or not usage.key_cert_sign:
        raise _fault(
            _REASONS[kind].chain, f"{issuer.subject.rfc4514_string()} may not issue certificates"
        )
    if constraints.path_length is not None and below > constraints.path_length:
        raise _fault(
            _REASONS[kind].chain, f"the chain of {name} is longer than its authority allows"
        )
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise _fault(
                _REASONS[kind].chain,
                f"{name} has the critical extension {extension.oid.dotted_string}",
            )


def _end_of_validity(
    certificate: x509.Certificate, kind: ChainKind, now: dt.datetime
) -> dt.datetime:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not start <= now <= end:
        name = certificate.subject.rfc4514_string()
        raise _fault(
            _REASONS[kind].expired, f"{name} is valid from {start} to {end}; the time is {now}"
        )
    return end


def _is_listed(certificate: x509.Certificate) -> bool:
    return any(e.oid == ExtensionOID.CRL_DISTRIBUTION_POINTS for e in certificate.extensions)


def _check_revocation(
    certificate: x509.Certificate,
    revocation_list: x509.CertificateRevocationList,
    kind: ChainKind,
    now: dt.datetime,
) -> dt.datetime:
    if revocation_list.get_revoked_certificate_by_serial_number(certificate.serial_number):
        raise _fault(_REASONS[kind].revoked, f"{certificate.subject.rfc4514_string()} is revoked")
    return check_current(revocation_list, kind=kind, now=now)


def check_current(
    revocation_list: x509.CertificateRevocationList, *, kind: ChainKind, now: dt.datetime
) -> dt.datetime:
    """Return when a list expires; VerificationError `attestation.<kind>.collateral_expired`."""
    start, end = revocation_list.last_update_utc, revocation_list.next_update_utc
    if end is None or not start <= now <= end:
        raise _fault(
            _REASONS[kind].collateral_expired,
            f"the revocation list of {revocation_list.issuer.rfc4514_string()} is valid from "
            f"{start} to {end}; the time is {now}",
        )
    return end


def parse_revocation_list(encoded: bytes) -> x509.CertificateRevocationList:
    """Parse a revocation list in DER.

    VerificationError `attestation.collateral.revocation_list`.
    """
    try:
        revocation_list = x509.load_der_x509_crl(encoded)
        _ = revocation_list.extensions, revocation_list.issuer
        _ = revocation_list.last_update_utc, revocation_list.next_update_utc
    except _UNREADABLE as error:
        raise _fault(
            "attestation.collateral.revocation_list", f"not a revocation list: {error}"
        ) from error
    return revocation_list


def verify_revocation_list(
    revocation_list: x509.CertificateRevocationList, *, issuer: x509.Certificate
) -> None:
    """VerificationError `attestation.collateral.revocation_list` unless `issuer` signed it."""
    try:
        is_signed = (
            revocation_list.issuer == issuer.subject
            and revocation_list.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
        )
    except (UnsupportedAlgorithm, TypeError, ValueError) as error:
        raise _fault(
            "attestation.collateral.revocation_list",
            f"the signature is of another kind: {error}",
        ) from error
    if not is_signed:
        raise _fault(
            "attestation.collateral.revocation_list",
            f"the revocation list is not signed by {issuer.subject.rfc4514_string()}",
        )


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
