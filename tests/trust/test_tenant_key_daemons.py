"""Rotation of a tenant's key with real daemons on etcd: brokers are killed, a host goes on."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane import sealanectl
from patience import PATIENCE_SECONDS
from sealane.client import Volume, connect
from sealane.crypto.keys import WrappingKey, derive_volume_key
from sealane.daemon.broker.records import TenantRecord, VolumeRecord
from sealane.daemon.broker.registry import TENANT_PURPOSE, Registry
from sealane.daemon.broker.store.etcd import EtcdStore
from trust.test_record_key_daemons import BROKERS, World, _at, killed_halfway, world
from trust.test_revocation import HOST, MIB, Load, host_of

__all__ = ["world"]

pytestmark = pytest.mark.slow

KEK = bytes(range(32))
TENANT = "t"
# So many that a broker can be killed while it goes through them.
VOLUMES = 1500
VOLUMES_OF_A_COMMIT = 50
OLD_BLOCK = b"sealed under the former key".ljust(4096, b".")
TENANT_RECORD = f"/sealane/data/tenants/{TENANT}".encode()


@contextlib.asynccontextmanager
async def _registry(world: World) -> AsyncIterator[Registry]:
    """Open the store as one more broker would."""
    store = await EtcdStore.open(world.etcd.endpoints, writer="test", credentials=None)
    registry = await Registry.open(store, WrappingKey(KEK), node="broker3")
    yield registry
    await registry.close()


def _id(number: int) -> uuid.UUID:
    return uuid.UUID(int=number)


def _record(number: int) -> bytes:
    return f"/sealane/data/volumes/{_id(number)}".encode()


async def _fill(world: World) -> None:
    """Put volumes of the tenant, around that of the host in the order of ids."""
    async with _registry(world) as registry:
        for first in range(0, VOLUMES, VOLUMES_OF_A_COMMIT):
            puts: dict[str, bytes] = {}
            for number in range(first, first + VOLUMES_OF_A_COMMIT):
                record = VolumeRecord(
                    volume_id=_id(number),
                    tenant=TENANT,
                    display_name="",
                    sector_count=1,
                    target_node="s",
                    generation=1,
                    key_epoch=1,
                )
                puts |= registry.volumes.sealed(str(_id(number)), record)
            assert await registry.commit(puts=puts) is not None


def _reached(world: World, name: str, stage: str) -> dict[str, Any]:
    """Wait until a broker shows the stage; return the tenant's key there."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        [shown] = world.status(name)["tenant_keys"]
        if shown["stage"] == stage or time.monotonic() > end:
            assert shown["stage"] == stage, shown
            return dict(shown)
        time.sleep(0.2)


async def _block(volume: Volume, content: bytes = b"") -> bytes:
    """Write a volume's first block, or read it."""
    async with host_of(volume) as host:
        await host.request_queues(1)
        queue = await host.open_queue(1)
        if content:
            await queue.write(0, content)
        read = bytearray(4096)
        await queue.read(0, read)
        await queue.close()
        return bytes(read)


async def _leased_epochs(registry: Registry, volume_id: uuid.UUID) -> set[int]:
    page, _ = await registry.grants.page(limit=1000)
    return {each.record.key_epoch for each in page if each.record.volume_id == volume_id}


async def test_tenants_key_is_replaced_although_brokers_are_killed_and_a_thief_lacks_the_new_one(
    world: World,
) -> None:
    gateway = await asyncio.to_thread(world.gateway)
    async with connect(gateway.socket) as client, asyncio.TaskGroup() as tasks:
        volume = await client.volumes.create(size_bytes=MIB)
        volume_id = uuid.UUID(volume.name.removeprefix("volumes/"))
        await _fill(world)
        stolen = world.adversary.get(TENANT_RECORD)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        assert await _block(volume, OLD_BLOCK) == OLD_BLOCK
        load = Load(first_block=1)
        running = tasks.create_task(load.run(volume))
        await load.goes_on()

        refused = await asyncio.to_thread(
            sealanectl, *_at(world.brokers["broker2"]), "key", "rotate-tenant", TENANT, "--yes"
        )
        assert "broker.tenant_key.not_prepared" in refused.stderr
        records = _record(0), _record(VOLUMES - 1)
        await asyncio.to_thread(killed_halfway, world, *records, "prepare-tenant", TENANT)
        # The other one goes on with it; nobody asked it to.
        shown = await asyncio.to_thread(_reached, world, "broker2", "prepared")
        assert (shown["number"], shown["ready"], shown["rotated"]) == (1, VOLUMES + 1, 0)
        await asyncio.to_thread(world.start, "broker")
        await load.goes_on()

        await asyncio.to_thread(killed_halfway, world, *records, "rotate-tenant", TENANT, "--yes")
        shown = await asyncio.to_thread(_reached, world, "broker2", "")
        assert (shown["number"], shown["former_numbers"], shown["failure"]) == (1, [0], "")
        await asyncio.to_thread(world.start, "broker")
        ended = await asyncio.to_thread(
            sealanectl,
            *_at(world.brokers["broker"]),
            "--output",
            "json",
            "key",
            "prepare-tenant",
            TENANT,
            "--wait",
        )
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["number"] == 2

        async with _registry(world) as registry:
            end = time.monotonic() + PATIENCE_SECONDS
            while (epochs := await _leased_epochs(registry, volume_id)) != {1, 2}:
                assert time.monotonic() < end, epochs
                await asyncio.sleep(0.2)
            await load.goes_on()
            record = (await registry.volume(volume_id)).record
            assert (record.present_tenant_key, record.next_tenant_key) == (1, 2)
            former = await registry.volume_key(record, 1)
            present = await registry.volume_key(record, 2)
            # The key encryption key and an older store open what was sealed before; nothing later.
            opened = TenantRecord.model_validate_json(stolen[32:])
            key = WrappingKey(KEK).unwrap(opened.wrapped_key, purpose=TENANT_PURPOSE, owner=TENANT)
            assert derive_volume_key(key, volume_id=volume_id, key_epoch=1) == former
            assert derive_volume_key(key, volume_id=volume_id, key_epoch=2) != present
        assert load.failure is None
        running.cancel()
        await asyncio.wait([running])
        assert await _block(volume) == OLD_BLOCK
    assert set(world.brokers) == set(BROKERS)
