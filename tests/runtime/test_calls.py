"""Authorization and error mapping: each check refuses by itself; the tables are complete."""

import asyncio
import datetime as dt
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealane import errors
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.call_proof import CallEnds, CallProver, request_digest
from sealane.crypto.certificates import LIFETIME, CertificateAuthority, Subject, verify_leaf
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.runtime.authorizers import (
    ALLOWED_ROLES,
    PROOF_KEY,
    RESULT_KEY,
    UNPROVED,
    VERIFIER_KEY,
    Authorizer,
    Refused,
    TlsOnly,
    no_record,
)
from sealane.daemon.runtime.calls import spread
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import CERTIFIED, server_options
from sealane.errors import Error, VerificationError
from sealane.protocol.status import REASON_KEY, error_of, one_line, status_of
from sealane.protocol.v1 import (
    broker_pb2,
    calls_pb2,
    devices_pb2,
    sessions_pb2,
    storage_pb2,
    trust_pb2,
)
from trust.results import Metadata, result_for

AUTHORITY = CertificateAuthority.create(broker="b", now=utc_now())
METRICS = Metrics()
KEM = X25519KemKey.create()
SERVER = "spiffe://sealane/target/s"
_SUBJECT = Subject(
    node="n", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=KEM.public_key
)
METHOD = "/sealane.v1.Storage/OpenQueue"
REQUEST = b"request"


class Context:
    """A call's context with the properties of its connection."""

    def __init__(
        self, properties: Mapping[str, list[bytes]], metadata: Metadata | None = None
    ) -> None:
        self._properties = properties
        self.metadata = _result(properties) if metadata is None else metadata

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return self._properties

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [*self.metadata.items()]


def _leaf(
    role: str = "gateway",
    *,
    tenant: str = "t",
    now: dt.datetime | None = None,
    authority: CertificateAuthority = AUTHORITY,
) -> bytes:
    subject = Subject(
        node="n",
        role=role,
        tenant=tenant,
        incarnation=bytes(16),
        kem_public_key=KEM.public_key,
    )
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return authority.issue(subject, key, now=now or utc_now()).public_bytes(Encoding.PEM)


def _result(properties: Mapping[str, list[bytes]], **options: Any) -> Metadata:
    """Return the result that goes with the leaf of the connection, if it has a good one."""
    try:
        leaf = x509.load_pem_x509_certificate(properties["x509_pem_cert"][0])
        subject = verify_leaf(leaf, anchor=AUTHORITY.certificate, now=utc_now())
    except (KeyError, IndexError, ValueError, VerificationError):
        return {}
    return result_for(AUTHORITY, subject, leaf, now=utc_now(), **options)


async def _admit(caller: Subject, leaf: x509.Certificate, result: AttestationResult) -> bool:
    assert result.subject == caller.spiffe_id
    if caller.tenant == "refused":
        raise VerificationError("node.revoked", "revoked")
    assert caller.node == "n"
    assert leaf.not_valid_after_utc > utc_now()
    return False


def _authorizer(refused: Refused = no_record) -> Authorizer:
    return Authorizer(
        TrustAnchors(AUTHORITY.certificate),
        server=SERVER,
        admit=_admit,
        metrics=METRICS,
        refused=refused,
    )


def _prover(authorizer: Authorizer, caller: Subject = _SUBJECT) -> CallProver:
    key = authorizer.call_keys.key_for(caller)
    ends = CallEnds(server=SERVER, caller=caller.spiffe_id, incarnation=caller.incarnation)
    return CallProver.open(key.key_id, key.sealed, ends=ends, kem=KEM)


async def _authorize(
    properties: Mapping[str, list[bytes]],
    method: str = METHOD,
    *,
    metadata: Metadata | None = None,
    authorizer: Authorizer | None = None,
) -> None:
    """Make a call that proves itself, unless `metadata` says otherwise."""
    authorizer = authorizer or _authorizer()
    context: Any = Context(properties, metadata)
    try:
        caller = authorizer.caller(context)
    except VerificationError:
        caller = _SUBJECT
    proof = _prover(authorizer, caller).prove(method, REQUEST)
    context.metadata = {PROOF_KEY: proof, **context.metadata}
    await authorizer.authorize(method, context, request_digest(REQUEST))


