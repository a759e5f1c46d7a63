"""Drives of a target: NVMe namespaces of 4096 + 64 bytes, each for one volume (stores.md §1).

Which one a volume lies on, a symbolic link says in the place of its store's file, under the path
that the operator gave the namespace. Nothing is believed for that: what lies on a namespace is
authenticated as the volume's own.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from sealane import _native
from sealane.daemon.device.catalogue import STORE_SUFFIX
from sealane.errors import UnavailableError

_CREATE: Final = "store.create"


class Drives:
    """The namespaces that a target may lay volumes out on. Calls block."""

    def __init__(self, paths: Sequence[Path], directory: Path) -> None:
        self._paths = paths
        self._directory = directory

    def claim(self, volume_id: uuid.UUID, sector_count: int) -> None:
        """Link a volume to a free namespace that is large enough, the smallest of those.

        UnavailableError `store.create`: there is none. One that holds something isn't free, whoever
        put it there.
        """
        taken = {os.path.realpath(link) for link in self._links()}
        refused: list[str] = []
        fitting: list[tuple[int, Path]] = []
        for path in self._paths:
            try:
                if os.path.realpath(path) in taken:
                    raise FileExistsError("has a volume")
                fitting.append((_room(path, sector_count), path))
            except OSError as error:
                refused.append(f"{path}: {error}")
        if not fitting:
            raise UnavailableError(
                _CREATE,
                f"no namespace is free for {sector_count} sectors: {'; '.join(refused)}",
            )
        _, path = min(fitting)
        try:
            self._link(volume_id).symlink_to(path)
            self._sync()
        except OSError as error:
            raise UnavailableError(_CREATE, f"can't link {path}: {error}") from error

    def release(self, volume_id: uuid.UUID) -> None:
        """Take a volume off its namespace, which another may have then.

        UnavailableError `store.remove`: the namespace gives no answer, and keeps the volume.
        """
        link = self._link(volume_id)
        if not link.is_symlink():
            return
        try:
            # Only what the operator let us use, whoever made the link.
            if os.path.realpath(link) in {os.path.realpath(path) for path in self._paths}:
                _native.erase_drive(link)
            link.unlink()
            self._sync()
        except OSError as error:
            raise UnavailableError("store.remove", f"can't release {link}: {error}") from error

    def _links(self) -> Iterator[Path]:
        yield from (path for path in self._directory.glob(f"*{STORE_SUFFIX}") if path.is_symlink())

    def _link(self, volume_id: uuid.UUID) -> Path:
        return self._directory / f"{volume_id}{STORE_SUFFIX}"

    def _sync(self) -> None:
        """Make links durable."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _room(path: Path, sector_count: int) -> int:
    """Return the blocks of a namespace that is free; OSError if it isn't, or is too small."""
    blocks, is_empty = _native.examine_drive(path)
    needed = _native.drive_blocks(sector_count)
    if not is_empty:
        raise FileExistsError("it holds something: its first 4096 bytes are not zeros")
    if blocks < needed:
        raise OSError(f"it has {blocks} blocks, the volume takes {needed}")
    return blocks
