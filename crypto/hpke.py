"""HPKE (RFC 9180, base mode) for secrets sent to an attested KEM key, and the signature over them.

Suite: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM. Base mode doesn't authenticate the
sender, so the broker signs the sealed bytes together with their `info`; `open_signed` checks the
signature first. `Context` is the `info`: change one field and the secret does not open.
"""

from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from sealane.crypto.encoding import fields
from sealane.errors import UsageError, VerificationError

REQUEST_ID_BYTES: Final = 16
PUBLIC_KEY_BYTES: Final = 32

_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SIGNATURE_DOMAIN: Final = "sealane sealed secret v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a sealed secret is for; becomes HPKE's `info`.

    `arena` is (broker instance, start epoch) of a lease and None for a key.
    """

    purpose: str
    recipient: str
    incarnation: bytes
    request_id: bytes
    volume_id: str
    key_epoch: int
    arena: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.request_id) != REQUEST_ID_BYTES:
            raise UsageError(
                "request.id.size",
                f"a request id has {REQUEST_ID_BYTES} bytes, not {len(self.request_id)}",
            )

    def info(self) -> bytes:
        """Return the bytes HPKE and the signature bind."""
        arena = b""
        if self.arena is not None:
            arena = self.arena[0].to_bytes(2, "big") + self.arena[1].to_bytes(3, "big")
        return fields(
            "sealane hpke v1",
            self.purpose.encode(),
            self.recipient.encode(),
            self.incarnation,
            self.request_id,
            self.volume_id.encode(),
            self.key_epoch.to_bytes(4, "big"),
            arena,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedSecret:
    """An HPKE ciphertext (encapsulated key ‖ ciphertext) and the broker's signature."""

    sealed: bytes
    signature: bytes


def seal_signed(
    secret: bytes | bytearray,
    *,
    recipient_key: bytes,
    context: Context,
    signing_key: ec.EllipticCurvePrivateKey,
) -> SignedSecret:
    """Seal `secret` to the X25519 key `recipient_key` (32 bytes) and sign it with context."""
    try:
        sealed = _SUITE.encrypt(
            bytes(secret), X25519PublicKey.from_public_bytes(recipient_key), context.info()
        )
    except ValueError as error:
        raise VerificationError(
            "key.kem.invalid", f"the KEM key of {context.recipient} is not usable"
        ) from error
    signed = fields(_SIGNATURE_DOMAIN, context.info(), sealed)
    return SignedSecret(sealed=sealed, signature=signing_key.sign(signed, ec.ECDSA(SHA256())))


def open_signed(
    message: SignedSecret,
    *,
    private_key: X25519PrivateKey,
    context: Context,
    signer: ec.EllipticCurvePublicKey,
) -> bytearray:
    """Check the signature, open and return the secret; the caller wipes it.

    VerificationError `secret.signature` or `secret.sealed`: not from this broker, or not for this
    recipient, incarnation, request, volume, arena and key epoch.
    """
    signed = fields(_SIGNATURE_DOMAIN, context.info(), message.sealed)
    try:
        signer.verify(message.signature, signed, ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise VerificationError(
            "secret.signature",
            f"the {context.purpose} is not signed by the broker for this request",
        ) from error
    try:
        return bytearray(_SUITE.decrypt(message.sealed, private_key, context.info()))
    except (InvalidTag, ValueError) as error:
        raise VerificationError(
            "secret.sealed", f"the {context.purpose} is not sealed to this node's key"
        ) from error
