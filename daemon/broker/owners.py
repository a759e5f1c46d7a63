"""The policy's owners: some keys, a threshold of which must have signed what counts.

A file of signatures is the bytes of a single one, or, from two on, JSON like DSSE's list: each with
the id of its key, which says only which key to try. What is signed is not in it.
docs/operate/policy-owners.md has both forms, and the document that names owners.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeGuard

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import from_json

from sealane.crypto.encoding import fields
from sealane.daemon.config import OWNERS_MAX
from sealane.daemon.runtime.config_types import Section
from sealane.daemon.runtime.sections import parse_toml
from sealane.errors import UsageError, VerificationError

POLICY_LABEL: Final = "sealane policy v1"
OWNERS_LABEL: Final = "sealane policy owners v1"
SIGNATURE_SUFFIX: Final = ".sig"
SIGNATURES_MAX: Final = 16
SIGNATURES_BYTES_MAX: Final = 8 << 10
OWNERS_BYTES_MAX: Final = 32 << 10
OWNERS_VERSION_MAX: Final = 9999

_FORMAT: Final = "sealane signatures v1"
_SIGNATURE_BYTES_MAX: Final = 256
_ED25519_BYTES: Final = 64
_KEY_ID_DIGITS: Final = 64

OWNER_KEYS: Final = "Ed25519, or ECDSA on P-256, P-384 or P-521"
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

OwnerKey = Ed25519PublicKey | ec.EllipticCurvePublicKey
OwnerPrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, and the id of the key that is said to have made it; empty: unknown."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A key and what people call its owner."""

    name: str
    key: OwnerKey

    @property
    def key_id(self) -> str:
        """SHA-256 of the key's SubjectPublicKeyInfo, hexadecimal."""
        return key_id_of(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The owners of a version by key id; version 0 are the configuration's."""

    version: int
    threshold: int
    by_id: Mapping[str, Owner]

    @classmethod
    def of(cls, owners: Iterable[Owner], *, threshold: int, version: int, source: str) -> "Owners":
        """Return these owners; UsageError `policy.owners.threshold`, `policy.owners.twice`."""
        given = [*owners]
        by_id = {owner.key_id: owner for owner in given}
        if len(by_id) != len(given):
            raise UsageError(
                "policy.owners.twice",
                f"{source}: {len(given)} owners with {len(by_id)} different keys; allowed: a key "
                "of their own for each",
            )
        if not 1 <= threshold <= len(by_id):
            raise UsageError(
                "policy.owners.threshold",
                f"{source}: threshold {threshold}; allowed: 1…{len(by_id)}, the number of keys",
            )
        return cls(version=version, threshold=threshold, by_id=by_id)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the threshold and the keys' ids: equal for the same owners."""
        ids = (bytes.fromhex(key_id) for key_id in sorted(self.by_id))
        threshold = self.threshold.to_bytes(4, "big")
        return hashlib.sha256(fields("sealane policy owners digest v1", threshold, *ids)).digest()

    def signers(
        self, label: str, document: bytes, signatures: Iterable[Signature]
    ) -> frozenset[str]:
        """Return the ids of the owners with a valid signature, each once."""
        signed = fields(label, document)
        found: set[str] = set()
        for signature in signatures:
            tried = [signature.key_id] if signature.key_id else [*self.by_id]
            for key_id in tried:
                owner = self.by_id.get(key_id)
                if owner is not None and _is_valid(owner.key, signature.value, signed):
                    found.add(key_id)
        return frozenset(found)

    def verify(
        self, label: str, document: bytes, signatures: Sequence[Signature], *, what: str
    ) -> frozenset[str]:
        """Return who signed; VerificationError `policy.signature` if they are too few."""
        found = self.signers(label, document, signatures)
        if len(found) < self.threshold:
            signed = ", ".join(sorted(self.by_id[key_id].name for key_id in found)) or "none"
            of_version = f"of version {self.version}" if self.version else "of the configuration"
            raise VerificationError(
                "policy.signature",
                f"{what} has valid signatures of {len(found)} of the {len(self.by_id)} owners "
                f"{of_version} ({signed}); needed: {self.threshold}, missing: "
                f"{self.threshold - len(found)}",
            )
        return found


class _Owner(Section):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    public_key: Annotated[str, Field(max_length=1024)]


class _OwnersDocument(Section):
    version: Annotated[int, Field(ge=0, le=OWNERS_VERSION_MAX)]
    threshold: Annotated[int, Field(ge=1, le=OWNERS_MAX)]
    owner: Annotated[list[_Owner], Field(min_length=1, max_length=OWNERS_MAX)]


def _key_id(value: str) -> str:
    if value and (len(value) != _KEY_ID_DIGITS or set(value) - set("0123456789abcdef")):
        raise ValueError("64 hexadecimal digits, lower case, or nothing")
    return value


class _Signed(Section):
    keyid: Annotated[str, AfterValidator(_key_id)]
    sig: Annotated[str, Field(min_length=1, max_length=_SIGNATURE_BYTES_MAX * 4 // 3 + 4)]


class _SignatureFile(Section):
    format: str
    sha256: Annotated[str, AfterValidator(_key_id)]
    signatures: Annotated[list[_Signed], Field(min_length=1, max_length=SIGNATURES_MAX)]


def key_id_of(key: OwnerKey) -> str:
    """Return the id of a key."""
    return hashlib.sha256(_encoded(key)).hexdigest()


def parse_owner_key(pem: bytes, *, source: str) -> OwnerKey:
    """Read the public key of an owner; UsageError `policy.owner_key.malformed`."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not _is_owner_key(key):
        raise UsageError(
            "policy.owner_key.malformed",
            f"{source}: not an owner's key; allowed: a public key, {OWNER_KEYS}, in PEM",
        )
    return key


def parse_owners(document: bytes, *, source: str) -> Owners:
    """Parse a document that names owners; UsageError `config.…`, `policy.owner…`."""
    if len(document) > OWNERS_BYTES_MAX:
        raise UsageError(
            "config.size", f"{source}: {len(document)} bytes; allowed: {OWNERS_BYTES_MAX}"
        )
    parsed = parse_toml(_OwnersDocument, document, source=source)
    owners = [Owner(name=each.name, key=_decoded(each, source)) for each in parsed.owner]
    return Owners.of(owners, threshold=parsed.threshold, version=parsed.version, source=source)


def owners_document(owners: Owners) -> bytes:
    """Return the document that names these owners."""
    lines = [f"version = {owners.version}", f"threshold = {owners.threshold}"]
    for _, owner in sorted(owners.by_id.items()):
        encoded = base64.b64encode(_encoded(owner.key)).decode()
        lines += ["", "[[owner]]", f'name = "{owner.name}"', f'public_key = "{encoded}"']
    return ("\n".join(lines) + "\n").encode()


def owner_name(path: Path) -> str:
    """Return what the owner of a key file is called: the file's name without its extension."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    return name[:64]


def parse_signatures(content: bytes, *, source: str) -> tuple[Signature, ...]:
    """Read a file of signatures; an empty one has none.

    VerificationError `policy.signature.malformed`; `policy.signature.format`: of another release.
    """
    if not content:
        return ()
    if len(content) > SIGNATURES_BYTES_MAX:
        raise _malformed(source, f"{len(content)} bytes; allowed: {SIGNATURES_BYTES_MAX}")
    parsed = _parsed(content, source=source)
    if parsed is None:
        if len(content) > _SIGNATURE_BYTES_MAX:
            raise _malformed(
                source, f"a signature of {len(content)} bytes; allowed: {_SIGNATURE_BYTES_MAX}"
            )
        return (Signature("", content),)
    try:
        return tuple(
            Signature(each.keyid, base64.b64decode(each.sig, validate=True))
            for each in parsed.signatures
        )
    except ValueError as error:
        raise _malformed(source, "a signature that isn't base64") from error


def is_list(content: bytes) -> bool:
    """Return whether a file of signatures is a list; a single one may begin with any byte."""
    return len(content) != _ED25519_BYTES and content.startswith(b"{")


def sign_document(label: str, document: bytes, key: OwnerPrivateKey) -> bytes:
    """Sign a document with an owner's key."""
    signed = fields(label, document)
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(signed)
    return key.sign(signed, ec.ECDSA(SHA256()))


def is_signature(content: bytes, label: str, document: bytes, key: OwnerPrivateKey) -> bool:
    """Return whether a file is a single signature of this document by this key."""
    return _is_valid(key.public_key(), content, fields(label, document))


def with_signature(
    before: bytes, label: str, document: bytes, key: OwnerPrivateKey, *, source: str
) -> bytes:
    """Return a file of signatures with one by `key` added to those of `before`.

    VerificationError as `parse_signatures`; UsageError `policy.signature.other`: `before` is of
    another document; `policy.signature.limit`.
    """
    public = key.public_key()
    digest = hashlib.sha256(document).hexdigest()
    signatures = parse_signatures(before, source=source)
    parsed = _parsed(before, source=source) if signatures else None
    if parsed is not None and parsed.sha256 != digest:
        raise UsageError(
            "policy.signature.other",
            f"{source}: signatures of another document than this one: remove that file first",
        )
    own = key_id_of(public)
    signed = fields(label, document)
    kept = [
        each
        for each in signatures
        if each.key_id != own and (each.key_id or not _is_valid(public, each.value, signed))
    ]
    if len(kept) == SIGNATURES_MAX:
        raise UsageError(
            "policy.signature.limit",
            f"{source}: {len(kept)} signatures already; allowed: {SIGNATURES_MAX}",
        )
    kept.append(Signature(own, sign_document(label, document, key)))
    content = {
        "format": _FORMAT,
        "sha256": digest,
        "signatures": [
            {"keyid": each.key_id, "sig": base64.b64encode(each.value).decode()} for each in kept
        ],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def verify_succession(
    before: Owners, after: Owners, document: bytes, signatures: Sequence[Signature]
) -> frozenset[str]:
    """Return who signed; VerificationError `policy.signature` unless both thresholds did."""
    what = f"the document of owners {after.version}"
    found = before.verify(OWNERS_LABEL, document, signatures, what=what)
    return found | after.verify(OWNERS_LABEL, document, signatures, what=what)


def _parsed(content: bytes, *, source: str) -> _SignatureFile | None:
    """Return a list of signatures; None: it is a single one."""
    if not is_list(content):
        return None
    try:
        found = from_json(content)
        said = found.get("format")
        if said != _FORMAT:
            raise VerificationError(
                "policy.signature.format",
                f"{source}: signatures in another format than {_FORMAT!r}: sign with this release",
            )
        return _SignatureFile.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise _malformed(source, f"{where}: {first['msg']}") from error
    except ValueError as error:
        raise _malformed(source, "not JSON") from error


def _malformed(source: str, fault: str) -> VerificationError:
    return VerificationError(
        "policy.signature.malformed", f"{source}: not a file of signatures: {fault}"
    )


def _encoded(key: OwnerKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _decoded(entry: _Owner, source: str) -> OwnerKey:
    try:
        key = serialization.load_der_public_key(base64.b64decode(entry.public_key, validate=True))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not _is_owner_key(key):
        raise UsageError(
            "policy.owner_key.malformed",
            f"{source}: public_key of {entry.name!r} is not an owner's key; allowed: {OWNER_KEYS}, "
            "what stands between the first and the last line of its PEM",
        )
    return key


def _is_owner_key(key: object) -> TypeGuard[OwnerKey]:
    if isinstance(key, ec.EllipticCurvePublicKey):
        return isinstance(key.curve, _CURVES)
    return isinstance(key, Ed25519PublicKey)


def _is_valid(key: OwnerKey, signature: bytes, signed: bytes) -> bool:
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, signed)
        else:
            key.verify(signature, signed, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True
