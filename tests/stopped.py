"""What a host does to a process whose bounds it doesn't like: stops it, or one thread of it."""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from typing import Final

_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_DETACH: Final = 17
_WALL: Final = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    ctypes.set_errno(0)
    if _libc.ptrace(request, thread, None, None) == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def main_thread_stopped(process_id: int) -> Iterator[None]:
    """Stop the main thread of a process, and no other, until the end of the block.

    The event loop stands still, and whatever waits for it; threads of the engine go on. Both ends
    of the block must be reached on one thread, which traces the other meanwhile.
    """
    _ptrace(_SEIZE, process_id)
    try:
        _ptrace(_INTERRUPT, process_id)
        os.waitpid(process_id, _WALL)
        yield
    finally:
        try:
            _ptrace(_DETACH, process_id)
        except OSError as error:
            # It was killed meanwhile.
            if error.errno != errno.ESRCH:
                raise


@contextlib.contextmanager
def frozen(process_id: int) -> Iterator[None]:
    """Stop every thread of a process until the end of the block."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)
