"""Intel TDX quotes, versions 4 and 5, with ECDSA P-256: an independent, bounded parser.

Intel TDX DCAP Quoting Library API, appendix 3 (little-endian). The engine that verifies quotes has
its own parser; the verifier compares both results. Parsing only: nothing is verified here.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealane.errors import VerificationError

# Some hosts return their whole buffer: up to 3065 zero bytes were seen after a quote.
TRAILING_ZEROS_MAX: Final = 16 << 10
_CHAIN_BYTES_MAX: Final = 16 << 10
_QE_DATA_BYTES_MAX: Final = 1 << 10

_HEADER: Final = struct.Struct("<HHIHH16s20s")
_ECDSA_P256: Final = 2
_TDX: Final = 0x81
_INTEL_QE: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_TD_1_0, _TD_1_5 = 2, 3
_BODY_BYTES: Final = {_TD_1_0: 584, _TD_1_5: 648}
_QE_REPORT_CERTIFICATION, _PCK_CHAIN = 6, 5

# Fields of the TD report: name, offset, length. The last ones exist only in TD 1.5.
_FIELDS: Final = (
    ("tee_tcb_svn", 0x000, 16),
    ("mrseam", 0x010, 48),
    ("mrsignerseam", 0x040, 48),
    ("seam_attributes", 0x070, 8),
    ("td_attributes", 0x078, 8),
    ("xfam", 0x080, 8),
    ("mrtd", 0x088, 48),
    ("mrconfigid", 0x0B8, 48),
    ("mrowner", 0x0E8, 48),
    ("mrownerconfig", 0x118, 48),
    ("rtmr0", 0x148, 48),
    ("rtmr1", 0x178, 48),
    ("rtmr2", 0x1A8, 48),
    ("rtmr3", 0x1D8, 48),
    ("report_data", 0x208, 64),
)
_FIELDS_1_5: Final = (("tee_tcb_svn_2", 0x248, 16), ("mrservicetd", 0x258, 48))

# Bits of TDATTRIBUTES by their names in the TDX Module specification; the others are reserved.
ATTRIBUTE_BITS: Final[Mapping[str, int]] = {
    "debug": 0,
    "sept_ve_disable": 28,
    "migratable": 29,
    "pks": 30,
    "kl": 31,
    "perfmon": 63,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A parsed quote: `body` holds the TD report's fields by name.

    `unpadded` is the quote without trailing zeros, `certificates` the PCK chain in PEM. Both
    include bytes that aren't signed: identify a quote by `signed` only.
    """

    version: int
    signed: bytes
    body: Mapping[str, bytes]
    certificates: bytes
    unpadded: bytes

    @property
    def attributes(self) -> dict[str, bool]:
        """Bits of TDATTRIBUTES by name."""
        value = int.from_bytes(self.body["td_attributes"], "little")
        return {name: bool(value >> bit & 1) for name, bit in ATTRIBUTE_BITS.items()}


def parse_quote(encoded: bytes) -> Quote:
    """Parse a quote; VerificationError `attestation.tdx.malformed` or `.tee_type`.

    Only zeros may follow it, at most TRAILING_ZEROS_MAX.
    """
    reader = _Reader(encoded)
    version, key_type, tee_type, _, _, vendor, _ = _HEADER.unpack(reader.take(_HEADER.size))
    if tee_type != _TDX:
        raise VerificationError(
            "attestation.tdx.tee_type", f"a quote for TEE type {tee_type:#x}, not {_TDX:#x} (TDX)"
        )
    if version not in {4, 5} or key_type != _ECDSA_P256 or vendor != _INTEL_QE:
        raise _malformed(f"version {version}, key type {key_type}, QE vendor {vendor.hex()}")
    body_type = _TD_1_0
    if version == 5:
        body_type, size = struct.unpack("<HI", reader.take(6))
        if _BODY_BYTES.get(body_type) != size:
            raise _malformed(f"body type {body_type} of {size} bytes")
    body = reader.take(_BODY_BYTES[body_type])
    signed = encoded[: reader.position]
    auth = _Reader(reader.take(reader.u32()))
    reader.finish_zeros()
    certificates = _parse_auth(auth)
    fields = _FIELDS + _FIELDS_1_5 * (body_type == _TD_1_5)
    quote = Quote(
        version=version,
        signed=signed,
        body={name: body[start : start + length] for name, start, length in fields},
        certificates=certificates,
        unpadded=encoded[: reader.position],
    )
    known = sum(1 << bit for bit in ATTRIBUTE_BITS.values())
    if int.from_bytes(quote.body["td_attributes"], "little") & ~known:
        raise _malformed(f"TDATTRIBUTES {quote.body['td_attributes'].hex()} has a reserved bit set")
    return quote


def _parse_auth(auth: "_Reader") -> bytes:
    """Walk the authentication data; return the PCK chain in PEM."""
    auth.take(64 + 64)  # signature of the quote, attestation key
    kind, size = auth.u16(), auth.u32()
    if kind != _QE_REPORT_CERTIFICATION:
        raise _malformed(f"certification data of type {kind}; allowed: 6")
    inner = _Reader(auth.take(size))
    auth.finish()
    inner.take(384 + 64)  # report of the quoting enclave and its signature
    inner.take(inner.u16(at_most=_QE_DATA_BYTES_MAX))
    kind, size = inner.u16(), inner.u32()
    if kind != _PCK_CHAIN or size > _CHAIN_BYTES_MAX:
        raise _malformed(f"certification data of type {kind} with {size} bytes; allowed: type 5")
    certificates = inner.take(size)
    inner.finish()
    return certificates


class _Reader:
    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > len(self._encoded) - self.position:
            raise _malformed(f"it ends within a field of {count} bytes at offset {self.position}")
        self.position += count
        return self._encoded[self.position - count : self.position]

    def u16(self, *, at_most: int = 0xFFFF) -> int:
        value = int.from_bytes(self.take(2), "little")
        if value > at_most:
            raise _malformed(f"a field of {value} bytes; allowed: {at_most}")
        return value

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def finish(self) -> None:
        if self.position != len(self._encoded):
            raise _malformed("a field is longer than its content")

    def finish_zeros(self) -> None:
        trailing = self._encoded[self.position :]
        if len(trailing) > TRAILING_ZEROS_MAX or any(trailing):
            raise _malformed(
                f"{len(trailing)} bytes follow; allowed: up to {TRAILING_ZEROS_MAX} zeros"
            )


def _malformed(message: str) -> VerificationError:
    return VerificationError("attestation.tdx.malformed", f"the quote: {message}")
