"""Addresses for servers that need theirs before they start, or keep it across restarts.

A free port of 127.0.0.1 may be taken between its choice and its use, or while its server restarts:
by another test, or by the kernel for somebody's connection. All of 127.0.0.0/8 is this machine's,
therefore each of these addresses is on a host of its own.
"""

import contextlib
import random
import re
import socket
from ipaddress import IPv4Address
from pathlib import Path

_HOSTS = range(int(IPv4Address("127.1.0.1")), int(IPv4Address("127.255.255.255")))
_PORTS = range(10_000, 65_536)
_draw = random.SystemRandom()


def addresses_of_our_own(count: int) -> list[str]:
    """Return addresses of this machine that nothing else uses."""
    found: list[str] = []
    while len(found) < count:
        address = str(IPv4Address(_draw.choice(_HOSTS))), _draw.choice(_PORTS)
        # A server on every address of this machine may have the port.
        with contextlib.suppress(OSError), socket.create_server(address):
            found.append("{}:{}".format(*address))
    return found


def choose_ports(config: Path) -> None:
    """Replace addresses of a configuration whose port the kernel would choose."""
    config.write_text(
        re.sub(r'"127\.0\.0\.1:0"', lambda _: f'"{addresses_of_our_own(1)[0]}"', config.read_text())
    )
