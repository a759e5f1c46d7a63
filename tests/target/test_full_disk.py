"""A target with a full file system: it serves existing data, and recovers when there is room.

Each test mounts a small file system for the target's directory, which needs root.
"""

import asyncio
import contextlib
import os
import re
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attacks.world import HOST, VOLUME_BYTES, Attacked, Cluster, attacked, attempt, pattern
from control_plane import Site, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.daemon.runtime.reserve_file import RESERVE_BYTES
from sealane.daemon.target.health import SERVING_SECONDS
from sealane.errors import Error, UnavailableError
from small_disk import fill, small_disk

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
        fill(self._filler)

    def make_room(self) -> None:
        """Remove the filling file."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        # In the directory, but not a file of the target's.
        return self.mount / "filler"


@contextlib.contextmanager
def full_soon(*, is_thin: bool, is_extents: bool = False) -> Iterator[SmallDisk]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        made = SmallDisk(Site(root), stack)
        made.is_thin = is_thin
        size = FILE_SYSTEM_BYTES * (2 if is_extents else 1)
        mounted = small_disk(root / "disk", size_bytes=size, is_extents=is_extents)
        made.mount = stack.enter_context(mounted)
        made.start()
        yield made


@contextlib.asynccontextmanager
async def on(disk: SmallDisk) -> AsyncIterator[Attacked]:
    async with attacked(disk) as world:
        yield world


async def test_target_on_a_full_file_system_serves_discards_restarts_and_deletes() -> None:
    with full_soon(is_thin=False) as disk:
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


async def test_full_disk_is_an_alarm_outlasts_restarts_and_ends_with_the_space() -> None:
    with full_soon(is_thin=False, is_extents=True) as disk:
        async with on(disk) as world, world.queue() as queue:
            await queue.write(8, pattern(8, 1, 8))
            disk.fill()
            # An allocation that fails halfway must not keep what it got.
            with pytest.raises(Error, match=r"\d+ bytes more are needed, \d+ are free") as refused:
                await world.client.volumes.resize(world.volume.name, size_bytes=10 * VOLUME_BYTES)
            assert refused.value.reason == "store.extend"
            for _ in range(3):
                disk.kill_target()
                # Somebody takes what the last process has given back.
                disk.fill()
                await asyncio.to_thread(disk.restart_target)
                assert await queue.read(8, 8) == pattern(8, 1, 8)
                await world.client.volumes.start_job(
                    world.volume.name, "scrub", bytes_per_second=1 << 30
                )
            async with connect(disk.target.socket) as operator:
                spaces = {space.place: space for space in (await operator.status()).spaces}
                assert spaces["volumes"].state == "full"
                assert spaces["volumes"].free_bytes < RESERVE_BYTES
                assert spaces["state"].state != "full"
                disk.make_room()
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while spaces["volumes"].state == "full":
                        await asyncio.sleep(0.1)
                        spaces = {space.place: space for space in (await operator.status()).spaces}
                shown = sealanectl("--socket", disk.target.socket, "status")
                assert re.search(r"space of volumes .*MiB free, 1 MiB in reserve", shown.stdout)
            await queue.write(0, pattern(0, 2))
            await queue.flush()


async def test_gateway_on_a_full_disk_attaches_and_keeps_attachments_over_a_restart() -> None:
    with short_directory() as root, contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(root / "g1", size_bytes=16 << 20))
        cluster = Cluster(Site(root), stack)
        cluster.start()
        async with attacked(cluster) as world, world.queue() as queue:
            other = await world.client.volumes.create(size_bytes=VOLUME_BYTES)
            await queue.write(0, pattern(0, 1))
            fill(disk / "filler")
            await world.client.volumes.attach(other.name, host_nqn=HOST)
            # The queue to the new process needs the attachment's file written.
            cluster.kill_target()
            await asyncio.to_thread(cluster.restart_target)
            await queue.write(1, pattern(1, 1))
            await queue.flush()
            cluster.kill_gateway("g1")
            again = await asyncio.to_thread(cluster.gateway, "g1")
            async with connect(again.socket) as client:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while True:
                        if {v.state for v in await client.volumes.list()} == {"attached"}:
                            break
                        await asyncio.sleep(0.1)
                await client.volumes.detach(other.name)


async def test_target_whose_store_failed_ends_and_the_next_one_serves() -> None:
    with full_soon(is_thin=False) as disk:
        async with on(disk) as world, world.queue() as queue:
            await queue.write(8, pattern(8, 1, 8))
            await queue.flush()
            # No write succeeds, as on a broken drive.
            process = disk.target.process
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            await queue.deallocate(8, 1)
            assert not (await attempt(queue.flush())).is_success
            channel = grpc.aio.insecure_channel(f"unix:{disk.target.socket}")
            async with asyncio.timeout(SERVING_SECONDS + PATIENCE_SECONDS):
                async with channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    answered = health.Watch(health_pb2.HealthCheckRequest(service="stores"))
                    states = [answer.status async for answer in _until_bad(answered)]
                assert states[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
                assert await asyncio.to_thread(process.wait) == UnavailableError.exit_code
            await asyncio.to_thread(disk.restart_target)
            assert await queue.read(9, 7) == pattern(9, 1, 7)
            await queue.write(8, pattern(8, 2))
            await queue.flush()


async def _until_bad(answered: Any) -> AsyncIterator[Any]:
    async for answer in answered:
        yield answer
        if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            return


async def test_volume_larger_than_the_file_system_is_refused_and_leaves_nothing() -> None:
    with full_soon(is_thin=False) as disk:
        async with connect(disk.gateway("g1").socket) as client:
            with pytest.raises(Error, match=r"thin = true") as refused:
                await client.volumes.create(size_bytes=1 << 30)
            assert refused.value.reason == "store.full"
            # What it needs, what is free, of how much, and in reserve.
            needs = str(refused.value).split(": ")[1]
            figures = [int(each) for each in re.findall(r"\b\d+\b", needs)]
            assert figures[0] > 1 << 30
            assert figures[2:] == [FILE_SYSTEM_BYTES, RESERVE_BYTES]
            assert 0 < figures[1] < FILE_SYSTEM_BYTES
            assert not [*disk.mount.glob("*.sectors")]
        async with on(disk) as world, world.queue() as queue:
            await queue.write(0, pattern(0, 1))


async def test_thin_volume_tells_hosts_that_there_is_no_room_and_goes_on_when_there_is() -> None:
    with full_soon(is_thin=True) as disk:
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
