"""A device rolled back between two anchors while its gateway runs, which notices."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kills.storage_world import StorageWorld, storage_world
from patience import PATIENCE_SECONDS
from sealane.client import Volume, connect
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from trust.test_revocation import HOST, host_of

pytestmark = pytest.mark.slow

BLOCK = 4096
MIB = 1 << 20
LBA = 7


async def write(queue: VolumeQueue, byte: bytes) -> None:
    await queue.write(LBA, byte * BLOCK)
    await queue.flush()


async def read(queue: VolumeQueue) -> bytes:
    found = bytearray(BLOCK)
    await queue.read(LBA, found)
    return bytes(found)


async def attach(world: StorageWorld, name: str = "") -> Volume:
    async with connect(world.daemons["g"].socket) as client:
        name = name or (await client.volumes.create(size_bytes=MIB)).name
        return await client.volumes.attach(name, host_nqn=HOST)


async def failure(world: StorageWorld) -> str:
    """Wait until the gateway has failed its volume; return the reason."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for line in world.daemons["g"].log_lines():
                if line.get("kind") == "volume_failed":
                    return str(line["reason"])
            await asyncio.sleep(0.05)


async def test_device_put_back_between_two_anchors_is_noticed_by_the_gateway_that_lives(
    tmp_path: Path,
) -> None:
    older = tmp_path / "older"
    async with storage_world(store="file", anchor="tpm2", scratch=tmp_path) as world:
        volume = await attach(world)
        store = world.site.root / "stores" / f"{volume.name.removeprefix('volumes/')}.sectors"
        async with host_of(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            await write(queue, b"1")
            # A crash isn't a rollback, although no anchor covers the flush.
            await world.kill("s")
            assert await read(queue) == b"1" * BLOCK
            shutil.copyfile(store, older)
            await write(queue, b"2")
            world.daemons["s"].kill()
            shutil.copyfile(older, store)
            await asyncio.to_thread(world.start, "s")
            with pytest.raises(NvmeStatusError):
                await read(queue)
            assert await failure(world) == "volume.rolled_back"
            await queue.close()
        # The target can't detect it: an operator has to accept the state.
        async with connect(world.daemons["g"].socket) as client:
            await client.volumes.detach(volume.name)
        async with host_of(await attach(world, volume.name)) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            assert await read(queue) == b"1" * BLOCK
            await queue.close()
