"""Snapshots of a broker's store: encrypted to a recipient, signed by the brokers' authority.

docs/formats/snapshot.md has the bytes. HPKE (RFC 9180) seals a fresh file key to the recipient; the
content follows in parts under that key (AES-256-GCM, nonce: the part's number, no additional data).
The authority signs the hash of all of it, the end included: HPKE's base mode doesn't authenticate
the sender, and anyone may know the recipient's public key.
"""

import datetime as dt
import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.encoding import canonical_json, fields, parse_canonical_json
from sealane.crypto.exchange import wipe
from sealane.crypto.kem import KEM_ALGORITHMS, X25519, X25519KemKey, seal, unseal
from sealane.crypto.private_keys import parse_private_key, private_key_pem
from sealane.errors import UsageError, VerificationError

VERSION: Final = 1
HEADER_BYTES_MAX: Final = 4096
PART_BYTES_MAX: Final = 1 << 20
CONTENT_BYTES_MAX: Final = 1 << 32

_MAGIC: Final = b"SLNSNAP\n"
_HEAD: Final = struct.Struct(">8sHH")  # magic, version, bytes of the header
_LENGTH: Final = struct.Struct(">I")
_TAG_BYTES: Final = 16
_KEY_BYTES: Final = 32
_SEALED_KEY_BYTES: Final = KEM_ALGORITHMS[X25519].public_key_bytes + _KEY_BYTES + _TAG_BYTES
_SIGNATURE_BYTES_MAX: Final = 72  # DER, P-256
_SIGNATURE_LABEL: Final = "sealane snapshot v1"
_KEY_LABEL: Final = "sealane snapshot key v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a snapshot says about itself in the clear. Digests are SHA-256, in hex."""

    anchor_sha256: str
    """Of the authority's certificate (DER): the trust domain."""
    recipient_sha256: str
    node: str
    created: int
    """Unix time in seconds, by the broker's clock."""
    revision: int
    state_number: int
    record_count: int
    schema: int
    """Version of the records' form."""

    def encoded(self) -> bytes:
        """Return its canonical JSON."""
        return canonical_json(asdict(self))

    @classmethod
    def parse(cls, encoded: bytes) -> "Header":
        """Decode; VerificationError `broker.snapshot.damaged`."""
        found = parse_canonical_json(
            encoded,
            bytes_max=HEADER_BYTES_MAX,
            what="the snapshot's header",
            reason="broker.snapshot.damaged",
        )
        kinds = cls.__annotations__
        if found.keys() != kinds.keys() or any(
            type(found[name]) is not kind for name, kind in kinds.items()
        ):
            raise _damaged("its header has other fields than this version's")
        return cls(**found)  # type: ignore[arg-type]

    @property
    def created_at(self) -> dt.datetime:
        """`created` as a time; VerificationError `broker.snapshot.damaged`."""
        try:
            return dt.datetime.fromtimestamp(self.created, dt.UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise _damaged("its time is out of range") from error


class RecipientKey:
    """The private key that opens snapshots."""

    __slots__ = ("_key",)

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls) -> "RecipientKey":
        """Create a new key."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def parse(cls, pem: bytes, *, source: str) -> "RecipientKey":
        """Parse PKCS #8 PEM; UsageError `key.recipient.malformed` names `source`."""
        key = parse_private_key(pem)
        if not isinstance(key, X25519PrivateKey):
            raise _not_a_key(source, "private")
        return cls(key)

    def pem(self) -> bytes:
        """Return the private key as PKCS #8 PEM."""
        return private_key_pem(self._key)

    def public_pem(self) -> bytes:
        """Return the public key as SubjectPublicKeyInfo PEM."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def kem(self) -> X25519KemKey:
        """The key for HPKE."""
        return X25519KemKey(self._key)


def parse_recipient(pem: bytes, *, source: str) -> bytes:
    """Return the 32 bytes of a public key in PEM; UsageError `key.recipient.malformed`."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError) as error:
        raise _not_a_key(source, "public") from error
    if not isinstance(key, X25519PublicKey):
        raise _not_a_key(source, "public")
    return key.public_bytes_raw()


def digest_of(content: bytes) -> str:
    """Return a digest as in the header."""
    return hashlib.sha256(content).hexdigest()


def anchor_digest(certificate: x509.Certificate) -> str:
    """Return the name of a trust domain."""
    return digest_of(certificate.public_bytes(serialization.Encoding.DER))


