"""A file that reserves space for small files: those of its directory, and one level below.

While the file system is full, a write is lent as much as it needs, and the reserve grows again as
soon as it can: by what the write's old file gave back, or when there is space.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

RESERVE_NAME: Final = "reserve"
RESERVE_BYTES: Final = 1 << 20
"""Size of a whole reserve."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system, or of its user's quota, without space."""
# For entries of directories, and for what the file system notes about a file.
_MORE_BLOCKS: Final = 2

_lending = threading.Lock()


def keep_reserve(directory: Path) -> int:
    """Grow a directory's reserve to `RESERVE_BYTES` or as far as possible; return its bytes.

    Returns 0 if there can't be any. Blocks.
    """
    try:
        descriptor = os.open(
            directory / RESERVE_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError:
        return 0
    try:
        return _grow(descriptor)
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def with_reserve(path: Path, count: int, write: Callable[[], None]) -> None:
    """Call `write`, of a file of `count` bytes at `path`; lend it space if it finds none.

    The space is of the reserve in the file's directory, or else in the one above. Blocks; raises
    what the last call of `write` raised.
    """
    try:
        write()
    except OSError as error:
        if error.errno not in FULL or not _lend(path, count, write):
            raise


def _lend(path: Path, count: int, write: Callable[[], None]) -> bool:
    """Repeat `write` with space of the reserve; False if that isn't enough."""
    with _lending:
        directory = next((d for d in [*path.parents][:2] if (d / RESERVE_NAME).exists()), None)
        while directory is not None and _shrink(directory / RESERVE_NAME, count):
            try:
                write()
            except OSError as error:
                if error.errno not in FULL:
                    raise
            else:
                keep_reserve(directory)
                return True
        return False


def _grow(descriptor: int) -> int:
    size, block = os.fstat(descriptor).st_size, os.fstatvfs(descriptor).f_frsize
    step = RESERVE_BYTES
    while size < RESERVE_BYTES and step >= block:
        try:
            os.posix_fallocate(descriptor, size, min(step, RESERVE_BYTES - size))
        except OSError as error:
            if error.errno not in FULL:
                raise
            step //= 2
        # A call that fails may have got a part.
        size = os.fstat(descriptor).st_size
    return size


def _shrink(path: Path, count: int) -> bool:
    """Release enough for a file of `count` bytes; False if there was nothing to release."""
    try:
        size, block = path.stat().st_size, os.statvfs(path).f_frsize
        if size:
            needed = (-(-count // block) + _MORE_BLOCKS) * block
            os.truncate(path, max(0, size - needed))
        else:
            # What is missing may be an inode.
            path.unlink()
    except OSError:
        return False
    return True
