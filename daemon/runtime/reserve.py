"""Space on the disk that is set aside behind the end of a file, for when there is no other."""

import ctypes
import errno
import os
from typing import Final

RESERVE_BYTES: Final = 8 << 20
"""What a file can still grow by once its file system is full: some 14,000 audit records."""
STEP_BYTES: Final = 256 << 10
"""How much is set aside at a time beyond that."""

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: the file's length stays as it is


class Reserve:
    """The reserve of one file, by fallocate(2) beyond its end: no other file can take the blocks.

    A truncation gives them up, which `forget` must be told.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._end = 0

    def forget(self) -> None:
        """Take it that nothing is set aside."""
        self._end = 0

    def extend(self, size: int, *, wholly: bool = False) -> bool:
        """Keep `RESERVE_BYTES` behind a file of `size` bytes; False: there is no space for it.

        `wholly`: also what may be used until more is set aside, so a full disk shows at once.
        True also where the file system has no such call: nothing is known of it then. OSError for
        any other failure.
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
