"""Signatures of several owners: a threshold of different keys, within limits."""

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from broker.policy_owners import new_keys, owners_of, signed, signed_owners
from sealane.crypto.audit import GENESIS, Chain
from sealane.daemon.broker.owners import (
    OWNERS_LABEL,
    POLICY_LABEL,
    SIGNATURES_BYTES_MAX,
    SIGNATURES_MAX,
    OwnerKey,
    OwnerPrivateKey,
    Owners,
    Signature,
    key_id_of,
    owners_document,
    parse_owner_key,
    parse_owners,
    parse_signatures,
    sign_document,
    verify_succession,
    with_signature,
)
from sealane.daemon.config import OWNERS_MAX
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import Error, UsageError, VerificationError

A, B, C, D = new_keys(4)
DOCUMENT = b"version = 1\n"
THREE = owners_of(A, B, C, threshold=2)


def pem(key: OwnerKey | rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def verify(signatures: bytes, owners: Owners = THREE, document: bytes = DOCUMENT) -> frozenset[str]:
    return owners.verify(
        POLICY_LABEL, document, parse_signatures(signatures, source="s"), what="the policy"
    )


def reason_of(error: "pytest.ExceptionInfo[Error]") -> str:
    return error.value.reason


@pytest.mark.parametrize(
    "key", [A, ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP521R1())]
)
@pytest.mark.parametrize("is_list", [False, True])
def test_owner_signs_with_ed25519_or_ecdsa(key: OwnerPrivateKey, is_list: bool) -> None:
    content = (
        signed(POLICY_LABEL, DOCUMENT, [key])
        if is_list
        else sign_document(POLICY_LABEL, DOCUMENT, key)
    )
    owners = owners_of(key)
    assert verify(content, owners) == {key_id_of(key.public_key())}
    assert parse_owner_key(pem(key.public_key()), source="k") == key.public_key()
    with pytest.raises(VerificationError):
        verify(content, owners, b"version = 2\n")


