"""Anchored stores with real daemons: a rollback is refused, a crash isn't."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from attached_hosts import detach_kept
from control_plane import Daemon, daemon
from sealane.client import Volume, connect
from trust.test_device_daemons import MIB, World, world
from trust.test_revocation import HOST, host_of

pytestmark = pytest.mark.slow

__all__ = ["world"]


@asynccontextmanager
async def attached(world: World, target: Daemon, name: str = "") -> AsyncIterator[Volume]:
    """Attach a volume, created if unnamed, at a gateway of its own."""
    with world.gateway(target) as gateway:
        async with connect(gateway.socket) as client:
            if name:
                await detach_kept(client, name)
            else:
                name = (await client.volumes.create(size_bytes=MIB)).name
            yield await client.volumes.attach(name, host_nqn=HOST)


async def write(volume: Volume, content: bytes) -> None:
    async with host_of(volume) as host:
        await host.request_queues(1)
        queue = await host.open_queue(1)
        await queue.write(7, content)
        await queue.flush()
        await queue.close()


async def read(volume: Volume) -> bytes:
    async with host_of(volume) as host:
        await host.request_queues(1)
        queue = await host.open_queue(1)
        found = bytearray(4096)
        await queue.read(7, found)
        await queue.close()
        return bytes(found)


def outcome(target: Daemon, volume: str) -> tuple[str, str]:
    """Return the event and reason with which a start reported the volume."""
    lines = [line for line in target.log_lines() if f"volumes/{line.get('volume_id')}" == volume]
    events: list[dict[str, Any]] = [
        line for line in lines if line.get("kind") in {"restored", "skipped"}
    ]
    return str(events[-1]["kind"]), str(events[-1].get("reason", ""))


@pytest.mark.parametrize("anchor", ["broker", "file"])
async def test_store_put_back_behind_a_flush_is_refused_and_the_honest_one_is_served(
    world: World, tmp_path: Path, anchor: str
) -> None:
    world.start_broker()
    config = world.target_config(anchor=anchor)
    older, newest = tmp_path / "older", tmp_path / "newest"
    with daemon(config) as target:
        async with attached(world, target) as volume:
            await write(volume, b"1" * 4096)
            store = world.directory / f"{volume.name.removeprefix('volumes/')}.sectors"
            shutil.copyfile(store, older)
            await write(volume, b"2" * 4096)
        target.kill()
    shutil.copyfile(store, newest)
    shutil.copyfile(older, store)
    with daemon(config) as target:
        assert outcome(target, volume.name) == ("skipped", "store.rolled_back")
    shutil.copyfile(newest, store)
    with daemon(config) as target:
        assert outcome(target, volume.name) == ("restored", "")
        async with attached(world, target, volume.name) as again:
            assert await read(again) == b"2" * 4096
