"""A small file system, to see what happens when it is full. Needs root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(at: Path, *, size_bytes: int, is_extents: bool = False) -> Iterator[Path]:
    """Mount an empty file system at `at` until the end of the block; skip the test if it can't be.

    It is a tmpfs, or an ext4 if `is_extents`: there an allocation that fails keeps what it got.
    """
    at.mkdir(parents=True, exist_ok=True)
    if is_extents:
        image = at.with_name(f"{at.name}.image")
        with image.open("wb") as file:
            file.truncate(size_bytes)
        _done(["mkfs.ext4", "-q", "-m", "0", image])
        _done(["mount", "-o", "loop", image, at])
        (at / "lost+found").rmdir()
    else:
        _done(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", at])
    at.chmod(0o700)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


def _done(command: list[str | Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")


def fill(path: Path) -> None:
    """Take all free space with a file at `path`, to the last byte."""
    # What a file system frees late, or keeps for a metadata block, is taken at another attempt.
    for _ in range(3):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(descriptor, bytes(size))
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
