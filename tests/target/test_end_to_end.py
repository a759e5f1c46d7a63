"""Target, gateway and initiator on loopback: reads return what was written, and nothing else."""

import asyncio
import itertools
from pathlib import Path
from typing import Literal

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.grants import QueueGrant
from sealane.daemon.volume.store_kinds import STORE_KINDS
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.transport.nvme.initiator import NvmeStatusError
from target.pair import (
    MEBIBYTE,
    SECTORS,
    World,
    counters,
    data,
    make_world,
)


@pytest.mark.parametrize("kind", ["emulated", "file", "inline", "memory"])
async def test_eight_mebibytes_come_back_and_the_store_holds_no_plaintext(
    tmp_path: Path, kind: Literal["emulated", "file", "inline", "memory"]
) -> None:
    content = data(8 * MEBIBYTE)
    directory = tmp_path / "store" if STORE_KINDS[kind].is_kept else None
    made = make_world(directory, store_kind=kind)
    async with made as world:
        async with world.queue() as queue:
            await queue.write(3, content)
            await queue.flush()
            back = bytearray(len(content))
            await queue.read(3, back)
            assert back == content
            assert queue.progress() == 2 * len(content)
        statistics = world.attached.statistics()
        sectors = len(content) // 4096
        assert statistics["sectors_sealed"] == statistics["sectors_opened"] == sectors
        assert statistics["counters_used"] == 256 * sectors
        assert statistics["refusals"] == 0
        assert world.target.statistics(world.volume_id)["sectors_written"] == sectors
        if world.path is not None:
            pieces = [content[at : at + 16] for at in range(0, len(content), 65536)]
            assert _native.find_pieces(world.path, pieces) == []


async def test_find_pieces_finds_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "haystack"
    path.write_bytes(b"x" * 100_000 + b"needle-needle-16" + b"y" * 10)
    assert _native.find_pieces(path, [b"absent", b"needle-needle-16"]) == [(1, 100_000)]


async def test_one_sector_writes_travel_in_the_capsule(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1, io_bytes=4096)
        content = data(64 * 4096)
        await queue.write(0, content)
        back = bytearray(len(content))
        await queue.read(0, back)
        await queue.close()
        assert back == content


async def test_two_queues_work_at_once(world: World) -> None:
    async with world.host() as host:
        assert await host.request_queues(2) == 2
        queues = [await host.open_queue(1), await host.open_queue(2)]
        content = data(2 * MEBIBYTE)
        await asyncio.gather(queues[0].write(0, content), queues[1].write(1024, content))
        back = bytearray(len(content))
        await queues[0].read(1024, back)
        assert back == content
        for queue in queues:
            await queue.close()


async def test_range_beyond_the_namespace_is_refused_and_the_queue_lives_on(world: World) -> None:
    async with world.queue() as queue:
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(SECTORS - 1, bytes(8192))
        assert caught.value.status == 0x080
        await queue.write(SECTORS - 1, bytes(4096))


async def test_exhausted_lease_refuses_writes_and_a_new_one_heals() -> None:
    three = counters(counter_end=1 + 3 * 256)
    async with make_world(None, lease=three) as world, world.queue() as queue:
        await queue.write(0, bytes(3 * 4096))
        with pytest.raises(NvmeStatusError) as caught:
            await queue.write(8, bytes(4096))
        assert caught.value.status == 0x082
        await world.reason("lease.exhausted")
        world.attached.add_counters([counters(start_epoch=2)])
        await queue.write(8, bytes(4096))


async def test_counters_that_a_failed_write_burned_are_counted() -> None:
    three = counters(counter_end=1 + 3 * 256)
    async with make_world(None, lease=three) as world, world.queue() as queue:
        with pytest.raises(NvmeStatusError):
            await queue.write(0, bytes(4 * 4096))
        statistics = world.attached.statistics()
        assert statistics["counters_used"] == statistics["counters_leased"] == 3 * 256
        assert world.attached.counters_remaining() == 0


