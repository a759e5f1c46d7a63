"""The blocking client: calls from threads, and a file that standard tools take."""

import concurrent.futures
import io
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from plain_target import SIZE, ThreadedTarget
from sealane.client import sync
from sealane.client.disk_queues import FrontEnd
from sealane.errors import UnavailableError, UsageError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[sync.Disk]:
    with ThreadedTarget(tmp_path) as front_end, sync.open_disk(front_end) as opened:
        yield opened


def test_threads_share_a_disk(disk: sync.Disk) -> None:
    def work(thread: int) -> None:
        content = bytes([thread + 1]) * 1000
        for _ in range(5):
            disk.write(thread * 1000, content)
            assert disk.read(thread * 1000, 1000) == content

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    buffer = bytearray(8000)
    assert disk.readinto(0, buffer) == 8000
    assert buffer == b"".join(bytes([thread + 1]) * 1000 for thread in range(8))
    disk.flush()
    disk.write_zeroes(10, 7990)
    disk.discard(0, SIZE)
    assert disk.read(0, 8192) == bytes(8192)


def test_a_tree_of_calls_on_a_file_does_what_it_does_to_bytes_io(disk: sync.Disk) -> None:
    chance = random.Random(3)
    reference = io.BytesIO(bytes(SIZE))
    with io.BufferedRandom(disk.file(), 10_000) as file:
        for _ in range(200):
            match chance.randrange(3):
                case 0:
                    content = chance.randbytes(chance.choice([1, 100, 5000, 20_000]))
                    content = content[: SIZE - reference.tell()]
                    assert file.write(content) == reference.write(content)
                case 1:
                    length = chance.choice([1, 100, 5000, 20_000])
                    assert file.read(length) == reference.read(length)
                case _:
                    position = chance.randrange(SIZE + 1)
                    assert file.seek(position) == reference.seek(position)
            assert file.tell() == reference.tell()
    assert disk.read(0, SIZE) == reference.getvalue()


def test_copies_go_through(disk: sync.Disk) -> None:
    content = random.Random(4).randbytes(300_001)
    with disk.file() as file:
        file.seek(77)
        shutil.copyfileobj(io.BytesIO(content), file)
        file.seek(77)
        assert file.read(len(content)) == content


def test_a_file_ends_where_its_disk_does(disk: sync.Disk) -> None:
    file = disk.file()
    assert (file.readable(), file.writable(), file.seekable()) == (True, True, True)
    assert file.seek(-2, io.SEEK_END) == SIZE - 2
    assert file.write(b"abc") == 2
    with pytest.raises(OSError, match="No space left"):
        file.write(b"c")
    assert file.write(b"") == 0
    assert file.seek(-3, io.SEEK_CUR) == SIZE - 3
    assert file.read(10) == b"\0ab"
    assert file.read(10) == b""
    with pytest.raises(io.UnsupportedOperation):
        file.truncate(0)
    with pytest.raises(io.UnsupportedOperation):
        file.fileno()
    with pytest.raises(OSError, match="Invalid"):
        file.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        file.seek(0, 9)
    file.close()
    for call in (file.tell, lambda: file.seek(0), lambda: file.read(1), lambda: file.write(b"x")):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_what_a_file_wrote_is_durable_when_it_is_closed(
    disk: sync.Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr(disk, "flush", lambda: flushed.append(True))
    with io.BufferedRandom(disk.file()) as file:
        file.write(b"x")
    assert flushed


def test_errors_reach_the_calling_thread(disk: sync.Disk) -> None:
    with pytest.raises(UsageError):
        disk.read(SIZE, 1)


def test_nobody_there_is_an_error() -> None:
    front_end = FrontEnd(
        traddr="127.0.0.1", trsvcid=1, subsystem_nqn="nqn.2026-11.dev.sealane:x",
        namespace_id=1, host_nqn="nqn.2026-11.dev.sealane:y",
    )  # fmt: skip
    with pytest.raises(UnavailableError), sync.open_disk(front_end):
        pass
    with pytest.raises(UnavailableError) as caught, sync.connect("/nonexistent/socket"):
        pass
    assert caught.value.reason == "daemon.unreachable"
