"""Disk space reserved behind the end of a file, for when the file system is full."""

import ctypes
import errno
import os
from typing import Final

RESERVE_BYTES: Final = 8 << 20
"""Growth still possible once the file system is full: some 14,000 audit records."""
STEP_BYTES: Final = 256 << 10
"""Space reserved beyond that at each extension."""

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: the file's length stays as it is


class Reserve:
    """The reserve of one file, by fallocate(2) beyond its end, so no other file gets the blocks.

    Truncating the file releases them: call `forget` then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._end = 0

    def forget(self) -> None:
        """Assume that nothing is reserved."""
        self._end = 0

    def extend(self, size: int, *, wholly: bool = False) -> bool:
        """Reserve `RESERVE_BYTES` behind a file of `size` bytes; return False if the disk is full.

        `wholly` also demands the step beyond them, so that a full disk is noticed at once. Also
        returns True if the file system doesn't support the call. OSError for any other failure.
        """
        if self._end - size >= RESERVE_BYTES + (STEP_BYTES if wholly else 0):
            return True
        end = size + RESERVE_BYTES + STEP_BYTES
        length = ctypes.c_longlong(end - size)
        if self._libc.fallocate(self._descriptor, _KEEP_SIZE, ctypes.c_longlong(size), length) == 0:
            self._end = end
            return True
        number = ctypes.get_errno()
        if number in {errno.ENOSPC, errno.EDQUOT}:
            return False
        if number in {errno.EOPNOTSUPP, errno.ENOSYS}:
            return True
        if number == errno.EINTR:
            return self.extend(size, wholly=wholly)
        raise OSError(number, os.strerror(number))
