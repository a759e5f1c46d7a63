"""What a daemon's process must refuse because keys are in its memory."""

import contextlib
import ctypes
import os
import resource
from typing import Final

from sealane.errors import UnavailableError

PR_SET_DUMPABLE: Final = 4
"""prctl(2); from <linux/prctl.h>."""


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
