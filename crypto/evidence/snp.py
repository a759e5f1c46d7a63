"""The verifier of AMD SEV-SNP reports (AMD 56860; keys and certificates: AMD 57230).

Chain: AMD root key (ARK, pinned by product) → SEV signing key (ASK for VCEK, ASVK for VLEK) →
versioned endorsement key. That key signs the report; extensions of its certificate name the TCB
version and the chip (VCEK) or cloud provider (VLEK) that it belongs to.
"""

import datetime as dt
import secrets
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from sealane.crypto.encoding import fields
from sealane.crypto.evidence import media_types
from sealane.crypto.evidence.chain import (
    VerifiedChain,
    common_name,
    parse_certificate,
    verify_chain,
)
from sealane.crypto.evidence.claims import Binding, Claims, Memory
from sealane.crypto.evidence.collateral import AMD_PRODUCTS, Collateral
from sealane.crypto.evidence.snp_report import (
    ASK_GUID,
    PLATFORM_BITS,
    POLICY_BITS,
    VCEK,
    VCEK_GUID,
    VLEK,
    VLEK_GUID,
    Report,
    decode_tcb,
    parse_certificate_table,
    parse_report,
)
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

EVIDENCE_TYPE: Final = "snp"
MEDIA_TYPE: Final = media_types.SNP_REPORT
ENDORSEMENTS_MEDIA_TYPE: Final = media_types.SNP_CERTIFICATES

# Required value of each flag unless the policy allows the other one by name; other flags only
# inform.
SAFE_FLAGS: Final[Mapping[str, bool]] = {
    "debug": False,
    "migrate_ma": False,
    "uncommitted": False,
    "alias_check_complete": True,
    "revocation_checked": True,
}

# Products whose firmware has made reports without CPUID.
_OF_VERSION_2: Final = ("Milan", "Genoa")

_EXTENSIONS: Final = "1.3.6.1.4.1.3704.1"
_TCB_OIDS: Final = {
    "bootloader": f"{_EXTENSIONS}.3.1",
    "tee": f"{_EXTENSIONS}.3.2",
    "snp": f"{_EXTENSIONS}.3.3",
    "microcode": f"{_EXTENSIONS}.3.8",
    "fmc": f"{_EXTENSIONS}.3.9",
}
_HWID_OID: Final = f"{_EXTENSIONS}.4"
_CSP_ID_OID: Final = f"{_EXTENSIONS}.5"
_HWID_LENGTHS: Final = {"Milan": 64, "Genoa": 64, "Turin": 8}
_CSP_ID_CHARACTERS_MAX: Final = 128


