"""The broker's certificate authority, and Sealane's certificate profiles.

P-256 throughout (gRPC's TLS does not accept Ed25519 client certificates). A leaf is valid for ten
minutes and names one role of one node: URI SAN `spiffe://sealane/<role>/<node>` and DNS SAN
`<node>.<role>.sealane.internal`, because gRPC matches only DNS names. A private extension carries
the attested KEM key, the node's incarnation and its tenant. attestation.md has the profile.
"""

import base64
import binascii
import datetime as dt
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sealane.crypto.encoding import canonical_json, parse_canonical_json
from sealane.crypto.kem import X25519
from sealane.crypto.roles import Role
from sealane.errors import UsageError, VerificationError

LIFETIME: Final = dt.timedelta(minutes=10)
VERIFIER_LIFETIME: Final = dt.timedelta(days=1)
SKEW: Final = dt.timedelta(seconds=30)
ANCHOR_LIFETIME: Final = dt.timedelta(days=3650)
ROLES: Final = tuple(Role)
# The signer of attestation results; no node enrols with this role, and no server accepts it as a
# caller.
VERIFIER_ROLE: Final = "verifier"
NAME_PATTERN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SPIFFE_ID: Final = re.compile(r"spiffe://sealane/([a-z]+)/([a-z0-9-]+)")

# In the arc that ITU-T X.667 assigns to UUIDs, which needs no registration.
CLAIMS_OID: Final = x509.ObjectIdentifier("2.25.167129814220873194053215914867334155049")
_CLAIMS_BYTES_MAX: Final = 1024
_DESCRIPTOR_DOMAIN: Final = b"sealane volume descriptor v1\0"
_DESCRIPTORS_KEPT: Final = 16384
"""Descriptors whose signatures are remembered, with some 0.5 KiB each: as many as a tenant has
at most. A list of more finds none of them, as each pushes out the one that comes next."""
_CERTIFICATES_KEPT: Final = 1024
"""Certificates whose checks are remembered, with some 2 KiB each."""
_AUTHORIZATION_DOMAIN: Final = b"sealane peer authorization v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Subject of a certificate."""

    node: str
    role: str
    tenant: str
    incarnation: bytes  # 16 bytes, random at each start of the node's process
    kem_public_key: bytes  # of `kem_algorithm`, serialized as in RFC 9180
    kem_algorithm: str = X25519

    def __post_init__(self) -> None:
        if self.role not in ROLES or NAME_PATTERN.fullmatch(self.node) is None:
            raise UsageError(
                "certificate.subject",
                f"role {self.role!r} of node {self.node!r}; allowed: one of "
                f"{', '.join(ROLES)} and a node's name",
            )

    @property
    def spiffe_id(self) -> str:
        """URI subject alternative name."""
        return spiffe_id(self.node, self.role)


def spiffe_id(node: str, role: str) -> str:
    """Return the SPIFFE id of one role of one node."""
    return f"spiffe://sealane/{role}/{node}"


def parse_spiffe_id(name: str) -> tuple[str, str]:
    """Return node and role of a SPIFFE id; VerificationError `certificate.profile`."""
    match = _SPIFFE_ID.fullmatch(name)
    if match is None or match[1] not in ROLES or NAME_PATTERN.fullmatch(match[2]) is None:
        raise VerificationError(
            "certificate.profile", f"{name[:120]!r} is not the name of a node's role"
        )
    return match[2], match[1]


def server_name(node: str, role: str) -> str:
    """Return the DNS name that a client expects of that node's server."""
    return f"{node}.{role}.sealane.internal"


