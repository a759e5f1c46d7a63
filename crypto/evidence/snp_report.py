"""AMD SEV-SNP's ATTESTATION_REPORT, versions 2 to 5, and its certificate table.

SEV Secure Nested Paging Firmware ABI Specification (AMD 56860), table ATTESTATION_REPORT; GHCB
specification (AMD 56421), section 4.1.8.1 for the certificate table. Parsing only: nothing is
verified here.
"""

import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealane.errors import VerificationError

REPORT_BYTES: Final = 0x4A0
SIGNED_BYTES: Final = 0x2A0
VERSIONS: Final = (2, 3, 4, 5)

VCEK_GUID: Final = uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd")
VLEK_GUID: Final = uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1")
# ASK or ASVK, whichever signed the endorsement key in the same table.
ASK_GUID: Final = uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782")

# A host's table holds four certificates of at most 2 kB, usually padded to whole pages.
TABLE_BYTES_MAX: Final = 64 << 10
TABLE_ENTRIES_MAX: Final = 16
_ENTRY: Final = struct.Struct("<16sII")

_ECDSA_P384_SHA384: Final = 1
_SIGNATURE_VALUE_BYTES: Final = 72
VCEK: Final = 0
VLEK: Final = 1

# Bits of POLICY from 16 up, and of PLATFORM_INFO, by their names in the specification.
POLICY_BITS: Final[Mapping[str, int]] = {
    "smt_allowed": 16,
    "migrate_ma": 18,
    "debug": 19,
    "single_socket": 20,
    "cxl_allowed": 21,
    "mem_aes_256_xts": 22,
    "rapl_dis": 23,
    "ciphertext_hiding_dram": 24,
    "page_swap_disable": 25,
}
PLATFORM_BITS: Final[Mapping[str, int]] = {
    "smt_en": 0,
    "tsme_en": 1,
    "ecc_en": 2,
    "rapl_disabled": 3,
    "ciphertext_hiding_dram_en": 4,
    "alias_check_complete": 5,
    "tio_en": 7,
}
_POLICY_RESERVED: Final = ~((1 << 26) - 1) & (1 << 64) - 1
_PLATFORM_RESERVED: Final = ~0b1011_1111 & (1 << 64) - 1

