"""A responder answers with an attestation result for a leaf that its end may present."""

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.daemon.fabric.establishment import Result
from sealane.daemon.fabric.shown import responder_shown
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY
from sealane.errors import VerificationError
from trust.results import result_for

NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
AUTHORITY = CertificateAuthority.create(broker="b", now=NOW)


def leaf_of(node: str) -> tuple[Subject, x509.Certificate]:
    subject = Subject(
        node=node, role="fabric", tenant="t", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return subject, AUTHORITY.issue(subject, key, now=NOW)


def result_of(
    subject: Subject, leaf: x509.Certificate, authority: CertificateAuthority = AUTHORITY
) -> Result:
    metadata = result_for(authority, subject, leaf, now=NOW)
    token, verifier = metadata[RESULT_KEY], metadata[VERIFIER_KEY]
    assert isinstance(token, str)
    assert isinstance(verifier, bytes)
    return Result(token=token, verifier=verifier)


def test_a_result_for_any_of_the_pinned_leaves_is_bound() -> None:
    older, newer = leaf_of("f"), leaf_of("f")
    pins = [newer[1], older[1]]

    for subject, leaf in (older, newer):
        result = result_of(subject, leaf)
        shown = responder_shown(
            result, pins=pins, anchors=TrustAnchors(AUTHORITY.certificate), now=NOW
        )
        assert shown.certificate == leaf.fingerprint(SHA256())
        assert shown.token == result.thumbprint


def test_a_result_for_another_leaf_another_node_or_time_is_refused() -> None:
    (subject, leaf), other = leaf_of("f"), leaf_of("g")

    for result, reason in (
        (result_of(*other), "token.holder.mismatch"),
        (result_of(other[0], leaf), "token.subject.mismatch"),
    ):
        with pytest.raises(VerificationError) as refused:
            responder_shown(
                result, pins=[leaf], anchors=TrustAnchors(AUTHORITY.certificate), now=NOW
            )
        assert refused.value.reason == reason
    later = NOW + dt.timedelta(days=1)
    with pytest.raises(VerificationError):
        responder_shown(
            result_of(subject, leaf),
            pins=[leaf],
            anchors=TrustAnchors(AUTHORITY.certificate),
            now=later,
        )


def test_a_result_of_somebody_elses_verifier_is_refused() -> None:
    subject, leaf = leaf_of("f")
    stranger = CertificateAuthority.create(broker="x", now=NOW)

    with pytest.raises(VerificationError) as refused:
        responder_shown(
            result_of(subject, leaf, stranger),
            pins=[leaf],
            anchors=TrustAnchors(AUTHORITY.certificate),
            now=NOW,
        )
    assert refused.value.reason.startswith("certificate.")
