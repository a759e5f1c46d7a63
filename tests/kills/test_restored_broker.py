"""A broker whose store is lost and restored from a snapshot, with running gateway and target."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from kills.backups import (
    check_disjoint,
    grants,
    opened_device,
    prepare,
    records,
    restore,
    take_snapshot,
)
from kills.storage_world import BLOCK, LOST, StorageWorld, storage_world
from sealane.client import Client, Volume, connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# The device's former server is waited for (device.busy): 60 s.
HEAL_SECONDS = 200.0


@pytest.mark.parametrize("anchor", ["file", "broker"])
async def test_volume_goes_on_after_its_broker_was_restored(anchor: str, tmp_path: Path) -> None:
    async with storage_world(store="file", anchor=anchor, scratch=tmp_path) as world:
        log = world.site.root / "broker" / "audit.jsonl"
        async with connect(world.daemons["g"].socket) as client:
            created = await client.volumes.create(size_bytes=1 << 20)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 1, b"before the snapshot")
            await asyncio.to_thread(take_snapshot, world)
            await client.volumes.detach(volume.name)
        # A gateway's next process has no leases left, so it gets others.
        await world.restart("g")
        async with connect(world.daemons["g"].socket) as client:
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 2, b"after the snapshot")
            world.daemons["broker"].kill()
            before = grants(log)
            prepare(world, instance=7)
            devices = [opened_device(log)] if anchor == "broker" else []
            await asyncio.to_thread(partial(restore, world, devices=devices))
            await asyncio.to_thread(world.start, "broker")
            # The attachment outlives the broker.
            await asyncio.to_thread(_wait_reopened, world)
            await _read(client, volume, 1, b"before the snapshot")
            await _read(client, volume, 2, b"after the snapshot")
            await _write(client, volume, 3, b"after the restore")
            await client.volumes.detach(volume.name)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 4, b"under another lease")
            for block, content in (
                (2, b"after the snapshot"),
                (3, b"after the restore"),
                (4, b"under another lease"),
            ):
                await _read(client, volume, block, content)
        after = grants(log)
        assert len(after) > len(before) >= 2
        assert after[: len(before)] == before
        check_disjoint(after)
        kinds = [each["kind"] for each in records(log)]
        assert "broker.restore" in kinds


async def _write(client: Client, volume: Volume, block: int, content: bytes) -> None:
    async with client.open(volume) as disk:
        await disk.write(block * BLOCK, content)
        await disk.flush()


async def _read(client: Client, volume: Volume, block: int, content: bytes) -> None:
    """Read what was written, once the volume is served again."""
    async with asyncio.timeout(HEAL_SECONDS):
        while True:
            try:
                async with client.open(volume) as disk:
                    assert await disk.read(block * BLOCK, len(content)) == content
                    return
            except LOST:
                await asyncio.sleep(1)


def _wait_reopened(world: StorageWorld) -> None:
    """Wait until the running target has opened its device at the restored broker."""
    deadline = time.monotonic() + HEAL_SECONDS
    while time.monotonic() < deadline:
        opened = [e for e in world.daemons["s"].log_lines() if e["event"] == "device_opened"]
        if len(opened) > 1:
            return
        time.sleep(0.5)
    raise AssertionError("the target did not open its device again")
