"""Small files on a full file system: its reserve is lent, and grows again."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.files import write_durably
from sealane.daemon.runtime.reserve_file import (
    RESERVE_BYTES,
    RESERVE_NAME,
    keep_reserve,
    with_reserve,
)
from small_disk import fill, small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@pytest.fixture(params=[False, True], ids=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size_bytes=16 << 20, is_extents=request.param) as at:
        yield at


def test_small_files_are_written_again_and_again_on_a_full_file_system(disk: Path) -> None:
    assert keep_reserve(disk) == RESERVE_BYTES
    assert (disk / RESERVE_NAME).stat().st_blocks * 512 >= RESERVE_BYTES
    fill(disk / "others")
    path = disk / "state"
    # Without the reserve, there is not even space for the first.
    for number in range(300):
        write_durably(path, b"%d" % number * 500)
        assert path.read_bytes() == b"%d" % number * 500
    # What the writes gave back is in the reserve again, but for the file that there is now.
    assert (disk / RESERVE_NAME).stat().st_size >= RESERVE_BYTES - (8 << 10)


def test_others_that_take_what_is_given_back_get_a_little_at_a_time(disk: Path) -> None:
    def write() -> None:
        (disk / "state").write_bytes(bytes(1000))
        fill(disk / "others")

    keep_reserve(disk)
    fill(disk / "others")
    for number in range(20):
        with_reserve(disk / "state", 1000, write)
        (disk / "state").rename(disk / f"state{number}")
    assert (disk / RESERVE_NAME).stat().st_size > RESERVE_BYTES // 2


def test_the_reserve_serves_directories_in_its_own_and_replaced_files(disk: Path) -> None:
    keep_reserve(disk)
    (disk / "inner").mkdir()
    fill(disk / "others")
    write_durably(disk / "inner" / "file", b"x" * 5000)
    replace_file(disk / "anchor.pem", b"y" * 5000)
    assert (disk / "inner" / "file").read_bytes() == b"x" * 5000
    assert (disk / "anchor.pem").read_bytes() == b"y" * 5000


def test_without_space_in_the_reserve_the_old_file_stays(disk: Path) -> None:
    path = disk / "state"
    write_durably(path, b"first")
    keep_reserve(disk)
    fill(disk / "others")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_durably(path, bytes(2 * RESERVE_BYTES))
    assert path.read_bytes() == b"first"
    assert "state.new" not in {found.name for found in disk.iterdir()}
    (disk / "others").unlink()
    assert keep_reserve(disk) == RESERVE_BYTES


def test_a_reserve_with_holes_is_none(disk: Path) -> None:
    with (disk / RESERVE_NAME).open("wb") as file:
        file.truncate(RESERVE_BYTES)
    assert keep_reserve(disk) == RESERVE_BYTES
    assert (disk / RESERVE_NAME).stat().st_blocks * 512 >= RESERVE_BYTES
    (disk / RESERVE_NAME).unlink()
    with (disk / RESERVE_NAME).open("wb") as file:
        file.truncate(RESERVE_BYTES)
    fill(disk / "others")
    assert keep_reserve(disk) < RESERVE_BYTES


def test_only_reserves_of_this_process_are_lent(disk: Path) -> None:
    # Somebody's file that has the same name.
    (disk / "other").mkdir()
    (disk / "other" / RESERVE_NAME).write_bytes(bytes(RESERVE_BYTES))
    (disk / "kept").mkdir()
    keep_reserve(disk / "kept")
    (disk / "file").write_bytes(bytes(RESERVE_BYTES))
    (disk / "kept" / RESERVE_NAME).unlink()
    (disk / "kept" / RESERVE_NAME).symlink_to(disk / "file")
    fill(disk / "others")
    for name in ("other", "kept"):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write_durably(disk / name / "state", bytes(5000))
    assert (disk / "other" / RESERVE_NAME).stat().st_size == RESERVE_BYTES
    assert (disk / "file").stat().st_size == RESERVE_BYTES