@pytest.mark.parametrize("curve", [ec.SECP192R1(), ec.SECP224R1(), ec.SECP256K1()])
def test_keys_on_other_curves_are_refused(curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    with pytest.raises(UsageError) as caught:
        parse_owner_key(pem(key.public_key()), source="k")
    assert reason_of(caught) == "policy.owner_key.malformed"
    with pytest.raises(UsageError) as caught:
        parse_owners(owners_document(owners_of(key, version=1)), source="o")
    assert reason_of(caught) == "policy.owner_key.malformed"


def test_the_ids_of_two_full_lists_fit_a_record_of_the_audit_log() -> None:
    ids = [f"{i:064x}" for i in range(OWNERS_MAX)]
    line = Chain(GENESIS).append(
        "policy.owners.replace",
        subject="operator",
        outcome="done",
        reason="",
        detail={"digest": bytes(32), "owners": ids, "owners_before": ids, "signers": ids + ids},
        now=utc_now(),
    )
    assert json.loads(line)["detail"]["owners_before"] == ids
    assert json.loads(line)["detail"]["signers"] == ids + ids


def test_threshold_of_owners_signs() -> None:
    assert len(verify(signed(POLICY_LABEL, DOCUMENT, [A, C]))) == 2
    assert len(verify(signed(POLICY_LABEL, DOCUMENT, [A, B, C]))) == 3


def twice(content: bytes) -> bytes:
    parsed = json.loads(content)
    parsed["signatures"] += parsed["signatures"]
    return json.dumps(parsed).encode()


def without_ids(content: bytes) -> bytes:
    parsed = json.loads(content)
    for each in parsed["signatures"]:
        each["keyid"] = ""
    return json.dumps(parsed).encode()


def of_others(content: bytes) -> bytes:
    """Say that other owners made each signature."""
    parsed = json.loads(content)
    ids = [each["keyid"] for each in parsed["signatures"]]
    for each, key_id in zip(parsed["signatures"], [*ids[1:], ids[0]], strict=True):
        each["keyid"] = key_id
    return json.dumps(parsed).encode()


@pytest.mark.parametrize(
    "content",
    [
        signed(POLICY_LABEL, DOCUMENT, [A]),
        sign_document(POLICY_LABEL, DOCUMENT, A),
        twice(signed(POLICY_LABEL, DOCUMENT, [A])),
        twice(without_ids(signed(POLICY_LABEL, DOCUMENT, [A]))),
        signed(POLICY_LABEL, DOCUMENT, [A, D]),
        of_others(signed(POLICY_LABEL, DOCUMENT, [A, B])),
        signed(OWNERS_LABEL, DOCUMENT, [A, B]),
        signed(POLICY_LABEL, b"version = 3\n", [A, B]),
    ],
)
def test_fewer_owners_than_the_threshold_are_refused_with_the_numbers(content: bytes) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(content)
    assert reason_of(caught) == "policy.signature"
    assert "needed: 2, missing: " in str(caught.value)


def test_a_single_signature_becomes_one_of_a_list() -> None:
    alone = sign_document(POLICY_LABEL, DOCUMENT, A)
    both = with_signature(alone, POLICY_LABEL, DOCUMENT, B, source="s")
    assert len(verify(both)) == 2
    again = with_signature(both, POLICY_LABEL, DOCUMENT, A, source="s")
    assert len(parse_signatures(again, source="s")) == 2
    assert len(verify(again)) == 2
    with pytest.raises(UsageError) as caught:
        with_signature(both, POLICY_LABEL, DOCUMENT + b"#", C, source="s")
    assert reason_of(caught) == "policy.signature.other"


def a_list(**changed: Any) -> bytes:
    good: dict[str, Any] = json.loads(signed(POLICY_LABEL, DOCUMENT, [A]))
    return json.dumps({**good, **changed}).encode()


ONE = {"keyid": "", "sig": base64.b64encode(bytes(64)).decode()}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(257), "policy.signature.malformed"),
        (a_list() + b" " * SIGNATURES_BYTES_MAX, "policy.signature.malformed"),
        (b"{" + b"[" * (SIGNATURES_BYTES_MAX - 1), "policy.signature.malformed"),
        (b'{"x":' * 900, "policy.signature.malformed"),
        (a_list(signatures=[]), "policy.signature.malformed"),
        (a_list(signatures=[ONE] * (SIGNATURES_MAX + 1)), "policy.signature.malformed"),
        (a_list(signatures=[{**ONE, "sig": "%%%%"}]), "policy.signature.malformed"),
        (a_list(signatures=[{**ONE, "sig": "A" * 400}]), "policy.signature.malformed"),
        (a_list(signatures=[{**ONE, "keyid": "ab"}]), "policy.signature.malformed"),
        (a_list(signatures=[{**ONE, "alg": "none"}]), "policy.signature.malformed"),
        (a_list(signatures=5), "policy.signature.malformed"),
        (a_list(sha256=None), "policy.signature.malformed"),
        (a_list(format="sealane signatures v2"), "policy.signature.format"),
        (b"{}" + b" " * 80, "policy.signature.format"),
    ],
)
def test_malformed_files_are_refused_before_any_signature_is_verified(
    content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.broker.owners._is_valid", pytest.fail)
    with pytest.raises(VerificationError) as caught:
        verify(content)
    assert reason_of(caught) == reason


def test_a_full_list_takes_no_further_signature() -> None:
    keys = new_keys(SIGNATURES_MAX + 1)
    full = signed(POLICY_LABEL, DOCUMENT, keys[:-1])
    assert len(verify(full, owners_of(*keys[:-1], threshold=SIGNATURES_MAX))) == SIGNATURES_MAX
    with pytest.raises(UsageError) as caught:
        with_signature(full, POLICY_LABEL, DOCUMENT, keys[-1], source="s")
    assert reason_of(caught) == "policy.signature.limit"


def test_owners_document_says_the_same_when_it_is_read_again() -> None:
    owners = owners_of(A, ec.generate_private_key(ec.SECP256R1()), threshold=2, version=3)
    again = parse_owners(owners_document(owners), source="o")
    assert (again.version, again.threshold) == (3, 2)
    assert {**again.by_id} == {**owners.by_id}
    assert again.digest == owners.digest
    other = owners_of(A, B, threshold=1, version=3)
    assert len({other.digest, owners_of(A, B, threshold=2).digest, owners_of(A).digest}) == 3


def with_rsa() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    encoded = b"".join(pem(key).splitlines()[1:-1])
    text = owners_document(owners_of(A, version=1))
    before = base64.b64encode(
        A.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return text.replace(before, encoded)


GOOD = owners_document(owners_of(A, B, version=1))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (GOOD + GOOD[GOOD.index(b"\n[[") :], "policy.owners.twice"),
        (GOOD.replace(b"threshold = 1", b"threshold = 3"), "policy.owners.threshold"),
        (GOOD.replace(b"threshold = 1", b"threshold = 0"), "config.range"),
        (GOOD.replace(b"version = 1", b"version = 10000"), "config.range"),
        (GOOD.replace(b'"o0"', b'"o 0\\u001b"'), "config.type"),
        (GOOD + b"#" * (32 << 10), "config.size"),
        (with_rsa(), "policy.owner_key.malformed"),
        (GOOD.replace(b'public_key = "', b'public_key = "%'), "policy.owner_key.malformed"),
        (b"version = 1\nthreshold = 1\nowner = []\n", "config.type"),
        (b"\xff", "config.syntax"),
    ],
)
def test_owners_documents_with_a_fault_are_refused(document: bytes, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_owners(document, source="o")
    assert reason_of(caught) == reason
    assert "\n" not in str(caught.value)


def test_present_and_next_owners_sign_a_change() -> None:
    after = owners_of(A, C, D, threshold=2, version=1)
    for keys, is_accepted in (((A, C), True), ((A, B, D), True), ((A, B), False), ((C, D), False)):
        document, content = signed_owners(after, *keys)
        signatures = parse_signatures(content, source="s")
        if is_accepted:
            verify_succession(THREE, after, document, signatures)
            continue
        with pytest.raises(VerificationError) as caught:
            verify_succession(THREE, after, document, signatures)
        assert reason_of(caught) == "policy.signature"


def test_a_single_signature_may_begin_like_a_list() -> None:
    assert parse_signatures(b"{" * 64, source="s") == (Signature("", b"{" * 64),)
