"""Certificates and descriptors: wrong key, wrong issuer, expired, wrong profile."""

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.certificates import (
    CLAIMS_OID,
    LIFETIME,
    CertificateAuthority,
    Subject,
    anchor_key,
    parse_anchor,
    parse_spiffe_id,
    verify_authorization,
    verify_descriptor,
    verify_leaf,
    verify_verifier,
)
from sealane.errors import UsageError, VerificationError

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
SUBJECT = Subject(
    node="g1", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=bytes(range(32))
)


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create(broker="b", now=NOW)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def test_leaf_says_what_was_attested(authority: CertificateAuthority) -> None:
    key = _key()
    leaf = authority.issue(SUBJECT, key.public_key(), now=NOW)
    assert verify_leaf(leaf, anchor=authority.certificate, now=NOW) == SUBJECT
    assert leaf.public_key() == key.public_key()
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "spiffe://sealane/gateway/g1"
    ]
    assert names.get_values_for_type(x509.DNSName) == ["g1.gateway.sealane.internal"]


@pytest.mark.parametrize(
    "when", [NOW + LIFETIME, NOW + dt.timedelta(days=1), NOW - dt.timedelta(minutes=1)]
)
def test_leaf_out_of_its_time_is_refused(
    authority: CertificateAuthority, when: dt.datetime
) -> None:
    leaf = authority.issue(SUBJECT, _key().public_key(), now=NOW)
    with pytest.raises(VerificationError) as caught:
        verify_leaf(leaf, anchor=authority.certificate, now=when)
    assert caught.value.reason == "certificate.expired"


def test_leaf_that_was_verified_before_expires_and_is_of_one_authority(
    authority: CertificateAuthority,
) -> None:
    other = CertificateAuthority.create(broker="b", now=NOW)
    leaf = authority.issue(SUBJECT, _key().public_key(), now=NOW)
    assert verify_leaf(leaf, anchor=authority.certificate, now=NOW) == SUBJECT
    with pytest.raises(VerificationError, match="valid from") as caught:
        verify_leaf(leaf, anchor=authority.certificate, now=NOW + LIFETIME)
    assert caught.value.reason == "certificate.expired"
    with pytest.raises(VerificationError) as caught:
        verify_leaf(leaf, anchor=other.certificate, now=NOW)
    assert caught.value.reason == "certificate.issuer"


def test_leaf_of_another_authority_is_refused(authority: CertificateAuthority) -> None:
    other = CertificateAuthority.create(broker="b", now=NOW)
    leaf = other.issue(SUBJECT, _key().public_key(), now=NOW)
    with pytest.raises(VerificationError) as caught:
        verify_leaf(leaf, anchor=authority.certificate, now=NOW)
    assert caught.value.reason == "certificate.issuer"


def test_certificate_without_the_profile_is_refused(authority: CertificateAuthority) -> None:
    bare = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(_key().public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + LIFETIME)
        .sign(authority.signing_key, hashes.SHA256())
    )
    for certificate in (bare, authority.certificate):
        with pytest.raises(VerificationError) as caught:
            verify_leaf(certificate, anchor=authority.certificate, now=NOW)
        assert caught.value.reason == "certificate.profile"


@pytest.mark.parametrize(
    ("node", "role"), [("g1", "root"), ("", "gateway"), ("a/b", "gateway"), ("A", "gateway")]
)
def test_subject_that_cannot_be_named_is_refused(node: str, role: str) -> None:
    with pytest.raises(UsageError):
        Subject(node=node, role=role, tenant="t", incarnation=bytes(16), kem_public_key=bytes(32))


