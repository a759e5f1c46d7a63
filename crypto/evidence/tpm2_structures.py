"""Structures of the TPM 2.0 Library Specification, Part 2, as far as evidence uses them.

Big-endian; each variable part follows its length (TPM2B). A reader takes exactly the bytes of a
structure; extra or missing bytes are refused. SHA-256 everywhere: weaker hashes are not accepted.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.errors import VerificationError

# TPM_ALG_ID (Part 2, 6.3)
ALG_RSA: Final = 0x0001
ALG_AES: Final = 0x0006
ALG_SHA256: Final = 0x000B
ALG_NULL: Final = 0x0010
ALG_RSASSA: Final = 0x0014
ALG_RSAES: Final = 0x0015
ALG_ECDSA: Final = 0x0018
ALG_ECDAA: Final = 0x001A
ALG_ECC: Final = 0x0023
ALG_CFB: Final = 0x0043
ECC_NIST_P256: Final = 0x0003

# TPMA_OBJECT (Part 2, 8.3)
FIXED_TPM: Final = 1 << 1
FIXED_PARENT: Final = 1 << 4
SENSITIVE_DATA_ORIGIN: Final = 1 << 5
RESTRICTED: Final = 1 << 16
DECRYPT: Final = 1 << 17
SIGN: Final = 1 << 18
# A key that the TPM generated from its own random numbers and that never leaves it.
BORN_IN_TPM: Final = FIXED_TPM | FIXED_PARENT | SENSITIVE_DATA_ORIGIN

# TPM_RH (Part 2, 7.4): the roots of the hierarchies of keys.
RH_OWNER: Final = 0x40000001
RH_NULL: Final = 0x40000007
RH_ENDORSEMENT: Final = 0x4000000B
RH_PLATFORM: Final = 0x4000000C

# TPMS_ATTEST (Part 2, 10.12)
_GENERATED: Final = 0xFF544347
_ST_ATTEST_QUOTE: Final = 0x8018
_ST_ATTEST_CERTIFY: Final = 0x8017

PCR_BYTES: Final = 32
PCR_COUNT: Final = 24

# Limits: the largest structure is an RSA-4096 public area of some 550 bytes.
_STRUCTURE_BYTES_MAX: Final = 1024
_RSA_BITS: Final = (2048, 3072, 4096)
_RSA_EXPONENT: Final = 65537

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


def malformed(message: str) -> VerificationError:
    """Return the error for bytes that are not the expected structure."""
    return VerificationError("attestation.tpm2.malformed", message)


class Reader:
    """Reads integers and sized buffers from the front of a structure."""

    def __init__(self, encoded: bytes, what: str) -> None:
        if len(encoded) > _STRUCTURE_BYTES_MAX:
            raise malformed(f"{what} has {len(encoded)} bytes; allowed: {_STRUCTURE_BYTES_MAX}")
        self._rest = memoryview(encoded)
        self._what = what

    def take(self, count: int) -> bytes:
        """Read `count` bytes."""
        if count > len(self._rest):
            raise malformed(f"{self._what} is truncated")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return bytes(taken)

    def integer(self, count: int) -> int:
        """Read an unsigned integer of `count` bytes."""
        return int.from_bytes(self.take(count), "big")

    def sized(self) -> bytes:
        """Read a TPM2B: two bytes of length, then that many bytes."""
        return self.take(self.integer(2))

    def finish(self) -> None:
        """Refuse trailing bytes."""
        if self._rest:
            raise malformed(f"{self._what} has {len(self._rest)} trailing bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """A TPMT_PUBLIC (Part 2, 12.2.4) of an RSA or P-256 key.

    `scheme` and `symmetric` are algorithm identifiers with their parameters, ALG_NULL first if
    there is none. `name` is the TPM's name of the object: algorithm and digest of the whole
    structure.
    """

    attributes: int
    symmetric: tuple[int, ...]
    scheme: tuple[int, ...]
    key: PublicKey
    name: bytes

    def has(self, *, required: int, forbidden: int = 0) -> bool:
        """Return whether all bits of `required` and none of `forbidden` are set."""
        return self.attributes & required == required and not self.attributes & forbidden


def parse_public(encoded: bytes) -> Public:
    """Parse a TPMT_PUBLIC; VerificationError `attestation.tpm2.malformed`, also for other keys."""
    reader = Reader(encoded, "TPMT_PUBLIC")
    kind = reader.integer(2)
    if reader.integer(2) != ALG_SHA256:
        raise malformed("a public area has a name algorithm other than SHA-256")
    attributes = reader.integer(4)
    reader.sized()  # authPolicy: part of the name, not used here
    symmetric = _symmetric(reader)
    scheme = _scheme(reader)
    key: PublicKey
    if kind == ALG_ECC:
        key = _ecc_key(reader)
    elif kind == ALG_RSA:
        key = _rsa_key(reader)
    else:
        raise malformed(f"a public area of type {kind:#06x}; allowed: RSA, ECC")
    reader.finish()
    return Public(
        attributes=attributes,
        symmetric=symmetric,
        scheme=scheme,
        key=key,
        name=ALG_SHA256.to_bytes(2, "big") + hashlib.sha256(encoded).digest(),
    )


def qualified_name(name: bytes, *, hierarchy: int) -> bytes:
    """Return the qualified name of a primary key in this hierarchy (Part 1, 16; TPM_RH).

    It is a digest over the parent's qualified name and the key's own name; a hierarchy's qualified
    name is its handle. So it distinguishes a primary key from a child, and the hierarchies from
    each other.
    """
    parent = hierarchy.to_bytes(4, "big")
    return ALG_SHA256.to_bytes(2, "big") + hashlib.sha256(parent + name).digest()


def _symmetric(reader: Reader) -> tuple[int, ...]:
    algorithm = reader.integer(2)
    if algorithm == ALG_NULL:
        return (ALG_NULL,)
    return algorithm, reader.integer(2), reader.integer(2)


def _scheme(reader: Reader) -> tuple[int, ...]:
    algorithm = reader.integer(2)
    if algorithm in {ALG_NULL, ALG_RSAES}:
        return (algorithm,)
    if algorithm == ALG_ECDAA:
        return algorithm, reader.integer(2), reader.integer(2)
    return algorithm, reader.integer(2)


def _ecc_key(reader: Reader) -> ec.EllipticCurvePublicKey:
    curve = reader.integer(2)
    _scheme(reader)  # the key derivation scheme
    x, y = reader.sized(), reader.sized()
    if curve != ECC_NIST_P256:
        raise malformed(f"an elliptic curve key on curve {curve:#06x}; allowed: P-256")
    point = b"\4" + x.rjust(32, b"\0") + y.rjust(32, b"\0")
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    except ValueError as error:
        raise malformed("an elliptic curve key whose point is not on P-256") from error


def _rsa_key(reader: Reader) -> rsa.RSAPublicKey:
    bits, exponent = reader.integer(2), reader.integer(4)
    modulus = int.from_bytes(reader.sized(), "big")
    # 0 stands for the default exponent. Others cost time, and no TPM uses them.
    if bits not in _RSA_BITS or exponent not in {0, _RSA_EXPONENT} or modulus.bit_length() != bits:
        raise malformed(f"an RSA key of {bits} bits with exponent {exponent}; allowed: {_RSA_BITS}")
    try:
        return rsa.RSAPublicNumbers(_RSA_EXPONENT, modulus).public_key()
    except ValueError as error:
        raise malformed("an RSA key whose modulus is invalid") from error


def verify_signature(key: PublicKey, signature: bytes, signed: bytes) -> None:
    """Check a TPMT_SIGNATURE (ECDSA or RSASSA, SHA-256) over `signed`.

    VerificationError `attestation.tpm2.malformed` or `attestation.tpm2.signature`.
    """
    reader = Reader(signature, "TPMT_SIGNATURE")
    algorithm, digest = reader.integer(2), reader.integer(2)
    if digest != ALG_SHA256:
        raise malformed(f"a signature with hash {digest:#06x}; allowed: SHA-256")
    try:
        if algorithm == ALG_ECDSA and isinstance(key, ec.EllipticCurvePublicKey):
            r, s = (int.from_bytes(reader.sized(), "big") for _ in range(2))
            reader.finish()
            key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(SHA256()))
        elif algorithm == ALG_RSASSA and isinstance(key, rsa.RSAPublicKey):
            value = reader.sized()
            reader.finish()
            key.verify(value, signed, padding.PKCS1v15(), SHA256())
        else:
            raise malformed(f"a signature of algorithm {algorithm:#06x} for this kind of key")
    except InvalidSignature as error:
        raise VerificationError(
            "attestation.tpm2.signature", "the attestation key did not sign this"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """The common part of all TPMS_ATTEST (Part 2, 10.12.8); TPMU_ATTEST is still to be read.

    `signer` is the qualified name of the signing key (`qualified_name`). In an attestation by a key
    outside the endorsement and platform hierarchies, numbers that depend on that key are added to
    reset count, restart count and firmware version (Part 1, 36.7). `clock` is in milliseconds of
    operation; `is_safe` says that it was never larger before. Resets are starts of the machine,
    restarts are resumes from hibernation.
    """

    signer: bytes
    extra_data: bytes
    clock: int
    reset_count: int
    restart_count: int
    is_safe: bool
    firmware_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A TPMS_ATTEST of type quote: the digest over the PCRs `indices` (bank SHA-256)."""

    attest: Attest
    indices: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """A TPMS_ATTEST of type certify: an object with this name is loaded in the signing TPM."""

    attest: Attest
    name: bytes


