"""Sends spans to an OpenTelemetry collector, and says what was lost.

Imported only where spans are sent: OpenTelemetry's SDK takes 0.1 s to load.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from sealane import __version__
from sealane.daemon.runtime.grpc_options import NO_PROXY
from sealane.daemon.runtime.traces_config import TracesConfig

EXPORT_SECONDS: Final = 2.0
"""Time limit for sending a batch."""
QUEUE_MAX: Final = 2048
"""Spans that wait for the collector, or are being sent; further ones are lost."""


class SpanExport:
    """Spans on their way to the collector, in batches and in a thread of their own.

    No call waits for it: spans that find the queue full, or that the collector doesn't take, are
    lost.
    """

    def __init__(
        self,
        config: TracesConfig,
        names: Mapping[str, str],
        *,
        lost: Callable[[int], None],
        changed: Callable[[bool], None],
    ) -> None:
        """Send spans of the service with these `names` (resource attributes).

        `lost` is called with numbers of lost spans, `changed` with whether the collector takes
        spans when that has changed; both from any thread.
        """
        # The SDK's own lines are plain text, several for each batch.
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(logging.NullHandler())
        sdk.propagate = False
        self._exporter = _Exporter(config, lost, changed)
        self.provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_percent / 100)),
            resource=Resource.create({**names, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(_Processor(self._exporter))
        self.tracer = self.provider.get_tracer("sealane")

    def close(self) -> None:
        """Send what is left; blocks for twice EXPORT_SECONDS at the most."""
        self._exporter.last = time.monotonic() + EXPORT_SECONDS
        self.provider.shutdown()


class _Processor(BatchSpanProcessor):
    """Batches spans; counts those that find QUEUE_MAX waiting."""

    def __init__(self, exporter: "_Exporter") -> None:
        super().__init__(exporter, max_queue_size=QUEUE_MAX)
        self._to = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._to.has_room():
            super().on_end(span)


class _Exporter(SpanExporter):
    """OTLP over gRPC; counts what the collector didn't take, and says when that begins and ends."""

    def __init__(
        self, config: TracesConfig, lost: Callable[[int], None], changed: Callable[[bool], None]
    ) -> None:
        roots = None if config.ca_file is None else Path(config.ca_file).read_bytes()
        self._otlp = OTLPSpanExporter(
            endpoint=config.endpoint,
            insecure=not config.is_encrypted,
            credentials=grpc.ssl_channel_credentials(roots) if config.is_encrypted else None,
            timeout=EXPORT_SECONDS,
            channel_options=(NO_PROXY,),  # type: ignore[arg-type]  # gRPC takes numbers as well
        )
        self._lost = lost
        self._changed = changed
        self._lock = threading.Lock()
        self._waiting = 0
        self._is_taking = True
        self.last: float | None = None
        """When to begin no other batch, by the monotonic clock."""

    def has_room(self) -> bool:
        """Count one more span as waiting, or as lost."""
        with self._lock:
            if self._waiting < QUEUE_MAX:
                self._waiting += 1
                return True
        self._lost(1)
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; blocks for EXPORT_SECONDS at the most."""
        result = SpanExportResult.FAILURE
        if self.last is None or time.monotonic() < self.last:
            result = self._otlp.export(spans)
        with self._lock:
            self._waiting -= len(spans)
        is_taking = result is SpanExportResult.SUCCESS
        if not is_taking:
            self._lost(len(spans))
        if is_taking is not self._is_taking:
            self._is_taking = is_taking
            self._changed(is_taking)
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()
