"""Disks and forks: a clear error in the child, a handle that opens the disk there, no hang."""

import gc
import io
import os
import pickle
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from plain_target import SIZE, PlainTarget, ThreadedTarget
from sealane.client import sync
from sealane.client.disk import DiskHandle
from sealane.client.disk_queues import FrontEnd
from sealane.errors import Error, UsageError


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    with ThreadedTarget(tmp_path) as made:
        yield made


def in_child(work: Callable[[], bytes]) -> bytes:
    """Fork and run `work` in the child; return what it returned, or the reason of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # What hangs is ended: the parent then reads nothing.
            signal.alarm(int(PATIENCE_SECONDS))
            try:
                os.write(writing, work())
            except Error as error:
                os.write(writing, error.reason.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status:#x}"
    return said


def test_a_disk_of_the_parent_is_a_clear_error_in_the_child(front_end: FrontEnd) -> None:
    with sync.open_disk(front_end) as disk, disk.file() as file:
        disk.write(0, b"parent")
        for call in (
            lambda: disk.read(0, 6),
            lambda: file.read(6),
            lambda: disk.flush() or b"flushed",
        ):
            assert in_child(call) == b"client.forked"
        assert disk.read(0, 6) == b"parent"


@pytest.fixture
def only_its_own() -> Iterator[None]:
    """Leave alone what other tests of this process left: some of their libraries can't fork."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_its_own")
def test_a_child_may_leave_and_collect_what_it_inherited(front_end: FrontEnd) -> None:
    with sync.open_disk(front_end) as disk:
        disk.write(0, b"parent")

        def leave() -> bytes:
            nonlocal disk
            disk.__dict__.clear()
            del disk
            gc.collect()
            return b"left"

        assert in_child(leave) == b"left"
        assert disk.read(0, 6) == b"parent"


def test_a_block_entered_by_the_parent_can_be_left_in_the_child(front_end: FrontEnd) -> None:
    opened = sync.open_disk(front_end)
    disk = opened.__enter__()

    def leave() -> bytes:
        opened.__exit__(None, None, None)
        return b"left"

    assert in_child(leave) == b"left"
    assert disk.read(0, 1) == b"\0"
    opened.__exit__(None, None, None)


def test_a_pickled_handle_opens_the_disk_in_the_child(front_end: FrontEnd) -> None:
    with sync.open_disk(front_end, hold_seconds=7.0) as disk:
        disk.write(0, b"parent")
        pickled = pickle.dumps(disk.handle)

        def reopen() -> bytes:
            handle = pickle.loads(pickled)  # noqa: S301 - our own
            assert handle.hold_seconds == 7.0
            with sync.open_disk(handle) as own:
                own.write(6, b" and child", durable=True)
                return own.read(0, 6)

        assert in_child(reopen) == b"parent"
        assert disk.read(0, 16) == b"parent and child"


async def test_handles_are_pickled_and_disks_are_not(tmp_path: Path) -> None:
    made = PlainTarget(tmp_path)
    await made.start()
    try:
        async with made.disk() as disk:
            handle = pickle.loads(pickle.dumps(disk.handle))  # noqa: S301 - our own
            assert handle == disk.handle
            assert isinstance(handle, DiskHandle)
            assert disk.handle.front_end.secret not in repr(handle)
            with pytest.raises(TypeError, match="handle"):
                pickle.dumps(disk)
            async with handle.open() as again:
                assert again.size == disk.size
    finally:
        await made.stop()


def test_a_file_of_some_length_is_read_from_its_end(front_end: FrontEnd) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("tensor", b"\1" * 5000)
    content = archive.getvalue()
    with sync.open_disk(front_end) as disk:
        disk.write(0, content)
        with disk.file() as whole, pytest.raises(zipfile.BadZipFile):
            zipfile.ZipFile(whole)
        with disk.file(length=len(content)) as file:
            assert (len(file), bool(file)) == (len(content), True)
            assert file.seek(-22, io.SEEK_END) == len(content) - 22
            assert file.read() == content[-22:]
            assert file.seek(0, io.SEEK_END) == len(content)
            assert file.read(1) == b""
            with pytest.raises(OSError, match="No space left"):
                file.write(b"x")
            with zipfile.ZipFile(file) as zipped:
                assert zipped.read("tensor") == b"\1" * 5000
        with disk.file(length=0) as empty:
            assert empty
        for length in (-1, SIZE + 1):
            with pytest.raises(UsageError) as caught:
                disk.file(length=length)
            assert caught.value.reason == "disk.range"
