"""Labs for tests, started as by a user, with access to sockets of their hosts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netns import create_socket

from patience import PATIENCE_SECONDS
from sealane.lab.control import LabConnection

SEALANE = [
    sys.executable,
    "-c",
    "import sys; from sealane.cli.lab import main; sys.exit(main())",
]
SO_RCVBUFFORCE = 33
RECEIVE_BUFFER_BYTES = 1 << 27

CLEAN = """
rate_bits_per_second = 50_000_000
delay_micros = 5_000
buffer_bytes = 16_000_000
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


def wan(name: str, extra: str = "", *, left: str = "a", right: str = "b", link: str = CLEAN) -> str:
    """Describe a link in TOML."""
    return f'[[wan]]\nname = "{name}"\nleft = ["{left}"]\nright = ["{right}"]\n{link}{extra}\n'


def command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SEALANE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        **options,
    )


class RunningLab:
    def __init__(self, name: str, status: dict[str, Any]) -> None:
        self.name = name
        self.status = status
        self.connection = LabConnection(name)

    def address(self, host: str, wan: str) -> str:
        address: str = self.status["hosts"][host][wan][0]
        return address

    def namespace(self, host: str) -> str:
        descriptor = self.connection.ask("host", host=host)["descriptor"]
        return f"/proc/{self.connection.pid}/fd/{descriptor}"

    def entering(self, host: str) -> list[str]:
        """Return the command prefix that runs a command as a host."""
        return ["nsenter", f"--net={self.namespace(host)}", "--"]

    def open_socket(
        self, host: str, kind: int = socket.SOCK_DGRAM, protocol: int = 0
    ) -> socket.socket:
        made: socket.socket = create_socket(
            self.namespace(host), socket.AF_INET, kind, protocol, flags=0
        )
        made.settimeout(PATIENCE_SECONDS)
        return made

    def receiver(self, host: str, wan: str) -> socket.socket:
        """Return a UDP socket that buffers all that a test sends, so that nobody has to read."""
        made = self.open_socket(host)
        made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        made.bind((self.address(host, wan), 0))
        return made

    def report(self, wan: str) -> dict[str, Any]:
        report: dict[str, Any] = self.connection.ask("report")[wan]
        return report

    def path(self, wan: str, direction: str = "forward") -> dict[str, int]:
        path: dict[str, int] = self.report(wan)[direction]["paths"][0]
        return path

    def wait_settled(self, wan: str, sent: int) -> dict[str, int]:
        """Wait until the link has dropped or delivered all of `sent` packets."""
        while True:
            forward = self.report(wan)["forward"]
            path: dict[str, int] = forward["paths"][0]
            settled = path["delivered_packets"] + path["lost_packets"] + path["down_packets"]
            settled += path["overflowed_packets"] + path["dropped_early_packets"]
            passed = forward["sent_packets"] + forward["unsent_packets"]
            if settled >= sent and passed >= path["delivered_packets"]:
                return path


def drain(receiver: socket.socket) -> list[bytes]:
    """Return the packets that have arrived."""
    receiver.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(receiver.recv(65_536))
    return found


@contextlib.contextmanager
def running(
    tmp_path: Path, topology: str, *options: str, name: str | None = None
) -> Iterator[RunningLab]:
    name = name or f"t{uuid.uuid4().hex[:10]}"
    path = tmp_path / "topology.toml"
    path.write_text(topology)
    result = command("up", path, "--name", name, "--unmeasured", "--output", "json", *options)
    assert result.returncode == 0, result.stderr
    lab = RunningLab(name, json.loads(result.stdout))
    try:
        yield lab
    finally:
        with contextlib.suppress(Exception), LabConnection(name) as connection:
            connection.end()
        lab.connection.__exit__()
