"""The demo's input: a file of the user's, or Python's standard library as one archive."""

import hashlib
import io
import random
import stat
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from sealane.errors import UsageError

ARCHIVE_BYTES_MAX = 64 << 20
INPUT_BYTES_MAX = 16 << 30
PIECE_BYTES = 16
# A piece with fewer distinct bytes (padding, a run of spaces) could occur elsewhere by chance.
PIECE_DISTINCT_BYTES_MIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The input's path, display name, length and SHA-256."""

    path: Path
    name: str
    size_bytes: int
    sha256: str


def open_source(path: Path | None, scratch: Path) -> Source:
    """Describe the given file, or pack the standard library into `scratch`.

    UsageError `input.…` for a path that is missing, not a regular file, unreadable, empty or too
    large.
    """
    if path is None:
        archive = scratch / "standard-library.tar"
        pack_standard_library(archive)
        return describe(archive, "the standard library's .py files, one archive")
    try:
        status = path.stat()
        path.open("rb").close()
    except FileNotFoundError as error:
        raise UsageError(
            "input.missing", f"--input: {path} does not exist, allowed: a readable file"
        ) from error
    except IsADirectoryError as error:
        raise UsageError(
            "input.directory", f"--input: {path} is a directory, allowed: a regular file"
        ) from error
    except OSError as error:
        raise UsageError(
            "input.unreadable", f"--input: {path} can't be read ({error.strerror})"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("input.special", f"--input: {path} is not a regular file")
    if not 0 < status.st_size <= INPUT_BYTES_MAX:
        raise UsageError(
            "input.size",
            f"--input: {path} has {status.st_size} bytes, allowed: 1 to {INPUT_BYTES_MAX}",
        )
    return describe(path, path.name)


def describe(path: Path, name: str) -> Source:
    """Return a file as a source, with its length and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = file.tell()
    return Source(path=path, name=name, size_bytes=size_bytes, sha256=digest)


def pack_standard_library(archive: Path) -> None:
    """Write the interpreter's .py files, sorted and with constant metadata, as one tar file."""
    library = Path(sysconfig.get_path("stdlib"))
    packed = 0
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(library.rglob("*.py")):
            relative = path.relative_to(library)
            if "site-packages" in relative.parts or "dist-packages" in relative.parts:
                continue
            content = path.read_bytes()
            packed += len(content) + 2 * tarfile.BLOCKSIZE
            if packed > ARCHIVE_BYTES_MAX - tarfile.RECORDSIZE:
                break
            member = tarfile.TarInfo(str(relative)[-100:])
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def distinctive_pieces(source: Source, count: int, seed: int) -> list[bytes]:
    """Sample up to `count` different 16-byte pieces that would not occur by chance."""
    generator = random.Random(seed)  # noqa: S311 - a sample, not a secret
    pieces: dict[bytes, None] = {}
    with source.path.open("rb") as file:
        for _ in range(4 * count):
            if source.size_bytes < PIECE_BYTES or len(pieces) == count:
                break
            file.seek(generator.randrange(source.size_bytes - PIECE_BYTES + 1))
            piece = file.read(PIECE_BYTES)
            if len(set(piece)) >= PIECE_DISTINCT_BYTES_MIN:
                pieces[piece] = None
    return list(pieces)
