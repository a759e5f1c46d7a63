"""Choice of the namespace for a volume of the `nvme` store. Real drives: tests/kernel_lab."""

import os
import uuid
from pathlib import Path

import pytest

from sealane import _native
from sealane.daemon.device.catalogue import Catalogue
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.drives import Drives
from sealane.errors import UnavailableError, UsageError

A, B, C = (uuid.UUID(int=number) for number in (1, 2, 3))
SECTORS = 1000


class Rack:
    """Namespaces by path: blocks, and whether they are empty."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "volumes"
        self.directory.mkdir()
        self.known: dict[str, tuple[int, bool]] = {}

    def add(self, name: str, *, spare: int = 0, is_empty: bool = True) -> Path:
        path = self.root / name
        path.touch()
        self.known[str(path)] = (_native.drive_blocks(SECTORS) + spare, is_empty)
        return path

    def examine(self, path: str | os.PathLike[str]) -> tuple[int, bool]:
        try:
            return self.known[os.path.realpath(path)]
        except KeyError:
            raise FileNotFoundError(2, "No such device") from None

    def erase(self, path: str | os.PathLike[str]) -> None:
        real = os.path.realpath(path)
        self.known[real] = (self.known[real][0], True)

    def fill(self, volume_id: uuid.UUID) -> str:
        """Record that a volume was laid out; return its path."""
        real = os.path.realpath(self.link(volume_id))
        self.known[real] = (self.known[real][0], False)
        return Path(real).name

    def link(self, volume_id: uuid.UUID) -> Path:
        return self.directory / f"{volume_id}.sectors"


@pytest.fixture
def rack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rack:
    made = Rack(tmp_path)
    monkeypatch.setattr(_native, "examine_drive", made.examine)
    monkeypatch.setattr(_native, "erase_drive", made.erase)
    return made


def test_volume_gets_the_smallest_namespace_that_is_free_and_fits(rack: Rack) -> None:
    paths = [
        rack.add("huge", spare=500),
        rack.add("small", spare=-1),
        rack.add("fitting"),
        rack.add("occupied", is_empty=False),
        rack.root / "missing",
    ]
    drives = Drives(paths, rack.directory)
    drives.claim(A, SECTORS)
    assert rack.fill(A) == "fitting"
    drives.claim(B, SECTORS)
    assert rack.fill(B) == "huge"
    with pytest.raises(UnavailableError) as caught:
        drives.claim(C, SECTORS)
    assert caught.value.reason == "store.create"
    for why in ("huge: in use", "small: too small", "occupied: not empty", "missing: [Errno 2]"):
        assert why in str(caught.value)
    assert not rack.link(C).is_symlink()


def test_namespace_under_two_names_is_one(rack: Rack) -> None:
    path, alias = rack.add("drive"), rack.root / "alias"
    alias.symlink_to(path)
    drives = Drives([alias, path], rack.directory)
    drives.claim(A, SECTORS)
    # Even while nothing is laid out on it.
    with pytest.raises(UnavailableError, match="in use by a volume"):
        drives.claim(B, SECTORS)


def test_namespace_of_a_removed_volume_serves_another(rack: Rack) -> None:
    drives = Drives([rack.add("drive")], rack.directory)
    drives.claim(A, SECTORS)
    rack.fill(A)
    drives.release(A)
    drives.release(A)
    drives.claim(B, SECTORS)
    assert rack.fill(B) == "drive"


def test_link_to_what_the_operator_did_not_name_erases_nothing(rack: Rack) -> None:
    drives = Drives([rack.add("drive")], rack.directory)
    other = rack.add("other", is_empty=False)
    rack.link(A).symlink_to(other)
    drives.release(A)
    assert not rack.link(A).is_symlink()
    assert rack.known[str(other)][1] is False


def test_drive_that_gives_no_answer_keeps_its_volume(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str | os.PathLike[str]) -> None:
        raise OSError(5, "Input/output error")

    drives = Drives([rack.add("drive")], rack.directory)
    drives.claim(A, SECTORS)
    monkeypatch.setattr(_native, "erase_drive", fail)
    with pytest.raises(UnavailableError) as caught:
        drives.release(A)
    assert caught.value.reason == "store.remove"
    assert rack.link(A).is_symlink()


def test_catalogue_finds_a_volume_whose_drive_is_gone(rack: Rack) -> None:
    rack.link(A).symlink_to(rack.root / "gone")
    (rack.directory / f"{A}.volume").write_bytes(b"descriptor")
    found = Catalogue(rack.directory).scan()
    assert (found.volumes, found.strays) == ([(A, b"descriptor")], [])


async def test_file_is_no_drive(tmp_path: Path) -> None:
    """The engine checks it, too: without a namespace, nothing is created or left behind."""
    path, directory = tmp_path / "image", tmp_path / "volumes"
    path.write_bytes(bytes(1 << 20))
    target = Target(
        traddr="127.0.0.1", trsvcid=0, store_kind="nvme", namespaces=[path], directory=directory
    )
    await target.start()
    try:
        with pytest.raises(UnavailableError) as caught:
            await target.create_volume(A, sector_count=SECTORS)
        assert caught.value.reason == "store.create"
        await target.discard_store(A)
        assert [path.name for path in directory.iterdir()] == ["reserve"]
    finally:
        await target.stop()


@pytest.mark.parametrize(("kind", "names"), [("nvme", []), ("inline", ["/dev/ng0n1"])])
def test_namespaces_are_for_the_nvme_store_alone(
    tmp_path: Path, kind: str, names: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        Target(
            traddr="127.0.0.1",
            trsvcid=0,
            store_kind=kind,  # type: ignore[arg-type]
            namespaces=[Path(name) for name in names],
            directory=tmp_path,
        )
    assert caught.value.reason == "target.store"
