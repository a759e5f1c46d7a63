"""Checks and bookkeeping of every gRPC call: authorization, correlation id, errors, metrics.

Each call is authorized, because gRPC checks certificates only at the handshake. It needs TLS 1.3,
an unexpired leaf of this broker, a role in the method's row of `ALLOWED_ROLES`, a proof that the
call comes from the attested process, and the server's own admission, which knows revoked callers.
A stream is rechecked while it lasts.
"""

import asyncio
import contextlib
import datetime as dt
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.ear import AttestationResult, verify_result
from sealane.crypto.call_proof import request_digest
from sealane.crypto.certificates import Subject, verify_leaf, verify_verifier
from sealane.crypto.roles import NODE_ROLES, Role
from sealane.daemon.runtime.call_completion import COMPLETED, CallCompletion
from sealane.daemon.runtime.call_keys import CallKeys
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.line_limit import LineLimit
from sealane.daemon.runtime.local_calls import LocalAuthorizer
from sealane.daemon.runtime.logs import CORRELATION_KEY, get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.stream_limit import STREAM_WRITE_SECONDS, taken_in_time
from sealane.daemon.runtime.traces import PASSED_ON, Traces
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.status import REASON_KEY, one_line, status_of
from sealane.protocol.trace_context import TRACEPARENT_KEY

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
STREAM_CHECK_SECONDS: Final = 5.0
"""The longest time by which a stream outlives its caller's authorization, while the caller takes
what is sent; one that takes nothing keeps it for `STREAM_WRITE_SECONDS` at most."""

PAGE_SIZE_MAX: Final = 1000
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


@dataclass(frozen=True, slots=True)
class _Received:
    """A request, and the digest of its bytes as received."""

    message: Any
    digest: bytes


