"""Files: bounded reads, secrets closed to other users, durable writes."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from sealane.daemon.runtime.credentials import (
    OWN_STORE,
    is_credential,
    is_encrypted,
    store_access,
)
from sealane.daemon.runtime.reserve_file import FULL, with_reserve
from sealane.errors import Error, UnavailableError, UsageError

FILE_BYTES_MAX: Final = 1 << 20
_GONE: Final = FULL | {
    errno.EIO,
    errno.ENODEV,
    errno.ENXIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EUCLEAN,
}
"""Errors of a file system that is full, or whose drive is gone: no fault of the configuration."""


def unusable(path: Path, error: OSError, *, key: str = "") -> Error:
    """Return what to raise for a path that can't be used.

    UnavailableError `directory.unavailable` if its file system is full or gone, so that the service
    manager tries again; otherwise UsageError `directory.unusable`.
    """
    message = f"{key} {path}: {error.strerror}".lstrip()
    if error.errno in _GONE:
        return UnavailableError("directory.unavailable", message)
    return UsageError("directory.unusable", message)


def read_bounded(path: Path) -> bytes:
    """Read at most FILE_BYTES_MAX + 1 bytes: one more than allowed shows that a file is too large.

    OSError if the file can't be read.
    """
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def read_file(path: str, *, key: str) -> bytes:
    """Read a file named in the configuration under `key`.

    UsageError `config.unreadable` or `config.size`.
    """
    try:
        content = read_bounded(Path(path))
    except OSError as error:
        raise UsageError("config.unreadable", f"{key} {path}: {error.strerror}") from error
    return _sized(content, path, key)


def read_secret(path: str, *, key: str) -> bytes:
    """Read a key file, which must be a regular file of ours or root's, closed to others.

    UsageError `key.file…`, `config.unreadable` or `config.size`.
    """
    if is_encrypted(path):
        raise UsageError(
            "key.encrypted", f"{key} {path}: only the service manager can read it, for the unit"
        )
    try:
        # Non-blocking, since opening a FIFO would wait for its writer.
        with store_access(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            _check_private(os.fstat(descriptor), path, key)
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        if not is_credential(path):
            raise UsageError("config.unreadable", f"{key} {path}: {error.strerror}") from error
        name = Path(path).name
        raise UsageError(
            "config.unreadable",
            f"{key}: the unit has no credential {name}; it comes from {OWN_STORE}/{name}, if the "
            f"unit has the line LoadCredential={name}",
        ) from error
    except OSError as error:
        raise UsageError("config.unreadable", f"{key} {path}: {error.strerror}") from error
    return _sized(content, path, key)


@contextlib.contextmanager
def replacing(path: Path, draft: Path) -> Iterator[None]:
    """Replace a file with the draft that the block writes, unless it raises OSError."""
    try:
        yield
        draft.replace(path)
    except OSError:
        # A half-written draft would only take space.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that a power cut leaves either the old or the new content.

    On return, the new content is durable. Only the owner can read the file. On a full file system
    it uses the reserve of the directory or the one above. OSError if the file can't be written:
    ENOSPC or EDQUOT say that the old content is still there; after another error either may be.
    """
    draft = path.with_name(path.name + ".new")
    is_replaced = False

    def write() -> None:
        nonlocal is_replaced
        with replacing(path, draft):
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        is_replaced = True
        sync_directory(path.parent)

    try:
        with_reserve(path, len(content), write)
    except OSError as error:
        if is_replaced and error.errno in FULL:
            raise OSError(errno.EIO, f"{path.parent} can't be synced: {error.strerror}") from error
        raise


def _check_private(status: os.stat_result, path: str, key: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("key.file", f"{key} {path}: not a regular file")
    if status.st_uid not in {os.geteuid(), 0}:
        raise UsageError(
            "key.file.owner",
            f"{key} {path}: owner {status.st_uid}; allowed: user id {os.geteuid()} or 0",
        )
    mode = stat.S_IMODE(status.st_mode)
    # The service manager opens credentials to one user by an access list, whose mask appears as
    # the group's permissions.
    if mode & (0o007 if is_credential(path) else 0o077):
        raise UsageError("key.file.mode", f"{key} {path}: mode {mode:04o}; allowed: 0600 or 0400")


def _sized(content: bytes, path: str, key: str) -> bytes:
    if len(content) > FILE_BYTES_MAX:
        raise UsageError("config.size", f"{key} {path}: too large; allowed: {FILE_BYTES_MAX} bytes")
    return content


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; raises as `write_new` does."""
    write_new(path, content, mode=0o600)


def write_new(
    path: Path, content: bytes, *, mode: int, owner: tuple[int, int] | None = None
) -> None:
    """Write a new file: a crash leaves all of it or nothing. On return it is durable.

    It belongs to us, or to the user and group `owner`.
    UsageError `key.unwritable` if it exists or can't be written.
    """
    try:
        with new_file(path) as file:
            file.write(content)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            os.fchmod(file.fileno(), mode)
    except OSError as error:
        raise UsageError("key.unwritable", f"{path}: {error.strerror}") from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a new file, only for its owner, which is there when it is whole and durable.

    OSError if it exists or can't be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        # Unlike a rename, fails if the file exists.
        path.hardlink_to(draft)
    finally:
        draft.unlink()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was made, renamed or removed in a directory durable; OSError if it can't."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
