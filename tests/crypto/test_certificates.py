"""Certificates and descriptors: wrong key, wrong issuer, expired, wrong profile."""

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.certificates import (
    LIFETIME,
    CertificateAuthority,
    Subject,
    parse_anchor,
    verify_descriptor,
    verify_leaf,
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
    with pytest.raises(VerificationError, match="not for the broker's key"):
        CertificateAuthority(_key(), authority.certificate)


def test_anchor_must_be_an_authority(authority: CertificateAuthority) -> None:
    leaf = authority.issue(SUBJECT, _key().public_key(), now=NOW).public_bytes(Encoding.PEM)
    assert parse_anchor(authority.anchor_pem, source="f") == authority.certificate
    for pem in (b"", b"nonsense", leaf):
        with pytest.raises(VerificationError, match=r"anchor\.pem: not a trust anchor"):
            parse_anchor(pem, source="anchor.pem")
