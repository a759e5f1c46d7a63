"""Drives of a target: NVMe namespaces of 4096 + 64 bytes, each for one volume (stores.md §1).

In place of a store's file, a symbolic link names the volume's namespace, by the path that the
operator configured. The link need not be trusted: the data on a namespace is authenticated as the
volume's own.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from sealane import _native
from sealane.daemon.device.catalogue import STORE_SUFFIX
from sealane.daemon.runtime.files import sync_directory
from sealane.errors import UnavailableError

_CREATE: Final = "store.create"


class Drives:
    """The namespaces on which a target may store volumes. Calls block."""

    def __init__(self, paths: Sequence[Path], directory: Path) -> None:
        self._paths = paths
        self._directory = directory

    def claim(self, volume_id: uuid.UUID, sector_count: int) -> None:
        """Link a volume to the smallest free namespace that is large enough.

        A namespace with any data isn't free, no matter who wrote it. UnavailableError
        `store.create` if none is free.
        """
        taken = {os.path.realpath(link) for link in self._links()}
        refused: list[str] = []
        fitting: list[tuple[int, Path]] = []
        for path in self._paths:
            try:
                if os.path.realpath(path) in taken:
                    raise FileExistsError("in use by a volume")
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
            sync_directory(self._directory)
        except OSError as error:
            raise UnavailableError(_CREATE, f"can't link {path}: {error}") from error

    def release(self, volume_id: uuid.UUID) -> None:
        """Erase a volume from its namespace, which is free then.

        UnavailableError `store.remove` if the namespace doesn't answer; it keeps the volume then.
        """
        link = self._link(volume_id)
        if not link.is_symlink():
            return
        try:
            # Erase only namespaces that the operator configured, no matter who created the link.
            if os.path.realpath(link) in {os.path.realpath(path) for path in self._paths}:
                _native.erase_drive(link)
            link.unlink()
            sync_directory(self._directory)
        except OSError as error:
            raise UnavailableError("store.remove", f"can't release {link}: {error}") from error

    def _links(self) -> Iterator[Path]:
        yield from (path for path in self._directory.glob(f"*{STORE_SUFFIX}") if path.is_symlink())

    def _link(self, volume_id: uuid.UUID) -> Path:
        return self._directory / f"{volume_id}{STORE_SUFFIX}"


def _room(path: Path, sector_count: int) -> int:
    """Return the blocks of a free namespace; OSError if it isn't free or is too small."""
    blocks, is_empty = _native.examine_drive(path)
    needed = _native.drive_blocks(sector_count)
    if not is_empty:
        raise FileExistsError("not empty: its first 4096 bytes are not all zero")
    if blocks < needed:
        raise OSError(f"too small: it has {blocks} blocks, the volume needs {needed}")
    return blocks
