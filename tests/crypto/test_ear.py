"""Attestation results: one signer, one algorithm, one holder and a period of validity."""

import base64
import datetime as dt
import json

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from sealane.crypto.attestation.appraisal import Appraisal, appraise
from sealane.crypto.attestation.ar4si import Tier
from sealane.crypto.attestation.ear import (
    TOKEN_CHARACTERS_MAX,
    ResultSigner,
    read_unverified,
    verify_result,
)
from sealane.crypto.attestation.policy import Hardware, Policy, software_reference
from sealane.crypto.certificates import CertificateAuthority, Subject, verify_leaf, verify_verifier
from sealane.crypto.evidence.claims import Claims, Memory
from sealane.errors import VerificationError

NOW = dt.datetime(2026, 11, 1, 12, tzinfo=dt.UTC)
AUTHORITY = CertificateAuthority.create(broker="b", now=NOW)
SIGNER = ResultSigner(AUTHORITY, broker="b", now=NOW)
SUBJECT = Subject(
    node="g", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=bytes(32)
)
LEAF = AUTHORITY.issue(SUBJECT, ec.generate_private_key(ec.SECP256R1()).public_key(), now=NOW)
OTHER_LEAF = AUTHORITY.issue(SUBJECT, ec.generate_private_key(ec.SECP256R1()).public_key(), now=NOW)
KEY = verify_verifier(SIGNER.certificate(now=NOW), anchor=AUTHORITY.certificate, now=NOW)


def appraisal() -> Appraisal:
    machine = Hardware(
        hardware_id="key-sha256:00",
        nodes=frozenset({"g"}),
        roles=frozenset({"gateway"}),
        tenant="t",
    )
    policy = Policy(
        version=7,
        digest=bytes(range(32)),
        hardware={machine.hardware_id: machine},
        references=(software_reference(frozenset({"gateway"})),),
    )
    claims = Claims(
        evidence_type="software",
        memory=Memory.ISOLATED,
        hardware_id=machine.hardware_id,
        product="software",
        measurements={},
        tcb={},
        flags={},
        valid_until=NOW + dt.timedelta(days=1),
    )
    return appraise({"primary": claims}, policy=policy, node="g", role="gateway", safe_flags={})


TOKEN = SIGNER.sign(appraisal(), leaf=LEAF, subject=SUBJECT.spiffe_id, nonce=bytes(32), now=NOW)


def reason(token: str, key: ec.EllipticCurvePublicKey = KEY) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_result(token, verifier_key=key)
    return caught.value.reason


def claims() -> dict[str, object]:
    decoded: dict[str, object] = jwt.decode(TOKEN, options={"verify_signature": False})
    return decoded


def signed(values: dict[str, object]) -> str:
    return jwt.encode(values, SIGNER._key, algorithm="ES384", headers={"typ": "JWT"})


def test_result_says_what_was_appraised() -> None:
    result = verify_result(TOKEN, verifier_key=KEY)
    result.check(leaf=LEAF, subject=SUBJECT.spiffe_id, now=NOW)
    assert result.status is Tier.WARNING
    assert result.policy_version == 7
    assert result.policy_id == f"sealane:7:sha256:{bytes(range(32)).hex()}"
    assert result.submodules["primary"].vector == {"instance-identity": 2, "runtime-opaque": 32}
    assert result.expires_at == LEAF.not_valid_after_utc
    assert len(TOKEN) < TOKEN_CHARACTERS_MAX


def test_another_verifiers_key_is_refused() -> None:
    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    assert reason(TOKEN, other) == "token.signature"


@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS384", "ES256"])
def test_other_algorithms_are_refused(algorithm: str) -> None:
    key: object = None
    if algorithm.startswith("HS"):
        # The public key as a shared secret: the classic confusion.
        key = b"x" * 64
    elif algorithm == "ES256":
        key = ec.generate_private_key(ec.SECP256R1())
    token = jwt.encode(claims(), key, algorithm=algorithm)  # type: ignore[arg-type]
    assert reason(token) == "token.malformed"


@pytest.mark.parametrize("name", ["jwk", "jku", "x5c", "x5u", "kid", "crit", "b64", "zip"])
def test_header_that_brings_a_key_is_refused(name: str) -> None:
    # Signed by the verifier itself: other headers are refused outright.
    header = {"alg": "ES384", "typ": "JWT", name: "x"}
    head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
    body = TOKEN.split(".")[1]
    algorithm = jwt.get_algorithm_by_name("ES384")
    signature = algorithm.sign(f"{head}.{body}".encode(), SIGNER._key)
    tail = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    assert reason(f"{head}.{body}.{tail}") == "token.malformed"


def test_result_beside_another_certificate_is_refused() -> None:
    result = verify_result(TOKEN, verifier_key=KEY)
    with pytest.raises(VerificationError) as caught:
        result.check(leaf=OTHER_LEAF, subject=SUBJECT.spiffe_id, now=NOW)
    assert caught.value.reason == "token.holder.mismatch"
    with pytest.raises(VerificationError) as caught:
        result.check(leaf=LEAF, subject="spiffe://sealane/gateway/h", now=NOW)
    assert caught.value.reason == "token.subject.mismatch"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-31, "token.not_yet_valid"),
        (-30, ""),
        (0, ""),
        (599, ""),
        (600, "token.expired"),
        (629, "token.expired"),
    ],
)
def test_skew_is_allowed_before_and_never_after(seconds: int, expected: str) -> None:
    result = verify_result(TOKEN, verifier_key=KEY)
    found = ""
    try:
        result.check(leaf=LEAF, subject=SUBJECT.spiffe_id, now=NOW + dt.timedelta(seconds=seconds))
    except VerificationError as error:
        found = error.reason
    assert found == expected


