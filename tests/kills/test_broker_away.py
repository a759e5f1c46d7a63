"""A broker that is unavailable for a while: a program's calls wait, and none fails."""

import asyncio
from pathlib import Path

import pytest

from kills.storage_world import StorageWorld, storage_world
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.volume_queue import VolumeQueue
from trust.test_revocation import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOT_READY = 0x082


async def test_a_flush_waits_for_a_broker_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()
    flush = VolumeQueue.flush

    async def noted(queue: VolumeQueue) -> None:
        try:
            await flush(queue)
        except NvmeStatusError as error:
            if (error.status, error.is_final) == (NOT_READY, False):
                refused.set()
            raise

    monkeypatch.setattr(VolumeQueue, "flush", noted)
    async with storage_world(store="file", anchor="broker", scratch=tmp_path) as world:
        # Longer than a target waits for its anchor, so that the program gets the target's answer.
        config = world.site.root / "g.toml"
        patient = config.read_text().replace("timeout_seconds = 5\n", "timeout_seconds = 30\n")
        config.write_text(patient)
        await world.restart("g")
        await held(world, refused)


async def held(world: StorageWorld, refused: asyncio.Event) -> None:
    async with connect(world.daemons["g"].socket) as client:
        created = await client.volumes.create(size_bytes=1 << 20)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with client.open(volume, hold_seconds=PATIENCE_SECONDS) as disk:
            await disk.write(1, b"not anchored yet")
            world.daemons["broker"].kill()
            flushing = asyncio.ensure_future(disk.flush())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await refused.wait()
            assert not flushing.done()
            await asyncio.to_thread(world.start, "broker")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await flushing
            assert await disk.read(1, 3) == b"not"
