"""Checks and bookkeeping of every gRPC call: authorization, correlation id, errors, metrics.

A stream is authorized again while it lasts.
"""

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import structlog

from sealane.crypto.call_proof import request_digest
from sealane.daemon.runtime.authorizers import Authorizer, Context, TlsOnly
from sealane.daemon.runtime.call_completion import COMPLETED, CallCompletion
from sealane.daemon.runtime.line_limit import LineLimit
from sealane.daemon.runtime.local_calls import LocalAuthorizer
from sealane.daemon.runtime.logs import CORRELATION_KEY, get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.stream_limit import STREAM_WRITE_SECONDS, taken_in_time
from sealane.daemon.runtime.traces import PASSED_ON, Traces
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.status import REASON_KEY, one_line, status_of
from sealane.protocol.trace_context import TRACEPARENT_KEY

STREAM_CHECK_SECONDS: Final = 5.0
"""The longest time by which a stream outlives its caller's authorization, while the caller takes
what is sent; one that takes nothing keeps it for `STREAM_WRITE_SECONDS` at most."""

_Item = TypeVar("_Item")

PAGE_SIZE_MAX: Final = 1000
_ITEMS_AT_ONCE: Final = 16


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
                async with self._reported(method, context):
                    if self._authorizer is not None:
                        await self._authorizer.authorize(method, context, received.digest)
                    with self._traced(method, caller):
                        response = await perform(received.message, context)
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
        async with self._reported(method, context):
            async for response in self._checked(method, context, digest, begin):
                yield response

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

    @contextlib.asynccontextmanager
    async def _reported(self, method: str, context: Context) -> AsyncIterator[None]:
        """Count how a call ends, and tell its caller why it failed."""
        try:
            yield
        except grpc.aio.AbortError:
            self._count(method, "ABORTED")
            raise
        except Error as error:
            await self._refuse(method, error, context)
        except Exception as error:  # noqa: BLE001 - the servicer boundary
            await self._fail(method, error, context)
        else:
            self._count(method, "OK")

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


async def spread(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yield items, and let the event loop run between some: each takes up to 0.4 ms to verify."""
    for number, item in enumerate(items):
        if number % _ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


def page_limit(page_size: int) -> int:
    """Return the limit of entries for a requested page size; 0 requests the maximum."""
    return min(page_size, PAGE_SIZE_MAX) if page_size > 0 else PAGE_SIZE_MAX
