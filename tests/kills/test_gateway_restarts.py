"""Gateways restart and crash under load: no call of a program fails, nothing is lost."""

import asyncio
import os
from pathlib import Path

import pytest

from kills.load import BYTES, WRITERS, Load
from kills.storage_world import StorageWorld, storage_world
from patience import PATIENCE_SECONDS
from sealane.client import Volume, connect
from sealane.errors import UnavailableError
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import HostController
from seeds import SEED
from trust.test_revocation import HOST, host_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENDS = int(os.environ.get("SEALANE_RESTARTS", "2"))
"""Restarts, and as many crashes."""


async def attached(world: StorageWorld) -> Volume:
    async with connect(world.daemons["g"].socket) as client:
        created = await client.volumes.create(size_bytes=BYTES)
        return await client.volumes.attach(created.name, host_nqn=HOST)


async def test_programs_live_through_restarts_and_crashes_of_the_gateway(tmp_path: Path) -> None:
    print("SEALANE_SEED =", SEED)
    async with storage_world(store="file", anchor="broker", scratch=tmp_path) as world:
        volume = await attached(world)
        assert volume.attachment is not None
        async with connect(world.daemons["g"].socket) as client:
            disk = client.open(volume, hold_seconds=PATIENCE_SECONDS)
            async with disk:
                load = Load(disk)
                async with asyncio.TaskGroup() as tasks:
                    for writer in range(WRITERS):
                        tasks.create_task(load.run(writer))
                    for end in [world.restart, world.kill] * ENDS:
                        await load.went_on()
                        await end("g")
                    await load.went_on()
                    load.is_over = True
                await load.check()
        assert world.alarms() == []
        async with connect(world.daemons["g"].socket) as client:
            shown = await client.volumes.get(volume.name)
            assert (shown.state, shown.attachment and shown.attachment.host_nqn) == (
                "attached",
                HOST,
            )
            await client.volumes.detach(volume.name)
        await world.restart("g")
        # A detached volume stays detached: its host is refused.
        with pytest.raises(NvmeStatusError) as caught:
            await host_of(volume).connect()
        assert (caught.value.status, caught.value.is_final) == (0x182, True)


async def test_a_host_is_asked_to_come_again_until_the_target_is_back(tmp_path: Path) -> None:
    async with storage_world(store="file", anchor="broker", scratch=tmp_path) as world:
        volume = await attached(world)
        async with host_of(volume) as host:
            queue = await host.open_queue(1)
            await queue.write(5, b"5" * 4096, is_forced=True)
            await queue.close()
        assert await asyncio.to_thread(world.daemons["g"].stop) == 0
        world.daemons["s"].kill()
        refusals: list[bool] = []
        knocking = asyncio.ensure_future(knock(volume, refusals))
        await asyncio.to_thread(world.start, "g")
        async with connect(world.daemons["g"].socket) as client:
            assert (await client.volumes.get(volume.name)).state == "reattaching"
        for nqn in (HOST, HOST.replace("1", "2")):
            stranger = _host(volume, nqn)
            with pytest.raises(NvmeStatusError) as caught:
                await stranger.connect()
            assert (caught.value.status, caught.value.is_final) == (0x181, False)
        await asyncio.to_thread(world.start, "s")
        knocking.cancel()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await read_back(volume, refusals):
                pass
        assert not any(refusals), "never sent away"


async def knock(volume: Volume, refusals: list[bool]) -> None:
    """Connect repeatedly, starting before the gateway listens."""
    while True:
        try:
            async with host_of(volume):
                pass
        except NvmeStatusError as error:
            refusals.append(error.is_final)
        except UnavailableError:
            await asyncio.sleep(0)


async def read_back(volume: Volume, refusals: list[bool]) -> bool:
    """Read what was written, or record whether the refusal was final."""
    try:
        async with host_of(volume) as host:
            queue = await host.open_queue(1)
            found = bytearray(4096)
            await queue.read(5, found)
            await queue.close()
    except NvmeStatusError as error:
        refusals.append(error.is_final)
        return False
    assert found == b"5" * 4096
    return True


def _host(volume: Volume, nqn: str) -> HostController:
    assert volume.attachment is not None
    return HostController(
        traddr=volume.attachment.traddr,
        trsvcid=volume.attachment.trsvcid,
        subsystem_nqn=volume.attachment.subsystem_nqn,
        host_nqn=nqn,
    )
