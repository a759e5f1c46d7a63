"""The verifier of NVIDIA GPU measurement reports (SPDM 1.1, DMTF DSP0274): secondary evidence.

A report is the GET_MEASUREMENTS request and its response, signed together by the GPU's attestation
key. Chain: device identity CA (pinned) → identity → provisioner → the chip's boot ROM → attestation
key. Its certificate names the firmware that it was derived for (DICE, TCG composite device id).
"""

import datetime as dt
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealane.crypto.encoding import fields, parse_fields
from sealane.crypto.evidence import media_types
from sealane.crypto.evidence.chain import (
    common_name,
    key_sha256,
    parse_certificates,
    verify_chain,
)
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.collateral import Collateral
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

EVIDENCE_TYPE: Final = "nvidia"
MEDIA_TYPE: Final = media_types.NVIDIA_EVIDENCE
ENDORSEMENTS_MEDIA_TYPE: Final = ""
EVIDENCE_LABEL: Final = "sealane nvidia evidence v1"
SAFE_FLAGS: Final[Mapping[str, bool]] = {"revocation_checked": True}

REPORT_BYTES_MAX: Final = 64 << 10
TRAILING_ZEROS_MAX: Final = 64

_SPDM_1_1: Final = 0x11
_GET_MEASUREMENTS, _MEASUREMENTS = 0xE0, 0x60
# Requests a signature, and all measurements.
_REQUEST_HEAD: Final = bytes([_SPDM_1_1, _GET_MEASUREMENTS, 0x01, 0xFF])
_SLOTS: Final = 8
_NONCE_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 96
_DMTF_MEASUREMENT: Final = 1

# NVIDIA's types of opaque data.
_DRIVER_VERSION, _VBIOS_VERSION, _FWID, _FEATURE_FLAG = 3, 6, 20, 36

