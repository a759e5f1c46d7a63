"""Bytes of a disk: any offset and length, many callers, lost front ends, cancelled calls."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plain_target import SIZE, PlainTarget, write_and_check
from sealane.client.disk import CHANGE_ATTEMPTS_MAX, OPERATIONS_MAX, Disk
from sealane.client.disk_queues import QUEUES_MAX, RETRIES_MAX
from sealane.errors import SectorVerificationError, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.volume_queue import VolumeQueue

SECTOR = 4096
OTHER_SECRET = str(HostSecret.generate(random.Random(2).randbytes))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PlainTarget]:
    made = PlainTarget(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call that has begun, and wait for its end."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_do_what_they_do_to_a_bytearray(world: PlainTarget, seed: int) -> None:
    chance = random.Random(seed)
    reference = bytearray(SIZE)
    async with world.disk() as disk:
        assert disk.size == SIZE
        for _ in range(150):
            length = chance.choice([0, 1, 7, 4095, 4096, 4097, 12_288, 100_001])
            offset = chance.randrange(SIZE - length + 1)
            if chance.random() < 0.3:
                offset -= offset % SECTOR
            end = offset + length
            match chance.randrange(5):
                case 0 | 1:
                    content = chance.randbytes(length)
                    durable = chance.random() < 0.2
                    assert await disk.write(offset, content, durable=durable) == length
                    reference[offset:end] = content
                case 2:
                    await disk.write_zeroes(offset, length)
                    reference[offset:end] = bytes(length)
                case 3:
                    await disk.discard(offset, length)
                    first, last = -(-offset // SECTOR) * SECTOR, end // SECTOR * SECTOR
                    if first < last:
                        reference[first:last] = bytes(last - first)
                case _:
                    assert await disk.read(offset, length) == reference[offset:end]
        await disk.flush()
        assert await disk.read(0, SIZE) == reference


async def test_two_hosts_that_write_different_bytes_of_one_sector_lose_nothing(
    world: PlainTarget,
) -> None:
    rounds, share = 40, 100

    async with world.disk() as one, world.disk() as other:
        async with asyncio.TaskGroup() as tasks:
            for index, disk in enumerate([one, other, one, other]):
                tasks.create_task(write_and_check(disk, 5000 + index * share, share, rounds=rounds))
        assert await one.read(5000, 4 * share) == bytes([rounds]) * (4 * share)
        assert await other.read(4096, 904) == bytes(904)


async def test_a_sector_that_others_keep_changing_is_given_up(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    async def refused(self: VolumeQueue, lba: int, expected: object, data: object) -> None:
        nonlocal attempts
        attempts += 1
        raise NvmeStatusError(0x285, lba=lba)

    monkeypatch.setattr(VolumeQueue, "compare_and_write", refused)
    monkeypatch.setattr("sealane.client.disk._CHANGE_PAUSE_SECONDS_MAX", 0.0)
    async with world.disk() as disk:
        with pytest.raises(UnavailableError) as caught:
            await disk.write(1, b"x")
        assert (caught.value.reason, attempts) == ("disk.contended", CHANGE_ATTEMPTS_MAX)


async def test_ranges_outside_are_refused(world: PlainTarget) -> None:
    async with world.disk() as disk:
        for offset, length in [(-1, 1), (SIZE, 1), (SIZE - 1, 2), (0, -1)]:
            with pytest.raises(UsageError):
                await disk.read(offset, length)
        with pytest.raises(UsageError):
            await disk.write(SIZE - 1, b"ab")
        with pytest.raises(UsageError):
            await disk.write_zeroes(SIZE, 1)
        with pytest.raises(UsageError):
            await disk.discard(0, SIZE + 1)
        assert await disk.read(SIZE, 0) == b""


async def test_without_compare_and_write_only_whole_sectors_are_written(world: PlainTarget) -> None:
    async with world.disk() as disk:
        disk._queues._has_compare_and_write = False
        for offset, content in [(1, b"x"), (0, bytes(5000)), (100, bytes(9000))]:
            with pytest.raises(UsageError) as caught:
                await disk.write(offset, content)
            assert caught.value.reason == "disk.unaligned"
        with pytest.raises(UsageError):
            await disk.write_zeroes(0, 1)
        await disk.write(SECTOR, b"y" * SECTOR)
        assert await disk.read(SECTOR - 1, 3) == b"\0yy"


async def test_calls_wait_for_a_front_end_that_comes_back(world: PlainTarget) -> None:
    async with world.disk() as disk:
        await disk.write(0, b"before")
        await world.stop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disk.write(10, b"after"))
            await asyncio.sleep(0)
            await world.start()
        assert await disk.read(10, 5) == b"after"


async def test_a_front_end_that_stays_away_is_an_error(world: PlainTarget) -> None:
    async with world.disk(hold_seconds=0.2) as disk:
        await world.stop()
        try:
            with pytest.raises(UnavailableError) as caught:
                await disk.read(0, 1)
            assert caught.value.reason == "disk.timeout"
        finally:
            await world.start()


async def test_a_front_end_that_comes_back_with_another_size_is_refused(
    world: PlainTarget,
) -> None:
    async with world.disk() as disk:
        await world.stop()
        world.size = 2 * SIZE
        await world.start()
        for _ in range(2):
            with pytest.raises(VerificationError) as caught:
                await disk.read(0, 1)
            assert caught.value.reason == "disk.changed"


async def test_a_front_end_that_doesnt_know_the_secret_any_more_is_refused(
    world: PlainTarget,
) -> None:
    async with world.disk() as disk:
        await world.stop()
        world.secret = OTHER_SECRET
        await world.start()
        with pytest.raises(VerificationError):
            await disk.read(0, 1)


async def test_a_lost_queue_is_replaced(world: PlainTarget) -> None:
    async with world.disk() as disk:
        await disk.write(5, b"kept")
        association = disk._queues._association
        assert association is not None
        for queue in association.queues:
            await queue.close()
        assert await disk.read(5, 4) == b"kept"


async def test_queues_are_bounded(world: PlainTarget) -> None:
    for count in (0, QUEUES_MAX + 1):
        with pytest.raises(UsageError) as caught:
            Disk(world.front_end, queue_count=count)
        assert caught.value.reason == "disk.queues"


@pytest.mark.parametrize(
    "failure",
    [UnavailableError("queue.closed", "lost again"), NvmeStatusError(0x300, is_final=False)],
    ids=type,
)
async def test_what_keeps_failing_is_an_error(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    async def failed(self: VolumeQueue) -> None:
        raise failure

    async with world.disk(hold_seconds=0.2) as disk:
        monkeypatch.setattr(VolumeQueue, "flush", failed)
        with pytest.raises(UnavailableError) as caught:
            await disk.flush()
        assert caught.value.reason == "disk.timeout"


async def test_durable_writes_are_forced_or_flushed(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    write = VolumeQueue.write

    async def forced(self: VolumeQueue, lba: int, data: bytes, *, is_forced: bool = False) -> None:
        seen.append(is_forced)
        await write(self, lba, data, is_forced=is_forced)

    async def flushed(self: VolumeQueue) -> None:
        seen.append("flush")

    async with world.disk() as disk:
        monkeypatch.setattr(VolumeQueue, "write", forced)
        monkeypatch.setattr(VolumeQueue, "flush", flushed)
        await disk.write(0, bytes(SECTOR), durable=True)
        await disk.write(0, bytes(SECTOR))
        await disk.write(1, b"x")
        assert seen == [True, False]
        await disk.write(1, b"y", durable=True)
        assert seen == [True, False, "flush"]


async def test_a_wrong_secret_is_refused_when_opening(world: PlainTarget) -> None:
    wrong = world.disk(secret=OTHER_SECRET)
    with pytest.raises(VerificationError):
        await wrong.open()
    with pytest.raises(UnavailableError):
        await wrong.read(0, 1)
    await wrong.close()


async def test_a_verification_failure_says_where(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(self: VolumeQueue, lba: int, into: object) -> None:
        raise NvmeStatusError(0x282, lba=lba + 3)

    async with world.disk() as disk:
        monkeypatch.setattr(VolumeQueue, "read", failed)
        with pytest.raises(SectorVerificationError) as caught:
            await disk.read(7 * SECTOR, 8 * SECTOR)
        assert caught.value.lba == 10


@dataclasses.dataclass
class Refusals:
    """What reads are answered with, in turn, before they succeed."""

    statuses: list[NvmeStatusError]
    asked: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = VolumeQueue.read

        async def refused(queue: VolumeQueue, lba: int, into: bytearray | memoryview) -> None:
            self.asked += 1
            if self.statuses:
                raise self.statuses.pop(0)
            await read(queue, lba, into)

        monkeypatch.setattr(VolumeQueue, "read", refused)


async def test_answers_that_say_later_are_asked_again(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = [0x021, 0x022, 0x082, 0x300, 0x302, 0x303]
    # More of them than refusals without a reason to pass: what passes is waited for by time.
    refusals = Refusals([NvmeStatusError(s, is_final=False) for s in [0x082, *passing]])
    async with world.disk() as disk:
        refusals.install(monkeypatch)
        assert await disk.read(0, 4) == bytes(4)
    assert not refusals.statuses


@pytest.mark.parametrize("status", [0x082, 0x300, 0x281])
async def test_an_answer_that_says_do_not_retry_is_believed(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    refusals = Refusals([NvmeStatusError(status, is_final=True)])
    async with world.disk() as disk:
        refusals.install(monkeypatch)
        with pytest.raises(NvmeStatusError) as caught:
            await disk.read(0, 4)
        assert (caught.value.status, refusals.asked) == (status, 1)


async def test_other_refusals_are_retried_as_often_as_linux_does(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (RETRIES_MAX, RETRIES_MAX + 1):
        refusals = Refusals([NvmeStatusError(0x281, is_final=False) for _ in range(count)])
        async with world.disk() as disk:
            with monkeypatch.context() as patched:
                refusals.install(patched)
                if count <= RETRIES_MAX:
                    assert await disk.read(0, 4) == bytes(4)
                    continue
                with pytest.raises(NvmeStatusError):
                    await disk.read(0, 4)
        assert refusals.asked == RETRIES_MAX + 1


async def test_a_cancelled_read_leaves_its_buffer_alone(world: PlainTarget) -> None:
    async with world.disk() as disk:
        await disk.write(0, b"\1" * SIZE)
        buffer = bytearray(SIZE)
        await cancelled(disk.readinto(0, buffer))
        held = bytes(buffer)
        await disk.read(0, SIZE)
        assert buffer == held


async def test_nothing_overtakes_a_cancelled_write(world: PlainTarget) -> None:
    async with world.disk() as disk:
        for _ in range(20):
            await cancelled(disk.write(0, b"\1" * SIZE))
            await disk.write(0, b"\2" * SIZE)
            assert await disk.read(0, SIZE) == b"\2" * SIZE


async def test_calls_at_once_are_bounded(
    world: PlainTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0
    is_full, gate = asyncio.Event(), asyncio.Event()

    async def held(self: VolumeQueue) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == OPERATIONS_MAX:
            is_full.set()
        await gate.wait()
        running -= 1

    async with world.disk() as disk:
        monkeypatch.setattr(VolumeQueue, "flush", held)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(OPERATIONS_MAX + 50):
                tasks.create_task(disk.flush())
            await is_full.wait()
            for _ in range(10):
                await asyncio.sleep(0)  # whoever else could run would by now
            gate.set()
    assert most == OPERATIONS_MAX


async def test_a_disk_that_was_closed_refuses_calls(world: PlainTarget) -> None:
    disk = world.disk()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(disk)
    with pytest.raises(UnavailableError) as caught:
        await disk.read(0, 1)
    assert caught.value.reason == "disk.closed"
