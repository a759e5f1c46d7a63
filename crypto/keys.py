"""Key hierarchy: k_s, k_v, device secrets, and their wrapping at rest (threat-model.md).

`k_v = HKDF-SHA256(k_s; info = label, volume UUID, key epoch)`: a gateway gets the key of one epoch
of one volume and can derive no other. Keys derived from `k_s`, from k_v or from a device secret for
different purposes are independent: each has its own label. `k_s` leaves the broker only wrapped by
AES-256-GCM under the key encryption key, bound to its purpose.
"""

import hashlib
import secrets
import uuid
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealane.crypto.encoding import fields
from sealane.errors import UnavailableError, UsageError, VerificationError

KEY_BYTES: Final = 32
KEY_EPOCH_MAX: Final = (1 << 32) - 1
GENERATION_MAX: Final = (1 << 32) - 1
# Key epochs that the sectors of one volume may be sealed under at the same time.
KEY_EPOCHS_MAX: Final = 256
WRAP_NONCE_BYTES: Final = 12
WRAP_TAG_BYTES: Final = 16
KEY_ID_BYTES: Final = 16
KEY_ID_NONCE: Final = bytes(WRAP_NONCE_BYTES)
KEY_ID_CONTEXT: Final = b"sealane key encryption key id v1"


def new_key() -> bytearray:
    """Return a new random 256-bit key."""
    return bytearray(secrets.token_bytes(KEY_BYTES))


def derive_volume_key(
    tenant_key: bytes | bytearray, *, volume_id: uuid.UUID, key_epoch: int
) -> bytearray:
    """Derive k_v of one volume and key epoch from the tenant's k_s (32 bytes)."""
    if len(tenant_key) != KEY_BYTES:
        raise UsageError(
            "key.size", f"a tenant key of {len(tenant_key)} bytes; needed: {KEY_BYTES}"
        )
    if not 1 <= key_epoch <= KEY_EPOCH_MAX:
        raise UsageError("key.epoch", f"key epoch {key_epoch}; allowed: 1…{KEY_EPOCH_MAX}")
    info = fields("sealane volume key v1", volume_id.bytes, key_epoch.to_bytes(4, "big"))
    return bytearray(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes(tenant_key)))


def derive_store_key(volume_key: bytes | bytearray, *, volume_id: uuid.UUID) -> bytearray:
    """Derive the key that authenticates a volume's store on a third party (stores.md §2).

    From k_v of the first key epoch, because the store outlives key rotations.
    """
    if len(volume_key) != KEY_BYTES:
        raise UsageError(
            "key.size", f"a volume key of {len(volume_key)} bytes; needed: {KEY_BYTES}"
        )
    info = fields("sealane third-party store key v1", volume_id.bytes)
    return bytearray(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes(volume_key)))


def derive_attachment_key(volume_key: bytes | bytearray, *, volume_id: uuid.UUID) -> bytearray:
    """Derive the key that seals a gateway's saved attachment of a volume.

    From k_v, which the broker releases only to gateways that may use the volume
    (docs/operate/attachments.md).
    """
    if len(volume_key) != KEY_BYTES:
        raise UsageError(
            "key.size", f"a volume key of {len(volume_key)} bytes; needed: {KEY_BYTES}"
        )
    info = fields("sealane attachment key v1", volume_id.bytes)
    return bytearray(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes(volume_key)))


def derive_tree_secret(
    device_secret: bytes | bytearray, *, volume_id: uuid.UUID, generation: int
) -> bytearray:
    """Derive the 32-byte secret for a volume's tree, MAC and log keys.

    From the secret that the broker releases to the owner of the device that the volume lies on.
    """
    if len(device_secret) != KEY_BYTES:
        raise UsageError(
            "key.size", f"a device secret of {len(device_secret)} bytes; needed: {KEY_BYTES}"
        )
    if not 1 <= generation <= GENERATION_MAX:
        raise UsageError("key.generation", f"generation {generation}; allowed: 1…{GENERATION_MAX}")
    info = fields("sealane hmt v1", volume_id.bytes + generation.to_bytes(4, "big"))
    return bytearray(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes(device_secret)))


