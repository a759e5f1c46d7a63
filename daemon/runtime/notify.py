"""Messages to systemd (sd_notify(3)): readiness, watchdog, stored descriptors; no library."""

import asyncio
import os
import socket
from array import array
from collections.abc import Mapping
from typing import Final

_MESSAGE_BYTES_MAX: Final = 4096
_NAME_MAX: Final = 255
_STOP_SECONDS: Final = 20
"""Longest time of a stop without what its caller adds."""


class Notifier:
    """Sends to the socket in NOTIFY_SOCKET; does nothing if it isn't set."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of the abstract name space.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._watchdog_seconds = _watchdog_seconds(environment)

    def ready(self, status: str) -> None:
        """Report that start-up is complete."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, *, drain_seconds: float) -> None:
        """Report that the daemon drains and stops, and extend the time-out accordingly."""
        microseconds = round((drain_seconds + _STOP_SECONDS) * 1e6)
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={microseconds}")

    def keep(self, name: str, descriptor: int) -> None:
        """Have a duplicate passed to the next process of this service, as `name`."""
        self._send(f"FDSTORE=1\nFDNAME={name}", descriptor)

    def forget(self, name: str) -> None:
        """Have all stored descriptors of that name closed."""
        if is_descriptor_name(name):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    async def keep_watchdog(self) -> None:
        """Feed the watchdog at half its period, from the event loop that it watches."""
        while self._watchdog_seconds is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _send(self, message: str, *descriptors: int) -> None:
        if not self._address:
            return
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                content = message.encode()[:_MESSAGE_BYTES_MAX]
                # Python 3.11's socket.send_fds ignores its address.
                sender.sendmsg([content], [rights] if descriptors else [], 0, self._address)
            except OSError:
                # A service manager that has gone away must not end the daemon.
                return


def is_descriptor_name(name: str) -> bool:
    """Return True for a name that systemd allows, so that it can't be another line's start."""
    return 0 < len(name) <= _NAME_MAX and name.isascii() and name.isprintable() and ":" not in name


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
