"""Spans of a program that calls a daemon, and the trace that goes on from there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sealane.client import connect, sync
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import new_server
from sealane.errors import Error, UsageError
from sealane.protocol.trace_context import format_traceparent, parse_traceparent
from sealane.protocol.v1 import nodes_pb2, nodes_pb2_grpc, storage_pb2, volumes_pb2_grpc

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CALLER = format_traceparent(TRACE, SPAN, 1)


class _Daemon(nodes_pb2_grpc.NodesServicer, volumes_pb2_grpc.VolumesServicer):
    """Keeps the metadata of its calls."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, Any]] = []

    def _heard(self, called: Any) -> None:
        self.metadata.append(dict(called.invocation_metadata()))

    async def GetNode(self, _: Any, context: Any) -> Any:  # noqa: N802
        self._heard(context)
        return nodes_pb2.Node(node="g")

    async def GetVolume(self, _: Any, context: Any) -> Any:  # noqa: N802
        self._heard(context)
        raise UsageError("volume.not_found", "private words")

    async def WatchVolume(self, _: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._heard(context)
        await context.send_initial_metadata(())
        yield storage_pb2.VolumeEvent(detail="one")

    def traceparents(self) -> list[object]:
        return [each.get("traceparent") for each in self.metadata]


@contextlib.asynccontextmanager
async def _serving(path: Path) -> AsyncIterator[_Daemon]:
    daemon = _Daemon()
    server = new_server(Metrics(), None)
    nodes_pb2_grpc.add_NodesServicer_to_server(daemon, server)
    volumes_pb2_grpc.add_VolumesServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield daemon
    finally:
        await server.stop(None)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Have this process send its spans to a list."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


async def _asynchronous(path: Path) -> None:
    async with connect(path) as client:
        await client.status()


async def _synchronous(path: Path) -> None:
    def call() -> None:
        with sync.connect(path) as client:
            client.status()

    await asyncio.to_thread(call)


@pytest.mark.parametrize("call", [_asynchronous, _synchronous])
async def test_each_call_is_a_span_below_the_caller_s(
    call: Callable[[Path], Any], tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with _serving(tmp_path / "s") as daemon:
        with trace.get_tracer("job").start_as_current_span("checkpoint"):
            await call(tmp_path / "s")
    made, outer = spans.get_finished_spans()
    assert (made.name, made.kind) == ("sealane.v1.Nodes/GetNode", trace.SpanKind.CLIENT)
    assert made.parent == outer.context
    ids = parse_traceparent(*daemon.traceparents())
    assert ids == (made.context.trace_id, made.context.span_id, made.context.trace_flags)


async def test_a_call_that_fails_is_a_span_with_the_reason_and_nothing_else(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with _serving(tmp_path / "s"), connect(tmp_path / "s") as client:
        with pytest.raises(Error) as failed:
            await client.volumes.get("volumes/secret-name")
    (made,) = spans.get_finished_spans()
    assert failed.value.reason == "volume.not_found"
    assert made.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "sealane.v1.Volumes/GetVolume",
        "sealane.reason": "volume.not_found",
    }
    assert made.status.status_code is trace.StatusCode.ERROR
    assert not made.events
    assert "private" not in made.to_json()
    assert "secret-name" not in made.to_json()


async def test_without_a_span_calls_belong_to_what_connect_was_told(tmp_path: Path) -> None:
    async with _serving(tmp_path / "s") as daemon:
        for told in ("", CALLER):
            async with connect(tmp_path / "s", traceparent=told) as client:
                await client.status()
                inner = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1))
                with trace.use_span(trace.NonRecordingSpan(inner)):
                    await client.status()
    assert daemon.traceparents() == [
        *(None, format_traceparent(1, 2, 1)),
        *(CALLER, format_traceparent(1, 2, 1)),
    ]


async def test_a_stream_goes_on_in_the_trace_and_is_no_span(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    path = tmp_path / "s"
    async with (
        _serving(path) as daemon,
        connect(path, traceparent=CALLER) as client,
        client.volumes.watch("volumes/x") as events,
    ):
        assert (await anext(events)).detail == "one"
    assert daemon.traceparents() == [CALLER]
    assert not spans.get_finished_spans()


async def test_baggage_and_trace_state_stay_with_the_caller(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    state = trace.TraceState([("vendor", "secret")])
    outer = trace.SpanContext(1, 2, False, trace.TraceFlags(1), state)
    inside = trace.set_span_in_context(trace.NonRecordingSpan(outer))
    token = context.attach(baggage.set_baggage("user", "secret", inside))
    try:
        async with _serving(tmp_path / "s") as daemon, connect(tmp_path / "s") as client:
            await client.status()
    finally:
        context.detach(token)
    (heard,) = daemon.metadata
    assert set(heard) == {"traceparent", "user-agent"}
    assert len(spans.get_finished_spans()) == 1


async def test_a_call_that_is_cancelled_is_a_span_that_says_so(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_called = asyncio.Event()

    async def wait(*_: object) -> None:
        is_called.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(_Daemon, "GetNode", wait)
    async with _serving(tmp_path / "s"), connect(tmp_path / "s") as client:
        call = asyncio.ensure_future(client.status())
        await is_called.wait()
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
    (made,) = spans.get_finished_spans()
    assert made.attributes is not None
    assert made.attributes["sealane.reason"] == "cancelled"
