"""Shares of a secret, each sealed to the attested KEM key of its receiver.

Two ends that exchange ephemeral keys over mutual TLS also seal a random share to each other's KEM
key, bound to everything they agree on (`bound`). So an attacker with only a stolen TLS key, or in
the middle, derives a useless secret.
"""

import secrets
from typing import Final, Protocol

from sealane.crypto.exchange import SECRET_BYTES, wipe
from sealane.crypto.kem import KemKey, seal, unseal
from sealane.errors import VerificationError

SHARE_BYTES: Final = SECRET_BYTES


class Bound(Protocol):
    """The purpose of a share."""

    def encode(self) -> bytes:
        """Return bytes that are unique to this purpose."""


def new_share() -> bytearray:
    """Return one end's contribution to the secret, 32 bytes; the caller wipes it."""
    return bytearray(secrets.token_bytes(SHARE_BYTES))


def seal_share(share: bytearray, bound: Bound, *, kem_algorithm: str, public_key: bytes) -> bytes:
    """Seal a share to the peer's attested KEM key; VerificationError `key.kem.invalid`."""
    try:
        return seal(share, algorithm=kem_algorithm, public_key=public_key, info=bound.encode())
    except ValueError as error:
        raise VerificationError("key.kem.invalid", "the peer's KEM key is not usable") from error


def open_share(sealed: bytes, bound: Bound, *, key: KemKey) -> bytearray:
    """Open the peer's share; the caller wipes it. Blocks as long as the key does.

    VerificationError `secret.sealed`: changed, or sealed for another purpose or to another key.
    """
    share = unseal(sealed, key=key, info=bound.encode())
    if len(share) != SHARE_BYTES:
        wipe(share)
        raise VerificationError(
            "secret.sealed", f"a share of {len(share)} bytes; needed: {SHARE_BYTES}"
        )
    return share