def sealed_snapshot(
    header: Header,
    content: Iterable[bytes],
    *,
    recipient: bytes,
    signing_key: ec.EllipticCurvePrivateKey,
) -> Iterator[bytes]:
    """Yield the file's bytes; `content` are pieces of 1 byte to PART_BYTES_MAX.

    VerificationError `key.kem.invalid` if the recipient's public key is invalid.
    """
    encoded = header.encoded()
    whole = hashlib.sha256()

    def hashed(piece: bytes) -> bytes:
        whole.update(piece)
        return piece

    key = bytearray(secrets.token_bytes(_KEY_BYTES))
    try:
        info = fields(_KEY_LABEL, encoded)
        sealed = seal(key, algorithm=X25519, public_key=recipient, info=info)
        cipher = AESGCM(key)
    except ValueError as error:
        raise VerificationError("key.kem.invalid", "the recipient's key is not usable") from error
    finally:
        wipe(key)
    yield hashed(_HEAD.pack(_MAGIC, VERSION, len(encoded)) + encoded + sealed)
    for number, piece in enumerate(content):
        yield hashed(_part(cipher, number, piece))
    yield hashed(_LENGTH.pack(0))
    yield signing_key.sign(_signed(whole.digest()), ec.ECDSA(SHA256()))


def read_snapshot(
    file: BinaryIO, *, key: RecipientKey, anchor: x509.Certificate
) -> tuple[Header, bytes]:
    """Return header and content of a whole, genuine snapshot of the trust domain of `anchor`.

    VerificationError `broker.snapshot.anchor`, `.recipient`, `.damaged`, `.signature`. UsageError
    `broker.snapshot.version`.
    """
    whole = hashlib.sha256()

    def take(count: int) -> bytes:
        taken = file.read(count)
        if len(taken) != count:
            raise _damaged("it is truncated")
        whole.update(taken)
        return taken

    magic, version, length = _HEAD.unpack(take(_HEAD.size))
    if magic != _MAGIC:
        raise _damaged("it doesn't begin like one")
    if version != VERSION:
        raise UsageError(
            "broker.snapshot.version",
            f"the snapshot has format version {version}; allowed: {VERSION}",
        )
    if not 1 <= length <= HEADER_BYTES_MAX:
        raise _damaged(f"a header of {length} bytes")
    encoded = take(length)
    header = Header.parse(encoded)
    if header.anchor_sha256 != anchor_digest(anchor):
        raise VerificationError(
            "broker.snapshot.anchor",
            f"the snapshot is of the brokers with trust anchor {header.anchor_sha256}, not of "
            f"{anchor_digest(anchor)}",
        )
    kem = key.kem
    if header.recipient_sha256 != digest_of(kem.public_key):
        raise VerificationError(
            "broker.snapshot.recipient",
            f"the snapshot is sealed to recipient {header.recipient_sha256}; this key is "
            f"{digest_of(kem.public_key)}",
        )
    file_key = _unsealed(take(_SEALED_KEY_BYTES), kem, encoded)
    cipher = AESGCM(file_key)
    wipe(file_key)
    # Whole and decrypted, but only the signature says that a broker made it.
    content = b"".join(_parts(take, cipher))
    signature = file.read(_SIGNATURE_BYTES_MAX + 1)
    public = anchor.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise VerificationError("broker.snapshot.anchor", "the trust anchor's key is not on P-256")
    try:
        public.verify(signature, _signed(whole.digest()), ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise VerificationError(
            "broker.snapshot.signature", "the snapshot is not signed by the brokers' authority"
        ) from error
    return header, content


def _unsealed(sealed: bytes, key: X25519KemKey, encoded: bytes) -> bytearray:
    try:
        return unseal(sealed, key=key, info=fields(_KEY_LABEL, encoded))
    except VerificationError as error:
        raise _damaged("its header or sealed key was changed") from error


def _parts(take: Callable[[int], bytes], cipher: AESGCM) -> list[bytes]:
    parts: list[bytes] = []
    total = 0
    while (length := _LENGTH.unpack(take(_LENGTH.size))[0]) != 0:
        total += length
        if not _TAG_BYTES < length <= PART_BYTES_MAX + _TAG_BYTES or total > CONTENT_BYTES_MAX:
            raise _damaged(f"a part of {length} bytes, after {total - length} bytes")
        try:
            parts.append(cipher.decrypt(_nonce(len(parts)), take(length), None))
        except InvalidTag as error:
            raise _damaged(f"part {len(parts) + 1} was changed or moved") from error
    return parts


def _part(cipher: AESGCM, number: int, content: bytes) -> bytes:
    if not 1 <= len(content) <= PART_BYTES_MAX:
        raise UsageError("broker.snapshot.size", f"a part of {len(content)} bytes")
    sealed = cipher.encrypt(_nonce(number), content, None)
    return _LENGTH.pack(len(sealed)) + sealed


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _signed(digest: bytes) -> bytes:
    return fields(_SIGNATURE_LABEL, digest)


def _damaged(what: str) -> VerificationError:
    return VerificationError(
        "broker.snapshot.damaged", f"the snapshot was damaged, or is not one: {what}"
    )


def _not_a_key(source: str, half: str) -> UsageError:
    return UsageError(
        "key.recipient.malformed",
        f"{source}: allowed: a {half} X25519 key in PEM (sealanectl key recipient makes a pair)",
    )
