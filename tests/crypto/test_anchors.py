"""Trust anchors, and successions of authorities: what is trusted after each statement."""

from dataclasses import replace

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.anchors import Succession, TrustAnchors, digest
from sealane.crypto.certificates import CertificateAuthority, Subject, verify_leaf
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import VerificationError

NOW = utc_now()
A, B, C, D = (CertificateAuthority.create(broker="b", now=NOW) for _ in range(4))
CERTIFICATES = {"A": A.certificate, "B": B.certificate, "C": C.certificate, "D": D.certificate}
A_TO_B = Succession.announce(A, B.certificate)
B_TO_C = Succession.announce(B, C.certificate)


def follow(statement: Succession, trusted: str) -> str:
    """Return the names of what is trusted after a statement."""
    after = statement.follow([CERTIFICATES[name] for name in trusted])
    return "".join(name for each in after for name, is_it in CERTIFICATES.items() if each == is_it)


def refusal(statement: Succession, trusted: str) -> str:
    with pytest.raises(VerificationError) as refused:
        follow(statement, trusted)
    return refused.value.reason


@pytest.mark.parametrize(
    ("statement", "trusted", "after"),
    [
        (A_TO_B, "A", "AB"),
        (A_TO_B, "AB", "AB"),
        (A_TO_B.retired(B), "A", "B"),
        (A_TO_B.retired(B), "AB", "B"),
        (B_TO_C, "AB", "BC"),
        (B_TO_C, "B", "BC"),
        # Replayed: nothing comes back, and nothing goes.
        (A_TO_B, "B", "B"),
        (A_TO_B.retired(B), "B", "B"),
        (A_TO_B, "BC", "BC"),
    ],
)
def test_what_is_trusted_after_a_statement(statement: Succession, trusted: str, after: str) -> None:
    assert follow(statement, trusted) == after


def test_only_the_authority_itself_names_its_successor() -> None:
    by_stranger = replace(Succession.announce(D, B.certificate), predecessor=A_TO_B.predecessor)
    assert refusal(by_stranger, "A") == "anchors.succession.signature"
    other = replace(A_TO_B, certificate=C.certificate.public_bytes(Encoding.DER))
    assert refusal(other, "A") == "anchors.succession.signature"


def test_only_the_successor_retires_its_predecessor() -> None:
    for by in (A, D):
        assert refusal(A_TO_B.retired(by), "AB") == "anchors.succession.signature"
    # The statement about another succession of the same authorities' is none about this one.
    moved = replace(A_TO_B, retirement=B_TO_C.retired(B).retirement)
    assert refusal(moved, "AB") == "anchors.succession.signature"


def test_who_has_the_old_key_displaces_no_successor_that_is_known() -> None:
    assert refusal(Succession.announce(A, D.certificate), "AB") == "anchors.succession.conflict"


def test_a_retired_authority_names_no_successor() -> None:
    assert refusal(Succession.announce(A, D.certificate), "B") == "anchors.succession.foreign"


@pytest.mark.parametrize(
    "change",
    [
        {"predecessor": bytes(31)},
        {"certificate": b""},
        {"certificate": bytes(4097)},
        {"certificate": b"none"},
        {"signature": bytes(81)},
        {"retirement": bytes(81)},
    ],
    ids=str,
)
def test_malformed_statements_are_refused(change: dict[str, bytes]) -> None:
    assert refusal(replace(A_TO_B, **change), "A") == "anchors.succession.malformed"


def test_a_leaf_is_no_successor() -> None:
    subject = Subject(
        node="g", role="gateway", tenant="", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    leaf = A.issue(subject, ec.generate_private_key(ec.SECP256R1()).public_key(), now=NOW)
    assert refusal(Succession.announce(A, leaf), "A") == "anchors.succession.malformed"


def test_checks_pass_under_either_anchor_and_under_no_other() -> None:
    subject = Subject(
        node="g", role="gateway", tenant="", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    anchors = TrustAnchors(A.certificate, B.certificate)
    for authority in (A, B):
        leaf = authority.issue(subject, key, now=NOW)
        found = anchors.checked(lambda anchor, leaf=leaf: verify_leaf(leaf, anchor=anchor, now=NOW))
        assert found == subject
        anchors.key.verify(_signed(authority), b"m", _HASH)
    strange = D.issue(subject, key, now=NOW)
    with pytest.raises(VerificationError, match=r"certificate\.issuer"):
        anchors.checked(lambda anchor: verify_leaf(strange, anchor=anchor, now=NOW))
    with pytest.raises(InvalidSignature):
        anchors.key.verify(_signed(D), b"m", _HASH)


_HASH = ec.ECDSA(SHA256())


def _signed(authority: CertificateAuthority) -> bytes:
    return authority.signing_key.sign(b"m", _HASH)


def test_a_predecessor_issues_nothing_after_the_successors_first_certificate() -> None:
    anchors = TrustAnchors(A.certificate, B.certificate)
    for issuer, issuing in ((None, "AB"), (A, "AB"), (B, "B"), (C, "AB")):
        anchors.issuer = None if issuer is None else issuer.certificate
        assert anchors.issuing.certificates == tuple(CERTIFICATES[name] for name in issuing)
    # Peers may still show certificates of both.
    assert anchors.certificates == (A.certificate, B.certificate)


def test_the_error_is_that_of_the_authority_which_signed() -> None:
    subject = Subject(
        node="g", role="gateway", tenant="", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    leaf = B.issue(subject, key, now=NOW)
    late = leaf.not_valid_after_utc
    with pytest.raises(VerificationError, match=r"certificate\.expired"):
        TrustAnchors(A.certificate, B.certificate).checked(
            lambda anchor: verify_leaf(leaf, anchor=anchor, now=late)
        )


def test_a_file_of_anchors() -> None:
    both = TrustAnchors(A.certificate, B.certificate)
    assert TrustAnchors.parse(both.pem, source="f").certificates == both.certificates
    assert both.digests == (digest(A.certificate), digest(B.certificate))
    for pem in (b"", b"no certificate", both.pem + C.anchor_pem, A.anchor_pem[:-40]):
        with pytest.raises(VerificationError, match=r"certificate\.anchor\.malformed"):
            TrustAnchors.parse(pem, source="f")
