"""Owners of a policy, for tests: keys, documents that name them, and signatures."""

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealane.daemon.broker.owners import (
    OWNERS_LABEL,
    POLICY_LABEL,
    Owner,
    OwnerPrivateKey,
    Owners,
    owners_document,
    with_signature,
)


def new_keys(count: int) -> list[Ed25519PrivateKey]:
    """Return that many keys, the same at each call."""
    return [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(1, count + 1)]


def owners_of(*keys: OwnerPrivateKey, threshold: int = 1, version: int = 0) -> Owners:
    """Return the owners with these keys, called `o0`, `o1` and so on."""
    owners = [Owner(name=f"o{i}", key=key.public_key()) for i, key in enumerate(keys)]
    return Owners.of(owners, threshold=threshold, version=version, source="o")


def signed(label: str, document: bytes, keys: Iterable[OwnerPrivateKey]) -> bytes:
    """Return a list of signatures by these keys; empty without any."""
    content = b""
    for key in keys:
        content = with_signature(content, label, document, key, source="s")
    return content


def signed_owners(owners: Owners, *keys: OwnerPrivateKey) -> tuple[bytes, bytes]:
    """Return the document that names these owners, and signatures of it by `keys`."""
    document = owners_document(owners)
    return document, signed(OWNERS_LABEL, document, keys)


def signed_policy(version: int, *keys: OwnerPrivateKey) -> tuple[bytes, bytes]:
    """Return a policy of this version, and signatures of it by `keys`."""
    document = f"version = {version}\n".encode()
    return document, signed(POLICY_LABEL, document, keys)
