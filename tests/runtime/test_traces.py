"""What a call passes on of its caller's trace, and what its span says."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from collector import collecting
from sealane.client.trace_context import told_traceparent
from sealane.daemon.runtime import traces as traces_module
from sealane.daemon.runtime.authorizers import TlsOnly
from sealane.daemon.runtime.calls import CallInterceptor
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.span_export import QUEUE_MAX
from sealane.daemon.runtime.traces import PASSED_ON, SentTraces, Traces, opened, passed_on
from sealane.daemon.runtime.traces_config import TracesConfig
from sealane.errors import UnavailableError
from sealane.protocol.trace_context import format_traceparent, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
METHOD = "/sealane.v1.Volumes/AttachVolume"


def test_traceparents_are_read_and_written() -> None:
    ids = parse_traceparent(CALLER)
    assert ids == (int(TRACE, 16), int(SPAN, 16), 1)
    assert format_traceparent(*ids) == CALLER


@pytest.mark.parametrize(
    "text",
    [
        None,
        CALLER.encode(),
        "",
        CALLER.upper(),
        CALLER + "0",
        CALLER + "\n",
        f"01-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_what_is_no_traceparent_is_not_passed_on(text: object) -> None:
    assert parse_traceparent(text) is None
    with PASSED_ON.serve(METHOD, text):
        assert passed_on() == ()


async def test_a_trace_is_passed_on_while_its_call_is_served() -> None:
    is_over = asyncio.Event()

    async def keep() -> tuple[tuple[str, str], ...]:
        assert passed_on() == (("traceparent", CALLER),)
        await is_over.wait()
        return passed_on()

    async with asyncio.TaskGroup() as tasks:
        with PASSED_ON.serve(METHOD, CALLER):
            outliving = tasks.create_task(keep())
            await asyncio.sleep(0)
        assert passed_on() == ()
        is_over.set()
    assert outliving.result() == ()


def _sent(endpoint: str, metrics: Metrics, **settings: float) -> Traces:
    config = TracesConfig(endpoint=endpoint, **settings)
    return SentTraces(config, node="g", lost=metrics.spans_lost)


async def test_each_call_is_a_span_of_its_callers_trace() -> None:
    with collecting() as collector:
        traces = _sent(collector.endpoint, Metrics())
        with traces.serve(METHOD, CALLER):
            ((_, own),) = passed_on()
        with pytest.raises(UnavailableError), traces.serve(METHOD, "made up"):
            raise UnavailableError("daemon.unreachable", "private words")
        await traces.close()
    first, second = collector.taken
    assert own == f"00-{TRACE}-{first.span.span_id.hex()}-01"
    assert (first.node, first.trace, first.span.parent_span_id.hex()) == ("g", TRACE, SPAN)
    assert first.span.name == "sealane.v1.Volumes/AttachVolume"
    assert first.span.kind == first.span.SPAN_KIND_SERVER
    assert second.trace != TRACE
    assert not second.span.parent_span_id
    assert second.attributes["sealane.reason"] == "daemon.unreachable"
    assert "private" not in str(second.span)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (asyncio.CancelledError, "cancelled"),
        (ValueError, "daemon.internal"),
        (grpc.aio.AbortError, "aborted"),
    ],
)
async def test_a_span_says_how_its_call_failed(
    ends: Callable[[], BaseException], reason: str
) -> None:
    with collecting() as collector:
        traces = _sent(collector.endpoint, Metrics())
        with contextlib.suppress(BaseException), traces.serve(METHOD, None):
            raise ends()
        await traces.close()
    (taken,) = collector.taken
    assert taken.attributes["sealane.reason"] == reason
    assert taken.span.status.code == taken.span.status.STATUS_CODE_ERROR


@pytest.mark.parametrize(("authorizer", "goes_on"), [(None, True), (TlsOnly(), False)])
async def test_calls_of_strangers_belong_to_no_trace(
    authorizer: TlsOnly | None, goes_on: bool
) -> None:
    async def behave(request: object, context: object) -> Any:
        return passed_on()

    async def find(details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(behave)

    details: Any = SimpleNamespace(method=METHOD, invocation_metadata=(("traceparent", CALLER),))
    handler = await CallInterceptor(Metrics(), authorizer).intercept_service(find, details)
    context = SimpleNamespace(auth_context=lambda: {"ssl_tls_version": [b"TLSv1.3"]})
    answer = await handler.unary_unary(handler.request_deserializer(b""), context)
    assert answer == ((("traceparent", CALLER),) if goes_on else ())


async def test_the_caller_decides_what_is_sent_of_its_trace() -> None:
    with collecting() as collector:
        none = _sent(collector.endpoint, Metrics(), sample_percent=0)
        for caller in (None, f"00-{TRACE}-{SPAN}-00", CALLER):
            with none.serve(METHOD, caller):
                assert passed_on()
        await none.close()
    assert [taken.trace for taken in collector.taken] == [TRACE]


async def test_spans_that_nobody_takes_are_counted_and_end_nothing() -> None:
    with collecting() as collector:
        endpoint = collector.endpoint
    metrics = Metrics()
    traces = _sent(endpoint, metrics)
    for _ in range(3):
        with traces.serve(METHOD, None):
            pass
    async with asyncio.timeout(20):
        await traces.close()
    assert metrics.registry.get_sample_value("sealane_spans_lost_total") == 3


def test_only_a_traceparent_of_the_environment_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEPARENT", raising=False)
    assert told_traceparent() == ""
    monkeypatch.setenv("TRACEPARENT", "x\r\ny")
    assert told_traceparent() == ""
    monkeypatch.setenv("TRACEPARENT", CALLER)
    assert told_traceparent() == CALLER


async def test_spans_that_find_no_room_are_counted_too() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        metrics = Metrics()
        traces = _sent(f"http://127.0.0.1:{silent.getsockname()[1]}", metrics)
        for _ in range(2 * QUEUE_MAX):
            with traces.serve(METHOD, None):
                pass
        async with asyncio.timeout(30):
            await traces.close()
    assert metrics.registry.get_sample_value("sealane_spans_lost_total") == 2 * QUEUE_MAX


async def test_spans_go_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as proxy, collecting() as at:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        traces = _sent(at.endpoint, Metrics())
        with traces.serve(METHOD, None):
            pass
        await traces.close()
        assert len(at.taken) == 1


async def _first(traces: Traces, behave: Callable[[], AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Return the messages of a stream behind the interceptor, which `behave` serves."""

    async def stream(request: object, context: object) -> AsyncIterator[Any]:
        async for each in behave():
            yield each

    async def find(details: object) -> Any:
        return grpc.unary_stream_rpc_method_handler(stream)

    details: Any = SimpleNamespace(method=METHOD, invocation_metadata=(("traceparent", CALLER),))
    handler = await CallInterceptor(Metrics(), None, traces).intercept_service(find, details)
    return handler.unary_stream(handler.request_deserializer(b""), SimpleNamespace())


