"""KEM keys that secrets are sealed to: DHKEM of RFC 9180, and HPKE's receiving half.

A KEM key is in memory (X25519), or in a TPM that never reveals it (P-256). The holder of a key can
only derive a shared secret with it, so decapsulation and key schedule are implemented here, once
for both; the library does the sealing. Base mode, HKDF-SHA256, AES-256-GCM, one message per key
schedule.
"""

import hmac
from dataclasses import dataclass
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealane.errors import VerificationError

X25519: Final = "x25519"
P256: Final = "p256"

_KDF_ID: Final = 0x0001
_AEAD_ID: Final = 0x0002
_AEAD_KEY_BYTES: Final = 32
_AEAD_NONCE_BYTES: Final = 12
_HASH_BYTES: Final = 32
_MODE_BASE: Final = b"\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class KemAlgorithm:
    """A DHKEM of RFC 9180, section 7.1. `public_key_bytes` is also the length of `enc`."""

    kem_id: int
    public_key_bytes: int
    suite: Suite


KEM_ALGORITHMS: Final = {
    X25519: KemAlgorithm(
        kem_id=0x0020,
        public_key_bytes=32,
        suite=Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM),
    ),
    P256: KemAlgorithm(
        kem_id=0x0010,
        public_key_bytes=65,
        suite=Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM),
    ),
}


class KemKey(Protocol):
    """A private key of one incarnation, in memory or in a TPM."""

    @property
    def algorithm(self) -> str:
        """`x25519` or `p256`."""

    @property
    def public_key(self) -> bytes:
        """Public key as in RFC 9180, section 7.1.1: 32 bytes, or an uncompressed point of 65."""

    def exchange(self, peer_public_key: bytes) -> bytearray:
        """Return the Diffie-Hellman secret with a peer's public key, 32 bytes; the caller wipes it.

        May block as long as a TPM takes. ValueError if the peer's key is invalid.
        """


class X25519KemKey:
    """A key in this process's memory."""

    __slots__ = ("_key", "public_key")

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()

    @classmethod
    def create(cls) -> "X25519KemKey":
        """Create a new key."""
        return cls(X25519PrivateKey.generate())

    @property
    def algorithm(self) -> str:
        """Always `x25519`."""
        return X25519

    def exchange(self, peer_public_key: bytes) -> bytearray:
        """Return the Diffie-Hellman secret; ValueError also if it would be zero."""
        return bytearray(self._key.exchange(X25519PublicKey.from_public_bytes(peer_public_key)))


def seal(secret: bytes | bytearray, *, algorithm: str, public_key: bytes, info: bytes) -> bytes:
    """Return `enc` ‖ ciphertext of `secret`; ValueError if `public_key` is not valid."""
    kem = KEM_ALGORITHMS.get(algorithm)
    if kem is None or len(public_key) != kem.public_key_bytes:
        raise ValueError(f"not a public key of {algorithm[:16]!r}")
    if algorithm == P256:
        point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public_key)
        return kem.suite.encrypt(bytes(secret), point, info)
    return kem.suite.encrypt(bytes(secret), X25519PublicKey.from_public_bytes(public_key), info)


def unseal(sealed: bytes, *, key: KemKey, info: bytes) -> bytearray:
    """Open what `seal` made for `key` and `info`; the caller wipes it. Blocks like `exchange`.

    VerificationError `secret.sealed`: truncated, changed, or for another key or `info`.
    """
    kem = KEM_ALGORITHMS[key.algorithm]
    enc, ciphertext = sealed[: kem.public_key_bytes], sealed[kem.public_key_bytes :]
    try:
        secret = decapsulate(enc, key=key)
        aead_key, nonce = _key_schedule(bytes(secret), kem_id=kem.kem_id, info=info)
        return bytearray(AESGCM(aead_key).decrypt(nonce, ciphertext, b""))
    except (InvalidTag, ValueError) as error:
        raise VerificationError(
            "secret.sealed", "the secret can't be opened with this node's key"
        ) from error


def decapsulate(enc: bytes, *, key: KemKey) -> bytearray:
    """Return DHKEM's shared secret (RFC 9180, section 4.1); ValueError if `enc` is not a key."""
    kem = KEM_ALGORITHMS[key.algorithm]
    if len(enc) != kem.public_key_bytes:
        raise ValueError(f"an encapsulated key of {len(enc)} bytes; needed: {kem.public_key_bytes}")
    agreed = key.exchange(enc)
    suite_id = b"KEM" + kem.kem_id.to_bytes(2, "big")
    extracted = _extract(b"", b"eae_prk", bytes(agreed), suite_id=suite_id)
    agreed[:] = bytes(len(agreed))
    context = enc + key.public_key
    return bytearray(_expand(extracted, b"shared_secret", context, _HASH_BYTES, suite_id=suite_id))


def _key_schedule(secret: bytes, *, kem_id: int, info: bytes) -> tuple[bytes, bytes]:
    """Return key and base nonce of base mode (RFC 9180, section 5.1)."""
    ids = (kem_id, _KDF_ID, _AEAD_ID)
    suite_id = b"HPKE" + b"".join(i.to_bytes(2, "big") for i in ids)
    context = (
        _MODE_BASE
        + _extract(b"", b"psk_id_hash", b"", suite_id=suite_id)
        + _extract(b"", b"info_hash", info, suite_id=suite_id)
    )
    extracted = _extract(secret, b"secret", b"", suite_id=suite_id)
    return (
        _expand(extracted, b"key", context, _AEAD_KEY_BYTES, suite_id=suite_id),
        _expand(extracted, b"base_nonce", context, _AEAD_NONCE_BYTES, suite_id=suite_id),
    )


def _extract(salt: bytes, label: bytes, material: bytes, *, suite_id: bytes) -> bytes:
    labelled = b"HPKE-v1" + suite_id + label + material
    return hmac.digest(salt or bytes(_HASH_BYTES), labelled, "sha256")


def _expand(key: bytes, label: bytes, info: bytes, length: int, *, suite_id: bytes) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + suite_id + label + info
    return HKDFExpand(SHA256(), length, labelled).derive(key)