def verify(
    evidence: bytes,
    *,
    binding: Binding,
    collateral: Collateral,
    now: dt.datetime,
    endorsements: bytes = b"",
) -> Claims:
    """Return the claims of a genuine report; VerificationError `attestation.snp.<fault>`.

    `evidence` is the report, 1184 bytes. `endorsements` is the untrusted certificate table that the
    host gives its guests (configfs-tsm: `auxblob`); certificates missing there are taken from
    `collateral`.
    """
    report = parse_report(evidence)
    if report.mask_chip_key or report.signing_key not in {VCEK, VLEK}:
        raise _fault("attestation.snp.unsigned", "the report is not signed by a VCEK or VLEK")
    product, key, chain = _endorsement_key(report, endorsements, collateral, now)
    _check_signature(report, key)
    tcbs = {
        name: decode_tcb(encoded, product)
        for name, encoded in (
            ("reported", report.reported_tcb),
            ("committed", report.committed_tcb),
            ("launch", report.launch_tcb),
            ("current", report.current_tcb),
        )
    }
    found = endorsed_tcb(key, product)
    if found != tcbs["reported"]:
        raise _fault(
            "attestation.snp.tcb_mismatch",
            f"the report is for TCB {tcbs['reported']}, its endorsement key for {found}",
        )
    hardware_id = _hardware_id(report, key, product)
    if not secrets.compare_digest(report.report_data, binding.report_data):
        raise _fault(
            "attestation.snp.report_data", "the report does not commit to this runtime data"
        )
    flags = {name: bool(report.policy >> bit & 1) for name, bit in POLICY_BITS.items()}
    flags |= {name: bool(report.platform_info >> bit & 1) for name, bit in PLATFORM_BITS.items()}
    flags["uncommitted"] = report.current_tcb != report.committed_tcb
    flags["author_key_en"] = report.author_key
    flags["revocation_checked"] = chain.revocation_checked
    return Claims(
        evidence_type=EVIDENCE_TYPE,
        memory=Memory.ENCRYPTED,
        hardware_id=hardware_id,
        product=product,
        measurements={
            "measurement": report.measurement,
            "host_data": report.host_data,
            "id_key_digest": report.id_key_digest,
            "author_key_digest": report.author_key_digest,
            "family_id": report.family_id,
            "image_id": report.image_id,
            "launch_mit_vector": report.launch_mit_vector,
            "current_mit_vector": report.current_mit_vector,
        },
        # A policy's minimum applies to each of the four TCBs, so the lowest is what counts.
        tcb={component: min(tcb[component] for tcb in tcbs.values()) for component in found}
        | {"guest_svn": report.guest_svn},
        flags=flags,
        properties={"report_version": report.version, "vmpl": report.vmpl},
        valid_until=chain.valid_until,
    )


def _endorsement_key(
    report: Report, endorsements: bytes, collateral: Collateral, now: dt.datetime
) -> tuple[str, x509.Certificate, VerifiedChain]:
    """Return the product, the VCEK or VLEK and its verified chain."""
    table = parse_certificate_table(endorsements)
    encoded = table.get(VCEK_GUID if report.signing_key == VCEK else VLEK_GUID)
    if encoded is not None:
        key = parse_certificate(encoded, kind=EVIDENCE_TYPE)
    else:
        key = _known_vcek(report, collateral)
    # A report of version 2 doesn't name its product: it is then the product of the root that the
    # chain ends at. AMD's names only tell which one to try.
    product = report.product or next(
        (p for p in _OF_VERSION_2 if common_name(key.issuer) == _signer(report, p)),
        "",
    )
    if product not in collateral.roots.amd:
        raise _fault(
            "attestation.snp.chain", f"no root for the issuer {key.issuer.rfc4514_string()}"
        )
    if ASK_GUID in table:
        signers = [parse_certificate(table[ASK_GUID], kind=EVIDENCE_TYPE)]
    else:
        signers = [c for c in collateral.amd_signers if c.subject == key.issuer]
        if not signers:
            raise _fault(
                "attestation.snp.collateral_missing",
                f"the certificate of {key.issuer.rfc4514_string()} is missing",
            )
    signer = signers[0]
    # Under one root, the two kinds of keys have different signers.
    if common_name(signer.subject) != _signer(report, product):
        raise _fault(
            "attestation.snp.chain",
            f"{common_name(signer.subject)} does not sign keys of this kind",
        )
    chain = verify_chain(
        [key, signer],
        root=collateral.roots.amd[product],
        revocation_lists=collateral.revocation_lists,
        kind=EVIDENCE_TYPE,
        now=now,
    )
    return product, key, chain


def _signer(report: Report, product: str) -> str:
    """Return the common name that AMD gives to ASK or ASVK."""
    return f"SEV-{product}" if report.signing_key == VCEK else f"SEV-VLEK-{product}"


def _known_vcek(report: Report, collateral: Collateral) -> x509.Certificate:
    """Find the endorsement key for the report's chip and TCB in the collateral."""
    for product in [report.product] if report.product else _OF_VERSION_2:
        tcb = decode_tcb(report.reported_tcb, product)
        key = collateral.amd_vceks.get(vcek_name(product, report.chip_id, tcb))
        if key is not None and report.signing_key == VCEK:
            return key
    # The host loaded the VLEK, so it has the certificate and supplies it.
    raise _fault(
        "attestation.snp.collateral_missing",
        "the endorsement key's certificate for this chip and TCB is missing",
    )


