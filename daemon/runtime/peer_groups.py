"""Supplementary groups of the process at the other end of a Unix socket (SO_PEERGROUPS).

The kernel keeps those that the process had at its connect(2), seen from this process's user
namespace. No list of groups on this machine is consulted: what counts is what the process has.
"""

import array
import ctypes
import errno
import os
import socket
from typing import Final

_SO_PEERGROUPS: Final = 59  # Linux 4.13; Python has no name for it
_GROUPS_MAX: Final = 65_536
"""NGROUPS_MAX of the kernel."""
_FIRST: Final = 64


def peer_groups(connection: socket.socket) -> list[int]:
    """Return the supplementary groups; OSError if the kernel doesn't tell them.

    socket.getsockopt takes 1024 bytes at most, which are 256 groups; a process may have 65,536.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for room in (_FIRST, _GROUPS_MAX):
        groups = array.array("I", bytes(4 * room))
        size = ctypes.c_uint32(4 * room)
        failed = libc.getsockopt(
            connection.fileno(),
            socket.SOL_SOCKET,
            _SO_PEERGROUPS,
            (ctypes.c_char * size.value).from_buffer(groups),
            ctypes.byref(size),
        )
        number = ctypes.get_errno()
        if not failed:
            return groups[: size.value // 4].tolist()
        if number != errno.ERANGE:
            break
    raise OSError(number, os.strerror(number))
