"""Brokers whose etcd is lost and restored from a snapshot, under a program that goes on."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from etcd_server import Cluster, etcd_cluster
from kills.backups import (
    Grant,
    check_disjoint,
    grants,
    opened_device,
    prepare,
    restore,
    take_snapshot,
)
from kills.load import BYTES, WRITERS, Load
from kills.storage_world import BROKERS, StorageWorld, storage_world
from nonces import DIRECTORY, once_each, sealed
from sealane.client import connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

# The device's former server is waited for (device.busy): 60 s.
HEAL_SECONDS = 200


async def test_a_program_goes_on_after_the_brokers_etcd_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    monkeypatch.setenv(DIRECTORY, str(ledgers))
    with etcd_cluster() as lost, etcd_cluster() as fresh:
        async with storage_world(
            store="file", anchor="broker", scratch=tmp_path, etcd=lost.endpoints
        ) as world:
            config = world.site.root / "g.toml"
            config.write_text(config.read_text() + f"hold_seconds = {HEAL_SECONDS}\n")
            await world.restart("g")
            before = await _through_a_restore(world, lost, fresh)
            after = _granted(world)
            assert len(after) > len(before) >= 2
            check_disjoint(after)
    once_each(sealed(ledgers))


async def _through_a_restore(world: StorageWorld, lost: Cluster, fresh: Cluster) -> list[Grant]:
    """Run a program while brokers and etcd are lost; return what had been granted by then."""
    async with connect(world.daemons["g"].socket) as client:
        created = await client.volumes.create(size_bytes=BYTES)
        volume = await client.volumes.attach(created.name, host_nqn=HOST)
        async with client.open(volume, hold_seconds=HEAL_SECONDS) as disk:
            load = Load(disk)
            async with asyncio.TaskGroup() as tasks:
                for writer in range(WRITERS):
                    tasks.create_task(load.run(writer))
                await load.went_on()
                await asyncio.to_thread(take_snapshot, world, BROKERS[1])
                # A gateway's next process has no leases left: it gets others.
                await world.restart("g")
                await load.went_on()
                for name in BROKERS:
                    world.daemons[name].kill()
                lost.stop()
                granted = _granted(world)
                await asyncio.to_thread(_restore, world, lost, fresh)
                await _goes_on(load)
                print(f"\nI/O paused for {load.pause_seconds:.1f} s")
                await world.restart("g")
                await _goes_on(load)
                load.is_over = True
            await load.check()
    return granted


def _restore(world: StorageWorld, lost: Cluster, fresh: Cluster) -> None:
    """Restore into another etcd, and start both brokers on it."""
    for instance, name in enumerate(BROKERS, start=7):
        config = world.site.root / f"{name}.toml"
        text = config.read_text()
        config.write_text(text.replace(json.dumps(lost.endpoints), json.dumps(fresh.endpoints)))
        prepare(world, instance=instance, broker=name)
    outcome = restore(world, devices=[opened_device(*_logs(world))])
    assert outcome["retired instances"] == [1, 2]
    for name in BROKERS:
        world.start(name)


def _granted(world: StorageWorld) -> list[Grant]:
    return [grant for log in _logs(world) for grant in grants(log)]


def _logs(world: StorageWorld) -> list[Path]:
    return [world.site.root / name / "audit.jsonl" for name in BROKERS]


async def _goes_on(load: Load) -> None:
    """Wait for progress as long as programs wait for their target."""
    async with asyncio.timeout(HEAL_SECONDS):
        while True:
            with contextlib.suppress(TimeoutError):
                await load.went_on()
                return