# Which byte of a TCB_VERSION holds which security version number; other bytes are zero.
_TCB_LAYOUT: Final[Mapping[str, Mapping[str, int]]] = {
    "Milan": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The fields of a report. TCBs are the raw 8 bytes; see `decode_tcb`."""

    encoded: bytes
    version: int
    guest_svn: int
    policy: int
    family_id: bytes
    image_id: bytes
    vmpl: int
    current_tcb: bytes
    platform_info: int
    author_key: bool
    mask_chip_key: bool
    signing_key: int
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    author_key_digest: bytes
    reported_tcb: bytes
    cpuid: tuple[int, int, int]
    chip_id: bytes
    committed_tcb: bytes
    launch_tcb: bytes
    launch_mit_vector: bytes
    current_mit_vector: bytes
    signature_r: int
    signature_s: int

    @property
    def signed(self) -> bytes:
        """The bytes that the endorsement key signs."""
        return self.encoded[:SIGNED_BYTES]

    @property
    def product(self) -> str:
        """Return the product, from its CPUID; empty if the report has none (version 2)."""
        family, model, _ = self.cpuid
        if self.version < 3:
            return ""
        for product, its_family, models in _PRODUCTS:
            if family == its_family and any(model in span for span in models):
                return product
        raise _malformed(f"CPUID family {family:#x} model {model:#x} is not a known product")


_PRODUCTS: Final = (
    ("Milan", 0x19, (range(0x10),)),
    ("Genoa", 0x19, (range(0x10, 0x20), range(0xA0, 0xB0))),
    ("Turin", 0x1A, (range(0x12),)),
)


def parse_report(encoded: bytes) -> Report:
    """Parse a report of exactly 1184 bytes; VerificationError `attestation.snp.malformed`."""
    if len(encoded) != REPORT_BYTES:
        raise _malformed(f"a report of {len(encoded)} bytes; allowed: {REPORT_BYTES}")
    version, guest_svn, policy = struct.unpack_from("<IIQ", encoded)
    vmpl, algorithm = struct.unpack_from("<II", encoded, 0x30)
    platform_info, flags = struct.unpack_from("<QI", encoded, 0x40)
    if version not in VERSIONS:
        raise _malformed(f"report version {version}; allowed: {VERSIONS}")
    if algorithm != _ECDSA_P384_SHA384:
        raise _malformed(f"signature algorithm {algorithm}; allowed: {_ECDSA_P384_SHA384}")
    if not policy >> 17 & 1 or policy & _POLICY_RESERVED or platform_info & _PLATFORM_RESERVED:
        raise _malformed("POLICY or PLATFORM_INFO has a reserved bit with the wrong value")
    _check_zero(encoded, version, flags)
    if vmpl > 3:
        raise _malformed(f"VMPL {vmpl}: not a guest's report")
    at = 0x2A0 + _SIGNATURE_VALUE_BYTES
    return Report(
        encoded=encoded,
        version=version,
        guest_svn=guest_svn,
        policy=policy,
        family_id=encoded[0x10:0x20],
        image_id=encoded[0x20:0x30],
        vmpl=vmpl,
        current_tcb=encoded[0x38:0x40],
        platform_info=platform_info,
        author_key=bool(flags & 1),
        mask_chip_key=bool(flags & 2),
        signing_key=flags >> 2,
        report_data=encoded[0x50:0x90],
        measurement=encoded[0x90:0xC0],
        host_data=encoded[0xC0:0xE0],
        id_key_digest=encoded[0xE0:0x110],
        author_key_digest=encoded[0x110:0x140],
        reported_tcb=encoded[0x180:0x188],
        cpuid=(encoded[0x188], encoded[0x189], encoded[0x18A]),
        chip_id=encoded[0x1A0:0x1E0],
        committed_tcb=encoded[0x1E0:0x1E8],
        launch_tcb=encoded[0x1F0:0x1F8],
        launch_mit_vector=encoded[0x1F8:0x200],
        current_mit_vector=encoded[0x200:0x208],
        signature_r=int.from_bytes(encoded[0x2A0:at], "little"),
        signature_s=int.from_bytes(encoded[at : at + _SIGNATURE_VALUE_BYTES], "little"),
    )


def _check_zero(encoded: bytes, version: int, flags: int) -> None:
    spans = [(0x4C, 0x50), (0x18B, 0x1A0), (0x1EB, 0x1EC), (0x1EF, 0x1F0), (0x208, 0x2A0)]
    # The bytes after the signature aren't signed.
    spans.append((0x330, REPORT_BYTES))
    if version < 3:
        spans.append((0x188, 0x18B))
    if version < 5:
        spans.append((0x1F8, 0x208))
    if flags >> 5 or any(any(encoded[start:end]) for start, end in spans):
        raise _malformed("a reserved field is not zero")


def decode_tcb(encoded: bytes, product: str) -> dict[str, int]:
    """Return the security version numbers of a TCB_VERSION (8 bytes) by component.

    Milan and Genoa: bootloader, tee, snp, microcode; Turin also has fmc, in a different order.
    Raises VerificationError `attestation.snp.malformed` if another byte isn't zero.
    """
    layout = _TCB_LAYOUT[product]
    if any(value for index, value in enumerate(encoded) if index not in layout.values()):
        raise _malformed(f"TCB {encoded.hex()} is not valid for {product}")
    return {component: encoded[index] for component, index in layout.items()}


def parse_certificate_table(encoded: bytes) -> dict[uuid.UUID, bytes]:
    """Return the certificates of a table by GUID; VerificationError `attestation.snp.table`.

    An empty table may also be zero bytes long: a host need not supply one.
    """
    if len(encoded) > TABLE_BYTES_MAX:
        raise _bad_table(f"{len(encoded)} bytes")
    found: dict[uuid.UUID, bytes] = {}
    for index in range(TABLE_ENTRIES_MAX + 1 if encoded else 0):
        position = index * _ENTRY.size
        if index == TABLE_ENTRIES_MAX or position + _ENTRY.size > len(encoded):
            raise _bad_table("it has no end marker")
        guid_bytes, offset, length = _ENTRY.unpack_from(encoded, position)
        if not any(guid_bytes):
            break
        guid = uuid.UUID(bytes=guid_bytes)
        if guid in found or offset > len(encoded) or length > len(encoded) - offset:
            raise _bad_table(f"the entry of {guid} is a duplicate or points outside the table")
        found[guid] = encoded[offset : offset + length]
    return found


def _malformed(message: str) -> VerificationError:
    return VerificationError("attestation.snp.malformed", message)


def _bad_table(message: str) -> VerificationError:
    return VerificationError("attestation.snp.table", f"the certificate table: {message}")