def test_descriptor_signature_covers_every_byte(authority: CertificateAuthority) -> None:
    descriptor = b"descriptor"
    signature = authority.sign_descriptor(descriptor)
    anchor = authority.certificate
    verify_descriptor(anchor, descriptor=descriptor, signature=signature)
    other = CertificateAuthority.create(broker="b", now=NOW).certificate
    for signer, text, signed in (
        (anchor, b"Descriptor", signature),
        (anchor, descriptor, signature[:-1] + bytes([signature[-1] ^ 1])),
        (anchor, descriptor, b""),
        (other, descriptor, signature),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_descriptor(signer, descriptor=text, signature=signed)
        assert caught.value.reason == "volume.descriptor.signature"


def test_authority_needs_the_key_of_its_certificate(authority: CertificateAuthority) -> None:
    with pytest.raises(VerificationError, match="for another key"):
        CertificateAuthority(_key(), authority.certificate)


def test_anchor_must_be_an_authority(authority: CertificateAuthority) -> None:
    leaf = authority.issue(SUBJECT, _key().public_key(), now=NOW).public_bytes(Encoding.PEM)
    assert parse_anchor(authority.anchor_pem, source="f") == authority.certificate
    for pem in (b"", b"nonsense", leaf):
        with pytest.raises(VerificationError, match=r"anchor\.pem: not a trust anchor"):
            parse_anchor(pem, source="anchor.pem")


def _authority_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> x509.Certificate:
    """Certify an authority with a key of another kind."""
    name = x509.Name([])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)],
    ids=["p384", "rsa"],
)
def test_anchor_has_a_key_on_p256(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    anchor = _authority_of(key)
    with pytest.raises(VerificationError, match="not a trust anchor"):
        parse_anchor(anchor.public_bytes(Encoding.PEM), source="anchor.pem")
    if isinstance(key, rsa.RSAPrivateKey):
        with pytest.raises(VerificationError, match=r"certificate\.anchor\.malformed"):
            anchor_key(anchor)


@pytest.mark.parametrize(
    "name",
    [
        *("", "spiffe://sealane/gateway/", "spiffe://sealane/root/g", "spiffe://other/gateway/g"),
        *("spiffe://sealane/gateway/-g", "spiffe://sealane/gateway/g/h"),
        "spiffe://sealane/gateway/" + "g" * 64,
    ],
)
def test_name_of_no_role_of_a_node_is_refused(name: str) -> None:
    assert parse_spiffe_id("spiffe://sealane/gateway/g-1") == ("g-1", "gateway")
    with pytest.raises(VerificationError, match=r"certificate\.profile"):
        parse_spiffe_id(name)


def test_authorization_is_signed_as_one(authority: CertificateAuthority) -> None:
    anchor = authority.certificate
    verify_authorization(anchor, authorization=b"a", signature=authority.sign_authorization(b"a"))
    for text, signature in (
        (b"b", authority.sign_authorization(b"a")),
        (b"a", authority.sign_descriptor(b"a")),
        (b"a", b""),
    ):
        with pytest.raises(VerificationError, match=r"authorization\.signature"):
            verify_authorization(anchor, authorization=text, signature=signature)


def _certified(
    authority: CertificateAuthority,
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    uris: list[str],
    *,
    ca: bool = False,
    claims: x509.ExtensionType | None = None,
) -> x509.Certificate:
    """Return a certificate with the test's contents, signed by the authority."""
    names = [x509.UniformResourceIdentifier(uri) for uri in uris] or [x509.DNSName("a")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(key)
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    if claims is not None:
        builder = builder.add_extension(claims, critical=False)
    return builder.sign(authority.signing_key, hashes.SHA256())


VERIFIER = "spiffe://sealane/verifier/b"
P384, P256 = (
    ec.generate_private_key(curve).public_key() for curve in (ec.SECP384R1(), ec.SECP256R1())
)


def test_verifier_is_certified_as_one_and_nothing_else(authority: CertificateAuthority) -> None:
    anchor = authority.certificate
    good = _certified(authority, P384, [VERIFIER])
    assert verify_verifier(good, anchor=anchor, now=NOW) == P384
    for certificate in (
        _certified(authority, P384, [VERIFIER], ca=True),
        _certified(authority, P384, []),
        _certified(authority, P384, [VERIFIER, VERIFIER]),
        _certified(authority, P384, ["spiffe://sealane/gateway/b"]),
        _certified(authority, P256, [VERIFIER]),
        _certified(authority, rsa.generate_private_key(65537, 2048).public_key(), [VERIFIER]),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_verifier(certificate, anchor=anchor, now=NOW)
        assert caught.value.reason == "certificate.profile"
    other = CertificateAuthority.create(broker="b", now=NOW)
    with pytest.raises(VerificationError, match=r"certificate\.issuer"):
        verify_verifier(_certified(other, P384, [VERIFIER]), anchor=anchor, now=NOW)
    with pytest.raises(VerificationError, match=r"certificate\.expired"):
        verify_verifier(good, anchor=anchor, now=NOW + LIFETIME)


def test_leaf_of_another_profile_is_refused(authority: CertificateAuthority) -> None:
    """The authority doesn't sign such leaves, but readers don't rely on that."""
    anchor = authority.certificate
    leaf = authority.issue(SUBJECT, P256, now=NOW)
    claims = leaf.extensions.get_extension_for_oid(CLAIMS_OID).value
    uri = SUBJECT.spiffe_id
    good = _certified(authority, P256, [uri], claims=claims)
    assert verify_leaf(good, anchor=anchor, now=NOW) == SUBJECT
    for certificate in (
        _certified(authority, P256, [uri], claims=claims, ca=True),
        _certified(authority, P256, [], claims=claims),
        _certified(authority, P256, [uri, "spiffe://sealane/broker/b"], claims=claims),
        _certified(authority, P256, ["spiffe://sealane/verifier/g1"], claims=claims),
        _certified(authority, P256, ["https://sealane/gateway/g1"], claims=claims),
        _certified(
            authority,
            P256,
            [uri],
            claims=x509.UnrecognizedExtension(CLAIMS_OID, b'{"tenant":"t"}'),
        ),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_leaf(certificate, anchor=anchor, now=NOW)
        assert caught.value.reason == "certificate.profile"
