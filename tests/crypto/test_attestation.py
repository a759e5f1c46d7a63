"""The verifier: each check refuses with its reason; the result names what was attested."""

import dataclasses
import datetime as dt
import json
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealane.crypto.attestation.appraisal import PolicyViolationError
from sealane.crypto.attestation.challenge import (
    CHALLENGE_SECONDS,
    CHALLENGES_MAX,
    CHALLENGES_PER_PEER_MAX,
    Challenge,
)
from sealane.crypto.attestation.policy import Hardware, Policy, software_reference
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.attestation.verifier import INTRODUCTION_BYTES_MAX, Verified, Verifier
from sealane.crypto.evidence.cmw import PRIMARY, Item, encode_collection, secondary_digests
from sealane.crypto.evidence.software import MEDIA_TYPE, SoftwareKey, SoftwareVerifier
from sealane.errors import UnavailableError, UsageError, VerificationError

NOW = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
AUDIENCE = "spiffe://sealane/broker/b"
VERIFIER_KEY = bytes(32)
DRIVER = SoftwareKey.create()
TLS_KEY = ec.generate_private_key(ec.SECP256R1()).public_key()
TLS_BYTES = TLS_KEY.public_bytes(
    serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
)


def _policy(*, allowed: bool = True, key: SoftwareKey = DRIVER) -> Policy:
    machine = Hardware(
        hardware_id=key.fingerprint.replace("sha256", "key-sha256"),
        nodes=frozenset({"g1"}),
        roles=frozenset({"gateway"}),
        tenant="t",
    )
    roles = frozenset({"gateway", "target"})
    return Policy(
        hardware={machine.hardware_id: machine},
        references=(software_reference(roles),) if allowed else (),
    )


def _verifier(policy: Policy | None = None) -> Verifier:
    return Verifier(
        policy=policy or _policy(),
        evidence_verifiers=[SoftwareVerifier()],
        audience=AUDIENCE,
        verifier_key_sha256=VERIFIER_KEY,
    )


def _challenge(
    verifier: Verifier, *, node: str = "g1", role: str = "gateway", now_ns: int = 0
) -> Challenge:
    return _ask(verifier, node=node, role=role, now_ns=now_ns)


def _ask(
    verifier: Verifier,
    *,
    node: str = "g1",
    role: str = "gateway",
    evidence_type: str = "software",
    introduction: bytes = b"",
    peer: str = "p",
    now_ns: int = 0,
) -> Challenge:
    introduced = verifier.prepare(
        node=node, role=role, evidence_types=[evidence_type], introduction=introduction, now=NOW
    )
    return verifier.open(
        node=node,
        role=role,
        evidence_type=evidence_type,
        peer=peer,
        introduced=introduced,
        now_ns=now_ns,
    )


def _data(challenge: Challenge) -> RuntimeData:
    return RuntimeData(
        nonce=challenge.nonce,
        audience=AUDIENCE,
        node=challenge.node,
        role=challenge.role,
        incarnation=bytes(range(16)),
        tls_public_key=TLS_BYTES,
        kem_public_key=bytes(range(32)),
        verifier_key_sha256=VERIFIER_KEY,
        evidence_type="software",
    )


def _attest(
    verifier: Verifier,
    challenge: Challenge,
    data: RuntimeData,
    *,
    driver: SoftwareKey = DRIVER,
    now_ns: int = 1,
) -> Verified:
    return _present(
        verifier, challenge, data.encode(), driver.evidence(data.binding()), now_ns=now_ns
    )


def _present(
    verifier: Verifier,
    challenge: Challenge,
    runtime_data: bytes,
    evidence: bytes,
    *,
    now_ns: int = 1,
) -> Verified:
    return verifier.verify(
        verifier.take(challenge.session_id, now_ns=now_ns),
        runtime_data=runtime_data,
        evidence=encode_collection({PRIMARY: Item(MEDIA_TYPE, evidence)}),
        now=NOW,
    )


