"""Addresses for servers that need theirs before they start, or keep it across restarts."""

import contextlib
import random
import re
import socket
from pathlib import Path

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_HIGHEST = 65_535
_draw = random.SystemRandom()


def addresses_of_our_own(count: int) -> list[str]:
    """Return free addresses outside the range from which the kernel chooses ports."""
    low, high = map(int, _KERNELS.read_text().split())
    ports = max(range(_LOWEST, low), range(high + 1, _HIGHEST + 1), key=len)
    assert len(ports) > count, f"{_KERNELS}: {low} to {high} leaves no ports to choose from"
    found: list[str] = []
    with contextlib.ExitStack() as taken:
        while len(found) < count:
            address = "127.0.0.1", _draw.choice(ports)
            with contextlib.suppress(OSError):
                taken.enter_context(socket.create_server(address))
                found.append("{}:{}".format(*address))
    return found


def choose_ports(config: Path) -> None:
    """Replace addresses of a configuration whose port the kernel would choose."""
    config.write_text(
        re.sub(r'"127\.0\.0\.1:0"', lambda _: f'"{addresses_of_our_own(1)[0]}"', config.read_text())
    )