def vcek_name(product: str, chip_id: bytes, tcb: Mapping[str, int]) -> bytes:
    """Return the name of a VCEK in collateral; `chip_id` is CHIP_ID, 64 bytes."""
    numbers = bytes(tcb[component] for component in sorted(tcb))
    return fields("vcek", product.encode(), chip_id, numbers)


def parse_vcek(certificate: x509.Certificate) -> tuple[str, bytes, dict[str, int]]:
    """Return product, CHIP_ID and TCB of a VCEK; VerificationError `attestation.snp.…`."""
    issuer = common_name(certificate.issuer)
    product = next((p for p in AMD_PRODUCTS if issuer == f"SEV-{p}"), None)
    if product is None:
        raise _fault("attestation.snp.certificate", f"{issuer} is not an issuer of VCEKs")
    return product, _hwid(certificate, product), endorsed_tcb(certificate, product)


def _check_signature(report: Report, certificate: x509.Certificate) -> None:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise _fault("attestation.snp.certificate", "the endorsement key is not on P-384")
    signature = encode_dss_signature(report.signature_r, report.signature_s)
    try:
        key.verify(signature, report.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise _fault(
            "attestation.snp.signature", "the endorsement key did not sign this report"
        ) from error


def endorsed_tcb(certificate: x509.Certificate, product: str) -> dict[str, int]:
    """Return the TCB of an endorsement key; VerificationError `attestation.snp.…`."""
    components = ["bootloader", "tee", "snp", "microcode"] + ["fmc"] * (product == "Turin")
    try:
        numbers = {
            c: asn1.decode_der(int, _extension(certificate, _TCB_OIDS[c])) for c in components
        }
    except ValueError as error:
        raise _fault(
            "attestation.snp.certificate", f"a security version number is malformed: {error}"
        ) from error
    return numbers


def _hardware_id(report: Report, certificate: x509.Certificate, product: str) -> str:
    if report.signing_key == VLEK:
        try:
            csp = asn1.decode_der(asn1.IA5String, _extension(certificate, _CSP_ID_OID)).as_str()
        except ValueError as error:
            raise _fault(
                "attestation.snp.certificate", f"the CSP id is malformed: {error}"
            ) from error
        if not 0 < len(csp) <= _CSP_ID_CHARACTERS_MAX:
            raise _fault(
                "attestation.snp.certificate",
                f"the CSP id has {len(csp)} characters; allowed: 1 to {_CSP_ID_CHARACTERS_MAX}",
            )
        return f"csp-id:{csp.encode().hex()}"
    if not any(report.chip_id) or report.chip_id != _hwid(certificate, product):
        raise _fault("attestation.snp.chip_mismatch", "the endorsement key belongs to another chip")
    return f"chip-id:{report.chip_id.hex()}"


def _hwid(certificate: x509.Certificate, product: str) -> bytes:
    """Return HWID as CHIP_ID: 64 bytes, for Turin 8 and zeros; raw or in an OCTET STRING."""
    value, length = _extension(certificate, _HWID_OID), _HWID_LENGTHS[product]
    if len(value) == length + 2 and value.startswith(bytes([4, length])):
        value = value[2:]
    if len(value) != length:
        raise _fault(
            "attestation.snp.certificate", f"HWID has {len(value)} bytes; needed: {length}"
        )
    return value.ljust(64, b"\0")


def _extension(certificate: x509.Certificate, oid: str) -> bytes:
    try:
        found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except x509.ExtensionNotFound as error:
        raise _fault(
            "attestation.snp.certificate", f"the endorsement key has no extension {oid}"
        ) from error
    if not isinstance(found, x509.UnrecognizedExtension):
        raise _fault("attestation.snp.certificate", f"the extension {oid} has the wrong type")
    return found.value


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