def _receiving(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], _Received]:
    """Return a deserializer that keeps the digest of the bytes received.

    Serializing the message again might give other bytes.
    """

    def receive(encoded: bytes) -> _Received:
        message = encoded if deserialize is None else deserialize(encoded)
        return _Received(message, request_digest(encoded))

    return receive


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every unary-unary and unary-stream method of a server.

    `authorizer` is a `LocalAuthorizer` on Unix sockets. Without one, all calls are allowed. `lines`
    limits how many refused calls are logged; the metric counts all of them.
    """

    def __init__(
        self,
        metrics: Metrics,
        authorizer: Authorizer | TlsOnly | LocalAuthorizer | None,
        traces: Traces = PASSED_ON,
        lines: LineLimit | None = None,
    ) -> None:
        self._metrics = metrics
        self._authorizer = authorizer
        self._traces = traces
        self._lines = lines
        self.completion = CallCompletion()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, wrapped in the checks."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        correlation = metadata.get(CORRELATION_KEY)
        if not isinstance(correlation, str) or not _is_correlation_id(correlation):
            correlation = secrets.token_hex(8)
        if handler.request_streaming:
            # Only reflection, a local service, has requests that are streams.
            if isinstance(self._authorizer, Authorizer | TlsOnly):
                return None
            return grpc.stream_stream_rpc_method_handler(
                self._dialogue(method, correlation, handler.stream_stream),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        traceparent = metadata.get(TRACEPARENT_KEY)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, correlation, traceparent, handler.unary_stream),
                request_deserializer=_receiving(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, correlation, traceparent, handler.unary_unary),
            request_deserializer=_receiving(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self,
        method: str,
        correlation: str,
        caller: str | bytes | None,
        behavior: Callable[[Any, Context], Awaitable[Any]],
    ) -> Callable[[_Received, Context], Awaitable[Any]]:
        perform = behavior
        if method in COMPLETED:

            async def perform(message: Any, context: Context) -> Any:
                work = partial(behavior, message, context)
                return await self.completion.run(method, work, caller=self._caller(context))

        async def answer(received: _Received, context: Context) -> Any:
            started = time.perf_counter()
            with structlog.contextvars.bound_contextvars(correlation_id=correlation, method=method):
                try:
                    if self._authorizer is not None:
                        await self._authorizer.authorize(method, context, received.digest)
                    with self._traced(method, caller):
                        response = await perform(received.message, context)
                except grpc.aio.AbortError:
                    self._count(method, "ABORTED")
                    raise
                except Error as error:
                    await self._refuse(method, error, context)
                except Exception as error:  # noqa: BLE001 - the servicer boundary
                    await self._fail(method, error, context)
                else:
                    self._count(method, "OK")
                    self._metrics.call_seconds.labels(method).observe(time.perf_counter() - started)
                    return response

        return answer

    def _traced(
        self, method: str, caller: str | bytes | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context in which an authorized call is part of its caller's trace.

        Strangers' calls and health checks belong to none.
        """
        if self._is_untraced(method):
            return contextlib.nullcontext()
        return self._traces.serve(method, caller)

    def _is_untraced(self, method: str) -> bool:
        return isinstance(self._authorizer, TlsOnly) or method.startswith("/grpc.health.")

    def _caller(self, context: Context) -> str:
        """Return who calls; "" on the Unix socket."""
        if isinstance(self._authorizer, Authorizer):
            return self._authorizer.caller(context).spiffe_id
        return ""

    def _stream(
        self,
        method: str,
        correlation: str,
        caller: str | bytes | None,
        behavior: Callable[[Any, Context], AsyncIterator[Any] | Awaitable[None]],
    ) -> Callable[[_Received, Context], AsyncIterator[Any]]:
        async def answer(received: _Received, context: Context) -> AsyncIterator[Any]:
            def begin() -> AsyncIterator[Any] | Awaitable[None]:
                responses = behavior(received.message, context)
                if not isinstance(responses, AsyncIterator) or self._is_untraced(method):
                    return responses
                return self._opened(method, correlation, caller, responses)

            async for response in self._answered(
                method, correlation, context, received.digest, begin
            ):
                yield response

        return answer

    def _dialogue(
        self,
        method: str,
        correlation: str,
        behavior: Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]],
    ) -> Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            begin = partial(behavior, requests, context)
            async for response in self._answered(method, correlation, context, b"", begin):
                yield response

        return answer

    async def _answered(
        self,
        method: str,
        correlation: str,
        context: Context,
        digest: bytes,
        begin: Callable[[], AsyncIterator[Any] | Awaitable[None]],
    ) -> AsyncIterator[Any]:
        """Yield the responses while the caller is authorized; refuse and count."""
        # For the rest of this task, which is the call's.
        structlog.contextvars.bind_contextvars(correlation_id=correlation, method=method)
        try:
            async for response in self._checked(method, context, digest, begin):
                yield response
        except grpc.aio.AbortError:
            self._count(method, "ABORTED")
            raise
        except Error as error:
            await self._refuse(method, error, context)
        except Exception as error:  # noqa: BLE001 - the servicer boundary
            await self._fail(method, error, context)
        else:
            self._count(method, "OK")

    async def _opened(
        self,
        method: str,
        correlation: str,
        caller: str | bytes | None,
        responses: AsyncIterator[Any],
    ) -> AsyncIterator[Any]:
        """Yield `responses`; the time to the first one is part of the caller's trace.

        Begins with the first message that is asked for, so after the caller was authorized.
        """
        with structlog.contextvars.bound_contextvars(correlation_id=correlation):
            opening = self._traces.open(method, caller)
        try:
            with opening:
                async for response in responses:
                    opening.end()
                    yield response
        finally:
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    async def _checked(
        self,
        method: str,
        context: Context,
        digest: bytes,
        begin: Callable[[], AsyncIterator[Any] | Awaitable[None]],
    ) -> AsyncIterator[Any]:
        """Yield the responses while the caller is authorized."""
        if self._authorizer is not None:
            await self._authorizer.authorize(method, context, digest)
        responses = begin()
        if not isinstance(responses, AsyncIterator):
            # The other form of a stream in gRPC, used by the health service: it writes to the
            # context.
            await self._while_authorized(method, context, responses)
            return
        if self._authorizer is None:
            async for response in responses:
                yield response
            return
        checked = time.monotonic()
        waiting: asyncio.Future[Any] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(responses))
                left = checked + STREAM_CHECK_SECONDS - time.monotonic()
                await asyncio.wait({waiting}, timeout=max(left, 0))
                if time.monotonic() >= checked + STREAM_CHECK_SECONDS:
                    await self._authorizer.reauthorize(method, context)
                    checked = time.monotonic()
                if waiting.done():
                    done, waiting = waiting, None
                    try:
                        response = done.result()
                    except StopAsyncIteration:
                        return
                    with taken_in_time(partial(self._refuse_unread, method, context)):
                        yield response
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait({waiting})
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    async def _while_authorized(
        self, method: str, context: Context, responses: Awaitable[None]
    ) -> None:
        running = asyncio.ensure_future(responses)
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=STREAM_CHECK_SECONDS)
                if not running.done() and self._authorizer is not None:
                    await self._authorizer.reauthorize(method, context)
            running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def _refuse_unread(self, method: str, context: Context) -> None:
        error = UnavailableError(
            "call.stream.unread", f"the caller took no message for {STREAM_WRITE_SECONDS:.0f} s"
        )
        # `abort` raises: the first if it could be told, the second if its connection has ended.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError):
            await self._refuse(method, error, context)

    async def _refuse(self, method: str, error: Error, context: Context) -> None:
        code = status_of(error)
        text = one_line(error)
        self._count(method, code.name)
        self._metrics.refusals.labels(error.reason).inc()
        if self._lines is None or self._lines.allow():
            get_logger().warning("call_refused", method=method, reason=error.reason, message=text)
        await context.abort(code, text, trailing_metadata=((REASON_KEY, error.reason),))

    async def _fail(self, method: str, error: Exception, context: Context) -> None:
        self._count(method, "INTERNAL")
        get_logger().error("call_failed", method=method, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL,
            "internal error; the daemon's log has details under this call's correlation id",
            trailing_metadata=((REASON_KEY, "daemon.internal"),),
        )

    def _count(self, method: str, code: str) -> None:
        self._metrics.calls.labels(method, code).inc()


def _is_correlation_id(text: str) -> bool:
    return 1 <= len(text) <= 64 and text.isascii() and text.replace("-", "").isalnum()


def parse_uuid(text: str, *, what: str) -> uuid.UUID:
    """Parse a caller's id of `what`, a noun for the message; UsageError `request.malformed`."""
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise UsageError("request.malformed", f"{what} {text[:80]!r}; allowed: a UUID") from error


def page_limit(page_size: int) -> int:
    """Return the limit of entries for a requested page size; 0 requests the maximum."""
    return min(page_size, PAGE_SIZE_MAX) if page_size > 0 else PAGE_SIZE_MAX
