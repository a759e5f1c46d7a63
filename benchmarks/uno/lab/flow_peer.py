"""One end of connections to the receiver: `receive PART` or `send PART`; PART is JSON.

A sender connects and prints `ready`, so that several can start at the same time. Then it reads
lines of `BEGIN SECONDS AT:BYTES …`: messages in order of time, AT seconds after BEGIN on the
monotonic clock of this machine. Each is sent on the first connection that is free, and given up
after SECONDS, which ends its connection; none starts later than SECONDS after the last is due. The
answer is JSON: `spans` are [number of the message,
start, end] in seconds after BEGIN, for those that were acknowledged.
"""

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""Sends a message of so many bytes, and waits up to so many seconds until it is acknowledged.

TimeoutError, ConnectionError.
"""


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
def _session(client: sync.Client, part: dict[str, Any], each: dict[str, Any]) -> Iterator[Send]:
    with client.open_session(
        each["name"],
        region_bytes=each["region_bytes"],
        peer_node=part["peer_node"],
        peer_address=part["address"],
        rate_bits_per_second=part["rate"],
        wait_seconds=OPEN_SECONDS,
    ) as session:

        def send(count: int, seconds: float) -> None:
            try:
                operation = session.post_send(length=count, reliability=Auto())
                operation.wait(timeout_seconds=seconds)
            except SessionError as error:
                raise ConnectionError(str(error)) from error

        yield send


def receive(part: dict[str, Any]) -> None:
    """Take these sessions, or any number of TCP connections, until killed."""
    if "sessions" not in part:
        receive_tcp(part["address"])
        return

    def listen(client: sync.Client, each: dict[str, Any]) -> None:
        with (
            contextlib.suppress(Error),
            client.listen_session(each["name"], region_bytes=each["region_bytes"]) as session,
        ):
            serve(session, each["message_bytes"], SLOTS)

    with sync.connect(part["socket"]) as client:
        threads = [
            threading.Thread(target=listen, args=(client, each)) for each in part["sessions"]
        ]
        for thread in threads:
            thread.start()
        print("listening", flush=True)
        for thread in threads:
            thread.join()


def send_all(
    sends: Sequence[Send], messages: Sequence[tuple[float, int]], begin: float, seconds: float
) -> list[tuple[int, float, float]]:
    """Send messages, given as (seconds after `begin`, bytes); return their numbers and times."""
    spans: list[tuple[int, float, float]] = []
    numbers = itertools.count()
    last = begin + messages[-1][0] + seconds

    def work(send: Send) -> None:
        while (number := next(numbers)) < len(messages):
            at, length = messages[number]
            time.sleep(max(0.0, begin + at - time.monotonic()))
            started = time.monotonic()
            if started > last:
                return
            try:
                send(length, seconds)
            except (TimeoutError, ConnectionError) as error:
                print(f"given up: {error!r}", file=sys.stderr)
                return
            ended = time.monotonic()
            spans.append((number, round(started - begin, 6), round(ended - begin, 6)))

    with ThreadPoolExecutor(len(sends)) as pool:
        for done in [pool.submit(work, send) for send in sends]:
            done.result()
    return sorted(spans)


def send(part: dict[str, Any]) -> None:
    """Connect, and send what standard input says."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if "sessions" in part:
            client = enter(sync.connect(part["socket"]))
            sends = [enter(_session(client, part, each)) for each in part["sessions"]]
        else:
            sends = [enter(_tcp(part)) for _ in range(part["connections"])]
        print("ready", flush=True)
        for line in sys.stdin:
            begin, seconds, *words = line.split()
            pairs = [word.split(":") for word in words]
            messages = [(float(at), int(length)) for at, length in pairs]
            spans = send_all(sends, messages, float(begin), float(seconds))
            print(json.dumps({"spans": spans}), flush=True)


if __name__ == "__main__":
    (receive if sys.argv[1] == "receive" else send)(json.loads(sys.argv[2]))
