"""Certificates and revocation lists: the common part of the synthetic vendors' PKIs."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
START = NOW - dt.timedelta(days=365)
END = NOW + dt.timedelta(days=365)

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def name(common_name: str, *, organization: str = "Test vendor") -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


@dataclass
class Authority:
    """A key and its certificate, which can issue others."""

    key: Key
    certificate: x509.Certificate
    hash: hashes.HashAlgorithm = field(default_factory=hashes.SHA384)

    @property
    def padding(self) -> padding.PSS | None:
        if not isinstance(self.key, rsa.RSAPrivateKey):
            return None
        return padding.PSS(mgf=padding.MGF1(self.hash), salt_length=self.hash.digest_size)

    def issue(
        self,
        common_name: str,
        key: Key,
        *,
        extensions: Sequence[tuple[str, bytes]] = (),
        critical: Sequence[str] = (),
        is_authority: bool = False,
        may_sign: bool | None = None,
        path_length: int | None = None,
        is_listed: bool = False,
        start: dt.datetime = START,
        end: dt.datetime = END,
        serial: int | None = None,
    ) -> "Authority":
        """Certify `key`; `is_listed` gives a distribution point, `may_sign` a usage of its own."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(common_name))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(serial or x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
        )
        builder = _constrain(
            builder, is_authority=is_authority, may_sign=may_sign, path=path_length
        )
        if is_listed:
            point = x509.DistributionPoint(
                [x509.UniformResourceIdentifier("http://vendor.example/list.crl")], None, None, None
            )
            builder = builder.add_extension(x509.CRLDistributionPoints([point]), critical=False)
        for oid, value in extensions:
            unrecognized = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)
            builder = builder.add_extension(unrecognized, critical=oid in critical)
        certificate = builder.sign(self.key, self.hash, rsa_padding=self.padding)
        return Authority(key, certificate, self.hash)

    def revoke(
        self,
        *serials: int,
        number: int = 1,
        start: dt.datetime = START,
        end: dt.datetime = END,
    ) -> x509.CertificateRevocationList:
        """Return a revocation list."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(start)
            .next_update(end)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        for serial in serials:
            entry = x509.RevokedCertificateBuilder(serial, start)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self.key, self.hash, rsa_padding=self.padding)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


def root(common_name: str, key: Key, *, hash_: hashes.HashAlgorithm | None = None) -> Authority:
    """Make a self-signed authority."""
    algorithm = hash_ or hashes.SHA384()
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(common_name))
        .issuer_name(name(common_name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START)
        .not_valid_after(END)
    )
    builder = _constrain(builder, is_authority=True, may_sign=None, path=None)
    made = Authority(key, None, algorithm)  # type: ignore[arg-type]
    made.certificate = builder.sign(key, algorithm, rsa_padding=made.padding)
    return made


def _constrain(
    builder: x509.CertificateBuilder, *, is_authority: bool, may_sign: bool | None, path: int | None
) -> x509.CertificateBuilder:
    constraints = x509.BasicConstraints(ca=is_authority, path_length=path)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority if may_sign is None else may_sign,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def p384() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def rsa_key() -> rsa.RSAPrivateKey:
    """Return a key of half the vendor's length: four times as fast, and fine for pinned roots."""
    return rsa.generate_private_key(65537, 2048)
