"""The directory of the jobs' sockets: jobs enter it, and none of them replaces what is in it."""

import os
import stat
from pathlib import Path

import pytest

from sealane.daemon.runtime.directories import SharedDirectory
from sealane.errors import UsageError


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        SharedDirectory(path, key="access.run_dir").prepare()
    return str(error.value.reason)


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """Return a directory that others may enter, as are those above it."""
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_mode & 0o011 == 0:
            each.chmod(0o711)
    return tmp_path


def test_it_is_made_for_entering_only(above: Path) -> None:
    before = os.umask(0o077)
    try:
        SharedDirectory(above / "jobs", key="access.run_dir").prepare()
    finally:
        os.umask(before)
    assert stat.S_IMODE((above / "jobs").stat().st_mode) == 0o711
    for mode in (0o755, 0o750, 0o711, 0o710):
        (above / "jobs").chmod(mode)
        SharedDirectory(above / "jobs", key="access.run_dir").prepare()


@pytest.mark.parametrize("mode", [0o700, 0o744, 0o775, 0o757, 0o1777])
def test_one_that_others_write_in_or_cannot_enter_is_refused(above: Path, mode: int) -> None:
    jobs = above / "jobs"
    jobs.mkdir()
    jobs.chmod(mode)
    assert refused(jobs) == "directory.mode"


def test_one_below_a_directory_that_others_write_in_is_refused(above: Path) -> None:
    jobs = above / "between" / "jobs"
    jobs.mkdir(parents=True)
    jobs.chmod(0o711)
    for mode, reason in ((0o777, "directory.mode"), (0o700, "directory.mode"), (0o1777, "")):
        (above / "between").chmod(mode)
        if reason:
            assert refused(jobs) == reason
        else:
            SharedDirectory(jobs, key="access.run_dir").prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_one_of_another_user_is_refused(above: Path) -> None:
    jobs = above / "jobs"
    jobs.mkdir()
    jobs.chmod(0o711)
    os.chown(jobs, 54_321, 54_321)
    assert refused(jobs) == "directory.owner"


def test_one_that_cannot_be_made_is_named(above: Path) -> None:
    assert refused(above / "missing" / "jobs") == "directory.unusable"