def test_honest_node_is_appraised_as_what_it_attested() -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    verified = _attest(verifier, challenge, _data(challenge))
    subject = verified.subject()
    assert subject.spiffe_id == "spiffe://sealane/gateway/g1"
    assert subject.tenant == "t"
    assert (subject.kem_algorithm, subject.kem_public_key) == ("x25519", bytes(range(32)))
    assert verified.tls_public_key == TLS_KEY


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nonce": b"\1" * 32}, "attestation.nonce.mismatch"),
        ({"audience": "spiffe://sealane/broker/other"}, "attestation.audience.mismatch"),
        ({"verifier_key_sha256": b"\1" * 32}, "attestation.verifier.mismatch"),
        ({"node": "g2"}, "attestation.subject.mismatch"),
        ({"role": "target"}, "attestation.subject.mismatch"),
        ({"tls_public_key": b"\1"}, "attestation.tls_key.malformed"),
        ({"kem_public_key": bytes(31)}, "attestation.runtime_data.malformed"),
        ({"incarnation": bytes(15)}, "attestation.runtime_data.malformed"),
        ({"evidence_type": "tpm2"}, "attestation.subject.mismatch"),
        ({"kem_algorithm": "p256"}, "attestation.runtime_data.malformed"),
        ({"kem_algorithm": "none"}, "attestation.runtime_data.malformed"),
        ({"secondary_evidence_sha256": (bytes(32),)}, "attestation.evidence.unbound"),
        ({"secondary_evidence_sha256": (bytes(31),)}, "attestation.runtime_data.malformed"),
        ({"secondary_evidence_sha256": (bytes(32),) * 16}, "attestation.runtime_data.malformed"),
    ],
)
def test_each_field_of_runtime_data_is_checked(change: dict[str, object], reason: str) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    data = dataclasses.replace(_data(challenge), **change)  # type: ignore[arg-type]
    with pytest.raises(VerificationError) as caught:
        _attest(verifier, challenge, data)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP256K1()),
        Ed25519PrivateKey.generate(),
    ],
    ids=["p384", "secp256k1", "ed25519"],
)
def test_tls_key_of_another_kind_is_refused(
    key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey,
) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    encoded = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    data = dataclasses.replace(_data(challenge), tls_public_key=encoded)
    with pytest.raises(VerificationError) as caught:
        _attest(verifier, challenge, data)
    assert caught.value.reason == "attestation.tls_key.malformed"


@pytest.mark.parametrize("label", [PRIMARY, "gpu0"])
def test_item_of_an_unknown_type_is_refused(label: str) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    items = {"gpu0": Item("a/b", b"x")} if label == "gpu0" else {}
    data = dataclasses.replace(_data(challenge), secondary_evidence_sha256=secondary_digests(items))
    items[PRIMARY] = Item(MEDIA_TYPE, DRIVER.evidence(data.binding()))
    items[label] = Item("a/b", b"x")
    with pytest.raises(VerificationError) as caught:
        verifier.verify(
            challenge, runtime_data=data.encode(), evidence=encode_collection(items), now=NOW
        )
    assert caught.value.reason == "attestation.evidence.type"


def test_nonce_is_used_once_even_by_a_failed_attempt() -> None:
    for driver in (DRIVER, SoftwareKey.create()):
        verifier = _verifier()
        challenge = _challenge(verifier)
        data = _data(challenge)
        if driver is DRIVER:
            _attest(verifier, challenge, data)
        else:
            with pytest.raises(VerificationError):
                _attest(verifier, challenge, data, driver=driver).subject()
        with pytest.raises(VerificationError) as caught:
            _attest(verifier, challenge, data)
        assert caught.value.reason == "attestation.nonce.stale"


@pytest.mark.parametrize("age_ns", [CHALLENGE_SECONDS * 10**9, 1 << 62])
def test_expired_challenge_is_refused(age_ns: int) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    with pytest.raises(VerificationError) as caught:
        _attest(verifier, challenge, _data(challenge), now_ns=age_ns)
    assert caught.value.reason == "attestation.nonce.stale"


def test_software_driver_is_refused_unless_allowed() -> None:
    for policy in (_policy(allowed=False), Policy()):
        with pytest.raises(VerificationError) as caught:
            _challenge(_verifier(policy))
        assert caught.value.reason == "attestation.type.refused"


def test_unknown_driver_is_refused() -> None:
    with pytest.raises(VerificationError) as caught:
        _ask(_verifier(), evidence_type="tpm2")
    assert caught.value.reason == "attestation.type.refused"


def test_type_that_nobody_verifies_is_refused_whatever_the_policy_says() -> None:
    reference = dataclasses.replace(
        software_reference(frozenset({"gateway"})), evidence_type="quantum"
    )
    with pytest.raises(VerificationError) as caught:
        _ask(_verifier(Policy(references=(reference,))), evidence_type="quantum")
    assert caught.value.reason == "attestation.type.refused"
    with pytest.raises(VerificationError) as caught:
        _verifier().prepare(node="g1", role="gateway", evidence_types=[], introduction=b"", now=NOW)
    assert caught.value.reason == "attestation.type.refused"


def test_key_outside_the_policy_is_refused() -> None:
    verifier = _verifier(_policy(key=SoftwareKey.create()))
    challenge = _challenge(verifier)
    verified = _attest(verifier, challenge, _data(challenge))
    with pytest.raises(PolicyViolationError) as caught:
        verified.subject()
    assert caught.value.reason == "attestation.hardware.not_listed"
    assert verified.appraisal.items["primary"].vector["instance-identity"] == 97


@pytest.mark.parametrize(
    ("node", "role", "reason"),
    [
        ("g2", "gateway", "attestation.node.refused"),
        ("g1", "target", "attestation.role.refused"),
    ],
)
def test_node_and_role_outside_the_policy_are_refused(node: str, role: str, reason: str) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier, node=node, role=role)
    with pytest.raises(PolicyViolationError) as caught:
        _attest(verifier, challenge, _data(challenge)).subject()
    assert caught.value.reason == reason


