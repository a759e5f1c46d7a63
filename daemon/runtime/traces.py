"""Traces of calls: a caller's trace goes on to the next daemon, and to an OpenTelemetry collector.

A unary call that is served passes its `traceparent` on with the calls made for it. With `[traces]`
it is also a span, which has method, outcome, correlation id and this node's name, and nothing of
request and response. Calls of strangers, without a certificate, belong to no trace.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import grpc
import structlog

from sealane.errors import Error
from sealane.protocol.trace_context import TRACEPARENT_KEY, format_traceparent, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from prometheus_client import Counter

    from sealane.daemon.runtime.traces_config import TracesConfig


class _Serving:
    """A call being served."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent
        self.has_ended = False


_serving: Final[ContextVar[_Serving | None]] = ContextVar("serving", default=None)


def passed_on() -> tuple[tuple[str, str], ...]:
    """Return metadata with the trace of the call being served; empty if there is none.

    Tasks started by a call that has ended since belong to no trace: they may run for weeks.
    """
    serving = _serving.get()
    if serving is None or serving.has_ended or not serving.traceparent:
        return ()
    return ((TRACEPARENT_KEY, serving.traceparent),)


class Traces:
    """Passes the caller's trace on and sends no spans."""

    @contextlib.contextmanager
    def serve(self, method: str, caller: object) -> Iterator[None]:  # noqa: ARG002
        """Serve a call; `caller` is its `traceparent`, and may be anything."""
        ids = parse_traceparent(caller)
        with _pass_on("" if ids is None else format_traceparent(*ids)):
            yield

    async def close(self) -> None:
        """Send what is left."""


class SentTraces(Traces):
    """Makes a span of each call."""

    def __init__(self, config: "TracesConfig", *, node: str, lost: "Counter") -> None:
        from sealane.daemon.runtime.span_export import SpanExport  # noqa: PLC0415

        self._export = SpanExport(config, node=node, lost=lost)

    @contextlib.contextmanager
    def serve(self, method: str, caller: object) -> Iterator[None]:
        """Serve a call as a span, in the caller's trace if there is one."""
        from opentelemetry import trace  # noqa: PLC0415

        parent = trace.INVALID_SPAN
        if (ids := parse_traceparent(caller)) is not None:
            number, span_id, flags = ids
            context = trace.SpanContext(
                number, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags)
            )
            parent = trace.NonRecordingSpan(context)
        span = self._export.tracer.start_span(
            method.removeprefix("/"),
            context=trace.set_span_in_context(parent),
            kind=trace.SpanKind.SERVER,
            attributes={
                # OpenTelemetry's semantic conventions for RPC.
                "rpc.system.name": "grpc",
                "rpc.method": method.removeprefix("/"),
                "sealane.correlation_id": str(
                    structlog.contextvars.get_contextvars().get("correlation_id", "")
                ),
            },
        )
        own = span.get_span_context()
        traceparent = format_traceparent(own.trace_id, own.span_id, own.trace_flags)
        with _ended(span), _pass_on(traceparent):
            yield

    async def close(self) -> None:
        """Send what is left, for some seconds at the most."""
        await asyncio.to_thread(self._export.close)


PASSED_ON: Final = Traces()


@contextlib.contextmanager
def _pass_on(traceparent: str) -> Iterator[None]:
    serving = _Serving(traceparent)
    token = _serving.set(serving)
    try:
        yield
    finally:
        serving.has_ended = True
        _serving.reset(token)


@contextlib.contextmanager
def _ended(span: "Span") -> Iterator[None]:
    """End a span after its call, with the reason id if the call failed."""
    from opentelemetry.trace import StatusCode  # noqa: PLC0415

    reason = "daemon.internal"
    try:
        yield
        reason = ""
    except Error as error:
        reason = error.reason
        raise
    except (asyncio.CancelledError, grpc.aio.AbortError) as error:
        reason = "cancelled" if isinstance(error, asyncio.CancelledError) else "aborted"
        raise
    finally:
        if reason:
            span.set_attribute("sealane.reason", reason)
            span.set_status(StatusCode.ERROR, reason)
        span.end()
