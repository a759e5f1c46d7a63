"""Where labs are found: abstract Unix sockets, which end with the process that listens."""

import struct
from pathlib import Path
from typing import Final

PEER_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED gives them (unix(7))."""
_PREFIX: Final = "sealane-lab"


def socket_address(name: str, user: int) -> str:
    """Return the address of a user's lab."""
    return f"\0{_PREFIX}/{user}/{name}"


def lab_names(user: int) -> list[str]:
    """Return the labs of a user that run, by the kernel's list of sockets."""
    prefix = f"@{_PREFIX}/{user}/"
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split(maxsplit=7)[7:]
        if path and path[0].startswith(prefix):
            names.add(path[0].removeprefix(prefix))
    return sorted(names)
