"""Authorization and error mapping: each check refuses by itself; the tables are complete."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from sealane import errors
from sealane.crypto.attestation.ear import AttestationResult
from sealane.crypto.certificates import LIFETIME, CertificateAuthority, Subject, verify_leaf
from sealane.daemon.calls import ALLOWED_ROLES, RESULT_KEY, VERIFIER_KEY, Authorizer, TlsOnly
from sealane.daemon.clock import utc_now
from sealane.daemon.metrics import Metrics
from sealane.daemon.servers import CERTIFIED, server_options
from sealane.errors import Error, VerificationError
from sealane.protocol.status import REASON_KEY, error_of, one_line, status_of
from sealane.protocol.v1 import broker_pb2, devices_pb2, sessions_pb2, storage_pb2, trust_pb2
from trust.results import Metadata, result_for

AUTHORITY = CertificateAuthority.create(broker="b", now=utc_now())
METRICS = Metrics()
_SUBJECT = Subject(
    node="n", role="gateway", tenant="t", incarnation=bytes(16), kem_public_key=bytes(32)
)
METHOD = "/sealane.v1.Storage/OpenQueue"


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
        node="n", role=role, tenant=tenant, incarnation=bytes(16), kem_public_key=bytes(32)
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


def _authorizer() -> Authorizer:
    return Authorizer(AUTHORITY.certificate, admit=_admit, metrics=METRICS)


async def _authorize(properties: Mapping[str, list[bytes]], method: str = METHOD) -> None:
    context: Any = Context(properties)
    await _authorizer().authorize(method, context)


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
        context: Any = Context(mine, metadata)
        before = METRICS.token_refusals.labels(reason)._value.get()
        with pytest.raises(VerificationError) as caught:
            await _authorizer().authorize(METHOD, context)
        assert caught.value.reason == reason
        assert METRICS.token_refusals.labels(reason)._value.get() == before + 1


async def test_result_ends_with_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = Context(_good())
    await _authorizer().authorize(METHOD, context)
    monkeypatch.setattr("sealane.daemon.calls.verify_leaf", lambda *_, **__: _SUBJECT)
    monkeypatch.setattr("sealane.daemon.calls.utc_now", lambda: utc_now() + LIFETIME)
    with pytest.raises(VerificationError) as caught:
        await _authorizer().authorize(METHOD, context)
    assert caught.value.reason == "token.expired"


async def test_enrolment_takes_tls_1_3_only() -> None:
    for version in ([b"TLSv1.2"], []):
        refused: Any = Context({"ssl_tls_version": version})
        with pytest.raises(VerificationError) as caught:
            await TlsOnly().authorize("/sealane.v1.Attestation/GetChallenge", refused)
        assert caught.value.reason == "call.tls.unauthenticated"
    allowed: Any = Context({"ssl_tls_version": [b"TLSv1.3"]})
    await TlsOnly().authorize("/sealane.v1.Attestation/GetChallenge", allowed)


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


def test_table_has_exactly_the_methods_of_the_mutual_tls_services() -> None:
    services = [
        broker_pb2.DESCRIPTOR.services_by_name["Broker"],
        devices_pb2.DESCRIPTOR.services_by_name["Devices"],
        storage_pb2.DESCRIPTOR.services_by_name["Storage"],
        sessions_pb2.DESCRIPTOR.services_by_name["SessionPeer"],
        trust_pb2.DESCRIPTOR.services_by_name["Trust"],
    ]
    methods = {f"/{s.full_name}/{m.name}" for s in services for m in s.methods}
    assert set(ALLOWED_ROLES) == methods


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
