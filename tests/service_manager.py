"""A service manager of ours: notifications, a file descriptor store, passed descriptors.

It follows sd_notify(3) and sd_listen_fds(3), and keeps the store of one service over its restarts.
"""

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from control_plane import Daemon, daemon

_BYTES_MAX = 4096
_DESCRIPTORS_MAX = 64

# Puts descriptors where a service expects them, and becomes the service.
_PASS = """
import fcntl, os, sys
names, numbers, notify = sys.argv[1], sys.argv[2].split(), sys.argv[3]
away = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in numbers]
for number in numbers:
    os.close(int(number))
for place, number in enumerate(away, 3):
    os.dup2(number, place)
    os.close(number)
os.environ["NOTIFY_SOCKET"] = notify
if numbers:
    os.environ |= {
        "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": names, "LISTEN_PID": str(os.getpid())
    }
os.execvp(sys.argv[4], sys.argv[4:])
"""


class ServiceManager:
    """Holds the descriptors of one service."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify")
        self.messages: list[str] = []
        self._stored: list[tuple[str, int]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of what is stored."""
        return [name for name, _ in self.stored()]

    def stored(self) -> Sequence[tuple[str, int]]:
        """Return names and descriptors of what is stored, after reading what was sent."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._receive()
            return list(self._stored)

    def add(self, name: str, descriptor: int) -> None:
        """Store a descriptor, as systemd does: none that it has."""
        held = {(each, os.fstat(number).st_ino) for each, number in self._stored}
        if (name, os.fstat(descriptor).st_ino) in held:
            os.close(descriptor)
        else:
            self._stored.append((name, descriptor))

    def close(self) -> None:
        """Forget everything."""
        for _, number in self._stored:
            os.close(number)
        self._stored.clear()
        self._socket.close()

    @contextlib.contextmanager
    def running(self, config: Path, *, exit_code: int = 0) -> Iterator[Daemon]:
        """Run sealaned, which is passed what is stored, until the end of the block."""
        stored = self.stored()
        names = ":".join(name for name, _ in stored)
        numbers = [number for _, number in stored]
        prefix = [sys.executable, "-S", "-c", _PASS, names, " ".join(map(str, numbers))]
        with daemon(
            config, prefix=[*prefix, self.address], descriptors=numbers, exit_code=exit_code
        ) as started:
            yield started

    def _receive(self) -> None:
        content, descriptors, _, _ = socket.recv_fds(self._socket, _BYTES_MAX, _DESCRIPTORS_MAX)
        text = content.decode()
        self.messages.append(text)
        fields = dict(line.partition("=")[::2] for line in text.split("\n"))
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            for descriptor in descriptors:
                self.add(name, descriptor)
        if fields.get("FDSTOREREMOVE") == "1":
            for each in [each for each in self._stored if each[0] == name]:
                self._stored.remove(each)
                os.close(each[1])
