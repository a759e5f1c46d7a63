"""An OpenTelemetry collector that keeps the spans it gets."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Taken:
    """A span, and the node that sent it, or `sealanectl`."""

    node: str
    span: Span

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, str]:
        return {pair.key: pair.value.string_value for pair in self.span.attributes}


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """All spans so far."""

    endpoint: str = ""
    taken: list[Taken] = field(default_factory=list)

    def Export(self, request: Any, context: object) -> Any:  # noqa: ARG002, N802
        for sent in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in sent.resource.attributes}
            service = names["service.name"]
            assert service in {"sealaned", "sealanectl"}
            node = names["service.instance.id"] if service == "sealaned" else service
            self.taken += [Taken(node, span) for scope in sent.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting(address: str = "127.0.0.1:0") -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port(address)
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
