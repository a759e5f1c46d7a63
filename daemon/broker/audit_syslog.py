"""Syslog collectors of the audit log: over TLS or plain TCP, and the local one's Unix socket.

Over TCP, records are messages of RFC 5424 with octet counting (RFC 6587), over TLS (RFC 5425) or
plain on loopback; at the Unix socket (`/dev/log`) they are datagrams as syslog(3) sends them. The
text of a message is the record's line as it is in the log, so that a receiver can check the chain
and its signed checkpoints.

Syslog has no acknowledgements. Over TCP, a record counts as forwarded once the collector's machine
has acknowledged its bytes, at the Unix socket once the kernel has put it into the collector's
queue. What lies between there and the collector's disk can be lost if the collector dies; its
receiver then sees a gap in the numbers.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import ssl
import struct
import termios
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from sealane.crypto.audit import Record
from sealane.daemon.broker.audit_collector import CONNECT_SECONDS, SEND_SECONDS, SendRecords
from sealane.daemon.runtime.files import read_file
from sealane.daemon.runtime.listeners import split_address
from sealane.errors import UsageError

_POLL_SECONDS: Final = 0.02
# RFC 5424: facility 13 is the log audit.
_FACILITY: Final = 13
_INFORMATIONAL: Final = 6
_WARNING: Final = 4
_MESSAGE_ID_CHARACTERS_MAX: Final = 32


def collector_tls(ca_file: str | None) -> ssl.SSLContext | None:
    """Return the TLS settings for a collector; None, for plain TCP, without a `ca_file`.

    UsageError `config.unreadable` or `config.size`.
    """
    if ca_file is None:
        return None
    key = "broker.audit_forward.ca_file"
    content = read_file(ca_file, key=key)
    try:
        # Not create_default_context: without a certificate in the file, that trusts the system's.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            "config.unreadable", f"{key} {ca_file}: holds no certificates (PEM)"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def syslog_message(line: bytes, *, node: str) -> bytes:
    """Return a record's line as a message of RFC 5424 with its length before it (RFC 6587)."""
    record = Record.decode(line)
    timestamp = record.time.isoformat(timespec="microseconds")
    kind = record.kind[:_MESSAGE_ID_CHARACTERS_MAX]
    header = f"{_priority(record)}1 {timestamp} {node} sealaned - {kind} - "
    message = header.encode("ascii") + line
    return f"{len(message)} ".encode() + message


def local_message(line: bytes) -> bytes:
    """Return a record's line as a datagram of syslog(3): the collector adds the host's name."""
    now = time.strftime("%b %e %H:%M:%S")
    return f"{_priority(Record.decode(line))}{now} sealaned[{os.getpid()}]: ".encode() + line


def _priority(record: Record) -> str:
    severity = _WARNING if record.outcome in {"refused", "failed"} else _INFORMATIONAL
    return f"<{_FACILITY * 8 + severity}>"


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


class SyslogTcp:
    """A syslog collector at address:port, over TLS if there is a `ca_file`."""

    def __init__(self, address: str, ca_file: str | None, *, node: str) -> None:
        """Raise what `collector_tls` does."""
        self._address = address
        self._tls = collector_tls(ca_file)
        self._node = node

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[SendRecords]:
        """Connect; yields what sends records. OSError, or UnicodeError for the host's name."""
        async with self.connection() as connection:
            yield partial(self._send, connection)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Connect; OSError or UnicodeError."""
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

    async def _send(self, connection: Connection, lines: list[bytes]) -> None:
        """Return once the collector's machine has acknowledged all of the lines."""
        async with asyncio.timeout(SEND_SECONDS):
            await self._send_all(connection, lines)

    async def _send_all(self, connection: Connection, lines: list[bytes]) -> None:
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


class SyslogUnix:
    """The syslog collector of this machine, at its Unix socket for datagrams."""

    def __init__(self, path: str) -> None:
        self._path = path

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[SendRecords]:
        """Connect; yields what sends records. OSError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setblocking(False)
            end.connect(self._path)
            yield partial(self._send, end)

    async def _send(self, end: socket.socket, lines: list[bytes]) -> None:
        """Return once all of the lines are in the collector's queue."""
        for line in lines:
            # One limit for each: a slow collector that takes them has no limit for all.
            async with asyncio.timeout(SEND_SECONDS):
                await asyncio.get_running_loop().sock_sendall(end, local_message(line))
