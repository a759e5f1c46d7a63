"""Who may make which call of the TLS servers.

gRPC checks certificates only at the handshake, so each call is authorized: it needs TLS 1.3, an
unexpired leaf of this broker, a role in the method's row of `ALLOWED_ROLES`, a proof that the call
comes from the attested process, and the server's own admission, which knows revoked callers.
"""

import datetime as dt
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.ear import AttestationResult, verify_result
from sealane.crypto.certificates import Subject, verify_leaf, verify_verifier
from sealane.crypto.roles import NODE_ROLES, Role
from sealane.daemon.runtime.call_keys import CallKeys
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError

_GATEWAY: Final = frozenset({Role.GATEWAY})
_TARGET: Final = frozenset({Role.TARGET})
_STORAGE: Final = frozenset({Role.GATEWAY, Role.TARGET})
_NODES: Final = frozenset(NODE_ROLES)

# Methods of the mutual-TLS servers without a row are refused.
ALLOWED_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    "/sealane.v1.Broker/RegisterVolume": _GATEWAY,
    "/sealane.v1.Broker/GetVolumeDescriptor": _STORAGE,
    "/sealane.v1.Broker/ListVolumeDescriptors": _STORAGE,
    "/sealane.v1.Broker/UnregisterVolume": _GATEWAY,
    "/sealane.v1.Broker/FinishFilling": _GATEWAY,
    "/sealane.v1.Broker/BeginResize": _GATEWAY,
    "/sealane.v1.Broker/FinishResize": _GATEWAY,
    "/sealane.v1.Broker/SetVolumeShare": _GATEWAY,
    "/sealane.v1.Broker/RemoveVolumeShare": _GATEWAY,
    "/sealane.v1.Broker/GetVolumeKey": _GATEWAY,
    "/sealane.v1.Broker/GrantLease": _GATEWAY,
    "/sealane.v1.Broker/ReturnLease": _GATEWAY,
    "/sealane.v1.Devices/OpenDevice": _STORAGE,
    "/sealane.v1.Devices/ConfirmDevice": _STORAGE,
    "/sealane.v1.Devices/AdvanceAnchor": _STORAGE,
    "/sealane.v1.Devices/CloseDevice": _STORAGE,
    "/sealane.v1.Devices/ReportFindings": _TARGET,
    "/sealane.v1.Devices/ReportTakeOver": _TARGET,
    "/sealane.v1.Storage/CreateNamespace": _GATEWAY,
    "/sealane.v1.Storage/DeleteNamespace": _GATEWAY,
    "/sealane.v1.Storage/ResizeNamespace": _GATEWAY,
    "/sealane.v1.Storage/OpenQueue": _GATEWAY,
    "/sealane.v1.Storage/ReleaseFailOverGroup": _GATEWAY,
    "/sealane.v1.Storage/BatchGetNamespaces": _GATEWAY,
    "/sealane.v1.Storage/GetNamespace": _GATEWAY,
    "/sealane.v1.Storage/GetTarget": _GATEWAY,
    "/sealane.v1.Storage/WatchEvents": _GATEWAY,
    "/sealane.v1.Storage/StartJob": _GATEWAY,
    "/sealane.v1.Storage/ChangeJob": _GATEWAY,
    "/sealane.v1.SessionPeer/Establish": frozenset({Role.FABRIC}),
    "/sealane.v1.Trust/GetPeer": frozenset({Role.GATEWAY, Role.FABRIC}),
    "/sealane.v1.Trust/AuthorizePeers": _NODES,
    "/sealane.v1.CallKeys/GetCallKey": _NODES,
}
UNPROVED: Final = frozenset({"/sealane.v1.CallKeys/GetCallKey"})
"""Methods that need only a leaf and its TLS key, since they reveal no secret and change nothing.

All others need a proof under the caller's call key."""
PROOF_KEY: Final = "sealane-proof-bin"
"""Metadata with a call's proof (sealane.crypto.call_proof)."""
RESULT_KEY: Final = "sealane-token"
VERIFIER_KEY: Final = "sealane-verifier-bin"
"""Metadata of every call: the attestation result, and the certificate of the key that signed it."""
ATTEST_AGAIN_KEY: Final = "sealane-attest-again"
"""Trailing metadata of an answer to a caller that attested under a policy about to be replaced."""
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Admit: TypeAlias = Callable[[Subject, x509.Certificate, AttestationResult], Awaitable[bool]]
"""The server's own admission: raises unless this caller, with this leaf and result, may act now.
Returns True if the caller should attest again soon."""
Refused: TypeAlias = Callable[[str, str, str], Awaitable[None]]
"""Called with (method, caller's SPIFFE id or UNKNOWN_CALLER, reason id) of a refused call."""
UNKNOWN_CALLER: Final = "unknown"


