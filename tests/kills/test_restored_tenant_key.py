"""A tenant's key is rotated after a snapshot, the gateway restarts, and the store is restored."""

import asyncio
from pathlib import Path

import pytest

from control_plane import sealanectl
from kills.backups import prepare, restore, take_snapshot
from kills.storage_world import StorageWorld, storage_world
from kills.test_restored_broker import _read, _wait_reopened, _write
from patience import PATIENCE_SECONDS
from sealane.client import Client, Volume, connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TENANT = "t"
BEFORE, ROTATED, RESTORED = b"under the former key", b"under the new key", b"after the restore"


def _key(world: StorageWorld, *arguments: str) -> None:
    ended = sealanectl("--socket", world.daemons["broker"].socket, "key", *arguments)
    assert ended.returncode == 0, ended.stderr


async def _switched(client: Client, volume: Volume, *, above: int) -> None:
    """Wait until the gateway seals under a key epoch above that."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if (await client.volumes.get(volume.name)).key_epoch > above:
                return
            await asyncio.sleep(0.2)


async def test_what_was_sealed_under_a_prepared_key_is_read_after_a_restart_and_a_restore(
    tmp_path: Path,
) -> None:
    async with storage_world(store="file", anchor="file", scratch=tmp_path) as world:
        async with connect(world.daemons["g"].socket) as client:
            created = await client.volumes.create(size_bytes=1 << 20)
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            await _write(client, volume, 1, BEFORE)
            await asyncio.to_thread(_key, world, "prepare-tenant", TENANT, "--wait")
            await asyncio.to_thread(take_snapshot, world)
            await asyncio.to_thread(_key, world, "rotate-tenant", TENANT, "--wait", "--yes")
            await _switched(client, volume, above=1)
            await _write(client, volume, 2, ROTATED)
        # The saved attachment is sealed under the epoch before.
        await world.restart("g")
        async with connect(world.daemons["g"].socket) as client:
            await _read(client, volume, 1, BEFORE)
            await _read(client, volume, 2, ROTATED)
            world.daemons["broker"].kill()
            prepare(world, instance=7)
            await asyncio.to_thread(restore, world)
            await asyncio.to_thread(world.start, "broker")
            await asyncio.to_thread(_wait_reopened, world)
            await _switched(client, volume, above=2)
            await _read(client, volume, 2, ROTATED)
            await _write(client, volume, 3, RESTORED)
            await client.volumes.detach(volume.name)
            # All keys come from the restored store.
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            for block, content in ((1, BEFORE), (2, ROTATED), (3, RESTORED)):
                await _read(client, volume, block, content)
