"""Check of the kernel's limit for the receive buffers of sessions' sockets."""

from pathlib import Path
from typing import Final

from sealane._native import SOCKET_BUFFER_BYTES
from sealane.daemon.runtime.logs import get_logger

LIMIT_FILE: Final = Path("/proc/sys/net/core/rmem_max")


def warn_of_small_buffers(limit_file: Path = LIMIT_FILE) -> None:
    """Log a warning if a socket can't have the buffer that a session asks for.

    With less, the kernel drops packets whenever a session's thread is late by a millisecond or
    two (`receive_drops`), and the peer sends more slowly.
    """
    try:
        limit = int(limit_file.read_text())
    except (OSError, ValueError):
        return  # Not readable in this network namespace: `receive_drops` still tells.
    if limit < SOCKET_BUFFER_BYTES:
        get_logger().warning(
            "receive_buffer_small",
            bytes_max=limit,
            bytes_wanted=SOCKET_BUFFER_BYTES,
            command=f"sysctl -w net.core.rmem_max={SOCKET_BUFFER_BYTES}",
        )
