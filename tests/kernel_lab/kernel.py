"""A kernel package's image and modules, converted to the form that boots fastest."""

import fnmatch
import lzma
import os
import re
import struct
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The ELF note that says where a kernel can be entered directly (XEN_ELFNOTE_PHYS32_ENTRY).
PVH_NOTE = re.compile(rb"\x04\0\0\0[\x04\x08]\0\0\0\x12\0\0\0Xen\0")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """How a guest's own programs run here: by its dynamic loader, or under an emulator."""

    loader: str = ""
    library: str = ""
    emulator: str = ""

    def command(self, root: Path, program: str, *, called: str = "") -> list[str | Path]:
        """Return the beginning of a command that runs a program of the guest with its libraries."""
        name = called or Path(program).name
        if self.emulator:
            return [self.emulator, "-L", root, "-0", name, root / program]
        library = ("--library-path", root / self.library, "--argv0", name)
        return [root / self.loader, *library, root / program]


@dataclass(frozen=True)
class GuestRoot:
    """A guest's unpacked packages, and how its programs run here."""

    path: Path
    runner: Runner

    def run(self, program: str, *arguments: object, called: str = "", **environment: str) -> None:
        """Run one of the guest's own programs here."""
        subprocess.run(
            [*self.runner.command(self.path, program, called=called), *map(str, arguments)],
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.DEVNULL,
            check=True,
        )


def decompressed(root: GuestRoot, data: bytes) -> bytes:
    """Decompress xz, zstd or gzip data, detected by its first bytes; ignore trailing data."""
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(data)
    if data.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        work = root.path.parent / "zstd-input"
        work.write_bytes(data)
        root.run("usr/bin/zstd", "-q", "-f", "-d", work, "-o", work.with_suffix(".out"))
        return work.with_suffix(".out").read_bytes()
    return data


def uncompressed_kernel(root: GuestRoot, image: bytes) -> bytes | None:
    """Extract the ELF kernel from a bzImage, so that the guest needn't decompress it.

    Returns None if the kernel cannot be started that way (it needs a PVH entry).
    """
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    # The last four bytes are the decompressed size.
    kernel = decompressed(root, image[start : start + length - 4])
    if not kernel.startswith(b"\x7fELF") or not PVH_NOTE.search(kernel):
        return None
    return kernel


class Modules:
    """The modules of an unpacked kernel package."""

    def __init__(self, root: GuestRoot, directory: Path) -> None:
        self._root = root
        self.directory = directory
        self._paths: dict[str, Path] = {}
        for path in sorted(directory.rglob("*.ko*")):
            name = path.name.partition(".ko")[0].replace("-", "_")
            self._paths[name] = path
        self._data: dict[str, bytes] = {}

    def place(self, name: str) -> Path:
        """Return a module's path below the modules directory, without a compression suffix."""
        place = self._paths[name].relative_to(self.directory)
        return place.with_name(place.name.partition(".ko")[0] + ".ko")

    def data(self, name: str) -> bytes:
        """Return a module, decompressed."""
        if name not in self._data:
            self._data[name] = decompressed(self._root, self._paths[name].read_bytes())
        return self._data[name]

    def matching(self, patterns: Iterable[str]) -> Iterator[str]:
        """Yield the modules whose path matches a pattern or prefix."""
        for name in self._paths:
            place = str(self.place(name)).removeprefix("kernel/")
            if any(
                place.startswith(pattern)
                if pattern.endswith("/")
                else fnmatch.fnmatch(place, pattern)
                for pattern in patterns
            ):
                yield name

    def with_dependencies(self, names: Iterable[str]) -> list[str]:
        """Return the existing modules of those named, each after its dependencies."""
        order: list[str] = []

        def visit(name: str) -> None:
            if name not in self._paths or name in order:
                return
            for dependency in self._declared(name, b"depends"):
                visit(dependency)
            order.append(name)

        for name in names:
            visit(name)
        return order

    def _declared(self, name: str, key: bytes) -> Iterator[str]:
        for value in re.findall(rb"\0" + key + rb"=([^\0]*)\0", self.data(name)):
            yield from filter(None, value.decode().replace("-", "_").split(","))
