"""Private keys in files: PKCS #8 in PEM, without a password."""

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


def parse_private_key(pem: bytes) -> PrivateKeyTypes | None:
    """Parse a key of whatever kind; None if there is none, or one that needs a password."""
    try:
        return load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def private_key_pem(key: PrivateKeyTypes) -> bytes:
    """Return the key as PKCS #8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
