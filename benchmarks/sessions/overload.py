"""`python -m benchmarks.sessions.overload`: TCP next to a session that overloads their link.

A lab of two hosts and one link. TCP (with the host's default congestion control) runs alone for ten
seconds, then next to a session whose rate is a multiple of the link's. Prints TCP's goodput for
each second; without the session's circuit breaker TCP would get none. Needs root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

UNIT_BYTES: Final = 1408
ALONE_SECONDS: Final = 10
PORT: Final = 5001
RUNS_FOR_EVER: Final = 1 << 50
_LAB: Final = (
    sys.executable,
    "-c",
    "import sys; from sealane.cli.lab import main; sys.exit(main())",
)
_RECEIVE: Final = f"""
import socket, time
connection, _ = socket.create_server(("0.0.0.0", {PORT})).accept()
started, second, received = time.monotonic(), 1, 0
while data := connection.recv(1 << 20):
    received += len(data)
    while time.monotonic() - started >= second:
        print(received * 8 / 1e6, flush=True)
        received, second = 0, second + 1
"""
_SEND: Final = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}))
while True:
    connection.sendall(bytes(1 << 16))
"""


def _topology(rate_bits_per_second: int) -> str:
    # The buffer holds 40 ms, two round trips of 20 ms.
    return f"""
[[wan]]
name = "link"
left = ["a"]
right = ["b"]
rate_bits_per_second = {rate_bits_per_second}
delay_micros = 10_000
buffer_bytes = {rate_bits_per_second // 200}
"""


@contextmanager
def _lab(rate_bits_per_second: int) -> Iterator[str]:
    name = f"overload-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        topology = Path(directory, "lab.toml")
        topology.write_text(_topology(rate_bits_per_second))
        up = [*_LAB, "up", str(topology), "--name", name]
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    try:
        yield name
    finally:
        # This also ends every process that runs in the lab.
        subprocess.run([*_LAB, "down", name], check=True, stdout=subprocess.DEVNULL)


class _Process:
    def __init__(self, lab: str, host: str, *command: str) -> None:
        self._process = subprocess.Popen(
            [*_LAB, "exec", "--lab", lab, host, "--", sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines = cast("IO[str]", self._process.stdout)
        self._input = cast("IO[str]", self._process.stdin)

    def tell(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()


def _addresses(lab: str) -> list[str]:
    asked = [*_LAB, "status", lab, "--output", "json"]
    printed = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout
    hosts = json.loads(printed)["hosts"]
    return [hosts[host]["link"][0] for host in ("a", "b")]


def _start_session(lab: str, addresses: list[str], rate_bits_per_second: int) -> None:
    peers = [_Process(lab, host, "-m", "benchmarks.sessions.peer") for host in ("a", "b")]
    for index, peer in enumerate(peers):
        part = {
            "address": addresses[index],
            "is_sender": index == 0,
            "unit_bytes": UNIT_BYTES,
            "rate_bits_per_second": rate_bits_per_second,
            "bytes": RUNS_FOR_EVER,
        }
        peer.tell(json.dumps(part))
    bound = [peer.lines.readline().strip() for peer in peers]
    for peer, address in zip(peers, reversed(bound), strict=True):
        peer.tell(address)


def main() -> int:
    """Measure and print TCP's goodput."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions.overload")
    parser.add_argument(
        "--link", type=int, default=60_000_000, help="rate of the link in bit/s (default 60 M)"
    )
    parser.add_argument(
        "--rate", type=int, default=120_000_000, help="rate of the session in bit/s (default 120 M)"
    )
    parser.add_argument(
        "--seconds", type=int, default=40, help="seconds with both running (default 40)"
    )
    arguments = parser.parse_args()
    goodput: list[tuple[float, float]] = []
    with _lab(arguments.link) as lab:
        addresses = _addresses(lab)
        receiver = _Process(lab, "b", "-c", _RECEIVE)

        def read() -> None:
            goodput.extend((time.monotonic(), float(line)) for line in receiver.lines)

        threading.Thread(target=read, daemon=True).start()
        # Give it time to listen.
        time.sleep(2)
        _Process(lab, "a", "-c", _SEND, addresses[1])
        time.sleep(ALONE_SECONDS)
        began = time.monotonic()
        _start_session(lab, addresses, arguments.rate)
        time.sleep(arguments.seconds)
    for what, values in (
        ("alone", [value for at, value in goodput if at < began]),
        ("with the session", [value for at, value in goodput if at >= began]),
    ):
        print(
            f"TCP {what}: median {statistics.median(values):.1f}, minimum {min(values):.1f} Mbit/s"
        )
        print("  Mbit/s in each second:", " ".join(f"{value:.0f}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
