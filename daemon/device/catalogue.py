"""The volumes in a target's directory: each one's signed descriptor beside its store.

`<volume id>.volume` holds the descriptor, `<volume id>.sectors` the store, `<volume id>.jobs` the
results of its background jobs. While a volume is being created or removed, its descriptor is called
`.volume.unfinished`. A volume that a crash leaves under that name was never announced, or is being
removed, and is deleted at the next start unless it is on the anchored list
(sealane.daemon.device.anchored_catalogue). A replacement descriptor, `.volume.next`, is either
dropped or takes effect, as the anchor decides. Nothing else is deleted.
"""

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.daemon.device.directory import DEVICE_FILES
from sealane.daemon.runtime.files import (
    FILE_BYTES_MAX,
    read_bounded,
    sync_directory,
    unusable,
    write_durably,
)
from sealane.errors import UnavailableError, UsageError

STORE_SUFFIX: Final = ".sectors"
JOBS_SUFFIX: Final = ".jobs"
_FINISHED: Final = ".volume"
_UNFINISHED: Final = ".volume.unfinished"
_NEXT: Final = ".volume.next"
_SUFFIXES: Final = frozenset({STORE_SUFFIX, _FINISHED, _UNFINISHED, _NEXT})
_DRAFTS: Final = frozenset({f"{_UNFINISHED}.new", f"{_NEXT}.new"})
_JOBS: Final = frozenset({JOBS_SUFFIX, f"{JOBS_SUFFIX}.new"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Content of the directory; all lists are sorted by name."""

    volumes: Sequence[tuple[uuid.UUID, bytes]]
    """Volumes with a store, and the content of their descriptor files."""
    unfinished: Sequence[uuid.UUID]
    """Volumes that were being created or removed."""
    replacements: Sequence[tuple[uuid.UUID, bytes]]
    """Volumes whose descriptor was being replaced, with the content of the next one."""
    strays: Sequence[tuple[str, str]]
    """Names of all other files, each with what is wrong."""


def make_directory(directory: Path) -> None:
    """Create a target's directory if it doesn't exist; errors of `unusable`."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(directory, error, key="target.directory") from error


class Catalogue:
    """The descriptor files of one directory, which belongs to one target process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Begin to create a volume. UsageError if any of its files exists."""
        for suffix in (_FINISHED, STORE_SUFFIX):
            path = self._path(volume_id, suffix)
            if path.exists():
                raise UsageError(
                    "volume.exists", f"{path} exists already; remove it or use another volume id"
                )
        self._write(self._path(volume_id, _UNFINISHED), content)

    def begin_replacement(self, volume_id: uuid.UUID, content: bytes) -> None:
        """Write the next descriptor of a volume."""
        self._write(self._path(volume_id, _NEXT), content)

    def finish_replacement(self, volume_id: uuid.UUID) -> None:
        """Replace the volume's descriptor by the next one."""
        self._rename(volume_id, _NEXT, _FINISHED)

    def drop_replacement(self, volume_id: uuid.UUID) -> None:
        """Drop the next descriptor of a volume."""
        self._unlink(volume_id, _NEXT)

    def finish(self, volume_id: uuid.UUID) -> None:
        """Record that the volume's store exists."""
        self._rename(volume_id, _UNFINISHED, _FINISHED)

    def begin_removal(self, volume_id: uuid.UUID) -> None:
        """Record that the volume's store is about to be deleted."""
        self._rename(volume_id, _FINISHED, _UNFINISHED)

    def forget(self, volume_id: uuid.UUID) -> None:
        """Forget an unfinished volume whose store was deleted."""
        self._unlink(volume_id, _UNFINISHED)

    def scan(self) -> Found:
        """Check all files. Changes nothing."""
        names = {entry.name for entry in self._directory.iterdir()}
        volumes: list[tuple[uuid.UUID, bytes]] = []
        unfinished: list[uuid.UUID] = []
        replacements: list[tuple[uuid.UUID, bytes]] = []
        strays: list[tuple[str, str]] = []
        for name in sorted(names):
            stem, dot, rest = name.partition(".")
            volume_id, suffix = _volume_id(stem), dot + rest
            if name in DEVICE_FILES or (volume_id is not None and suffix in _JOBS | _DRAFTS):
                continue
            if volume_id is None or suffix not in _SUFFIXES:
                strays.append((name, "not a file of a volume"))
            elif suffix == STORE_SUFFIX and not {stem + _FINISHED, stem + _UNFINISHED} & names:
                strays.append((name, "a store without a descriptor"))
            elif suffix == _NEXT and stem + _FINISHED not in names:
                strays.append((name, "a replacement descriptor without a volume"))
            elif suffix == _NEXT:
                self._add(volume_id, name, replacements, strays)
            elif suffix == _UNFINISHED and stem + _FINISHED in names:
                strays.append((name, "a second descriptor of a volume"))
            elif suffix == _UNFINISHED:
                unfinished.append(volume_id)
            elif suffix == _FINISHED and stem + STORE_SUFFIX not in names:
                strays.append((name, "a descriptor without a store"))
            elif suffix == _FINISHED:
                self._add(volume_id, name, volumes, strays)
        return Found(
            volumes=volumes, unfinished=unfinished, replacements=replacements, strays=strays
        )

    def unfinished(self, found: Found, *, limit: int) -> list[tuple[uuid.UUID, bytes]]:
        """Return up to `limit` unfinished volumes with a store, with their descriptor files."""
        volumes: list[tuple[uuid.UUID, bytes]] = []
        for volume_id in found.unfinished[:limit]:
            if self._path(volume_id, STORE_SUFFIX).exists():
                self._add(volume_id, f"{volume_id}{_UNFINISHED}", volumes, [])
        return volumes

    def _add(
        self,
        volume_id: uuid.UUID,
        name: str,
        volumes: list[tuple[uuid.UUID, bytes]],
        strays: list[tuple[str, str]],
    ) -> None:
        try:
            content = read_bounded(self._directory / name)
        except OSError as error:
            strays.append((name, f"unreadable: {error.strerror}"))
            return
        if len(content) > FILE_BYTES_MAX:
            strays.append((name, f"larger than {FILE_BYTES_MAX} bytes"))
        else:
            volumes.append((volume_id, content))

    def _path(self, volume_id: uuid.UUID, suffix: str) -> Path:
        return self._directory / f"{volume_id}{suffix}"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_durably(path, content)
        except OSError as error:
            raise UnavailableError("store.create", f"can't write {path}: {error}") from error

    def _unlink(self, volume_id: uuid.UUID, suffix: str) -> None:
        try:
            self._path(volume_id, suffix).unlink(missing_ok=True)
            sync_directory(self._directory)
        except OSError as error:
            raise UnavailableError(
                "store.remove", f"can't remove the files of volume {volume_id}: {error}"
            ) from error

    def _rename(self, volume_id: uuid.UUID, old: str, new: str) -> None:
        """Rename, durably; may be repeated after an error."""
        source, target = self._path(volume_id, old), self._path(volume_id, new)
        try:
            if source.exists() or not target.exists():
                source.replace(target)
            sync_directory(self._directory)
        except OSError as error:
            raise UnavailableError(
                "store.catalogue", f"can't rename the descriptor of volume {volume_id}: {error}"
            ) from error


def _volume_id(stem: str) -> uuid.UUID | None:
    with contextlib.suppress(ValueError):
        volume_id = uuid.UUID(stem)
        if str(volume_id) == stem:
            return volume_id
    return None