def _good() -> dict[str, list[bytes]]:
    return {"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [_leaf()]}


async def test_good_caller_is_known() -> None:
    context: Any = Context(_good())
    await _authorize(_good())
    assert _authorizer().caller(context).spiffe_id == "spiffe://sealane/gateway/n"


async def test_each_check_refuses_alone() -> None:
    stranger = CertificateAuthority.create(broker="b", now=utc_now())
    for change, reason in (
        ({"ssl_tls_version": [b"TLSv1.2"]}, "call.tls.unauthenticated"),
        ({"ssl_tls_version": []}, "call.tls.unauthenticated"),
        ({"x509_pem_cert": []}, "call.certificate.unauthenticated"),
        ({"x509_pem_cert": [b"nonsense"]}, "certificate.profile"),
        ({"x509_pem_cert": [_leaf(authority=stranger)]}, "certificate.issuer"),
        ({"x509_pem_cert": [_leaf(now=utc_now() - LIFETIME)]}, "certificate.expired"),
        ({"x509_pem_cert": [_leaf("fabric")]}, "call.role.refused"),
        ({"x509_pem_cert": [_leaf(tenant="refused")]}, "node.revoked"),
    ):
        with pytest.raises(VerificationError) as caught:
            await _authorize({**_good(), **change})
        assert caught.value.reason == reason


async def test_stolen_or_missing_result_is_refused() -> None:
    mine, others = _good(), _good()
    stranger = CertificateAuthority.create(broker="b", now=utc_now())
    leaf = x509.load_pem_x509_certificate(mine["x509_pem_cert"][0])
    subject = verify_leaf(leaf, anchor=AUTHORITY.certificate, now=utc_now())
    good = _result(mine)
    forged = result_for(stranger, subject, leaf, now=utc_now())
    for metadata, reason in (
        ({}, "token.missing.unauthenticated"),
        ({RESULT_KEY: good[RESULT_KEY]}, "token.missing.unauthenticated"),
        ({VERIFIER_KEY: good[VERIFIER_KEY]}, "token.missing.unauthenticated"),
        ({**good, RESULT_KEY: "a.b.c"}, "token.malformed"),
        ({**good, VERIFIER_KEY: b"nonsense"}, "certificate.profile"),
        # That of another machine, over our own connection.
        (_result(others), "token.holder.mismatch"),
        (
            result_for(AUTHORITY, replace(subject, role="fabric"), leaf, now=utc_now()),
            "token.subject.mismatch",
        ),
        (forged, "certificate.issuer"),
        ({**good, RESULT_KEY: forged[RESULT_KEY]}, "token.signature"),
    ):
        before = METRICS.token_refusals.labels(reason)._value.get()
        with pytest.raises(VerificationError) as caught:
            await _authorize(mine, metadata=metadata)
        assert caught.value.reason == reason
        assert METRICS.token_refusals.labels(reason)._value.get() == before + 1


async def _refused(
    authorizer: Authorizer, proof: object, *, method: str = METHOD, request: bytes = REQUEST
) -> str:
    """Call with that proof; returns why it was refused, or nothing."""
    good = _good()
    context: Any = Context(good)
    if proof is not None:
        context.metadata = {**context.metadata, PROOF_KEY: proof}
    try:
        await authorizer.authorize(method, context, request_digest(request))
    except VerificationError as error:
        return error.reason
    return ""


async def test_a_proof_is_of_one_call_of_one_process_at_one_server() -> None:
    told: list[tuple[str, str, str]] = []

    async def note(*refusal: str) -> None:
        told.append(refusal)  # type: ignore[arg-type]

    here, elsewhere = _authorizer(note), _authorizer()
    prover, other = _prover(here), _prover(elsewhere)
    assert await _refused(here, None) == "call.proof.missing"
    assert await _refused(here, "text") == "call.proof.missing"
    assert await _refused(here, b"x" * 55) == "call.proof.malformed"
    assert await _refused(here, bytes(56)) == "call.proof.unknown_key"
    assert await _refused(here, other.prove(METHOD, REQUEST)) == "call.proof.unknown_key"
    proof = prover.prove(METHOD, REQUEST)
    another = "/sealane.v1.Storage/DeleteNamespace"
    assert await _refused(here, proof, method=another) == "call.proof.mismatch"
    assert await _refused(here, proof, request=b"another") == "call.proof.mismatch"
    later = proof[:23] + bytes([proof[23] + 1]) + proof[24:]
    assert await _refused(here, later) == "call.proof.mismatch"
    assert await _refused(here, proof[:-1] + bytes([proof[-1] ^ 1])) == "call.proof.mismatch"
    assert await _refused(here, proof) == ""
    assert await _refused(here, proof) == "call.proof.replayed"
    reasons = [reason for _, _, reason in told]
    assert len(reasons) == 10
    assert {subject for _, subject, _ in told} == {_SUBJECT.spiffe_id}
    # Who only reads what anybody may read needs none.
    assert await _refused(here, None, method=next(iter(UNPROVED))) == ""


async def test_another_process_of_the_same_node_needs_a_key_of_its_own() -> None:
    """A leaf of another incarnation or KEM key doesn't go with the key that was given out."""
    authorizer = _authorizer()
    for other in (
        replace(_SUBJECT, incarnation=b"o" * 16),
        replace(_SUBJECT, kem_public_key=X25519KemKey.create().public_key),
    ):
        proof = _prover(authorizer).prove(METHOD, REQUEST)
        with pytest.raises(VerificationError) as caught:
            authorizer.call_keys.check(
                other, proof, method=METHOD, request_digest=request_digest(REQUEST)
            )
        assert caught.value.reason == "call.proof.unknown_key"


async def test_a_stream_under_way_is_not_asked_for_another_proof() -> None:
    authorizer = _authorizer()
    context: Any = Context(_good())
    await authorizer.reauthorize(METHOD, context)
    context = Context(_good() | {"x509_pem_cert": [_leaf(tenant="refused")]})
    with pytest.raises(VerificationError):
        await authorizer.reauthorize(METHOD, context)


async def test_result_ends_with_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    good = _good()
    metadata = _result(good)
    await _authorize(good, metadata=metadata)
    monkeypatch.setattr("sealane.daemon.runtime.authorizers.verify_leaf", lambda *_, **__: _SUBJECT)
    monkeypatch.setattr("sealane.daemon.runtime.authorizers.utc_now", lambda: utc_now() + LIFETIME)
    with pytest.raises(VerificationError) as caught:
        await _authorize(good, metadata=metadata)
    assert caught.value.reason == "token.expired"


async def test_enrolment_takes_tls_1_3_only() -> None:
    for version in ([b"TLSv1.2"], []):
        refused: Any = Context({"ssl_tls_version": version})
        with pytest.raises(VerificationError) as caught:
            await TlsOnly().authorize("/sealane.v1.Attestation/GetChallenge", refused, b"")
        assert caught.value.reason == "call.tls.unauthenticated"
    allowed: Any = Context({"ssl_tls_version": [b"TLSv1.3"]})
    await TlsOnly().authorize("/sealane.v1.Attestation/GetChallenge", allowed, b"")


def test_only_connections_of_other_machines_have_an_age() -> None:
    remote, local = (dict(server_options(quota)) for quota in (CERTIFIED, None))
    assert remote["grpc.max_connection_age_ms"] == 600_000
    assert "grpc.max_connection_age_ms" not in local
    assert remote["grpc.max_receive_message_length"] == 256 << 10
    assert local["grpc.max_receive_message_length"] == 1 << 20


def test_text_that_travels_is_one_bounded_line() -> None:
    assert one_line(errors.UsageError("a.b", "first\nsecond")) == "first"
    assert len(one_line(errors.UsageError("a.b", "x" * 100_000))) == 1000


async def test_method_without_a_row_is_refused() -> None:
    with pytest.raises(VerificationError) as caught:
        await _authorize(_good(), "/sealane.v1.Storage/Format")
    assert caught.value.reason == "call.role.refused"


def _fields(message: Any, seen: frozenset[str] = frozenset()) -> list[Any]:
    """Every field of a message and of what is in it."""
    if message.full_name in seen:
        return []
    inner = [f.message_type for f in message.fields if f.message_type]
    below = [_fields(each, seen | {message.full_name}) for each in inner]
    return [*message.fields, *itertools.chain(*below)]


def test_table_has_exactly_the_methods_of_the_mutual_tls_services() -> None:
    services = [
        broker_pb2.DESCRIPTOR.services_by_name["Broker"],
        devices_pb2.DESCRIPTOR.services_by_name["Devices"],
        storage_pb2.DESCRIPTOR.services_by_name["Storage"],
        sessions_pb2.DESCRIPTOR.services_by_name["SessionPeer"],
        trust_pb2.DESCRIPTOR.services_by_name["Trust"],
        calls_pb2.DESCRIPTOR.services_by_name["CallKeys"],
    ]
    methods = {f"/{s.full_name}/{m.name}": m for s in services for m in s.methods}
    assert set(ALLOWED_ROLES) == methods.keys()
    # Everything else is proved: what is added here must tell no secret and change nothing.
    assert {"/sealane.v1.CallKeys/GetCallKey"} == UNPROVED
    # The bytes that a proof is over are those that are sent: of a map their order isn't fixed.
    for method in methods.values():
        assert not any(
            f.message_type and f.message_type.GetOptions().map_entry
            for f in _fields(method.input_type)
        )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("a.b", "x"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UsageError("a.not_found", "x"), grpc.StatusCode.NOT_FOUND),
        (errors.UsageError("a.exists", "x"), grpc.StatusCode.ALREADY_EXISTS),
        (errors.UsageError("a.state", "x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.VerificationError("a.b", "x"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.VerificationError("a.unauthenticated", "x"), grpc.StatusCode.UNAUTHENTICATED),
        (errors.ProtocolError("a.b", "x"), grpc.StatusCode.ABORTED),
        (errors.LeaseError("lease.b", "x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.VerificationError("lease.b", "x"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.UnavailableError("a.b", "x"), grpc.StatusCode.UNAVAILABLE),
        (errors.UnavailableError("a.limit", "x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Error("a.b", "x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_error_crosses_the_wire_as_itself(error: Error, code: grpc.StatusCode) -> None:
    assert status_of(error) is code
    sent = grpc.aio.AioRpcError(
        code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((REASON_KEY, error.reason)),
        details=str(error.args[0]),
    )
    received = error_of(sent, peer="p")
    assert type(received) is type(error)
    assert (received.reason, received.args) == (error.reason, error.args)


def test_silent_peer_is_named_in_one_line() -> None:
    sent = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="connection refused\nmore",
    )
    received = error_of(sent, peer="target s at h:1")
    assert str(received) == (
        "target s at h:1 can't be reached: connection refused [peer.unreachable]"
    )


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        ("UNAVAILABLE", "… OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: …", "peer.certificate"),
        ("UNAVAILABLE", "… Hostname Verification Check failed.", "peer.certificate"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "peer.deadline_exceeded"),
        ("UNIMPLEMENTED", "Method not found!", "peer.unimplemented"),
    ],
)
def test_what_grpc_says_itself_names_the_peer(code: str, details: str, reason: str) -> None:
    sent = grpc.aio.AioRpcError(
        grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details=details
    )
    received = error_of(sent, peer="target s at h:1")
    assert received.reason == reason
    assert str(received).startswith("target s at h:1")


def test_reason_that_looks_like_none_is_not_taken_over() -> None:
    sent = grpc.aio.AioRpcError(
        grpc.StatusCode.ABORTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((REASON_KEY, "x" * 500 + ".y")),
        details="d",
    )
    assert error_of(sent, peer="p").reason == "peer.aborted"


async def test_other_tasks_run_while_a_long_list_is_made() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    assert [each async for each in spread(range(1000))] == [*range(1000)]
    task.cancel()
    assert turns >= 1000 // 16
