"""Linux namespaces: calls missing in Python's standard library before 3.12, and mount(2)."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000
"""From <linux/sched.h>."""

MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_SLAVE: Final = 0x8_0000
"""From <linux/mount.h>."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def go_first() -> None:
    """Give this thread and those it starts real-time priority, if permitted."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def let_go(*descriptors: int) -> None:
    """Replace descriptors by /dev/null, so that readers at their other ends see the end."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) to new namespaces; OSError if refused."""
    _check(_libc.unshare(flags), "unshare")


def enter(namespace: int, kind: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) to an existing namespace.

    `namespace` is its descriptor. OSError if refused.
    """
    _check(_libc.setns(namespace, kind), "setns")


def mount(source: str, target: Path, kind: str | None, flags: int = 0) -> None:
    """Mount a file system, or bind a path; OSError if refused."""
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), os.fsencode(target), encoded, ctypes.c_ulong(flags), None)
    _check(result, f"mount on {target}")


def unmount(target: Path) -> None:
    """Unmount a file system; OSError if refused."""
    _check(_libc.umount(os.fsencode(target)), f"unmount {target}")
