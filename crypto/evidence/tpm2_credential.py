"""TPM2_MakeCredential without a TPM (TPM 2.0 Library, Part 1, section 24; Part 3, section 12.6).

A credential can be opened only by the TPM that has the endorsement key, and only while an object
with the given name is loaded. So opening it proves that the attestation key is in the same TPM as
the endorsement key.
"""

import hmac
import secrets
from typing import Final

from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFHMAC, CounterLocation, Mode

from sealane.crypto.evidence.tpm2_structures import PublicKey

_SEED_BYTES: Final = 32
_AES_KEY_BYTES: Final = 16
_IDENTITY: Final = b"IDENTITY\0"


def make_credential(secret: bytes, *, endorsement_key: PublicKey, name: bytes) -> bytes:
    """Return a TPM2B_ID_OBJECT followed by a TPM2B_ENCRYPTED_SECRET.

    `secret` has at most 32 bytes; `endorsement_key` is a storage key with SHA-256 and AES-128-CFB,
    on P-256 or RSA; `name` is that of the attestation key.
    """
    if isinstance(endorsement_key, ec.EllipticCurvePublicKey):
        seed, encrypted_seed = _share_by_agreement(endorsement_key)
    else:
        seed = secrets.token_bytes(_SEED_BYTES)
        oaep = padding.OAEP(padding.MGF1(SHA256()), SHA256(), _IDENTITY)
        encrypted_seed = endorsement_key.encrypt(seed, oaep)
    encryption_key = _kdf_a(seed, b"STORAGE", name, _AES_KEY_BYTES)
    encryptor = Cipher(AES(encryption_key), CFB(bytes(16))).encryptor()
    identity = encryptor.update(_sized(secret)) + encryptor.finalize()
    integrity = hmac.digest(_kdf_a(seed, b"INTEGRITY", b"", 32), identity + name, "sha256")
    return _sized(_sized(integrity) + identity) + _sized(encrypted_seed)


def _share_by_agreement(endorsement_key: ec.EllipticCurvePublicKey) -> tuple[bytes, bytes]:
    """Return the seed, and the point from which the TPM derives it (Part 1, annex C.6.1)."""
    ephemeral = ec.generate_private_key(ec.SECP256R1())
    ours = ephemeral.public_key().public_numbers()
    x, y = ours.x.to_bytes(32, "big"), ours.y.to_bytes(32, "big")
    theirs = endorsement_key.public_numbers().x.to_bytes(32, "big")
    # KDFe is the concatenation KDF of SP 800-56A with these fields as its other information.
    derivation = ConcatKDFHash(SHA256(), _SEED_BYTES, _IDENTITY + x + theirs)
    return derivation.derive(ephemeral.exchange(ec.ECDH(), endorsement_key)), _sized(x) + _sized(y)


def _kdf_a(key: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """KDFa: SP 800-108 in counter mode with HMAC-SHA256; the label is followed by a zero byte."""
    derivation = KBKDFHMAC(
        algorithm=SHA256(),
        mode=Mode.CounterMode,
        length=length,
        rlen=4,
        llen=4,
        location=CounterLocation.BeforeFixed,
        label=label,
        context=context,
        fixed=None,
    )
    return derivation.derive(key)


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(2, "big") + content
