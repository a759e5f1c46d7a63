"""What a daemon's process must refuse because keys are in its memory."""

import contextlib
import ctypes
import os
import resource
from typing import Final, Literal

from sealane.errors import UnavailableError

PR_SET_DUMPABLE: Final = 4
"""prctl(2); from <linux/prctl.h>."""
LOCK_EVERYTHING: Final = 1 | 2 | 4
"""mlockall(2): MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT; from <bits/mman-linux.h>."""

LockMemory = Literal["require", "prefer", "off"]


def forbid_inspection() -> None:
    """Keep other processes of our user from tracing this one, or reading its memory and files.

    Jobs may run as our user and are hostile. It also means no core dumps. Raises UnavailableError
    if the kernel refuses.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise UnavailableError(
            "process.inspectable",
            "other processes can't be kept from tracing this one: "
            f"{os.strerror(ctypes.get_errno())}",
        )


def lock_memory() -> None:
    """Keep all memory of this process out of swap, now and later (mlockall(2)).

    Keys are everywhere in it: in Python's and OpenSSL's heaps, in the engine, on stacks. Pages are
    locked when they are first touched, so what is only reserved costs nothing. Raises
    UnavailableError `process.memory.swappable` where the kernel wouldn't lock without bound.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = hard == resource.RLIM_INFINITY
    # Reserved addresses count against a limit, so that allocations would fail long before memory
    # is used up. CAP_IPC_LOCK lifts it, and nothing else lets mlockall succeed under a limit of 0.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard if is_unlimited else 0, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mlockall(LOCK_EVERYTHING) != 0
    number = ctypes.get_errno()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if failed:
        raise UnavailableError(
            "process.memory.swappable",
            f"memory can't be locked ({os.strerror(number)}; limit of locked memory: "
            f"{'none' if is_unlimited else f'{hard} bytes'}): keys may be "
            "written to swap. Allowed: LimitMEMLOCK=infinity, or CAP_IPC_LOCK",
        )