def derive_anchor_key(
    device_secret: bytes | bytearray, *, device_id: uuid.UUID, kind: str
) -> bytearray:
    """Derive the key for the MACs of a device's anchor records (docs/understand/anchors.md).

    Each kind of anchor has its own key, so records can't be moved from one kind to another.
    """
    if len(device_secret) != KEY_BYTES:
        raise UsageError(
            "key.size", f"a device secret of {len(device_secret)} bytes; needed: {KEY_BYTES}"
        )
    info = fields("sealane anchor record key v1", device_id.bytes, kind.encode())
    return bytearray(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes(device_secret)))


class KeyWrapper(Protocol):
    """Wraps keys for storage, bound to their purpose. Blocking: the module may be remote."""

    @property
    def key_id(self) -> bytes:
        """16 bytes that name the key and reveal nothing else about it (`key_id_of`)."""

    def wrap(self, secret: bytes | bytearray, *, purpose: str, owner: str) -> bytes:
        """Encrypt `secret`, bound to `purpose` and `owner`."""

    def unwrap(self, wrapped: bytes, *, purpose: str, owner: str) -> bytearray:
        """Decrypt; VerificationError if key, ciphertext, purpose or owner is wrong."""

    def close(self) -> None:
        """Release the key; it must not be used afterwards."""


class WrappingKey:
    """A key encryption key in this process's memory.

    A wrapped key is nonce (12, random) ‖ AES-256-GCM ciphertext and tag; the associated data is the
    purpose, so one row of a store can't replace another. Random nonces are safe here: SP 800-38D
    allows 2^32 wraps under one key, and a broker makes a few per tenant.
    """

    __slots__ = ("_aead", "key_id")

    def __init__(self, key: bytes | bytearray) -> None:
        if len(key) != KEY_BYTES:
            raise UsageError(
                "key.size", f"a key encryption key of {len(key)} bytes; needed: {KEY_BYTES}"
            )
        self._aead: AESGCM | None = AESGCM(bytes(key))
        self.key_id = key_id_of(self._cipher.encrypt(KEY_ID_NONCE, KEY_ID_CONTEXT, None))

    def wrap(self, secret: bytes | bytearray, *, purpose: str, owner: str) -> bytes:
        """Encrypt `secret`, bound to `purpose` and `owner`."""
        nonce = secrets.token_bytes(WRAP_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, bytes(secret), wrap_context(purpose, owner))

    def unwrap(self, wrapped: bytes, *, purpose: str, owner: str) -> bytearray:
        """Decrypt; VerificationError if key, ciphertext, purpose or owner is wrong."""
        nonce, sealed = wrapped[:WRAP_NONCE_BYTES], wrapped[WRAP_NONCE_BYTES:]
        try:
            return bytearray(self._cipher.decrypt(nonce, sealed, wrap_context(purpose, owner)))
        except (InvalidTag, ValueError) as error:
            raise not_opened(purpose, owner) from error

    def close(self) -> None:
        """Release the key: the library clears its copy."""
        self._aead = None

    @property
    def _cipher(self) -> AESGCM:
        if self._aead is None:
            raise UnavailableError("broker.key.missing", "this key encryption key was given up")
        return self._aead


def key_id_of(sealed: bytes) -> bytes:
    """Return the id of the key that sealed `KEY_ID_CONTEXT` under `KEY_ID_NONCE`.

    A token can do this with a key that never leaves it. The nonce is used for this one message
    only; a random nonce equals it with probability 2^-96, and the hash hides the tag.
    """
    return hashlib.sha256(sealed).digest()[:KEY_ID_BYTES]


def not_opened(purpose: str, owner: str) -> VerificationError:
    """Return the error for a wrapped key that can't be decrypted."""
    return VerificationError(
        "key.wrap.invalid",
        f"the stored {purpose} of {owner} can't be decrypted: the key encryption key is wrong, or "
        "the store was changed",
    )


def wrap_context(purpose: str, owner: str) -> bytes:
    """Return the associated data of a wrapped key."""
    return fields("sealane wrapped key v1", purpose.encode(), owner.encode())
