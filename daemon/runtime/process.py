"""Protection of a daemon's process, whose memory holds keys."""

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
    """Keep other processes of our user from tracing this one and reading its memory and files.

    Jobs may run as our user and are hostile. Also disables core dumps. UnavailableError
    `process.inspectable` if the kernel refuses.
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

    Keys may be anywhere in it: in Python's and OpenSSL's heaps, in the engine, on stacks. Pages are
    locked when first touched, so address space that is only reserved costs nothing.
    UnavailableError `process.memory.swappable` if the kernel doesn't allow unlimited locking.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = hard == resource.RLIM_INFINITY
    # Reserved address space counts against a limit, so allocations would fail long before memory is
    # used up. With a limit of 0, mlockall succeeds only with CAP_IPC_LOCK, which lifts the limit.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard if is_unlimited else 0, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mlockall(LOCK_EVERYTHING) != 0
    number = ctypes.get_errno()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if failed:
        raise UnavailableError(
            "process.memory.swappable",
            f"memory can't be locked ({os.strerror(number)}; limit of locked memory: "
            f"{'none' if is_unlimited else f'{hard} bytes'}), so keys may be "
            "written to swap; allowed: LimitMEMLOCK=infinity, or CAP_IPC_LOCK",
        )