async def test_detach_ends_the_host_and_deletes_the_export(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1)
        await world.attached.detach()
        with pytest.raises(UnavailableError):
            await queue.write(0, bytes(4096))
        await queue.close()
    with pytest.raises(NvmeStatusError):
        await world.host().connect()


async def test_detach_flushes_what_no_host_flushed(world: World) -> None:
    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    assert world.attached.statistics()["journal_bytes"]
    await world.attached.detach()
    seen = world.attached.statistics()
    assert (seen["flushes"], seen["journal_flushes"], seen["journal_bytes"]) == (1, 0, 0)
    assert world.attached.statistics()["journal_bytes"] == 0
    assert "journal_dropped" not in [event.kind for event in world.attached.take_events()]


@pytest.mark.parametrize(
    ("is_silent", "reason"), [(False, "call.unreachable"), (True, "connection.timeout")]
)
async def test_detach_reports_a_journal_that_it_cannot_flush(
    world: World, monkeypatch: pytest.MonkeyPatch, is_silent: bool, reason: str
) -> None:
    async def unreachable(queue_id: int, epoch: int, milestone: bytes) -> QueueGrant:
        if is_silent:
            await asyncio.Event().wait()
        raise UnavailableError("call.unreachable", "no target")

    if is_silent:
        monkeypatch.setattr("sealane.daemon.gateway.last_flush.FLUSH_SECONDS", 0.1)
    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    monkeypatch.setattr(world.attached.back_end, "_open_queue", unreachable)
    await world.attached.detach()
    dropped = [e.reason for e in world.attached.take_events() if e.kind == "journal_dropped"]
    assert dropped == [reason]


async def test_a_stop_waits_for_a_target_that_restarts_at_the_same_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_queue = world.attached.back_end._open_queue
    attempts = itertools.count(1)

    async def restarting(queue_id: int, epoch: int, milestone: bytes) -> QueueGrant:
        if next(attempts) <= 3:
            raise UnavailableError("call.unreachable", "no target")
        return await open_queue(queue_id, epoch, milestone)

    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    monkeypatch.setattr(world.attached.back_end, "_open_queue", restarting)
    assert await world.attached.detach(patience_seconds=PATIENCE_SECONDS)
    assert next(attempts) > 4
    assert "journal_dropped" not in [event.kind for event in world.attached.take_events()]


async def test_a_stop_does_not_ask_again_for_data_that_is_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = itertools.count(1)

    async def lost(queue_id: int, epoch: int, milestone: bytes) -> QueueGrant:
        next(attempts)
        raise VerificationError("volume.rolled_back", "older")

    async with world.queue() as queue:
        await queue.write(0, data(8 * 4096))
    monkeypatch.setattr(world.attached.back_end, "_open_queue", lost)
    assert not await world.attached.detach(patience_seconds=PATIENCE_SECONDS)
    assert next(attempts) == 2


async def test_closed_volume_is_not_served_and_discarding_it_leaves_no_file(world: World) -> None:
    assert world.path is not None
    assert world.path.stat().st_mode & 0o777 == 0o600
    await world.target.close_volume(world.volume_id)
    assert world.path.exists()
    await world.target.discard_store(world.volume_id)
    assert not world.path.exists()
    with pytest.raises(UsageError):
        world.grant(1)


async def test_plain_front_end_stays_on_loopback() -> None:
    with pytest.raises(UsageError, match="loopback"):
        Gateway(traddr="192.0.2.1", trsvcid=0)


async def test_address_in_use_is_said_so(world: World) -> None:
    traddr, trsvcid = world.gateway.address
    with pytest.raises(UsageError, match=str(trsvcid)):
        await Gateway(traddr=traddr, trsvcid=trsvcid).start()


async def test_host_may_shut_its_controller_down_after_its_queues(world: World) -> None:
    async with world.host() as host:
        queue = await host.open_queue(1)
        await queue.close()
        await world.event(lambda event: event.kind == "queue_closed")
        assert (await host.identify_namespace()).block_bytes == 4096
