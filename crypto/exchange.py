"""Ephemeral key exchange: X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869) over a transcript.

Both sides exchange public keys over a channel that authenticates them (mutual TLS). Every value
that both sides must agree on is in the transcript, so a changed value gives different keys.
"""

import hashlib

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealane.errors import VerificationError

PUBLIC_KEY_BYTES = 32
SECRET_BYTES = 32


class Exchange:
    """One side's ephemeral key: created in memory, used for one exchange, never stored."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public_key: bytes = self._private.public_key().public_bytes_raw()
        """32 bytes, sent to the peer."""

    def derive(
        self, peer_public: bytes, transcript: bytes, label: str, *, also: bytearray | bytes = b""
    ) -> bytearray:
        """Derive 32 secret bytes for the purpose that `label` names; the consumer wipes them.

        HKDF-SHA256 with the shared secret, followed by `also` (other secrets known to both), as
        input, SHA-256 of the transcript as salt and the label as info. Raises VerificationError for
        a public key of wrong length or low order: the result would not depend on the own secret
        (RFC 7748 §6.1).
        """
        if len(peer_public) != PUBLIC_KEY_BYTES:
            raise VerificationError(
                "exchange.share.malformed",
                f"the peer's public key has {len(peer_public)} bytes; needed: {PUBLIC_KEY_BYTES}",
            )
        try:
            shared = bytearray(
                self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
            )
        except ValueError:
            raise VerificationError(
                "exchange.share.low_order", "the peer's public key is a low-order point"
            ) from None
        secret = bytearray(SECRET_BYTES)
        material = shared + also
        try:
            HKDF(
                algorithm=SHA256(),
                length=SECRET_BYTES,
                salt=hashlib.sha256(transcript).digest(),
                info=label.encode(),
            ).derive_into(material, secret)
        finally:
            wipe(shared)
            wipe(material)
        return secret


def wipe(secret: bytearray) -> None:
    """Overwrite the bytes with zeros, in place."""
    secret[:] = bytes(len(secret))
