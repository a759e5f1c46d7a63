"""Forwarding of the audit log to the machine's own syslog, and to a collector that takes OTLP."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc

from broker.audit_logs import KEY, SMALL, opened
from broker.test_audit_forward import FORWARDED, _certificate, fill, until
from sealane.crypto.audit import Record, verify_log
from sealane.daemon.broker import audit_forward, audit_otlp, audit_syslog
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_forward import AuditForwarder
from sealane.daemon.broker.audit_otlp import Otlp
from sealane.daemon.config import AuditForwardConfig
from sealane.errors import UsageError


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_forward, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(audit_forward, "BACK_OFF_SECONDS", 0.05)


@contextlib.asynccontextmanager
async def _forwarding(
    log: AuditLog, directory: Path, address: str, ca_file: Path | None = None
) -> AsyncIterator[AuditForwarder]:
    config = AuditForwardConfig(address=address, ca_file=str(ca_file) if ca_file else None)
    forwarder = AuditForwarder(log, config, node="b1", position=directory / "audit.forwarded")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(forwarder.run())
        yield forwarder
        task.cancel()


def _syslog(path: Path) -> socket.socket:
    """Listen as a local syslog server does."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(str(path))
    server.setblocking(False)
    return server


def _taken(server: socket.socket) -> list[tuple[str, bytes]]:
    """Return the headers and texts of the datagrams that wait."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            header, line = re.split(b" (?={)", server.recv(65536), maxsplit=1)
            found.append((header.decode(), line))
    return found


async def test_the_machine_s_syslog_gets_a_log_that_verifies(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FORWARDED)
    path = tmp_path / "log"
    taken: list[tuple[str, bytes]] = []

    def is_all_taken(server: socket.socket) -> bool:
        taken.extend(_taken(server))
        return log.forwarded == log.head.sequence == len({line for _, line in taken})

    await fill(log, 5)
    await log.record("call", subject="x", outcome="refused", reason="r")
    async with _forwarding(log, tmp_path, str(path)) as forwarder:
        # Nobody is there yet.
        await until(lambda: forwarder._is_away)
        assert log.forwarded == 0
        with _syslog(path) as server:
            await until(lambda: is_all_taken(server))
        # It is started again.
        await fill(log, 5)
        with _syslog(path) as server:
            await until(lambda: is_all_taken(server))
    lines = list(dict.fromkeys(line for _, line in taken))
    assert verify_log(lines, signer=KEY.public_key()).head == log.head
    (refused,) = {header for header, line in taken if Record.decode(line).outcome == "refused"}
    day = r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"<108>{day} sealaned\[\d+\]:", refused)
    assert taken[0][0].startswith("<110>")
    await log.close()


def _queue_max() -> int:
    return int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())


async def test_a_full_queue_of_the_machine_s_syslog_is_waited_for(tmp_path: Path) -> None:
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, _queue_max() + 20)
    taken: list[bytes] = []
    with _syslog(tmp_path / "log") as server:
        async with _forwarding(log, tmp_path, str(tmp_path / "log")) as forwarder:
            await until(lambda: len(_peeked(server)) > 0)
            assert log.forwarded == 0
            assert not forwarder._is_away

            def is_all_taken() -> bool:
                taken.extend(line for _, line in _taken(server))
                return log.forwarded == log.head.sequence

            await until(is_all_taken)
            taken.extend(line for _, line in _taken(server))
    assert len(taken) == log.head.sequence
    await log.close()


def _peeked(server: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return server.recv(1, socket.MSG_PEEK)
    return b""


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    """A collector that takes OTLP, and may refuse records."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.refused = 0
        self.refused_number = 0
        self.message = ""

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        answer = logs_service_pb2.ExportLogsServiceResponse()
        records = request.resource_logs[0].scope_logs[0].log_records
        lines = [record.body.string_value.encode() for record in records]
        taken = [line for line in lines if Record.decode(line).sequence != self.refused_number]
        refused = self.refused or len(lines) - len(taken)
        answer.partial_success.rejected_log_records = refused
        answer.partial_success.error_message = self.message
        if not self.refused:
            self.lines += taken
        return answer


@contextlib.asynccontextmanager
async def _collecting(
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[tuple[_Logs, int]]:
    logs = _Logs()
    server = grpc.aio.server()
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield logs, port
    finally:
        await server.stop(None)


async def test_a_collector_of_otlp_gets_a_log_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=t")
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 10)
    await log.record("call", subject="x", outcome="refused", reason="r")
    async with _collecting() as (logs, port):
        logs.refused = 1
        async with _forwarding(log, tmp_path, f"http://127.0.0.1:{port}") as forwarder:
            # What it refuses counts as not forwarded.
            await until(lambda: forwarder._is_away and len(logs.requests) > 1)
            assert log.forwarded == 0
            logs.refused = 0
            await until(lambda: log.forwarded == log.head.sequence)
    assert verify_log(logs.lines, signer=KEY.public_key()).head == log.head
    assert logs.metadata["x-token"] == "t"
    sent = logs.requests[-1].resource_logs[0]
    names = {pair.key: pair.value.string_value for pair in sent.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("sealaned", "b1")
    (refused,) = (
        record for record in sent.scope_logs[0].log_records if record.severity_text == "WARN"
    )
    assert refused.event_name == "sealane.audit.call"
    made = Record.decode(refused.body.string_value.encode())
    assert abs(refused.time_unix_nano / 1e9 - made.time.timestamp()) < 1e-5
    await log.close()


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_only_a_collector_of_the_authority_gets_records(
    tmp_path: Path, is_trusted: bool
) -> None:
    _certificate(tmp_path, "collector")
    _certificate(tmp_path, "another")
    pem = (tmp_path / "collector.key").read_bytes()
    credentials = grpc.ssl_server_credentials([(pem, (tmp_path / "collector.pem").read_bytes())])
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 5)
    ca_file = tmp_path / ("collector.pem" if is_trusted else "another.pem")
    async with _collecting(credentials) as (logs, port):
        address = f"https://127.0.0.1:{port}"
        async with _forwarding(log, tmp_path, address, ca_file) as forwarder:
            if is_trusted:
                await until(lambda: log.forwarded == log.head.sequence)
            else:
                await until(lambda: forwarder._is_away)
    assert bool(logs.lines) is is_trusted
    await log.close()


