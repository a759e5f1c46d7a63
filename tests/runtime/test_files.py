"""Files that operators name: key files closed to others, bounded reads, one line each."""

import errno
import os
import stat
from pathlib import Path

import pytest

from sealane.daemon.runtime import files
from sealane.daemon.runtime.files import (
    FILE_BYTES_MAX,
    read_file,
    read_secret,
    write_durably,
    write_new,
)
from sealane.errors import UsageError


def _file(path: Path, mode: int) -> str:
    path.write_bytes(b"secret")
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_key_file_closed_to_others_is_read(mode: int, tmp_path: Path) -> None:
    assert read_secret(_file(tmp_path / "k", mode), key="a.b") == b"secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_key_file_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = _file(tmp_path / "k", mode)
    with pytest.raises(UsageError) as caught:
        read_secret(path, key="a.b")
    assert str(caught.value) == (
        f"a.b {path}: mode {mode:04o}; allowed: 0600 or 0400 [key.file.mode]"
    )


def test_credential_of_the_service_manager_may_carry_an_access_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_secret(_file(tmp_path / "k", 0o440), key="a.b") == b"secret"
    with pytest.raises(UsageError):
        read_secret(_file(tmp_path / "w", 0o444), key="a.b")
    (tmp_path / "sub").mkdir()
    with pytest.raises(UsageError):
        read_secret(_file(tmp_path / "sub" / "k", 0o440), key="a.b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "k", 0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError) as caught:
        read_secret(path, key="a.b")
    assert caught.value.reason == "key.file.owner"


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UsageError) as caught:
            read_secret(str(path), key="a.b")
        assert caught.value.reason == "key.file"


def test_endless_and_missing_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_file("/dev/zero", key="a.b")
    text = f"a.b /dev/zero: too large; allowed: {FILE_BYTES_MAX} bytes [config.size]"
    assert str(caught.value) == text
    for read in (read_file, read_secret):
        with pytest.raises(UsageError) as caught:
            read(str(tmp_path / "none"), key="a.b")
        assert caught.value.reason == "config.unreadable"
        with pytest.raises(UsageError):
            read(str(tmp_path), key="a.b")


def test_a_new_file_never_replaces_another_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new(path, b"first", mode=0o640)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(UsageError) as caught:
        write_new(path, b"second", mode=0o640)
    assert caught.value.reason == "key.unwritable"
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_a_file_that_was_replaced_does_not_count_as_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, str(path))

    monkeypatch.setattr(files, "sync_directory", refuse)
    with pytest.raises(OSError, match="can't be synced") as refused:
        write_durably(tmp_path / "state", b"new")
    assert refused.value.errno == errno.EIO
    assert (tmp_path / "state").read_bytes() == b"new"
