"""Connections within the process, and the event loop of all fuzz targets."""

import asyncio
import atexit
import contextlib
import socket

LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


class LocalSocket(socket.socket):
    """A Unix socket instead of a TCP one; it ignores TCP options."""

    def setsockopt(self, *_: object) -> None:  # type: ignore[override]
        """Set nothing."""

    def getsockname(self) -> tuple[str, int]:
        """Address of a listener."""
        return "127.0.0.1", 4420


def pair() -> tuple[LocalSocket, LocalSocket]:
    """Return two connected sockets: a non-blocking one for us, and one for the peer."""
    near, far = (LocalSocket(fileno=end.detach()) for end in socket.socketpair())
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def finish(far: socket.socket) -> bytes:
    """Return everything sent to the peer."""
    received = b""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while part := far.recv(1 << 20):
            received += part
    return received
