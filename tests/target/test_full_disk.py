"""A target with a full file system: it serves existing data, and recovers when there is room.

Each test mounts a small file system for the target's directory, which needs root.
"""

import asyncio
import contextlib
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from attacks.world import Attacked, Cluster, attacked, attempt, pattern
from control_plane import Site, short_directory
from sealane.client import connect
from sealane.errors import Error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]
FILE_SYSTEM_BYTES = 64 << 20
CAPACITY_EXCEEDED = 0x081
"""NVM Express Base Specification, generic command status."""


class SmallDisk(Cluster):
    """A cluster whose target keeps `file` stores on a small file system."""

    mount: Path
    is_thin = False

    def _target_config(self) -> Path:
        return self.site.write_config(
            "s",
            self.site.enrolment("s", self.broker)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            f'store = "file"\ndirectory = "{self.mount}"\nthin = {str(self.is_thin).lower()}\n',
        )

    def fill(self) -> None:
        """Fill the file system with another file."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(descriptor, bytes(size))
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                os.write(descriptor, b"1")
        finally:
            os.close(descriptor)

    def make_room(self) -> None:
        """Remove the filling file."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        # In the directory, but not a file of the target's.
        return self.mount / "filler"


@contextlib.contextmanager
def small_disk(*, is_thin: bool) -> Iterator[SmallDisk]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        made = SmallDisk(Site(root), stack)
        made.mount, made.is_thin = root / "disk", is_thin
        made.mount.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "tmpfs", made.mount]
        mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"can't mount: {mounted.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", "--lazy", made.mount], check=True)
        made.start()
        yield made


@contextlib.asynccontextmanager
async def on(disk: SmallDisk) -> AsyncIterator[Attacked]:
    async with attacked(disk) as world:
        yield world


async def test_target_on_a_full_file_system_serves_discards_restarts_and_deletes() -> None:
    with small_disk(is_thin=False) as disk:
        async with on(disk) as world:
            disk.fill()
            async with world.queue() as queue:
                # Its space was reserved at its creation.
                for lba in range(0, 1024, 8):
                    await queue.write(lba, pattern(lba, 1, 8))
                await queue.flush()
                await queue.deallocate(0, 8)
                await queue.flush()
                disk.kill_target()
                await asyncio.to_thread(disk.restart_target)
                assert await queue.read(0) == bytes(4096)
                assert await queue.read(8, 8) == pattern(8, 1, 8)
            name = world.volume.name
        async with connect(disk.gateway("g1").socket) as client:
            await client.volumes.delete(name)
        disk.make_room()
        async with on(disk) as world, world.queue() as queue:
            await queue.write(0, pattern(0, 2))


async def test_volume_larger_than_the_file_system_is_refused_and_leaves_nothing() -> None:
    with small_disk(is_thin=False) as disk:
        async with connect(disk.gateway("g1").socket) as client:
            with pytest.raises(Error, match=r"thin = true") as refused:
                await client.volumes.create(size_bytes=1 << 30)
            assert refused.value.reason == "store.full"
            assert not [*disk.mount.glob("*.sectors")]
        async with on(disk) as world, world.queue() as queue:
            await queue.write(0, pattern(0, 1))


async def test_thin_volume_tells_hosts_that_there_is_no_room_and_goes_on_when_there_is() -> None:
    with small_disk(is_thin=True) as disk:
        async with on(disk) as world, world.queue() as queue:
            await queue.write(0, pattern(0, 1))
            await queue.flush()
            disk.fill()
            outcomes = [await attempt(queue.write(lba, pattern(lba, 1))) for lba in range(1, 40)]
            errors = [outcome.error for outcome in outcomes if not outcome.is_success]
            assert errors
            assert {getattr(error, "status", None) for error in errors} == {CAPACITY_EXCEEDED}
            # The store goes on: its own metadata has reserved space.
            assert await queue.read(0) == pattern(0, 1)
            await queue.deallocate(0, 1)
            await queue.flush()
            disk.make_room()
            await queue.write(2, pattern(2, 2))
            await queue.flush()
            assert await queue.read(2) == pattern(2, 2)
