"""Directories on a file system that is full or gone: the daemon is to be started again."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from sealane.daemon.runtime.directories import (
    check_directory,
    claimed_state,
    prepare_directory,
    replace_file,
)
from sealane.daemon.runtime.files import unusable
from sealane.daemon.runtime.reserve_file import RESERVE_BYTES
from sealane.daemon.runtime.state_format import FORMAT_NAME, check_format
from sealane.errors import UnavailableError, UsageError
from small_disk import fill, small_disk

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_may_pass_is_no_fault_of_the_configuration(number: int) -> None:
    error = unusable(Path("state"), OSError(number, os.strerror(number)), key="node.state_dir")
    assert isinstance(error, UnavailableError)
    assert str(error).startswith(f"node.state_dir state: {os.strerror(number)}")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.ELOOP])
def test_what_does_not_pass_is_one(number: int) -> None:
    assert isinstance(unusable(Path("state"), OSError(number, "")), UsageError)


@needs_mount
def test_a_file_system_that_became_read_only_is_unavailable(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 << 20) as disk:
        prepare_directory(disk / "state", key="node.state_dir")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for use in (
            lambda: check_directory(disk / "state", key="node.state_dir"),
            lambda: check_directory(disk / "other", key="node.state_dir"),
            lambda: prepare_directory(disk / "other", key="node.state_dir"),
            lambda: claimed_state(disk / "state").__enter__(),
            lambda: replace_file(disk / "state" / "anchor.pem", b"anchor"),
        ):
            with pytest.raises(UnavailableError) as refused:
                use()
            assert refused.value.reason == "directory.unavailable"


@needs_mount
def test_a_full_file_system_is_unavailable_and_keeps_no_draft(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=16 << 20) as disk:
        replace_file(disk / "anchor.pem", b"anchor")
        fill(disk / "others")
        with pytest.raises(UnavailableError) as refused:
            replace_file(disk / "anchor.pem", bytes(2 * RESERVE_BYTES))
        assert refused.value.reason == "directory.unavailable"
        assert {path.name for path in disk.iterdir()} == {"anchor.pem", "others"}
        # What is there already needs no space.
        replace_file(disk / "anchor.pem", b"anchor")


def test_a_file_with_the_same_content_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "anchor.pem"
    replace_file(path, b"anchor")
    first = path.stat().st_ino
    replace_file(path, b"anchor")
    assert path.stat().st_ino == first
    replace_file(path, b"other")
    assert path.read_bytes() == b"other"


@pytest.mark.parametrize("content", [None, b"1", b"1\n"])
def test_a_state_directory_of_a_format_that_this_release_reads(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / FORMAT_NAME).write_bytes(content)
    check_format(tmp_path)


@pytest.mark.parametrize("content", [b"", b"0", b"-1", b"x", b"1.0", b"1 ", b"9" * 10])
def test_what_is_no_format_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FORMAT_NAME).write_bytes(content)
    with pytest.raises(UsageError, match="not the number of a format"):
        check_format(tmp_path)


def test_a_directory_of_a_later_release_is_not_claimed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / FORMAT_NAME).write_bytes(b"2\n")
    with pytest.raises(UsageError, match="state of format 2"), claimed_state(state):
        pass
