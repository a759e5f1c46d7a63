"""A collector of the audit log that takes OTLP: OpenTelemetry's log records, over gRPC.

The body of a log record is the audit record's line as it is in the log. A record counts as
forwarded once the collector has answered that it took it.

Imported only where it is used: its messages are a part of OpenTelemetry's exporter.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import (
    SEVERITY_NUMBER_INFO,
    SEVERITY_NUMBER_WARN,
    LogRecord,
    ResourceLogs,
    ScopeLogs,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.util.re import parse_env_headers

from sealane import __version__
from sealane.crypto.audit import Record
from sealane.daemon.broker.audit_collector import CONNECT_SECONDS, SendRecords
from sealane.daemon.broker.audit_syslog import collector_tls
from sealane.daemon.runtime.files import read_file

HEADERS_VARIABLE: Final = "OTEL_EXPORTER_OTLP_HEADERS"
_NANOS: Final = 1_000_000_000
_MICROS: Final = 1_000_000
# A proxy would be another machine.
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)


class Otlp:
    """A collector at `endpoint`: http:// on loopback, or https:// with a `ca_file`."""

    def __init__(self, endpoint: str, ca_file: str | None, *, node: str) -> None:
        """Raise what `collector_tls` does."""
        collector_tls(ca_file)
        self._address = endpoint.partition("://")[2]
        self._credentials = None
        if ca_file is not None:
            roots = read_file(ca_file, key="broker.audit_forward.ca_file")
            self._credentials = grpc.ssl_channel_credentials(roots)
        names = {
            "service.name": "sealaned",
            "service.version": __version__,
            "service.instance.id": node,
        }
        self._resource = Resource(attributes=[_pair(name, names[name]) for name in names])
        headers = parse_env_headers(os.environ.get(HEADERS_VARIABLE, ""), liberal=True)
        self._headers = tuple(headers.items())

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[SendRecords]:
        """Open a channel; yields what sends records, by a call for each batch."""
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self._address, self._credentials, options=_OPTIONS)
        async with channel:
            yield partial(self._send, LogsServiceStub(channel))  # type: ignore[no-untyped-call]

    async def _send(self, stub: LogsServiceStub, lines: list[bytes]) -> None:
        """Return once the collector has taken all of the lines; ConnectionError."""
        logs = ScopeLogs(log_records=[log_record(line) for line in lines])
        request = ExportLogsServiceRequest(
            resource_logs=[ResourceLogs(resource=self._resource, scope_logs=[logs])]
        )
        try:
            answer = await stub.Export(request, timeout=CONNECT_SECONDS, metadata=self._headers)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        if refused := answer.partial_success.rejected_log_records:
            raise ConnectionError(f"the collector refused {refused} of {len(lines)} records")


def log_record(line: bytes) -> LogRecord:
    """Return a record's line as a log record."""
    record = Record.decode(line)
    is_warning = record.outcome in {"refused", "failed"}
    micros = round(record.time.timestamp() * _MICROS)
    return LogRecord(
        time_unix_nano=micros * (_NANOS // _MICROS),
        severity_number=SEVERITY_NUMBER_WARN if is_warning else SEVERITY_NUMBER_INFO,
        severity_text="WARN" if is_warning else "INFO",
        event_name=f"sealane.audit.{record.kind}",
        body=AnyValue(string_value=line.decode()),
        attributes=[_pair("sealane.audit.outcome", record.outcome)],
    )


def _pair(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))