async def test_records_before_one_that_is_always_refused_arrive(tmp_path: Path) -> None:
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, 300)
    async with _collecting() as (logs, port):
        logs.refused_number = 201
        logs.message = "too\nold" + 1000 * "!"

        def last_sizes() -> list[int]:
            latest = logs.requests[-3:]
            return [len(each.resource_logs[0].scope_logs[0].log_records) for each in latest]

        with structlog.testing.capture_logs() as lines:
            async with _forwarding(log, tmp_path, f"http://127.0.0.1:{port}"):
                # Nothing before it is repeated for ever, and it isn't left out.
                await until(lambda: last_sizes() == [1, 1, 1])
                assert log.forwarded == 200
                logs.refused_number = 0
                await until(lambda: log.forwarded == log.head.sequence)
    said = [line for line in lines if line["event"] == "audit_forward_lost"]
    assert said[-1]["forwarded"] == 200
    assert "the collector refused 1 of " in said[-1]["message"]
    assert " records: too?old!" in said[-1]["message"]
    assert len(said[-1]["message"]) < 400
    await log.close()


@pytest.mark.parametrize("at_once", [1, 7])
async def test_a_slow_local_syslog_gets_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The whole takes longer than the time limit, which is for each record."""
    monkeypatch.setattr(audit_syslog, "SEND_SECONDS", 0.5)
    log = await opened(tmp_path, None, FORWARDED)
    await fill(log, _queue_max() + 12 * at_once)
    taken: list[bytes] = []
    with _syslog(tmp_path / "log") as server:
        async with _forwarding(log, tmp_path, str(tmp_path / "log")) as forwarder:
            while log.forwarded < log.head.sequence:
                await asyncio.sleep(0.1)
                for _ in range(at_once):
                    with contextlib.suppress(BlockingIOError):
                        taken.append(re.split(b" (?={)", server.recv(65536), maxsplit=1)[1])
            assert not forwarder._is_away
        taken.extend(line for _, line in _taken(server))
    assert verify_log(taken, signer=KEY.public_key()).head == log.head
    await log.close()


class _Malformed(grpc.GenericRpcHandler):
    """Answers each call with bytes that are no message."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(
            _request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> bytes:
            return b"\xff"

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_an_answer_that_is_no_message_is_a_collector_that_is_away(tmp_path: Path) -> None:
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 5)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Malformed(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with _forwarding(log, tmp_path, f"http://127.0.0.1:{port}") as forwarder:
        await until(lambda: forwarder._is_away)
        assert log.forwarded == 0
    await server.stop(None)
    await log.close()


async def test_a_call_that_grpc_refuses_is_a_collector_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a check of headers missed one.
    monkeypatch.setattr(audit_otlp, "_headers", lambda _: [("x-token-bin", "abc")])
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 5)
    async with (
        _collecting() as (logs, port),
        _forwarding(log, tmp_path, f"http://127.0.0.1:{port}") as forwarder,
    ):
        await until(lambda: forwarder._is_away)
    assert not logs.requests
    await log.close()


@pytest.mark.parametrize(
    "headers",
    [
        "authorization=Bearer%0Aabc",
        "x-token=%C3%A9",
        "x-token=é",
        "x%20token=abc",
        "x token=abc",
        "x-token-bin=abc",
        ":authority=abc",
        "=abc",
        "abc",
        "x-token=t,abc%7F=secret",
    ],
)
def test_headers_that_can_not_be_sent_are_refused(
    monkeypatch: pytest.MonkeyPatch, headers: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with pytest.raises(UsageError) as caught:
        Otlp("http://127.0.0.1:4317", None, node="b1")
    assert caught.value.reason == "config.value"
    assert "secret" not in str(caught.value)


def test_headers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", " Authorization = Basic%20YTpi==,, x.y=1,")
    sent = Otlp("http://127.0.0.1:4317", None, node="b1")._headers
    assert sent == (("authorization", "Basic YTpi=="), ("x.y", "1"))


async def test_records_go_through_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens there.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    log = await opened(tmp_path, SMALL, FORWARDED)
    await fill(log, 5)
    async with (
        _collecting() as (_, port),
        _forwarding(log, tmp_path, f"http://127.0.0.1:{port}") as forwarder,
    ):
        await until(lambda: forwarder._is_away or log.forwarded == log.head.sequence)
        assert not forwarder._is_away
    await log.close()


@pytest.mark.parametrize("content", [None, b"", b"x", b"\xff"])
def test_file_without_certificates_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Otlp("https://127.0.0.1:4317", str(tmp_path / "ca"), node="b1")
    assert caught.value.reason == ("config.unreadable" if content is None else "config.value")
