"""Files: bounded reads of what an operator names, secrets closed to others, durable writes."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

from sealane.errors import UsageError

FILE_BYTES_MAX: Final = 1 << 20
RESERVE_NAME: Final = "reserve"
"""A file that holds room for small files of its directory, until the file system is full."""
RESERVE_BYTES: Final = 1 << 20
_RESERVE_BYTES_MIN: Final = 1 << 16


def read_bounded(path: Path) -> bytes:
    """Read at most FILE_BYTES_MAX + 1 bytes: one more than allowed tells that there are more."""
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def read_file(path: str, *, key: str) -> bytes:
    """Read a file that the configuration names under `key`; UsageError in one line."""
    try:
        content = read_bounded(Path(path))
    except OSError as error:
        raise UsageError("config.unreadable", f"{key} {path}: {error.strerror}") from error
    return _sized(content, path, key)


def read_secret(path: str, *, key: str) -> bytes:
    """Read a key file; UsageError also if it is not a plain file of ours, closed to others."""
    try:
        # Not blocking: opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            _check_private(os.fstat(descriptor), path, key)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError("config.unreadable", f"{key} {path}: {error.strerror}") from error
    return _sized(content, path, key)


def keep_reserve(directory: Path) -> bool:
    """Have the directory hold room for small files; False if there is none for that now."""
    path = directory / RESERVE_NAME
    if path.exists():
        return True
    size = RESERVE_BYTES
    while size >= _RESERVE_BYTES_MIN:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            size //= 2
        else:
            return True
    return False


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that a power cut leaves the old content or the new; OSError if it can't.

    When it returns, the new content is durable. The file is readable by its owner only. On a full
    file system it takes the room that the directory's reserve holds.
    """
    try:
        _write_durably(path, content)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not _spend_reserve(path.parent):
            raise
        _write_durably(path, content)


def _spend_reserve(directory: Path) -> bool:
    try:
        (directory / RESERVE_NAME).unlink()
    except OSError:
        return False
    return True


def _write_durably(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        # What is half written would only take room.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_private(status: os.stat_result, path: str, key: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("key.file", f"{key} {path}: not a plain file")
    if status.st_uid not in {os.geteuid(), 0}:
        raise UsageError(
            "key.file.owner",
            f"{key} {path}: owner {status.st_uid}; allowed: {os.geteuid()} or 0",
        )
    mode = stat.S_IMODE(status.st_mode)
    # The service manager opens its credentials to one user by an access list, whose mask stands
    # where the group's mode is.
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    is_credential = credentials is not None and Path(path).parent == Path(credentials)
    if mode & (0o007 if is_credential else 0o077):
        raise UsageError("key.file.mode", f"{key} {path}: mode {mode:04o}; allowed: 0600 or 0400")


def _sized(content: bytes, path: str, key: str) -> bytes:
    if len(content) > FILE_BYTES_MAX:
        raise UsageError("config.size", f"{key} {path}: allowed are {FILE_BYTES_MAX} bytes")
    return content


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; never replaces one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError("key.unwritable", f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
