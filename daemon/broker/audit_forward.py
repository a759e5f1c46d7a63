"""Forwards the audit log to a syslog collector, in order and at least once.

Records are messages of RFC 5424, with octet counting (RFC 6587) over TLS (RFC 5425), or over plain
TCP on loopback. The text of a message is the record's line as it is in the log, so that a receiver
can check the chain and its signed checkpoints. Syslog has no acknowledgements: a record counts as
forwarded once the collector's machine has acknowledged its bytes. What lies between there and the
collector's disk can be lost if the collector dies; its receiver then sees a gap in the numbers.

Nothing waits for the collector. Records are read back from the log's files, a batch at a time.
"""

import asyncio
import contextlib
import fcntl
import socket
import ssl
import struct
import termios
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.crypto.audit import Record
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_source import AuditSource
from sealane.daemon.config import AuditForwardConfig
from sealane.daemon.runtime.files import read_file
from sealane.daemon.runtime.listeners import split_address
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError

CONNECT_SECONDS: Final = 10.0
BATCH_SECONDS: Final = 60.0
"""Time limit for a collector to take one batch."""
PAUSE_SECONDS: Final = 1.0
"""Pause after a batch that had all records, and before the first new attempt."""
BACK_OFF_SECONDS: Final = 60.0
"""Longest pause between attempts."""

_POLL_SECONDS: Final = 0.02
# RFC 5424: facility 13 is the log audit.
_FACILITY: Final = 13
_INFORMATIONAL: Final = 6
_WARNING: Final = 4
_MESSAGE_ID_CHARACTERS_MAX: Final = 32


def forward_tls(config: AuditForwardConfig) -> ssl.SSLContext | None:
    """Return the TLS settings for the collector; None for plain TCP on loopback.

    UsageError `config.unreadable` or `config.size`.
    """
    if config.ca_file is None:
        return None
    key = "broker.audit_forward.ca_file"
    content = read_file(config.ca_file, key=key)
    try:
        # Not create_default_context: without a certificate in the file, that trusts the system's.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            "config.unreadable", f"{key} {config.ca_file}: holds no certificates (PEM)"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def syslog_message(line: bytes, *, node: str) -> bytes:
    """Return a record's line as a message of RFC 5424 with its length before it (RFC 6587)."""
    record = Record.decode(line)
    severity = _WARNING if record.outcome in {"refused", "failed"} else _INFORMATIONAL
    time = record.time.isoformat(timespec="microseconds")
    kind = record.kind[:_MESSAGE_ID_CHARACTERS_MAX]
    header = f"<{_FACILITY * 8 + severity}>1 {time} {node} sealaned - {kind} - "
    message = header.encode("ascii") + line
    return f"{len(message)} ".encode() + message


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a collector; `tcp` is the transport below TLS, or the writer's own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tcp: asyncio.WriteTransport

    def unacknowledged_bytes(self) -> int:
        """Return how much the peer's machine hasn't acknowledged, wherever it waits.

        That is in TLS, in the transport below it, or in the kernel (tcp(7), SIOCOUTQ).
        """
        end: socket.socket = self.tcp.get_extra_info("socket")
        (sent,) = struct.unpack("i", fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, bytes(4)))
        above = self.writer.transport.get_write_buffer_size()
        return above + self.tcp.get_write_buffer_size() + int(sent)


class AuditForwarder:
    """Forwards the records of `log`; `run` ends only if the log was tampered with."""

    def __init__(
        self, log: AuditLog, config: AuditForwardConfig, *, node: str, position: Path
    ) -> None:
        """Keep the position in the file `position`. Raises the errors of `forward_tls`."""
        self._log = log
        self._address = config.address
        self._tls = forward_tls(config)
        self._node = node
        self._source = AuditSource(log, position)
        self._pause = PAUSE_SECONDS
        self._is_away = False

    async def run(self) -> None:
        """Forward until cancelled; VerificationError `audit.…`."""
        try:
            while True:
                try:
                    await self._forward()
                except (OSError, UnicodeError) as error:
                    # UnicodeError: a host that the resolver can't encode.
                    self._lost(error)
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, BACK_OFF_SECONDS)
        finally:
            self._source.close()

    async def _forward(self) -> None:
        """Forward over one connection until it ends: OSError."""
        position = await asyncio.to_thread(self._source.rewind)
        self._log.forwarded = position.sequence
        async with self._connection() as connection:
            while True:
                await self._log.advanced(self._source.head.sequence)
                lines = await asyncio.to_thread(self._source.read)
                async with asyncio.timeout(BATCH_SECONDS):
                    await self._send(lines, connection)
                await asyncio.to_thread(self._source.keep)
                self._log.forwarded = self._source.head.sequence
                self._found()
                if self._source.head == self._log.head:
                    await asyncio.sleep(PAUSE_SECONDS)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        host, port = split_address(self._address)
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
        tcp = writer.transport
        try:
            if self._tls is not None:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await writer.start_tls(self._tls, server_hostname=host)
            # Not 0, with which asyncio's TLS never resumes.
            writer.transport.set_write_buffer_limits(high=1)
            yield Connection(reader, writer, tcp)
        finally:
            writer.transport.abort()
            tcp.abort()

    async def _send(self, lines: list[bytes], connection: Connection) -> None:
        """Return once the collector's machine has acknowledged all of the lines."""
        writer = connection.writer
        writer.write(b"".join(syslog_message(line, node=self._node) for line in lines))
        await writer.drain()
        # The kernel has no event for it.
        while True:
            # A closed socket has no number to ask the kernel about.
            if writer.is_closing() or connection.tcp.is_closing() or connection.reader.at_eof():
                raise ConnectionResetError("the collector closed the connection")
            if not connection.unacknowledged_bytes():
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _lost(self, error: Exception) -> None:
        if not self._is_away:
            get_logger().warning(
                "audit_forward_lost",
                address=self._address,
                message=f"audit records wait in the log: {str(error) or type(error).__name__}",
            )
        self._is_away = True

    def _found(self) -> None:
        self._pause = PAUSE_SECONDS
        if self._is_away:
            get_logger().info("audit_forward_resumed", address=self._address)
        self._is_away = False