_COMPOSITE_DEVICE_ID: Final = x509.ObjectIdentifier("2.23.133.5.4.1")
_SHA384: Final = x509.ObjectIdentifier("2.16.840.1.101.3.4.2.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A parsed report. `signature` (P-384, r ‖ s, big-endian) covers `signed`."""

    nonce: bytes
    blocks: Mapping[int, bytes]
    opaque: Mapping[int, bytes]
    signed: bytes
    signature: bytes


@asn1.sequence
class _FirmwareId:
    algorithm: x509.ObjectIdentifier
    digest: bytes


@asn1.sequence
class _CompositeDeviceId:
    version: int
    device_id: asn1.TLV
    firmware_id: _FirmwareId


def encode_evidence(report: bytes, certificates: bytes) -> bytes:
    """Return the item: SPDM request and response, and the chain in PEM, leaf first."""
    return fields(EVIDENCE_LABEL, report, certificates)


def parse_report(encoded: bytes) -> Report:
    """Parse request and response; VerificationError `attestation.nvidia.malformed`.

    The length is computed from the fields; at most TRAILING_ZEROS_MAX zeros may follow.
    """
    if len(encoded) > REPORT_BYTES_MAX:
        raise _malformed(f"it has {len(encoded)} bytes; allowed: {REPORT_BYTES_MAX}")
    reader = _Reader(encoded)
    if reader.take(4) != _REQUEST_HEAD:
        raise _malformed("it does not begin with a request for all signed measurements of SPDM 1.1")
    nonce, slot = reader.take(_NONCE_BYTES), reader.number(1)
    version, code, _, answered_slot = reader.take(4)
    if (version, code) != (_SPDM_1_1, _MEASUREMENTS):
        raise _malformed(f"the response has SPDM version {version:#x} and code {code:#x}")
    if slot >= _SLOTS or answered_slot & 0x0F != slot:
        raise _malformed(f"slot {slot} was requested, but slot {answered_slot & 0x0F} answered")
    count = reader.number(1)
    blocks = _parse_blocks(reader.take(reader.number(3)), count)
    reader.take(_NONCE_BYTES)
    opaque = _parse_opaque(reader.take(reader.number(2)))
    signed = encoded[: reader.position]
    signature = reader.take(_SIGNATURE_BYTES)
    trailing = encoded[reader.position :]
    if len(trailing) > TRAILING_ZEROS_MAX or any(trailing):
        raise _malformed(f"{len(trailing)} bytes follow; allowed: up to {TRAILING_ZEROS_MAX} zeros")
    return Report(nonce=nonce, blocks=blocks, opaque=opaque, signed=signed, signature=signature)


def _parse_blocks(encoded: bytes, count: int) -> dict[int, bytes]:
    reader = _Reader(encoded)
    blocks: dict[int, bytes] = {}
    for _ in range(count):
        index, specification = reader.take(2)
        size = reader.number(2)
        reader.take(1)  # what is measured, and whether it is a digest
        length = reader.number(2)
        if specification != _DMTF_MEASUREMENT or size != length + 3 or index in blocks:
            raise _malformed(f"block {index} is a duplicate or not a DMTF measurement")
        blocks[index] = reader.take(length)
    reader.finish()
    return blocks


def _parse_opaque(encoded: bytes) -> dict[int, bytes]:
    reader = _Reader(encoded)
    found: dict[int, bytes] = {}
    while reader.position < len(encoded):
        kind = reader.number(2)
        if kind in found:
            raise _malformed(f"opaque data of type {kind} appears twice")
        found[kind] = reader.take(reader.number(2))
    return found


class _Reader:
    """Reads little-endian numbers and bytes, never past the end."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > len(self._encoded) - self.position:
            raise _malformed(f"it ends within a field of {count} bytes at offset {self.position}")
        self.position += count
        return self._encoded[self.position - count : self.position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def finish(self) -> None:
        if self.position != len(self._encoded):
            raise _malformed("the measurement record is longer than its blocks")


def verify(
    evidence: bytes,
    *,
    binding: Binding,
    collateral: Collateral,
    now: dt.datetime,
    endorsements: bytes = b"",  # noqa: ARG001 - a report comes with its chain
) -> Claims:
    """Return the claims of a genuine report; VerificationError `attestation.nvidia.<fault>`.

    `evidence` is a result of `encode_evidence`; its chain may include the root.
    """
    parts = parse_fields(EVIDENCE_LABEL, evidence, count_max=2)
    if parts is None or len(parts) != 2:
        raise _malformed("it is not a report with certificates")
    report = parse_report(parts[0])
    chain = parse_certificates(parts[1], kind=EVIDENCE_TYPE)
    if chain[-1] == collateral.roots.nvidia:
        chain.pop()
    if len(chain) < 2:
        raise _fault("attestation.nvidia.chain", "the chain has no attestation key below a device")
    verified = verify_chain(
        chain,
        root=collateral.roots.nvidia,
        revocation_lists=collateral.revocation_lists,
        kind=EVIDENCE_TYPE,
        now=now,
    )
    key, device = chain[0], chain[1]
    _check_signature(report, key)
    firmware_id = _endorsed_firmware(key, device)
    if report.opaque.get(_FWID) != firmware_id:
        raise _fault(
            "attestation.nvidia.fwid",
            "the attestation key belongs to other firmware than the report",
        )
    if not secrets.compare_digest(report.nonce, binding.device_nonce):
        raise _fault("attestation.nvidia.nonce", "the report does not answer this challenge")
    measurements = {f"block_{index}": value for index, value in report.blocks.items()}
    measurements["fwid"] = firmware_id
    for name, kind in (("driver_version", _DRIVER_VERSION), ("vbios_version", _VBIOS_VERSION)):
        if kind in report.opaque:
            measurements[name] = report.opaque[kind].rstrip(b"\0")
    properties = {}
    if _FEATURE_FLAG in report.opaque:
        properties["feature_flag"] = int.from_bytes(report.opaque[_FEATURE_FLAG], "little")
    return Claims(
        evidence_type=EVIDENCE_TYPE,
        hardware_id=f"key-sha256:{key_sha256(device).hex()}",
        product=common_name(device.subject).partition(" ")[0],
        measurements=measurements,
        tcb={},
        flags={"revocation_checked": verified.revocation_checked},
        properties=properties,
        valid_until=verified.valid_until,
    )


def _check_signature(report: Report, certificate: x509.Certificate) -> None:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise _fault("attestation.nvidia.certificate", "the attestation key is not on P-384")
    r, s = (int.from_bytes(report.signature[i : i + 48], "big") for i in (0, 48))
    try:
        key.verify(encode_dss_signature(r, s), report.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise _fault(
            "attestation.nvidia.signature", "the attestation key did not sign this report"
        ) from error


def _endorsed_firmware(key: x509.Certificate, device: x509.Certificate) -> bytes:
    """Return the firmware id in the attestation key's certificate, which must name its device."""
    device_key = device.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        found = key.extensions.get_extension_for_oid(_COMPOSITE_DEVICE_ID).value
        encoded = found.value if isinstance(found, x509.UnrecognizedExtension) else b""
        composite = asn1.decode_der(_CompositeDeviceId, encoded)
        expected = asn1.decode_der(asn1.TLV, device_key)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise _fault(
            "attestation.nvidia.certificate", f"no composite device id: {error}"
        ) from error
    if composite.device_id.data != expected.data or composite.firmware_id.algorithm != _SHA384:
        raise _fault(
            "attestation.nvidia.certificate",
            "the attestation key names another device, or a hash other than SHA-384",
        )
    return composite.firmware_id.digest


def _malformed(message: str) -> VerificationError:
    return _fault("attestation.nvidia.malformed", f"the report: {message}")


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
