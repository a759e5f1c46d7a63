"""Readiness and watchdog messages to systemd (sd_notify(3)): one datagram each, no library."""

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Final

_MESSAGE_BYTES_MAX: Final = 4096
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

    async def keep_watchdog(self) -> None:
        """Feed the watchdog at half its period, from the event loop that it watches."""
        while self._watchdog_seconds is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                sender.sendto(message.encode()[:_MESSAGE_BYTES_MAX], self._address)
            except OSError:
                # A service manager that has gone away must not end the daemon.
                return


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
