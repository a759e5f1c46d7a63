"""Messages over kernel TCP: `receive ADDRESS` or `send ADDRESS CONGESTION_CONTROL RATE`.

A message is its length in 8 bytes, then the data; the receiver acknowledges it with one byte.
RATE is the pacing rate in bits per second (SO_MAX_PACING_RATE).
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Final

from benchmarks.sessions.lab.jobs import SECONDS_MAX, do, jobs

SO_MAX_PACING_RATE: Final = 47
"""From <asm-generic/socket.h>."""
BLOCK_BYTES: Final = 1 << 18
LENGTH_BYTES: Final = 8


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _receive_exactly(connection: socket.socket, into: memoryview, count: int) -> bool:
    """Read and discard `count` bytes; return False if the peer has closed."""
    while count:
        got = connection.recv_into(into[: min(count, len(into))])
        if not got:
            return False
        count -= got
    return True


def receive(address: str) -> None:
    """Serve connections until the process is killed."""
    with socket.create_server(_address(address), backlog=16) as server:
        print("{}:{}".format(*server.getsockname()), flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    block = memoryview(bytearray(BLOCK_BYTES))
    # A sender that gives up on a message resets the connection.
    with connection, contextlib.suppress(ConnectionError):
        _answer(connection, block)


def _answer(connection: socket.socket, block: memoryview) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while _receive_exactly(connection, block, LENGTH_BYTES):
        length = int.from_bytes(block[:LENGTH_BYTES], "big")
        if not _receive_exactly(connection, block, length):
            break
        connection.sendall(b"\1")


@contextlib.contextmanager
def connected(address: str, congestion: str, rate: int) -> Iterator[socket.socket]:
    """Connect, with a congestion control of the kernel and a pacing rate in bits per second."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate // 8)
        connection.settimeout(SECONDS_MAX)
        connection.connect(_address(address))
        yield connection


def send(address: str, congestion: str, rate: int) -> None:
    """Run the jobs on standard input."""
    for job in jobs():
        message = job.bytes.to_bytes(LENGTH_BYTES, "big") + bytes(job.bytes)

        def exchange(connection: socket.socket, message: bytes = message) -> None:
            connection.sendall(message)
            if connection.recv(1) != b"\1":
                raise ConnectionError("the receiver has ended")

        do(job, lambda: connected(address, congestion, rate), exchange)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], sys.argv[3], int(sys.argv[4]))
