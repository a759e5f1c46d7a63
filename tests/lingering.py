"""A descriptor whose last close blocks whoever does it."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Final

LINGER_SECONDS: Final = 60


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """Yield a TCP socket's descriptor, for the caller to close; its peer takes nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        # A little fills it.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client = socket.create_connection(server.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        peer, _ = server.accept()
    with peer:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(bytes(1 << 20))
        linger = struct.pack("ii", 1, LINGER_SECONDS)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        yield client.detach()
