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

STAT_BLOCK_BYTES: Final = 512
"""Unit of `st_blocks`."""

_kept: Final[dict[Path, threading.RLock]] = {}
"""Directories whose reserves this process keeps; others' files of this name are never touched."""


def keep_reserve(directory: Path) -> int:
    """Grow a directory's reserve to `RESERVE_BYTES` or as far as possible; return its bytes.

    From now on it may be lent. Returns 0 if there can't be any. Blocks.
    """
    with _kept.setdefault(directory.absolute(), threading.RLock()):
        try:
            descriptor = _opened(directory / RESERVE_NAME, os.O_CREAT)
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
    directory = next((d for d in [*path.absolute().parents][:2] if _has_reserve(d)), None)
    if directory is None:
        return False
    with _kept[directory]:
        while _shrink(directory / RESERVE_NAME, count):
            try:
                write()
            except OSError as error:
                if error.errno not in FULL:
                    raise
            else:
                keep_reserve(directory)
                return True
        return False


def _has_reserve(directory: Path) -> bool:
    return directory in _kept and (directory / RESERVE_NAME).exists()


def _opened(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _grow(descriptor: int) -> int:
    size, block = _space(descriptor), os.fstatvfs(descriptor).f_frsize
    step = RESERVE_BYTES
    while size < RESERVE_BYTES and step >= block:
        # From the start if the file has holes, for example because it was copied.
        start = size if size == os.fstat(descriptor).st_size else 0
        try:
            os.posix_fallocate(descriptor, start, min(start + step, RESERVE_BYTES) - start)
        except OSError as error:
            if error.errno not in FULL:
                raise
            step //= 2
        else:
            if start == 0 and _space(descriptor) <= size:
                # The file system doesn't reserve, or compresses.
                break
        # A call that fails may have got a part.
        size = _space(descriptor)
    return size


def _space(descriptor: int) -> int:
    """Return how much of its size a file has got."""
    status = os.fstat(descriptor)
    return min(status.st_size, status.st_blocks * STAT_BLOCK_BYTES)


def _shrink(path: Path, count: int) -> bool:
    """Release enough for a file of `count` bytes; False if there was nothing to release."""
    try:
        descriptor = _opened(path)
        try:
            size, block = os.fstat(descriptor).st_size, os.fstatvfs(descriptor).f_frsize
            needed = (-(-count // block) + _MORE_BLOCKS) * block
            os.ftruncate(descriptor, max(0, size - needed))
        finally:
            os.close(descriptor)
        if not size:
            # What is missing may be an inode.
            path.unlink()
    except OSError:
        return False
    return True
