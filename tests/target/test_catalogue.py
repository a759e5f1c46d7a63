"""Descriptor files next to the stores, and how a target handles them at its start."""

import os
import uuid
from pathlib import Path

import pytest

from sealane.daemon.device.catalogue import Catalogue
from sealane.daemon.runtime.files import FILE_BYTES_MAX
from sealane.errors import UnavailableError, UsageError

FIRST = uuid.UUID("11111111-1111-4111-8111-111111111111")
SECOND = uuid.UUID("22222222-2222-4222-8222-222222222222")


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path)


def test_volume_is_found_once_it_is_whole(tmp_path: Path, catalogue: Catalogue) -> None:
    catalogue.begin(FIRST, b"descriptor")
    found = catalogue.scan()
    assert (found.volumes, found.unfinished, found.strays) == ([], [FIRST], [])
    (tmp_path / f"{FIRST}.sectors").write_bytes(b"store")
    catalogue.finish(FIRST)
    found = catalogue.scan()
    assert (found.volumes, found.unfinished, found.strays) == ([(FIRST, b"descriptor")], [], [])
    assert (tmp_path / f"{FIRST}.volume").stat().st_mode & 0o777 == 0o600


def test_volume_being_removed_is_unfinished_until_it_is_forgotten(
    tmp_path: Path, catalogue: Catalogue
) -> None:
    (tmp_path / f"{FIRST}.sectors").touch()
    (tmp_path / f"{FIRST}.volume").write_bytes(b"descriptor")
    catalogue.begin_removal(FIRST)
    assert catalogue.scan().unfinished == [FIRST]
    (tmp_path / f"{FIRST}.sectors").unlink()
    catalogue.forget(FIRST)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("suffix", [".sectors", ".volume"])
def test_nothing_that_exists_is_overwritten(
    tmp_path: Path, catalogue: Catalogue, suffix: str
) -> None:
    path = tmp_path / f"{FIRST}{suffix}"
    path.write_bytes(b"somebody's")
    with pytest.raises(UsageError) as caught:
        catalogue.begin(FIRST, b"descriptor")
    assert caught.value.reason == "volume.exists"
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"somebody's")]


@pytest.mark.parametrize(
    "names",
    [
        ["notes.txt"],
        ["not-a-volume.volume"],
        [f"{FIRST}.sectors"],
        [f"{FIRST}.volume"],
        [f"{FIRST}.volume.tmp"],
        [f"{str(FIRST).upper().replace('1', 'A')}.volume"],
    ],
)
def test_foreign_files_are_reported_and_left(
    tmp_path: Path, catalogue: Catalogue, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = catalogue.scan()
    assert (found.volumes, found.unfinished) == ([], [])
    assert [name for name, _ in found.strays] == names
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


def test_second_descriptor_of_a_volume_discards_nothing(
    tmp_path: Path, catalogue: Catalogue
) -> None:
    for suffix in (".sectors", ".volume", ".volume.unfinished"):
        (tmp_path / f"{FIRST}{suffix}").touch()
    found = catalogue.scan()
    assert [volume for volume, _ in found.volumes] == [FIRST]
    assert found.unfinished == []
    assert [name for name, _ in found.strays] == [f"{FIRST}.volume.unfinished"]


def test_too_large_descriptor_is_reported(tmp_path: Path, catalogue: Catalogue) -> None:
    (tmp_path / f"{FIRST}.sectors").touch()
    with (tmp_path / f"{FIRST}.volume").open("wb") as file:
        os.truncate(file.fileno(), FILE_BYTES_MAX + 1)
    found = catalogue.scan()
    assert found.volumes == []
    assert [name for name, _ in found.strays] == [f"{FIRST}.volume"]


def test_directory_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "gone")
    for step in (
        lambda: catalogue.begin(FIRST, b""),
        lambda: catalogue.finish(FIRST),
        lambda: catalogue.forget(SECOND),
    ):
        with pytest.raises(UnavailableError):
            step()
