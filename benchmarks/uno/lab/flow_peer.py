"""One end of connections to the receiver: `receive PART` or `send PART`; PART is JSON.

A sender connects and prints `ready`, so that several can start at the same time. Then it reads
lines of `BYTES COUNT SECONDS`, sends up to COUNT messages one after the other until all are
acknowledged or one has taken SECONDS, and prints their completion times as JSON.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.sessions.lab.session_peer import serve
from benchmarks.sessions.lab.tcp_peer import LENGTH_BYTES, connected
from benchmarks.sessions.lab.tcp_peer import receive as receive_tcp

from sealane.client import sync
from sealane.client.messages import Auto
from sealane.errors import Error, SessionError

SLOTS: Final = 3
"""Receives that are posted at a time."""
OPEN_SECONDS: Final = 60.0

Send = Callable[[int, float], None]
"""Sends a message of so many bytes, and waits up to so many seconds until it is acknowledged."""


@contextlib.contextmanager
def _tcp(part: dict[str, Any]) -> Iterator[Send]:
    with connected(part["address"], part["congestion"], part["rate"]) as connection:

        def send(count: int, seconds: float) -> None:
            connection.settimeout(seconds)
            connection.sendall(count.to_bytes(LENGTH_BYTES, "big") + bytes(count))
            if connection.recv(1) != b"\1":
                raise ConnectionError("the receiver has ended")

        yield send


@contextlib.contextmanager
def _session(part: dict[str, Any]) -> Iterator[Send]:
    with (
        sync.connect(part["socket"]) as client,
        client.open_session(
            part["name"],
            region_bytes=part["region_bytes"],
            peer_node=part["peer_node"],
            peer_address=part["address"],
            rate_bits_per_second=part["rate"],
            wait_seconds=OPEN_SECONDS,
        ) as session,
    ):
        # Arrays of a region are handed out once.
        arrays = {count: session.empty(count, "uint8") for count in part["lengths"]}

        def send(count: int, seconds: float) -> None:
            try:
                operation = session.post_send(arrays[count], reliability=Auto())
                operation.wait(timeout_seconds=seconds)
            except SessionError as error:
                raise ConnectionError(str(error)) from error

        yield send


def receive(part: dict[str, Any]) -> None:
    """Take the sessions with these names, or any number of TCP connections, until killed."""
    if "names" not in part:
        receive_tcp(part["address"])
        return

    def listen(client: sync.Client, name: str) -> None:
        with (
            contextlib.suppress(Error),
            client.listen_session(name, region_bytes=part["region_bytes"]) as session,
        ):
            serve(session, max(part["lengths"]), SLOTS)

    with sync.connect(part["socket"]) as client:
        threads = [threading.Thread(target=listen, args=(client, name)) for name in part["names"]]
        for thread in threads:
            thread.start()
        print("listening", flush=True)
        for thread in threads:
            thread.join()


def send(part: dict[str, Any]) -> None:
    """Connect, and send what standard input says."""
    with (_session if "socket" in part else _tcp)(part) as exchange:
        print("ready", flush=True)
        for line in sys.stdin:
            length, count, seconds = line.split()
            times: list[float] = []
            unfinished = 0
            try:
                for _ in range(int(count)):
                    started = time.perf_counter()
                    exchange(int(length), float(seconds))
                    times.append(round(time.perf_counter() - started, 6))
            except (TimeoutError, ConnectionError) as error:
                print(f"given up: {error!r}", file=sys.stderr)
                unfinished = 1
            print(json.dumps({"times": times, "unfinished": unfinished}), flush=True)


if __name__ == "__main__":
    (receive if sys.argv[1] == "receive" else send)(json.loads(sys.argv[2]))
