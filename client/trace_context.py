"""The trace of the calling process, which its calls to the daemon belong to.

It is OpenTelemetry's current span, if this process uses OpenTelemetry. A command is one step of its
caller's trace, `TRACEPARENT` in the environment; a job, which runs for weeks, is not.
"""

import os
import sys
from typing import Any, Final

import grpc

from sealane.protocol.trace_context import TRACEPARENT_KEY, format_traceparent, parse_traceparent

TRACEPARENT_VARIABLE: Final = "TRACEPARENT"
"""OpenTelemetry's name for the context that a process is started with."""


def told_traceparent() -> str:
    """Return the `traceparent` that this process was started with; "" if there is none."""
    told = os.environ.get(TRACEPARENT_VARIABLE, "")
    return told if parse_traceparent(told) is not None else ""


def _current_traceparent() -> str:
    # The client doesn't need OpenTelemetry; a process that has a span has loaded it.
    api = sys.modules.get("opentelemetry.trace")
    span = None if api is None else api.get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return ""
    return format_traceparent(span.trace_id, span.span_id, span.trace_flags)


class TraceContext(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the current trace to each unary call, or that of `traceparent` if there is none."""

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    def added(self, details: Any) -> Any:
        """Return a call's details with the trace in its metadata."""
        traceparent = _current_traceparent() or self._traceparent
        if not traceparent:
            return details
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (TRACEPARENT_KEY, traceparent))
        return details._replace(metadata=metadata)

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make the call with the trace in its metadata."""
        return await continuation(self.added(client_call_details), request)
