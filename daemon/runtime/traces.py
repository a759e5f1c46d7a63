"""Traces of calls: a caller's trace goes on to the next daemon, and to an OpenTelemetry collector.

A call that is served passes its `traceparent` on with the calls made for it. With `[traces]` it is
also a span, which has method, outcome, correlation id and this node's name, and nothing of request
and response. Of a stream, this is its opening only. Calls of strangers, without a certificate,
belong to no trace.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import grpc
import structlog

from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error
from sealane.protocol.trace_context import TRACEPARENT_KEY, format_traceparent, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from prometheus_client import Counter

    from sealane.daemon.runtime.traces_config import TracesConfig

OPENING_SECONDS: Final = 10.0
"""How long the opening of a stream belongs to a trace, at most."""


class Serving:
    """A call being served, or a stream being opened; the end of the block ends it."""

    def __init__(self, traceparent: str = "", span: "Span | None" = None) -> None:
        self.traceparent = traceparent
        self.has_ended = False
        self.on_end: Callable[[], None] | None = None
        self._span = span

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end("" if error is None else _reason_of(error))

    def end(self, reason: str = "") -> None:
        """End its part of the trace, with the reason id of a failure; only the first end counts."""
        if self.has_ended:
            return
        self.has_ended = True
        if self.on_end is not None:
            self.on_end()
        if self._span is None:
            return
        if reason:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415

            self._span.set_attribute("sealane.reason", reason)
            self._span.set_status(StatusCode.ERROR, reason)
        self._span.end()


_serving: Final[ContextVar[Serving | None]] = ContextVar("serving", default=None)


def passed_on() -> tuple[tuple[str, str], ...]:
    """Return metadata with the trace of the call being served; empty if there is none.

    Tasks started by a call that has ended since belong to no trace: they may run for weeks.
    """
    serving = _serving.get()
    if serving is None or serving.has_ended or not serving.traceparent:
        return ()
    return ((TRACEPARENT_KEY, serving.traceparent),)


def opened() -> None:
    """Say that the stream being served is open: its first message may take days."""
    if (serving := _serving.get()) is not None:
        serving.end()


class Traces:
    """Passes the caller's trace on and sends no spans."""

    @contextlib.contextmanager
    def serve(self, method: str, caller: object) -> Iterator[None]:
        """Serve a call; `caller` is its `traceparent`, and may be anything."""
        serving = self._begin(method, caller)
        token = _serving.set(serving)
        try:
            with serving:
                yield
        finally:
            _serving.reset(token)

    def open(self, method: str, caller: object) -> Serving:
        """Open a stream in this task, which serves nothing else; it ends in OPENING_SECONDS."""
        serving = self._begin(method, caller)
        timer = asyncio.get_running_loop().call_later(OPENING_SECONDS, serving.end)
        serving.on_end = timer.cancel
        _serving.set(serving)
        return serving

    def _begin(self, method: str, caller: object) -> Serving:  # noqa: ARG002
        ids = parse_traceparent(caller)
        return Serving("" if ids is None else format_traceparent(*ids))

    async def close(self) -> None:
        """Send what is left."""


class SentTraces(Traces):
    """Makes a span of each call."""

    def __init__(self, config: "TracesConfig", *, node: str, lost: "Counter") -> None:
        from sealane.daemon.runtime.span_export import SpanExport  # noqa: PLC0415

        self._endpoint = config.endpoint
        names = {"service.name": "sealaned", "service.instance.id": node}
        self._export = SpanExport(config, names, lost=lost.inc, changed=self._log)

    def _begin(self, method: str, caller: object) -> Serving:
        """Begin a span, in the caller's trace if there is one."""
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
        return Serving(format_traceparent(own.trace_id, own.span_id, own.trace_flags), span)

    def _log(self, is_taking: bool) -> None:
        if is_taking:
            get_logger().info("spans_taken", endpoint=self._endpoint)
        else:
            get_logger().warning("spans_lost", endpoint=self._endpoint)

    async def close(self) -> None:
        """Send what is left, for some seconds at the most."""
        await asyncio.to_thread(self._export.close)


PASSED_ON: Final = Traces()


def _reason_of(error: BaseException) -> str:
    if isinstance(error, Error):
        return error.reason
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return "aborted" if isinstance(error, grpc.aio.AbortError) else "daemon.internal"
