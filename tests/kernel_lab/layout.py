"""Shared by building and running a guest: its files, cpio archives, errors."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# The files of a built guest, inside the directory given to build-guest and run-guest.
KERNEL = "vmlinuz"
DIRECT_KERNEL = "vmlinux"  # decompressed; absent if it can't be booted directly
INITRAMFS = "initramfs.cpio"
ROOT_IMAGE = "root.ext4"
MANIFEST = "manifest.json"

# The manifest's entry that names the guest's processor, as Debian does.
ARCHITECTURE = "architecture"

# The serial number by which the initramfs knows the root disk among the guest's disks.
ROOT_SERIAL = "lab-root"

# Names of the virtio-serial ports between run-guest and the guest.
CONTROL_PORT = "lab.control"
FILES_PORT = "lab.files"


class LabError(Exception):
    """A failure to report in one line, without a traceback."""


def main(function: Callable[[], int]) -> None:
    """Run a command's main function and turn a LabError into exit status 125."""
    try:
        sys.exit(function())
    except LabError as error:
        print(f"kernel lab: {error}", file=sys.stderr)
        sys.exit(125)
    except KeyboardInterrupt:
        sys.exit(130)


def read_manifest(guest: Path) -> dict[str, Any] | None:
    """Return the manifest of the guest in this directory; None without a guest."""
    try:
        manifest: dict[str, Any] = json.loads((guest / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    return manifest


class Cpio:
    """Writes a "newc" cpio archive, the format of an initramfs.

    The kernel unpacks concatenated archives in order, and later files replace earlier ones. So a
    small archive can be added to a large one by appending it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._inode = 0
        self._directories: set[str] = set()

    def _entry(
        self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (
            self._inode,
            mode,
            0,
            0,
            1,
            0,
            len(data),
            0,
            0,
            *device,
            len(encoded),
            0,
        )
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        self._write_padded(header + encoded)
        self._write_padded(data)

    def _write_padded(self, data: bytes) -> None:
        self._stream.write(data + b"\0" * (-len(data) % 4))

    def directory(self, name: str) -> None:
        """Add a directory and those above it, each once."""
        parts = name.strip("/").split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if path not in self._directories:
                self._directories.add(path)
                self._entry(path, stat.S_IFDIR | 0o755)

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file and the directories above it."""
        name = name.strip("/")
        if "/" in name:
            self.directory(name.rpartition("/")[0])
        self._entry(name, stat.S_IFREG | mode, data)

    def symlink(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        self._entry(name.strip("/"), stat.S_IFLNK | 0o777, target.encode())

    def character_device(self, name: str, major: int, minor: int) -> None:
        """Add a device node."""
        self._entry(name.strip("/"), stat.S_IFCHR | 0o600, device=(major, minor))

    def tree(self, source: Path, name: str) -> None:
        """Add a file, or a directory with everything under it, as `name`."""
        if source.is_dir():
            self.directory(name)
            for child in sorted(source.iterdir()):
                self.tree(child, f"{name}/{child.name}")
        elif source.is_file():
            executable = os.access(source, os.X_OK)
            self.file(name, source.read_bytes(), 0o755 if executable else 0o644)
        else:
            raise LabError(f"no such file: {source}")

    def close(self) -> None:
        """End the archive, at a boundary where another may follow."""
        self._inode = -1
        self._entry("TRAILER!!!", 0)
        self._stream.write(b"\0" * (-self._stream.tell() % 512))
