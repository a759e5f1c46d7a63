"""The trace of the calling process, which its calls to the daemon belong to.

It is OpenTelemetry's current span, if this process uses OpenTelemetry, else `TRACEPARENT` in the
environment.
"""

import os
import sys
from typing import Any, Final

import grpc

from sealane.protocol.trace_context import TRACEPARENT_KEY, format_traceparent, parse_traceparent

TRACEPARENT_VARIABLE: Final = "TRACEPARENT"
"""OpenTelemetry's name for the context that a process is started with."""


def current_traceparent() -> str:
    """Return the `traceparent` for a call made now; "" if there is no trace."""
    # The client doesn't need OpenTelemetry; a process that has a span has loaded it.
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        span = api.get_current_span().get_span_context()
        if span.is_valid:
            return format_traceparent(span.trace_id, span.span_id, span.trace_flags)
    told = os.environ.get(TRACEPARENT_VARIABLE, "")
    return told if parse_traceparent(told) is not None else ""


def _added(details: Any) -> Any:
    traceparent = current_traceparent()
    if not traceparent:
        return details
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (TRACEPARENT_KEY, traceparent))
    return details._replace(metadata=metadata)


class TraceContext(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the trace to each unary call."""

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make the call with the trace in its metadata."""
        return await continuation(_added(client_call_details), request)