def parse_quote(encoded: bytes) -> Quote:
    """Parse a quote over one selection of the SHA-256 bank."""
    reader = Reader(encoded, "TPMS_ATTEST")
    attest = _attest(reader, _ST_ATTEST_QUOTE)
    if reader.integer(4) != 1 or reader.integer(2) != ALG_SHA256:
        raise malformed("a quote that does not cover exactly one selection, of the SHA-256 bank")
    bitmap = reader.take(reader.integer(1))
    digest = reader.sized()
    reader.finish()
    if len(bitmap) > PCR_COUNT // 8:
        raise malformed("a quote of PCRs above 23")
    bits = int.from_bytes(bitmap, "little")
    indices = tuple(i for i in range(PCR_COUNT) if bits >> i & 1)
    return Quote(attest=attest, indices=indices, digest=digest)


def parse_certification(encoded: bytes) -> Certification:
    """Parse the structure that TPM2_Certify signs."""
    reader = Reader(encoded, "TPMS_ATTEST")
    attest = _attest(reader, _ST_ATTEST_CERTIFY)
    name = reader.sized()
    # The qualified name isn't needed, although it depends on the parent. The attributes of the key
    # suffice: a TPM creates a key that is fixed to it only under a parent that is.
    reader.sized()
    reader.finish()
    return Certification(attest=attest, name=name)


def _attest(reader: Reader, kind: int) -> Attest:
    # The magic number says that the TPM made this from its own state: a restricted key signs
    # nothing else that begins with it.
    if reader.integer(4) != _GENERATED or reader.integer(2) != kind:
        raise malformed("not a TPM attestation, or one of another type")
    signer, extra_data = reader.sized(), reader.sized()
    clock, reset_count, restart_count = reader.integer(8), reader.integer(4), reader.integer(4)
    safe = reader.integer(1)
    if safe > 1:
        raise malformed("a clock whose safe flag is neither 0 nor 1")
    return Attest(
        signer=signer,
        extra_data=extra_data,
        clock=clock,
        reset_count=reset_count,
        restart_count=restart_count,
        is_safe=safe == 1,
        firmware_version=reader.integer(8),
    )
