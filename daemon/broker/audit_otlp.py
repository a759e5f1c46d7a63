"""A collector of the audit log that takes OTLP: OpenTelemetry's log records, over gRPC.

The body of a log record is the audit record's line as it is in the log. A record counts as
forwarded once the collector has answered that it took it.

Imported only where it is used: its messages are a part of OpenTelemetry's exporter.
"""

import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Final
from urllib.parse import unquote

import grpc
from cryptography.hazmat.primitives.serialization import Encoding
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

from sealane import __version__
from sealane.crypto.audit import Record
from sealane.daemon.broker.audit_collector import CONNECT_SECONDS, SendRecords
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.grpc_options import NO_PROXY
from sealane.errors import UsageError

HEADERS_VARIABLE: Final = "OTEL_EXPORTER_OTLP_HEADERS"
STATED_CHARACTERS_MAX: Final = 256
"""What is kept of a collector's own words."""
_NANOS: Final = 1_000_000_000
_MICROS: Final = 1_000_000
# What gRPC sends as it is: names that end in "-bin" are for bytes, which a variable can't hold.
_HEADER_NAME: Final = re.compile(r"[0-9a-z_.-]+(?<!-bin)")
_HEADER_VALUE: Final = re.compile(r"[ -~]*")
_OPTIONS: Final = (NO_PROXY,)


class Otlp:
    """A collector at `endpoint`: http:// on loopback, or https:// with a `ca_file`."""

    def __init__(self, endpoint: str, ca_file: str | None, *, node: str) -> None:
        """Raise what `read_certificates` does, and UsageError `config.value` for a header."""
        self._address = endpoint.partition("://")[2]
        self._credentials = None
        if ca_file is not None:
            roots = read_certificates(ca_file, "broker.audit_forward.ca_file")
            pem = b"".join(each.public_bytes(Encoding.PEM) for each in roots)
            self._credentials = grpc.ssl_channel_credentials(pem)
        names = {
            "service.name": "sealaned",
            "service.version": __version__,
            "service.instance.id": node,
        }
        self._resource = Resource(attributes=[_pair(name, names[name]) for name in names])
        self._headers = tuple(_headers(os.environ.get(HEADERS_VARIABLE, "")))

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
            text = _stated(error.details() or "")
            raise ConnectionError(f"{error.code().name}: {text}") from error
        except Exception as error:
            # gRPC raises more kinds than it documents, and none may end the broker.
            raise ConnectionError(f"gRPC failed: {type(error).__name__}") from error
        # gRPC's answer to a message that it can't parse.
        if answer is None:
            raise ConnectionError("the collector's answer is malformed")
        if refused := answer.partial_success.rejected_log_records:
            text = _stated(answer.partial_success.error_message) or "it doesn't say why"
            raise ConnectionError(
                f"the collector refused {refused} of {len(lines)} records: {text}"
            )


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


def _stated(text: str) -> str:
    """Return what a collector says, so that a line of a log can hold it."""
    text = text[:STATED_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in text)


def _headers(text: str) -> Iterator[tuple[str, str]]:
    """Yield the headers of `name=value,…`, URL-encoded; UsageError `config.value`.

    The message has no value: that may be a secret.
    """
    for number, part in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        name, equals, value = (unquote(word).strip() for word in part.partition("="))
        name = name.lower()
        if not equals or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise UsageError(
                "config.value",
                f"{HEADERS_VARIABLE}: header {number} can't be sent; allowed: name=value, "
                'URL-encoded, a name of letters, digits and "_.-" that doesn\'t end in "-bin", '
                "a value of printable ASCII",
            )
        yield name, value


def _pair(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))
