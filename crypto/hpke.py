"""HPKE (RFC 9180, base mode) for secrets sent to an attested KEM key, signed by the broker.

`sealane.crypto.kem` has the suites. Base mode doesn't authenticate the sender, so the broker signs
the sealed bytes together with their `info`; `open_signed` checks the signature first. `Context` is
the `info`: if any field differs, the secret can't be opened.
"""

from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import Verifying
from sealane.crypto.encoding import fields
from sealane.crypto.kem import X25519, KemKey, seal, unseal
from sealane.errors import UsageError, VerificationError

REQUEST_ID_BYTES: Final = 16

_SIGNATURE_DOMAIN: Final = "sealane sealed secret v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The purpose of a sealed secret; becomes HPKE's `info`.

    `arena` is (broker instance, start epoch) of a lease and None for a key. A device secret has the
    device's UUID in place of the volume's and the fencing epoch in place of the key epoch. `beside`
    is the digest of further data that the signature covers without sealing it; empty: none.
    """

    purpose: str
    recipient: str
    incarnation: bytes
    request_id: bytes
    volume_id: str
    key_epoch: int
    arena: tuple[int, int] | None = None
    beside: bytes = b""

    def __post_init__(self) -> None:
        if len(self.request_id) != REQUEST_ID_BYTES:
            raise UsageError(
                "request.id.size",
                f"a request id of {len(self.request_id)} bytes; needed: {REQUEST_ID_BYTES}",
            )

    def info(self) -> bytes:
        """Return the bytes that HPKE and the signature bind."""
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
            *([self.beside] if self.beside else []),
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
    kem_algorithm: str = X25519,
) -> SignedSecret:
    """Seal `secret` to `recipient_key`, a `kem_algorithm` public key, and sign it with its context.

    VerificationError `key.kem.invalid` if the key is invalid.
    """
    try:
        sealed = seal(
            secret, algorithm=kem_algorithm, public_key=recipient_key, info=context.info()
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
    private_key: KemKey,
    context: Context,
    signer: Verifying,
) -> bytearray:
    """Check the signature, open and return the secret; the caller wipes it.

    Blocks as long as the private key does. VerificationError `secret.signature` or `secret.sealed`:
    not from this broker, or not for this recipient, incarnation, request, volume, arena and key
    epoch.
    """
    signed = fields(_SIGNATURE_DOMAIN, context.info(), message.sealed)
    try:
        signer.verify(message.signature, signed, ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise VerificationError(
            "secret.signature",
            f"the {context.purpose} is not signed by the broker for this request",
        ) from error
    return unseal(message.sealed, key=private_key, info=context.info())
