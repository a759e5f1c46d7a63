"""Trust anchors, and how one authority is succeeded by another.

A succession is a statement by an authority: this other authority succeeds me. While both are
valid, who trusts one and knows the statement trusts both. Later the successor adds that its
predecessor is retired. A node keeps statements, so that it needs no other file than the one it was
set up with. What each signature covers: docs/operate/authority.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.certificates import CertificateAuthority, anchor_key, check_anchor, parse_anchor
from sealane.crypto.encoding import fields
from sealane.errors import VerificationError

ANCHORS_MAX: Final = 2
"""Authorities that are trusted at the same time."""
RETIRED_MAX: Final = 64
"""Retired authorities that are remembered."""
DIGEST_BYTES: Final = 32
CERTIFICATE_BYTES_MAX: Final = 4096
SIGNATURE_BYTES_MAX: Final = 80
"""Of an ECDSA signature on P-256, DER."""

_SUCCESSION: Final = "sealane succession v1"
_RETIREMENT: Final = "sealane retirement v1"
_PEM_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
# What a check under one authority says of something that another one signed.
_OTHER_AUTHORITY: Final = frozenset(
    {
        "authorization.signature",
        "broker.snapshot.anchor",
        "certificate.issuer",
        "volume.descriptor.signature",
    }
)

_Result = TypeVar("_Result")


class Verifying(Protocol):
    """A public key, or several of which any will do."""

    def verify(
        self, signature: bytes, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm
    ) -> None:
        """Raise InvalidSignature unless the signature is by this key."""


class AnyKey:
    """Accepts a signature by any of some keys."""

    def __init__(self, keys: Iterable[ec.EllipticCurvePublicKey]) -> None:
        self._keys = tuple(keys)

    def verify(
        self, signature: bytes, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm
    ) -> None:
        """Raise InvalidSignature unless the signature is by one of the keys."""
        for key in self._keys:
            try:
                return key.verify(signature, data, signature_algorithm)
            except InvalidSignature:
                continue
        raise InvalidSignature


class SuccessiveKeys:
    """Accepts signatures by one key after another: by none that is before the last that signed."""

    def __init__(self, keys: Iterable[ec.EllipticCurvePublicKey]) -> None:
        self._keys = tuple(keys)
        self.signed_by = 0
        """Position of the key that made the last signature."""

    def verify(
        self, signature: bytes, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm
    ) -> None:
        """Raise InvalidSignature unless the key that signed last, or a later one, signed it."""
        for position in range(self.signed_by, len(self._keys)):
            try:
                self._keys[position].verify(signature, data, signature_algorithm)
            except InvalidSignature:
                continue
            self.signed_by = position
            return
        raise InvalidSignature


class TrustAnchors:
    """The authorities that are trusted: one, or two while one succeeds the other, oldest first.

    Those who share the object see each change at once.
    """

    def __init__(self, *certificates: x509.Certificate) -> None:
        self.certificates = certificates
        self.retired: tuple[x509.Certificate, ...] = ()
        """Retired authorities. Only what was stored while one was trusted may be signed by it."""
        self.issuer: x509.Certificate | None = None
        """The newest authority that has certified this node; None: none has yet."""

    @classmethod
    def parse(cls, pem: bytes, *, source: str, most: int = ANCHORS_MAX) -> "TrustAnchors":
        """Parse a file of 1 to `most` certificates; VerificationError names `source`."""
        begin, *rest = pem.split(_PEM_BEGIN)
        if len(rest) > most:
            raise VerificationError(
                "certificate.anchor.malformed",
                f"{source}: {len(rest)} trust anchors; allowed: {most}",
            )
        parts = [_PEM_BEGIN + part for part in rest] or [begin]
        return cls(*(parse_anchor(part, source=source) for part in parts))

    @property
    def pem(self) -> bytes:
        """All certificates, one after the other."""
        return b"".join(each.public_bytes(Encoding.PEM) for each in self.certificates)

    @property
    def newest(self) -> x509.Certificate:
        """The one that is trusted longest: an older one may have been retired meanwhile."""
        return self.certificates[-1]

    def successive_keys(self) -> SuccessiveKeys:
        """Return the keys for a log, which each of them signed until the next one did."""
        return SuccessiveKeys(map(anchor_key, self.certificates))

    @property
    def issuing(self) -> "TrustAnchors":
        """Those that may still certify this node, and sign secrets and authorizations for it.

        Not a predecessor, from the first certificate by its successor on: it may be a stolen key.
        """
        if self.issuer not in self.certificates:
            return TrustAnchors(*self.certificates)
        return TrustAnchors(*self.certificates[self.certificates.index(self.issuer) :])

    @property
    def with_retired(self) -> "TrustAnchors":
        """What records may be signed by of which it is certain since when they are stored."""
        return TrustAnchors(*self.certificates, *self.retired)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each certificate (DER)."""
        return tuple(map(digest, self.certificates))

    @property
    def key(self) -> AnyKey:
        """The public keys of all of them."""
        return AnyKey(map(anchor_key, self.certificates))

    def checked(self, check: Callable[[x509.Certificate], _Result]) -> _Result:
        """Return the result of `check` under the authority that signed what it checks.

        Raises its error under that authority; if none signed it, the error under the first.
        """
        first: VerificationError | None = None
        for each in self.certificates:
            try:
                return check(each)
            except VerificationError as error:
                if error.reason not in _OTHER_AUTHORITY:
                    raise
                first = first or error
        assert first is not None  # noqa: S101 - there is always an anchor
        raise first


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """`certificate` (DER) succeeds the authority with this digest, which signed the statement.

    `retirement` is the successor's signature over the end of its predecessor; empty: both are
    valid.
    """

    predecessor: bytes
    certificate: bytes
    signature: bytes
    retirement: bytes = b""

    @classmethod
    def announce(cls, present: CertificateAuthority, following: x509.Certificate) -> "Succession":
        """Return the statement of `present`, not yet retired."""
        predecessor = digest(present.certificate)
        certificate = following.public_bytes(Encoding.DER)
        signed = fields(_SUCCESSION, predecessor, certificate)
        return cls(
            predecessor=predecessor,
            certificate=certificate,
            signature=present.signing_key.sign(signed, ec.ECDSA(SHA256())),
        )

    def retired(self, successor: CertificateAuthority) -> "Succession":
        """Return the same with the successor's statement that its predecessor is retired."""
        return replace(self, retirement=successor.signing_key.sign(self._end(), ec.ECDSA(SHA256())))

    def follow(self, trusted: Sequence[x509.Certificate]) -> tuple[x509.Certificate, ...]:
        """Return what is trusted by those who trust `trusted` and learn this.

        VerificationError `anchors.succession.malformed`, `.signature`; `.conflict` if the
        predecessor was succeeded by another one before; `.foreign` if none of them is in it.
        """
        sizes = (len(self.predecessor), len(self.certificate), len(self.signature))
        if sizes[0] != DIGEST_BYTES or not (
            0 < sizes[1] <= CERTIFICATE_BYTES_MAX
            and max(sizes[2], len(self.retirement)) <= SIGNATURE_BYTES_MAX
        ):
            raise _malformed()
        by_digest = {digest(each): each for each in trusted}
        following = _parsed(self.certificate)
        known = by_digest.get(digest(following))
        before = by_digest.get(self.predecessor)
        if before is None:
            if known is None:
                raise VerificationError(
                    "anchors.succession.foreign",
                    "the broker's authority succeeds one that this node doesn't trust",
                )
            return tuple(trusted)
        signed = fields(_SUCCESSION, self.predecessor, self.certificate)
        self._verify(before, self.signature, signed)
        if known is None and trusted[-1] is not before:
            raise VerificationError(
                "anchors.succession.conflict",
                "this node already knows another successor of the broker's authority",
            )
        if not self.retirement:
            return (before, following)
        self._verify(following, self.retirement, self._end())
        return (following,)

    def _end(self) -> bytes:
        return fields(_RETIREMENT, self.predecessor, self.certificate)

    @staticmethod
    def _verify(signer: x509.Certificate, signature: bytes, signed: bytes) -> None:
        try:
            anchor_key(signer).verify(signature, signed, ec.ECDSA(SHA256()))
        except InvalidSignature as error:
            raise VerificationError(
                "anchors.succession.signature",
                "the succession of the broker's authority is not signed by it",
            ) from error


def digest(certificate: x509.Certificate) -> bytes:
    """Return SHA-256 of a certificate (DER)."""
    return certificate.fingerprint(SHA256())


def parse_retired(certificates: Sequence[bytes]) -> tuple[x509.Certificate, ...]:
    """Parse certificates (DER) of retired authorities; `anchors.succession.malformed`."""
    if len(certificates) > RETIRED_MAX or any(
        len(each) > CERTIFICATE_BYTES_MAX for each in certificates
    ):
        raise _malformed()
    return tuple(map(_parsed, certificates))


def _parsed(der: bytes) -> x509.Certificate:
    try:
        return check_anchor(x509.load_der_x509_certificate(der), source="the successor")
    except (ValueError, VerificationError) as error:
        raise _malformed() from error


def _malformed() -> VerificationError:
    return VerificationError(
        "anchors.succession.malformed", "the succession of the broker's authority can't be parsed"
    )