async def no_record(method: str, subject: str, reason: str) -> None:
    """Record nothing: for nodes without an audit log, whose logs and metrics have each refusal."""


class TlsOnly:
    """Checks callers of the attestation listener, who have no certificate yet."""

    def __init__(self, *, refused: Refused = no_record) -> None:
        self._refused = refused

    async def authorize(
        self,
        method: str,
        context: Context,
        digest: bytes,  # noqa: ARG002 - a caller without a certificate can't prove its calls
    ) -> None:
        """Raise VerificationError `call.tls.unauthenticated` unless the call came by TLS 1.3."""
        try:
            _check_tls(context.auth_context())
        except VerificationError as error:
            await self._refused(method, UNKNOWN_CALLER, error.reason)
            raise

    async def reauthorize(self, method: str, context: Context) -> None:
        """Check the same for a running stream."""
        await self.authorize(method, context, b"")


class Authorizer:
    """Checks callers of the mutual-TLS server with SPIFFE id `server`.

    `anchors` are the brokers' trust anchors. Callers prove their calls with keys of `call_keys`.
    """

    def __init__(
        self,
        anchors: TrustAnchors,
        *,
        server: str,
        admit: Admit,
        metrics: Metrics,
        refused: Refused = no_record,
    ) -> None:
        self._anchors = anchors
        self._admit = admit
        self._metrics = metrics
        self._refused = refused
        self.call_keys = CallKeys(server)

    async def authorize(self, method: str, context: Context, digest: bytes) -> None:
        """Raise VerificationError if the caller may not call `method`, after calling `refused`.

        `digest` is that of the request as received. Uses up the call's proof.
        """

        def prove(caller: Subject) -> None:
            if method not in UNPROVED:
                proof = dict(context.invocation_metadata() or ()).get(PROOF_KEY)
                self.call_keys.check(caller, proof, method=method, request_digest=digest)

        await self._authorize(method, context, prove)

    async def reauthorize(self, method: str, context: Context) -> None:
        """Raise VerificationError if the caller of a running stream has lost its authorization.

        The proof isn't checked: it was used up when the stream began.
        """
        await self._authorize(method, context, lambda _: None)

    async def _authorize(
        self, method: str, context: Context, prove: Callable[[Subject], None]
    ) -> None:
        subject = UNKNOWN_CALLER
        try:
            caller = self.caller(context)
            subject = caller.spiffe_id
            await self._check(method, caller, context, prove)
        except VerificationError as error:
            await self._refused(method, subject, error.reason)
            raise

    async def _check(
        self, method: str, caller: Subject, context: Context, prove: Callable[[Subject], None]
    ) -> None:
        allowed = ALLOWED_ROLES.get(method, frozenset())
        if caller.role not in allowed:
            raise VerificationError(
                "call.role.refused",
                f"a {caller.role} may not call {method}; allowed: {', '.join(sorted(allowed))}",
            )
        leaf = _leaf_of(context)
        result = self._result(caller, leaf, context)
        prove(caller)
        if await self._admit(caller, leaf, result):
            context.set_trailing_metadata(((ATTEST_AGAIN_KEY, "1"),))

    def _result(
        self, caller: Subject, leaf: x509.Certificate, context: Context
    ) -> AttestationResult:
        """Return the call's attestation result, which must be for `leaf`.

        VerificationError `token.…` or `certificate.…`.
        """
        now = utc_now()
        try:
            token, verifier = _token_of(context)
            result = check_result(token, verifier, anchors=self._anchors, now=now)
            result.check(leaf=leaf, subject=caller.spiffe_id, now=now)
        except VerificationError as error:
            self._metrics.token_refusals.labels(error.reason).inc()
            raise
        return result

    def caller(self, context: Context) -> Subject:
        """Return the caller; VerificationError `call.….unauthenticated` or `certificate.…`."""
        _check_tls(context.auth_context())
        leaf = _leaf_of(context)
        return self._anchors.checked(lambda anchor: verify_leaf(leaf, anchor=anchor, now=utc_now()))

    @staticmethod
    def certificate_digest(context: Context) -> bytes:
        """Return the SHA-256 of the caller's leaf (DER)."""
        return _leaf_of(context).fingerprint(SHA256())

    @staticmethod
    def token_digest(context: Context) -> bytes:
        """Return the SHA-256 of the call's attestation result."""
        return hashlib.sha256(_token_of(context)[0].encode()).digest()


