"""Mode off on our target: everything is sealed, but old data can be replayed."""

import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attached_hosts import host_of, new_secret
from attacks.disk import read_slot, write_slot
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.data_path import AttachedVolume, Gateway
from sealane.daemon.gateway.filling_volume import FillingVolume
from sealane.daemon.gateway.grants import QueueGrant, VolumeKey
from sealane.daemon.target.data_path import Target
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import VolumeQueue
from target.pair import GATEWAY, HOST, counters

SECTORS = 2500
PAGE = 4096
APPLICATION_TAG, GUARD, INVALID_OPCODE, COMPARE_FAILURE = 0x283, 0x282, 0x001, 0x285


@dataclass
class World:
    """A target and a gateway, and no control plane between them."""

    target: Target
    gateway: Gateway
    volume_id: uuid.UUID = field(default_factory=uuid.uuid4)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    starts: int = 0

    async def open_queue(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        assert not milestone
        await self.target.close_older_queues(self.volume_id, GATEWAY, association_epoch)
        secret, ticket = secrets.token_bytes(32), secrets.token_bytes(16)
        self.target.admit_queue(
            ticket,
            volume_id=self.volume_id,
            host_nqn=GATEWAY,
            queue_id=queue_id,
            secret=bytearray(secret),
            association_epoch=association_epoch,
            incarnation=7,
            gateway=None,
            permit=None,
        )
        traddr, trsvcid = self.target.address
        return QueueGrant(
            ticket=ticket,
            secret=bytearray(secret),
            association_epoch=association_epoch,
            target_incarnation=7,
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self.target.subsystem_nqn(self.volume_id),
            host_nqn=GATEWAY,
        )

    def volume(self) -> VolumeKey:
        return VolumeKey(
            volume_id=self.volume_id,
            generation=1,
            sector_count=SECTORS,
            keys={1: bytearray(self.key)},
            fully_sealed=True,
        )

    def lease(self) -> list[CounterRange]:
        self.starts += 1
        return [counters(start_epoch=self.starts)]

    async def filling(self) -> FillingVolume:
        return await self.gateway.open_filling(
            self.volume(), counters=self.lease(), open_queue=self.open_queue
        )

    async def fill(self) -> None:
        filling = await self.filling()
        await filling.write_zeroes(0, SECTORS)
        await filling.flush()
        await filling.close()

    async def attach(self) -> AttachedVolume:
        return await self.gateway.attach(
            self.volume(),
            counters=self.lease(),
            secret=new_secret(),
            host_nqn=HOST,
            open_queue=self.open_queue,
        )

    @contextlib.asynccontextmanager
    async def queue(self, port: AttachedVolume) -> AsyncIterator[VolumeQueue]:
        async with host_of(port, HOST) as host:
            queue = await host.open_queue(1)
            try:
                yield queue
            finally:
                await queue.close()

    @property
    def path(self) -> Path:
        path = self.target.store_path(self.volume_id)
        assert path is not None
        return path


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    target = Target(
        traddr="127.0.0.1", trsvcid=0, store_kind="inline", directory=tmp_path / "store"
    )
    gateway = Gateway(traddr="127.0.0.1", trsvcid=0)
    await target.start()
    await gateway.start()
    made = World(target, gateway)
    await target.create_volume(made.volume_id, sector_count=SECTORS, freshness=False)
    try:
        yield made
    finally:
        await gateway.stop()
        await target.stop()


async def read(queue: VolumeQueue, lba: int, sectors: int) -> bytes:
    into = bytearray(sectors * PAGE)
    await queue.read(lba, into)
    return bytes(into)


async def status_of(queue: VolumeQueue, lba: int) -> int:
    with pytest.raises(NvmeStatusError) as caught:
        await read(queue, lba, 1)
    return caught.value.status


async def test_filled_volume_is_zeros_which_the_store_does_not_see(world: World) -> None:
    await world.fill()
    assert read_slot(world.path, SECTORS - 1).block[:PAGE].count(0) < PAGE // 64
    async with world.queue(await world.attach()) as queue:
        assert await read(queue, 0, SECTORS) == bytes(SECTORS * PAGE)


async def test_zeros_written_are_sealed_and_deallocate_is_not_offered(world: World) -> None:
    await world.fill()
    port = await world.attach()
    async with world.queue(port) as queue:
        await queue.write(0, b"x" * PAGE * 200)
        before = port.statistics()["sectors_sealed"]
        await queue.write_zeroes(3, 150, deallocate=True)
        assert port.statistics()["sectors_sealed"] == before + 150
        expected = b"x" * PAGE * 3 + bytes(PAGE * 150) + b"x" * PAGE * 47
        assert await read(queue, 0, 200) == expected
        with pytest.raises(NvmeStatusError) as caught:
            await queue.deallocate([(0, 8)])
        assert caught.value.status == INVALID_OPCODE
        assert await read(queue, 0, 200) == expected


async def test_host_compares_and_writes_in_one_step(world: World) -> None:
    await world.fill()
    async with world.queue(await world.attach()) as queue:
        await queue.compare_and_write(7, bytes(PAGE), b"b" * PAGE)
        with pytest.raises(NvmeStatusError) as caught:
            await queue.compare_and_write(7, bytes(PAGE), b"c" * PAGE)
        assert caught.value.status == COMPARE_FAILURE
        assert await read(queue, 7, 1) == b"b" * PAGE


async def test_erased_sector_is_an_error_and_never_zeros(world: World) -> None:
    await world.fill()
    genuine = read_slot(world.path, 5)

    def erase(block: bytearray) -> None:
        block[:] = bytes(len(block))

    def erase_iv(block: bytearray) -> None:
        block[PAGE + 16 : PAGE + 28] = bytes(12)

    def say_unwritten(block: bytearray) -> None:
        block[:] = bytes(len(block))
        block[-2:] = b"\x01\x01"

    async with world.queue(await world.attach()) as queue:
        for change in (erase, erase_iv, say_unwritten):
            write_slot(genuine.changed(change))
            assert await status_of(queue, 5) == APPLICATION_TAG
            with pytest.raises(NvmeStatusError):
                await queue.compare_and_write(5, bytes(PAGE), b"c" * PAGE)
        write_slot(genuine)
        assert await read(queue, 5, 1) == bytes(PAGE)


async def test_changed_or_moved_sector_does_not_open(world: World) -> None:
    await world.fill()
    genuine = read_slot(world.path, 5)

    def flip(block: bytearray) -> None:
        block[100] ^= 1

    async with world.queue(await world.attach()) as queue:
        write_slot(genuine.changed(flip))
        assert await status_of(queue, 5) == GUARD
        write_slot(genuine.holding(read_slot(world.path, 6)))
        assert await status_of(queue, 5) == GUARD


async def test_sector_put_back_is_not_noticed_and_nobody_promises_it(world: World) -> None:
    await world.fill()
    async with world.queue(await world.attach()) as queue:
        await queue.write(5, b"1" * PAGE)
        old = read_slot(world.path, 5)
        await queue.write(5, b"2" * PAGE)
        write_slot(old)
        # docs/understand/threat-model.md: mode off provides no freshness.
        assert await read(queue, 5, 1) == b"1" * PAGE


async def test_target_that_answers_unwritten_is_not_believed(world: World) -> None:
    # A target with a table of current IVs, which reports unwritten sectors as such.
    world.volume_id = uuid.uuid4()
    await world.target.create_volume(world.volume_id, sector_count=SECTORS)
    port = await world.attach()
    async with world.queue(port) as queue:
        assert await status_of(queue, 5) == APPLICATION_TAG
    assert any(event.reason == "sector.unwritten" for event in port.take_events())


async def test_filling_goes_on_over_a_lost_association(world: World) -> None:
    filling = await world.filling()
    await filling.write_zeroes(0, 1000)
    newest = world.target.newest_epoch(world.volume_id, GATEWAY)
    await world.target.close_older_queues(world.volume_id, GATEWAY, newest + 1)
    await filling.write_zeroes(1000, SECTORS - 1000)
    await filling.flush()
    await filling.close()
    async with world.queue(await world.attach()) as queue:
        assert await read(queue, 0, SECTORS) == bytes(SECTORS * PAGE)