class CertificateAuthority:
    """Signs leaves and volume descriptors with the broker's P-256 key."""

    __slots__ = ("_key", "_sign_descriptor", "certificate")

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        if certificate.public_key() != key.public_key():
            raise VerificationError(
                "certificate.anchor.mismatch",
                "the broker's certificate is for another key",
            )
        self._key = key
        self._sign_descriptor = lru_cache(_DESCRIPTORS_KEPT)(partial(_sign_descriptor, key))
        self.certificate = certificate

    @classmethod
    def create(cls, *, broker: str, now: dt.datetime) -> "CertificateAuthority":
        """Create a key and its self-signed certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sealane broker {broker}")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + ANCHOR_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @property
    def signing_key(self) -> ec.EllipticCurvePrivateKey:
        """Private key of the broker; never leaves the broker's process."""
        return self._key

    @property
    def anchor_pem(self) -> bytes:
        """Trust anchor, in the form that nodes get."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def private_bytes(self) -> bytearray:
        """Return the key as PKCS #8, to be wrapped for storage."""
        return bytearray(
            self._key.private_bytes(
                serialization.Encoding.DER,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def issue(
        self,
        subject: Subject,
        public_key: ec.EllipticCurvePublicKey,
        *,
        now: dt.datetime,
        valid_until: dt.datetime | None = None,
    ) -> x509.Certificate:
        """Issue a leaf for `public_key`, which must be the attested one.

        It is valid for ten minutes, or until `valid_until` if that is earlier.
        """
        end = now + LIFETIME if valid_until is None else min(now + LIFETIME, valid_until)
        claims = canonical_json(
            {
                "incarnation": subject.incarnation.hex(),
                "kem_algorithm": subject.kem_algorithm,
                "kem_public_key": base64.b64encode(subject.kem_public_key).decode(),
                "tenant": subject.tenant,
            }
        )
        names = [
            x509.UniformResourceIdentifier(subject.spiffe_id),
            x509.DNSName(server_name(subject.node, subject.role)),
        ]
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return (
            x509.CertificateBuilder()
            .subject_name(
                x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{subject.role} on a node")])
            )
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .add_extension(x509.UnrecognizedExtension(CLAIMS_OID, claims), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue_verifier(
        self, public_key: ec.EllipticCurvePublicKey, *, broker: str, now: dt.datetime
    ) -> x509.Certificate:
        """Certify the P-384 key that signs attestation results at this broker, for a day."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Sealane verifier")])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + VERIFIER_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.UniformResourceIdentifier(spiffe_id(broker, VERIFIER_ROLE))]
                ),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )

    def sign_descriptor(self, descriptor: bytes) -> bytes:
        """Sign a serialized VolumeDescriptor; the same one has the same signature for a while."""
        return self._sign_descriptor(descriptor)

    def sign_authorization(self, authorization: bytes) -> bytes:
        """Sign a serialized Authorization."""
        return self._key.sign(_AUTHORIZATION_DOMAIN + authorization, ec.ECDSA(hashes.SHA256()))


def _sign_descriptor(key: ec.EllipticCurvePrivateKey, descriptor: bytes) -> bytes:
    return key.sign(_DESCRIPTOR_DOMAIN + descriptor, ec.ECDSA(hashes.SHA256()))


def parse_anchor(pem: bytes, *, source: str) -> x509.Certificate:
    """Parse a trust anchor; VerificationError names `source` if it is not one."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise _no_anchor(source) from error
    return check_anchor(certificate, source=source)


def check_anchor(certificate: x509.Certificate, *, source: str) -> x509.Certificate:
    """Return the certificate; VerificationError names `source` if it is not a trust anchor."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        key = certificate.public_key() if constraints.value.ca else None
    except (x509.ExtensionNotFound, UnsupportedAlgorithm, ValueError) as error:
        raise _no_anchor(source) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _no_anchor(source)
    return certificate


def _no_anchor(source: str) -> VerificationError:
    return VerificationError(
        "certificate.anchor.malformed",
        f"{source}: not a trust anchor; allowed: PEM certificates of P-256 authorities",
    )


def anchor_key(anchor: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the broker's public key."""
    key = anchor.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise VerificationError("certificate.anchor.malformed", "the trust anchor has no P-256 key")
    return key


def verify_descriptor(anchor: x509.Certificate, *, descriptor: bytes, signature: bytes) -> None:
    """Raise VerificationError unless the broker signed `descriptor`."""
    _verify_descriptor(anchor, descriptor, signature)


# Lists of volumes have the same descriptors again and again. Only successes are remembered.
@lru_cache(maxsize=_DESCRIPTORS_KEPT)
def _verify_descriptor(anchor: x509.Certificate, descriptor: bytes, signature: bytes) -> None:
    try:
        anchor_key(anchor).verify(
            signature, _DESCRIPTOR_DOMAIN + descriptor, ec.ECDSA(hashes.SHA256())
        )
    except InvalidSignature as error:
        raise VerificationError(
            "volume.descriptor.signature", "the volume descriptor is not signed by the broker"
        ) from error


def verify_authorization(
    anchor: x509.Certificate, *, authorization: bytes, signature: bytes
) -> None:
    """Raise VerificationError unless the broker signed `authorization`."""
    try:
        anchor_key(anchor).verify(
            signature, _AUTHORIZATION_DOMAIN + authorization, ec.ECDSA(hashes.SHA256())
        )
    except InvalidSignature as error:
        raise VerificationError(
            "authorization.signature", "the authorization is not signed by the broker"
        ) from error


def verify_leaf(leaf: x509.Certificate, *, anchor: x509.Certificate, now: dt.datetime) -> Subject:
    """Check a leaf's signature, validity and profile; return its subject.

    Raises VerificationError: `certificate.issuer`, `certificate.expired`, `certificate.profile`.
    """
    _check_issued(leaf, anchor=anchor, now=now)
    return _parse_subject(leaf)


def verify_verifier(
    certificate: x509.Certificate, *, anchor: x509.Certificate, now: dt.datetime
) -> ec.EllipticCurvePublicKey:
    """Check the certificate of a key that signs attestation results; return the key.

    Raises VerificationError: `certificate.issuer`, `certificate.expired`, `certificate.profile`.
    """
    _check_issued(certificate, anchor=anchor, now=now)
    return _verifier_key(certificate)


@lru_cache(maxsize=_CERTIFICATES_KEPT)
def _verifier_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    malformed = VerificationError(
        "certificate.profile", "the certificate does not have the profile of a Sealane verifier"
    )
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise malformed from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if (
        constraints.ca
        or len(uris) != 1
        or not uris[0].startswith(spiffe_id("", VERIFIER_ROLE))
        or not isinstance(key, ec.EllipticCurvePublicKey)
        or not isinstance(key.curve, ec.SECP384R1)
    ):
        raise malformed
    return key


def _check_issued(leaf: x509.Certificate, *, anchor: x509.Certificate, now: dt.datetime) -> None:
    _check_issuer(leaf, anchor)
    if not leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc:
        raise VerificationError(
            "certificate.expired",
            f"the certificate is valid from {leaf.not_valid_before_utc:%H:%M:%S} to "
            f"{leaf.not_valid_after_utc:%H:%M:%S} UTC; it is now {now:%H:%M:%S}",
        )


# Each call checks its caller's and its verifier's certificates. Neither the signature nor the
# content of one can change, and only successes are remembered.
@lru_cache(maxsize=_CERTIFICATES_KEPT)
def _check_issuer(leaf: x509.Certificate, anchor: x509.Certificate) -> None:
    try:
        leaf.verify_directly_issued_by(anchor)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise VerificationError(
            "certificate.issuer", "the certificate was not issued by this broker"
        ) from error


@lru_cache(maxsize=_CERTIFICATES_KEPT)
def _parse_subject(leaf: x509.Certificate) -> Subject:
    malformed = VerificationError(
        "certificate.profile", "the certificate does not have the profile of a Sealane node"
    )
    try:
        extensions = leaf.extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        claims = extensions.get_extension_for_oid(CLAIMS_OID).value
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise malformed from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = re.fullmatch(r"spiffe://sealane/([a-z]+)/([a-z0-9-]+)", uris[0]) if uris else None
    if (
        len(uris) != 1
        or match is None
        or constraints.ca
        or not isinstance(claims, x509.UnrecognizedExtension)
    ):
        raise malformed
    try:
        values = parse_canonical_json(
            claims.value,
            bytes_max=_CLAIMS_BYTES_MAX,
            what="the certificate's claims",
            reason="certificate.profile",
        )
        return Subject(
            role=match[1],
            node=match[2],
            tenant=str(values["tenant"]),
            incarnation=bytes.fromhex(str(values["incarnation"])),
            kem_public_key=base64.b64decode(str(values["kem_public_key"]), validate=True),
            kem_algorithm=str(values["kem_algorithm"]),
        )
    except (VerificationError, UsageError, KeyError, ValueError, binascii.Error) as error:
        raise malformed from error


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
