"""The trace of the calling process, which its calls to the daemon belong to.

It is OpenTelemetry's current span, if this process uses OpenTelemetry; each call is then a span of
its own below that, which the process's own tracer provider sends or doesn't. A command is one step
of its caller's trace, `TRACEPARENT` in the environment; a job, which runs for weeks, is not.

Only the trace goes to the daemon: no baggage, no `tracestate`.
"""

import os
import sys
from typing import Any, Final

import grpc

from sealane import __version__
from sealane.protocol.status import error_of
from sealane.protocol.trace_context import TRACEPARENT_KEY, format_traceparent, parse_traceparent

TRACEPARENT_VARIABLE: Final = "TRACEPARENT"
"""OpenTelemetry's name for the context that a process is started with."""


def told_traceparent() -> str:
    """Return the `traceparent` that this process was started with; "" if there is none."""
    told = os.environ.get(TRACEPARENT_VARIABLE, "")
    return told if parse_traceparent(told) is not None else ""


def interceptors(traceparent: str = "") -> list[grpc.aio.ClientInterceptor]:
    """Return what adds the current trace to each call, or `traceparent` if there is none."""
    return [_Unary(traceparent), _Stream(traceparent)]


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    """Makes a span of each call, if the process uses OpenTelemetry."""

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make the call in its trace."""
        api = _opentelemetry()
        if api is None:
            return await continuation(_with(client_call_details, self._traceparent), request)
        method = _name_of(client_call_details.method)
        span = api.get_tracer("sealane.client", __version__).start_span(
            method,
            context=api.set_span_in_context(current(api, self._traceparent)),
            kind=api.SpanKind.CLIENT,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )
        call = await continuation(_with(client_call_details, _traceparent_of(span)), request)
        reason = "cancelled"
        try:
            await call
            reason = ""
        except grpc.aio.AioRpcError as error:
            reason = error_of(error, peer="sealaned").reason
        finally:
            if reason:
                span.set_attribute("sealane.reason", reason)
                span.set_status(api.StatusCode.ERROR, reason)
            span.end()
        # It has its answer, or raises its error again.
        return call


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    """Adds the trace to a stream: its opening is a span of the daemon, and none here."""

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Begin the call in its trace."""
        api = _opentelemetry()
        traceparent = self._traceparent
        if api is not None:
            traceparent = _traceparent_of(current(api, self._traceparent))
        return await continuation(_with(client_call_details, traceparent), request)


def _opentelemetry() -> Any:
    """Return OpenTelemetry's API if this process has loaded it, else None."""
    # The client doesn't need it; a process that has a span has loaded it.
    return sys.modules.get("opentelemetry.trace")


def current(api: Any, traceparent: str) -> Any:
    """Return the current span, or that of `traceparent` if there is none.

    `api` is the module `opentelemetry.trace`.
    """
    span_here = api.get_current_span()
    ids = parse_traceparent(traceparent)
    if span_here.get_span_context().is_valid or ids is None:
        return span_here
    trace, span, flags = ids
    context = api.SpanContext(trace, span, is_remote=True, trace_flags=api.TraceFlags(flags))
    return api.NonRecordingSpan(context)


def _traceparent_of(span: Any) -> str:
    ids = span.get_span_context()
    if not ids.is_valid:
        return ""
    return format_traceparent(ids.trace_id, ids.span_id, ids.trace_flags)


def _with(details: Any, traceparent: str) -> Any:
    """Return a call's details with the trace in its metadata."""
    if not traceparent:
        return details
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (TRACEPARENT_KEY, traceparent))
    return details._replace(metadata=metadata)


def _name_of(method: str | bytes) -> str:
    name = method.decode() if isinstance(method, bytes) else method
    return name.removeprefix("/")