@pytest.mark.parametrize(
    "change",
    [
        {"eat_profile": "tag:example.com,2026:other"},
        {"cnf": {}},
        {"cnf": {"x5t#S256": "AAAA"}},
        {"submods": {}},
        {"submods": "x"},
        {"exp": "soon"},
        {"exp": 1 << 70},
        {"sealane.policy-version": None},
        {"eat_nonce": 7},
    ],
)
def test_claims_outside_the_profile_are_refused(change: dict[str, object]) -> None:
    assert reason(signed({**claims(), **change})) == "token.malformed"


def test_token_has_a_bound_even_from_its_verifier() -> None:
    assert reason(signed({**claims(), "more": "x" * TOKEN_CHARACTERS_MAX})) == "token.malformed"


def test_status_better_than_its_worst_claim_is_refused() -> None:
    values = json.loads(json.dumps(claims()))
    values["submods"]["primary"]["ear.status"] = "affirming"
    assert reason(signed(values)) == "token.malformed"


def test_claim_that_no_vector_has_is_refused() -> None:
    values = json.loads(json.dumps(claims()))
    values["submods"]["primary"]["ear.trustworthiness-vector"]["luck"] = 2
    assert reason(signed(values)) == "token.malformed"


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "a.b.c.d",
        TOKEN + "=",
        TOKEN + ".",
        TOKEN.replace(".", "..", 1),
        TOKEN + "!",
        TOKEN + "\n",
        "x" * 9000,
    ],
)
def test_what_is_no_token_is_refused(token: str) -> None:
    assert reason(token) == "token.malformed"


@pytest.mark.parametrize("token", ["", "a.b.c", TOKEN.rpartition(".")[0], TOKEN + ".e30"])
def test_what_is_no_token_is_not_shown_either(token: str) -> None:
    assert read_unverified(TOKEN).subject == SUBJECT.spiffe_id
    with pytest.raises(VerificationError, match=r"token\.malformed"):
        read_unverified(token)


@given(st.integers(0, len(TOKEN) - 1), st.characters(min_codepoint=33, max_codepoint=126))
def test_every_changed_character_is_refused(position: int, character: str) -> None:
    changed = TOKEN[:position] + character + TOKEN[position + 1 :]
    if changed != TOKEN:
        assert reason(changed) in {"token.malformed", "token.signature"}


def test_signature_in_its_other_form_is_the_same_result() -> None:
    # (r, n - s) verifies, too: tokens must be compared by id, not by bytes.
    head, body, tail = TOKEN.split(".")
    raw = base64.urlsafe_b64decode(tail)
    order = ec.SECP384R1().group_order
    flipped = raw[:48] + (order - int.from_bytes(raw[48:], "big")).to_bytes(48, "big")
    other = f"{head}.{body}.{base64.urlsafe_b64encode(flipped).decode()}"
    assert other != TOKEN
    assert verify_result(other, verifier_key=KEY) == verify_result(TOKEN, verifier_key=KEY)


def test_verifiers_certificate_is_no_nodes_and_the_other_way_round() -> None:
    certificate = SIGNER.certificate(now=NOW)
    with pytest.raises(VerificationError) as caught:
        verify_leaf(certificate, anchor=AUTHORITY.certificate, now=NOW)
    assert caught.value.reason == "certificate.profile"
    with pytest.raises(VerificationError) as caught:
        verify_verifier(LEAF, anchor=AUTHORITY.certificate, now=NOW)
    assert caught.value.reason == "certificate.profile"
    with pytest.raises(VerificationError) as caught:
        verify_verifier(AUTHORITY.certificate, anchor=AUTHORITY.certificate, now=NOW)
    assert caught.value.reason == "certificate.profile"
    large = ec.generate_private_key(ec.SECP384R1()).public_key()
    small = ec.generate_private_key(ec.SECP256R1()).public_key()
    for wrong in (
        AUTHORITY.issue(SUBJECT, large, now=NOW),
        AUTHORITY.issue_verifier(small, broker="b", now=NOW),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_verifier(wrong, anchor=AUTHORITY.certificate, now=NOW)
        assert caught.value.reason == "certificate.profile"
    other = CertificateAuthority.create(broker="b", now=NOW)
    for anchor, now, expected in (
        (other.certificate, NOW, "certificate.issuer"),
        (AUTHORITY.certificate, NOW + dt.timedelta(days=1), "certificate.expired"),
        (AUTHORITY.certificate, NOW - dt.timedelta(seconds=31), "certificate.expired"),
    ):
        with pytest.raises(VerificationError) as caught:
            verify_verifier(certificate, anchor=anchor, now=now)
        assert caught.value.reason == expected


def test_verifiers_certificate_is_renewed_in_time() -> None:
    signer = ResultSigner(AUTHORITY, broker="b", now=NOW)
    first = signer.certificate(now=NOW)
    later = NOW + dt.timedelta(hours=13)
    renewed = signer.certificate(now=later)
    assert renewed != first
    assert isinstance(renewed, x509.Certificate)
    encoding = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    assert renewed.public_key().public_bytes(*encoding) == first.public_key().public_bytes(
        *encoding
    )
    verify_verifier(renewed, anchor=AUTHORITY.certificate, now=later + dt.timedelta(hours=11))
