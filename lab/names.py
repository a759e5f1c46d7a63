"""Names of running labs: abstract Unix sockets, which end with their listening process."""

import struct
from pathlib import Path
from typing import Final

PEER_CREDENTIALS: Final = struct.Struct("3i")
"""The result of SO_PEERCRED: process, user and group (unix(7))."""
_PREFIX: Final = "sealane-lab"


def socket_address(name: str, user: int) -> str:
    """Return the socket address of a user's lab."""
    return f"\0{_PREFIX}/{user}/{name}"


def lab_names(user: int) -> list[str]:
    """Return the names of a user's running labs, from the kernel's list of sockets."""
    prefix = f"@{_PREFIX}/{user}/"
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split(maxsplit=7)[7:]
        if path and path[0].startswith(prefix):
            names.add(path[0].removeprefix(prefix))
    return sorted(names)