def _check_tls(properties: Mapping[str, Any]) -> None:
    version = _property(properties, "ssl_tls_version")
    if version != b"TLSv1.3":
        raise VerificationError(
            "call.tls.unauthenticated", f"TLS version {version!r}; allowed: TLSv1.3"
        )


def _leaf_of(context: Context) -> x509.Certificate:
    pem = _property(context.auth_context(), "x509_pem_cert")
    if not pem:
        raise VerificationError(
            "call.certificate.unauthenticated", "the caller presented no certificate"
        )
    return _parse(pem)


def _property(properties: Mapping[str, Any], name: str) -> bytes:
    values = properties.get(name)
    return bytes(values[0]) if values else b""


@lru_cache(maxsize=256)
def _parse(pem: bytes) -> x509.Certificate:
    # Parsing is cached; signature, time and role are checked at every call.
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise VerificationError(
            "certificate.profile", "the caller's certificate can't be parsed"
        ) from error


def _token_of(context: Context) -> tuple[str, bytes]:
    metadata = dict(context.invocation_metadata() or ())
    token, verifier = metadata.get(RESULT_KEY), metadata.get(VERIFIER_KEY)
    if not isinstance(token, str) or not isinstance(verifier, bytes):
        raise VerificationError(
            "token.missing.unauthenticated", "the call has no attestation result"
        )
    return token, verifier


@lru_cache(maxsize=64)
def _parse_der(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise VerificationError(
            "certificate.profile", "the verifier's certificate can't be parsed"
        ) from error


def check_result(
    token: str, verifier: bytes, *, anchors: TrustAnchors, now: dt.datetime
) -> AttestationResult:
    """Return an attestation result signed by a verifier under `anchors`.

    The caller must check the result's subject and time. VerificationError `token.…` or
    `certificate.…`.
    """
    certificate = _parse_der(verifier)
    anchors.checked(lambda anchor: verify_verifier(certificate, anchor=anchor, now=now))
    return verified_result(token, verifier)


@lru_cache(maxsize=1024)
def verified_result(token: str, verifier: bytes) -> AttestationResult:
    """Return an attestation result signed by the key in `verifier`, an unchecked certificate (DER).

    The signature is checked once per result; subject and time must be checked at every call.
    VerificationError `token.…` or `certificate.profile`.
    """
    key = _parse_der(verifier).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise VerificationError("certificate.profile", "the verifier's key is not on P-384")
    return verify_result(token, verifier_key=key)
