"""Attacks of a host on a process: stopping all of it, or one thread."""

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from patience import PATIENCE_SECONDS

_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_DETACH: Final = 17
_WALL: Final = 0x40000000
_STOPPED: Final = {"T", "t"}
"""Stopped by a signal, or by its tracer."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    ctypes.set_errno(0)
    if _libc.ptrace(request, thread, None, None) == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def main_thread_stopped(process_id: int) -> Iterator[None]:
    """Stop only the main thread of a process until the end of the block.

    The event loop and everything that waits for it stop; threads of the engine go on. The block
    must begin and end on the same thread, which traces the stopped one.
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
    """Stop every thread of a process until the end of the block.

    The block begins once each of them has stopped: on a busy machine some go on for a while.
    """
    os.kill(process_id, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _states(process_id) <= _STOPPED:
            assert time.monotonic() < deadline, f"a thread of process {process_id} goes on"
            time.sleep(0.001)
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def _states(process_id: int) -> set[str]:
    """Return the states of a process's threads (proc(5), `stat`)."""
    states = set()
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        # One may have ended meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add((thread / "stat").read_text().rpartition(") ")[2][0])
    return states