@pytest.mark.parametrize("node", ["", "A", "a/b", "a" * 64, "x" * (1 << 20)])
def test_node_that_cannot_be_named_gets_no_challenge(node: str) -> None:
    with pytest.raises(UsageError) as caught:
        _challenge(_verifier(), node=node)
    assert caught.value.reason == "attestation.node.malformed"
    assert len(str(caught.value)) < 200


def test_nobody_enrols_as_broker() -> None:
    with pytest.raises(UsageError) as caught:
        _challenge(_verifier(), role="broker")
    assert caught.value.reason == "attestation.role.unknown"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda e: e[:-1], "attestation.software.malformed"),
        (lambda _: b"", "attestation.evidence.malformed"),
        (lambda e: e[:40] + bytes([e[40] ^ 1]) + e[41:], "attestation.software.signature"),
        (lambda e: bytes([e[0] ^ 1]) + e[1:], "attestation.software.signature"),
    ],
)
def test_spoiled_evidence_is_refused(spoil: Callable[[bytes], bytes], reason: str) -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    data = _data(challenge)
    with pytest.raises(VerificationError) as caught:
        _present(verifier, challenge, data.encode(), spoil(DRIVER.evidence(data.binding())))
    assert caught.value.reason == reason


def test_evidence_over_other_runtime_data_is_refused() -> None:
    verifier = _verifier()
    challenge = _challenge(verifier)
    data = _data(challenge)
    other = dataclasses.replace(data, incarnation=bytes(16))
    with pytest.raises(VerificationError) as caught:
        _present(verifier, challenge, data.encode(), DRIVER.evidence(other.binding()))
    assert caught.value.reason == "attestation.software.signature"


def test_one_address_cannot_take_every_challenge() -> None:
    verifier = _verifier()
    for _ in range(CHALLENGES_PER_PEER_MAX):
        _challenge(verifier)
    with pytest.raises(UnavailableError) as caught:
        _challenge(verifier)
    assert caught.value.reason == "attestation.challenge.limit"
    _ask(verifier, peer="q")
    _challenge(verifier, now_ns=CHALLENGE_SECONDS * 10**9)


def test_addresses_together_cannot_take_more_than_there_are() -> None:
    verifier = _verifier()
    for number in range(CHALLENGES_MAX):
        _ask(verifier, peer=str(number))
    with pytest.raises(UnavailableError) as caught:
        _ask(verifier, peer="another")
    assert caught.value.reason == "attestation.challenge.limit"


@pytest.mark.parametrize("length", [1, INTRODUCTION_BYTES_MAX + 1])
def test_introduction_that_the_type_has_not_is_refused(length: int) -> None:
    with pytest.raises(VerificationError) as caught:
        _ask(_verifier(), introduction=bytes(length))
    assert caught.value.reason == "attestation.introduction.malformed"
    assert ("allowed" in str(caught.value)) == (length > INTRODUCTION_BYTES_MAX)


def test_runtime_data_has_one_encoding() -> None:
    encoded = _data(_challenge(_verifier())).encode()
    assert RuntimeData.decode(encoded).encode() == encoded
    value = json.loads(encoded)
    for other in (
        json.dumps(value).encode(),
        encoded + b" ",
        json.dumps({**value, "more": "x"}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({k: v for k, v in value.items() if k != "role"}).encode(),
        json.dumps({**value, "nonce": 7}, sort_keys=True, separators=(",", ":")).encode(),
        encoded.replace(b'"nonce":"', b'"nonce":"A', 1),
        encoded.replace(b"0c0d0e0f", b"0C0D0E0F", 1),
        encoded.replace(b"0c0d0e0f", b"0c0d 0e0f", 1),
        encoded.replace(b"sealane-attestation/2", b"sealane-attestation/1", 1),
        b"[]",
        b"\xff",
        b"[" * 4000,
        b"x" * 5000,
    ):
        with pytest.raises(VerificationError) as caught:
            RuntimeData.decode(other)
        assert caught.value.reason == "attestation.runtime_data.malformed"


def test_every_byte_flip_of_runtime_data_is_refused() -> None:
    verifier = _verifier()
    encoded = _data(_challenge(verifier)).encode()
    evidence = DRIVER.evidence(RuntimeData.decode(encoded).binding())
    for position in range(0, len(encoded), 3):
        challenge = _challenge(verifier, now_ns=position * 10**12)
        changed = bytearray(encoded)
        changed[position] ^= 1
        with pytest.raises(VerificationError):
            _present(verifier, challenge, bytes(changed), evidence, now_ns=position * 10**12)


def test_key_file_that_is_no_ed25519_key_is_refused() -> None:
    rsa_like = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    assert SoftwareKey.parse(DRIVER.pem(), source="k").fingerprint == DRIVER.fingerprint
    for pem in (b"", b"nonsense", rsa_like):
        with pytest.raises(UsageError, match=r"k\.pem: "):
            SoftwareKey.parse(pem, source="k.pem")
