"""Hosts that close and open I/O queues while others keep running, as SPDK does."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import SubsystemConfig
from sealane.daemon.target.subsystems import PlainSubsystems
from sealane.errors import Error
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from sealane.transport.nvme.volume_queue import VolumeQueue
from target.pair import GATEWAY, World, make_world
from target.test_plain_subsystems import HOST, NQN, Nothing

BLOCK = 4096
LIVE = (1, 2)
CHURNED = (3, 4, 5)
ROUNDS = 12
BLOCKS_OF_A_QUEUE = 32


@dataclass(slots=True)
class Site:
    """A subsystem with queues, and its listener."""

    listener: Listener
    host: HostController


@contextlib.asynccontextmanager
async def plain(_: Path) -> AsyncIterator[Site]:
    listener = Listener(Nothing(), traddr="127.0.0.1", trsvcid=0, offers_digests=True)
    await listener.start()
    subsystems = PlainSubsystems(listener)
    try:
        disk = {"nsid": 1, "store": "memory", "size_bytes": 1 << 20}
        await subsystems.apply(
            [
                SubsystemConfig.model_validate(
                    {"nqn": NQN, "hosts": [{"nqn": HOST}], "namespaces": [disk]}
                )
            ]
        )
        traddr, trsvcid = listener.address
        async with HostController(
            traddr=traddr, trsvcid=trsvcid, subsystem_nqn=NQN, host_nqn=HOST
        ) as host:
            yield Site(listener, host)
    finally:
        await subsystems.close()
        await listener.stop()


@contextlib.asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[Site]:
    async with make_world(directory / "store") as world, world.host() as host:
        yield Site(world.gateway.listener, host)


async def load(queue: VolumeQueue, number: int, until: asyncio.Event) -> int:
    """Write, read and compare on a queue until told to stop; return the number of rounds."""
    first = number * BLOCKS_OF_A_QUEUE
    for rounds in itertools.count():
        if until.is_set():
            return rounds
        content = secrets.token_bytes(8 * BLOCK)
        lba = first + rounds % 3 * 8
        await queue.write(lba, content)
        back = bytearray(len(content))
        await queue.read(lba, back)
        assert back == content
    raise AssertionError


async def churn(host: HostController, number: int) -> None:
    """Open, use and close a queue repeatedly; every other time with commands in flight."""
    for rounds in range(ROUNDS):
        queue = await host.open_queue(number)
        lba = number * BLOCKS_OF_A_QUEUE
        content = secrets.token_bytes(4 * BLOCK)
        await queue.write(lba, content)
        back = bytearray(len(content))
        await queue.read(lba, back)
        assert back == content
        if rounds % 2:
            on_their_way = [
                asyncio.ensure_future(queue.write(lba + 4 * each, content)) for each in range(4)
            ]
            await asyncio.sleep(0)
            await queue.close()
            await asyncio.gather(*on_their_way, return_exceptions=True)
        else:
            await queue.close()


@pytest.mark.parametrize("site", [plain, gateway])
async def test_queues_that_come_and_go_leave_the_others_alone(
    tmp_path: Path, site: Callable[[Path], contextlib.AbstractAsyncContextManager[Site]]
) -> None:
    async with site(tmp_path) as made, asyncio.timeout(2 * PATIENCE_SECONDS):
        queues = [await made.host.open_queue(number) for number in LIVE]
        (association,) = made.listener.associations
        until = asyncio.Event()
        loads = [
            asyncio.ensure_future(load(queue, number, until))
            for number, queue in zip(LIVE, queues, strict=True)
        ]
        await asyncio.gather(*(churn(made.host, number) for number in CHURNED))
        until.set()
        assert all(rounds > 0 for rounds in await asyncio.gather(*loads))
        assert list(made.listener.associations) == [association]
        await until_used(association.queues, set(LIVE))
        # The host's own claim that its controller is the same.
        await made.host.identify_namespace()
        for queue in queues:
            await queue.close()
        await until_used(association.queues, set())
        assert list(made.listener.associations) == [association]


async def until_used(queues: dict[int, asyncio.Event], numbers: set[int]) -> None:
    """Wait until the listener has exactly these queues."""
    while set(queues) != numbers:
        await queues[min(set(queues) - numbers)].wait()


async def test_back_ends_go_with_their_queues(tmp_path: Path) -> None:
    async with make_world(tmp_path / "store") as world, world.host() as host:
        kept = await host.open_queue(1)
        for _ in range(5):
            queue = await host.open_queue(2)
            await queue.write(8, bytes(BLOCK))
            await queue.close()
            await world.event(lambda event: event.kind == "queue_closed" and event.queue_id == 2)
            await settled(world, queues=1)
        await kept.write(0, bytes(BLOCK))
        assert world.attached.statistics()["associations_lost"] == 0
        await kept.close()


async def settled(world: World, *, queues: int) -> None:
    """Wait until the target serves `count` queues, each in its own association."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            running = world.target.statistics(world.volume_id)["queues_running"]
            if (running, len(world.target.listener.associations)) == (queues, queues):
                return
            await asyncio.sleep(0)


async def test_a_secure_controllers_queues_come_and_go_by_tickets(world: World) -> None:
    first, spent = world.grant(1), world.grant(2)
    async with world.back_host() as host, asyncio.timeout(PATIENCE_SECONDS):
        kept = await host.connect_queue(1, ticket=first.ticket)
        second = await host.connect_queue(2, ticket=spent.ticket)
        (association,) = world.target.listener.associations
        for _ in range(3):
            second.close()
            # Immediately: the listener waits until the previous queue with this id has ended.
            second = await host.connect_queue(2, ticket=world.grant(2).ticket)
            assert set(association.queues) == {1, 2}
        ended = association.queues[2]
        second.close()
        await ended.wait()
        with pytest.raises(NvmeStatusError):
            await host.connect_queue(2, ticket=spent.ticket)
        second = await host.connect_queue(2, ticket=world.grant(2).ticket)
        await settled_queues(world, 2)
        # A fence also ends queues that joined the association late.
        await world.target.close_older_queues(world.volume_id, GATEWAY, world.newest_epoch + 1)
        assert world.target.statistics(world.volume_id)["queues_running"] == 0
        with pytest.raises(Error):
            await host.connect_queue(3, ticket=world.grant(3).ticket)
        kept.close()
        second.close()


async def settled_queues(world: World, queues: int) -> None:
    """Wait until the target serves `count` queues."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if world.target.statistics(world.volume_id)["queues_running"] == queues:
                return
            await asyncio.sleep(0)