async def test_the_opening_of_a_stream_is_a_span_and_the_stream_belongs_to_no_trace() -> None:
    seen: list[object] = []

    async def behave() -> AsyncIterator[str]:
        seen.append(passed_on())
        yield "first"
        seen.append(passed_on())
        yield "second"

    with collecting() as collector:
        traces = _sent(collector.endpoint, Metrics())
        messages = await _first(traces, behave)
        assert await anext(messages) == "first"
        await traces.close()
        # It is sent although the stream goes on.
        (taken,) = collector.taken
        assert [each async for each in messages] == ["second"]
    assert (taken.trace, taken.span.parent_span_id.hex()) == (TRACE, SPAN)
    assert taken.attributes["sealane.correlation_id"]
    assert "sealane.reason" not in taken.attributes
    assert seen == [(("traceparent", f"00-{TRACE}-{taken.span.span_id.hex()}-01"),), ()]


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_stream_without_messages_is_open_when_it_says_so_or_in_some_seconds(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces_module, "OPENING_SECONDS", 30.0 if is_told else 0.1)
    is_open = asyncio.Event()

    async def behave() -> AsyncIterator[str]:
        if is_told:
            opened()
        while passed_on():  # noqa: ASYNC110 - nothing says that it has ended
            await asyncio.sleep(0.01)
        is_open.set()
        await asyncio.Event().wait()
        yield "never"

    with collecting() as collector:
        traces = _sent(collector.endpoint, Metrics())
        messages = await _first(traces, behave)
        waiting = asyncio.ensure_future(anext(messages))
        async with asyncio.timeout(10):
            await is_open.wait()
        await traces.close()
        (taken,) = collector.taken
        waiting.cancel()
        await asyncio.wait({waiting})
    assert "sealane.reason" not in taken.attributes


async def test_a_stream_that_is_refused_is_a_span_with_the_reason() -> None:
    async def behave() -> AsyncIterator[str]:
        raise UnavailableError("daemon.unreachable", "private words")
        yield "never"

    with collecting() as collector:
        traces = _sent(collector.endpoint, Metrics())
        messages = await _first(traces, behave)
        with pytest.raises(AttributeError):  # the context here can't abort a call
            await anext(messages)
        await traces.close()
    (taken,) = collector.taken
    assert taken.attributes["sealane.reason"] == "daemon.unreachable"
