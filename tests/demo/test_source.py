"""The demo's input: accepted sources, and one-line refusals."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from sealane.cli.demo.source import (
    ARCHIVE_BYTES_MAX,
    Source,
    describe,
    distinctive_pieces,
    open_source,
)
from sealane.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "input"
    path.write_bytes(bytes(range(256)) * 4096 + bytes(1 << 20))
    return describe(path, "input")


def test_named_file_is_hashed_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"abc")
    found = open_source(path, tmp_path)
    assert (found.size_bytes, found.sha256) == (3, hashlib.sha256(b"abc").hexdigest())


def test_missing_path_directory_and_empty_file_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path, reason in (
        (tmp_path / "absent", "input.missing"),
        (tmp_path, "input.directory"),
        (empty, "input.size"),
        (Path("/dev/null"), "input.special"),
    ):
        with pytest.raises(UsageError) as caught:
            open_source(path, tmp_path)
        assert caught.value.reason == reason
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_standard_library_is_packed_the_same_twice(tmp_path: Path) -> None:
    first, second = (open_source(None, tmp_path) for _ in range(2))
    assert first.sha256 == second.sha256
    assert 1 << 20 < first.size_bytes <= ARCHIVE_BYTES_MAX
    with tarfile.open(first.path) as archive:
        assert all(name.endswith(".py") for name in archive.getnames())


def test_pieces_are_distinctive_and_reproducible(source: Source) -> None:
    pieces = distinctive_pieces(source, 100, seed=5)
    assert pieces == distinctive_pieces(source, 100, seed=5)
    assert len(set(pieces)) == 100
    content = source.path.read_bytes()
    assert all(len(piece) == 16 and piece in content for piece in pieces)
    assert all(len(set(piece)) >= 8 for piece in pieces)


def test_input_shorter_than_a_piece_has_none(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"0123456789")
    assert distinctive_pieces(describe(path, "short"), 10, seed=1) == []
