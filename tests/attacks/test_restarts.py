"""The target dies with unflushed writes while the tenant goes on (crash-consistency.md §4).

Acknowledged writes survive; the gateway sends again what the drive lost.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attacks.disk import read_slot, write_slot
from attacks.pdus import WRITE, Pdu
from attacks.proxy import Proxy
from attacks.raw_host import RawQueue
from attacks.rules import is_command, is_response
from attacks.world import SECTOR, Attacked, Cluster, attacked, attempt, pattern
from patience import PATIENCE_SECONDS
from sealane.protocol.nvme.constants import Status
from sealane.transport.nvme.errors import NvmeStatusError

pytestmark = pytest.mark.slow
LBAS = range(24)
FLUSH_MILESTONE = 0x82


@pytest.fixture
async def world(mortal_cluster: Cluster) -> AsyncIterator[Attacked]:
    async with (
        Proxy(mortal_cluster.data_address).listening() as proxy,
        attacked(mortal_cluster, proxy=proxy) as made,
    ):
        yield made


@contextlib.asynccontextmanager
async def queue_once_ready(world: Attacked) -> AsyncIterator[RawQueue]:
    """Open a queue as hosts do: retry while the gateway is still finding its target."""
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    queue = await stack.enter_async_context(world.queue())
                except NvmeStatusError as error:
                    if error.status != Status.CONNECT_BUSY:
                        raise
                else:
                    break
        yield queue


class Tenant:
    """Overwrites and reads sectors until stopped, and fails on any older version."""

    def __init__(self, queue: RawQueue) -> None:
        self._queue = queue
        self.version = dict.fromkeys(LBAS, 0)
        self.writes = 0
        self.is_leaving = False

    async def write_all(self) -> None:
        for lba in LBAS:
            await self._write(lba)

    async def work(self) -> None:
        while not self.is_leaving:
            for lba in LBAS[:8]:
                await self._write(lba)
                await self._check(lba)
            # These sectors aren't written again, so only a resend can restore them.
            for lba in LBAS[8:]:
                await self._check(lba)

    async def check_all(self) -> None:
        for lba in LBAS:
            await self._check(lba)

    async def _write(self, lba: int) -> None:
        await self._queue.write(lba, pattern(lba, self.version[lba] + 1))
        self.version[lba] += 1
        self.writes += 1

    async def _check(self, lba: int) -> None:
        assert await self._queue.read(lba) == pattern(lba, self.version[lba])


def snapshot(cluster: Cluster, to: Path) -> None:
    shutil.copytree(cluster.stores, to)


def put_back(cluster: Cluster, kept: Path) -> None:
    shutil.rmtree(cluster.stores)
    shutil.copytree(kept, cluster.stores)


@pytest.mark.parametrize("is_cache_lost", [False, True])
async def test_killed_target_with_unflushed_writes_loses_nothing_the_tenant_was_told(
    world: Attacked, tmp_path: Path, is_cache_lost: bool
) -> None:
    """The cache is lost, so the drive is as it was at the last flush, as after any crash."""
    cluster, kept = world.cluster, tmp_path / "kept"
    async with world.queue() as queue:
        tenant = Tenant(queue)
        await tenant.write_all()
        await queue.flush()
        snapshot(cluster, kept)
        await tenant.write_all()
        working = asyncio.ensure_future(tenant.work())
        before = tenant.writes
        await world.proxy.until(lambda: tenant.writes >= before + 8)
        cluster.kill_target()
        if is_cache_lost:
            put_back(cluster, kept)
        await asyncio.to_thread(cluster.restart_target)
        written = tenant.writes
        await world.proxy.until(lambda: tenant.writes >= written + 16 or working.done())
        tenant.is_leaving = True
        await working
        await tenant.check_all()
        await queue.flush()
    async with world.queue() as queue:
        for lba in LBAS:
            assert await queue.read(lba) == pattern(lba, tenant.version[lba])


async def test_flushed_writes_survive_two_deaths_in_a_row(world: Attacked) -> None:
    """The second death comes while the gateway is still resending after the first."""
    cluster = world.cluster
    async with world.queue() as queue:
        tenant = Tenant(queue)
        await tenant.write_all()
        await queue.flush()
        await tenant.write_all()
        for _ in range(2):
            cluster.kill_target()
            await asyncio.to_thread(cluster.restart_target)
        await tenant.check_all()


@dataclass
class Threshold:
    """Passes some of the writes that a gateway sends again, then withholds the rest."""

    writes: int
    passed: int = 0
    answered: int = 0
    stopped: int = 0

    def __call__(self, pdu: Pdu) -> list[Pdu]:
        if is_command(WRITE, FLUSH_MILESTONE)(pdu):
            if self.passed == self.writes or pdu.opcode != WRITE:
                self.stopped += 1
                return []
            self.passed += 1
        self.answered += is_response(WRITE)(pdu)
        return [pdu]


@pytest.mark.parametrize("writes", range(2))
async def test_durable_write_is_not_undone_by_the_gateways_own_journal(
    world: Attacked, tmp_path: Path, writes: int
) -> None:
    """Gateway and target die while the journal, older than the durable write, is sent again.

    What the drive has of it is not sent: only what it loses with its cache is.
    """
    cluster, volume, again = world.cluster, world.volume, Threshold(writes)
    kept = tmp_path / "kept"
    async with world.queue() as queue:
        await queue.write(0, pattern(0, 1) + pattern(1, 1))
        await queue.write(0, pattern(0, 2), is_forced=True)
        snapshot(cluster, kept)
        await queue.write(1, pattern(1, 2))
        cluster.kill_target()
        put_back(cluster, kept)
        world.proxy.rules.append(again)
        await asyncio.to_thread(cluster.restart_target)
        await world.proxy.until(lambda: again.stopped and again.answered == writes)
        cluster.kill_gateway("g1")
        cluster.kill_target()
        await asyncio.to_thread(cluster.restart_target)
    async with attacked(cluster, gateway="g2", volume=volume) as later:
        assert await later.contents(0) == pattern(0, 2)
        assert await later.contents(1) in {pattern(1, 1), pattern(1, 2)}


async def test_late_journal_does_not_undo_what_another_gateway_did_since_the_restart(
    world: Attacked, tmp_path: Path
) -> None:
    """A gateway finds the restarted target only after another one has used the same blocks."""
    kept = tmp_path / "kept"
    async with (
        attacked(world.cluster, gateway="g2", volume=world.volume) as other,
        world.queue() as ours,
        other.queue() as theirs,
    ):
        snapshot(world.cluster, kept)
        await ours.write(0, b"".join(pattern(lba, 1) for lba in range(4)))
        world.proxy.is_refusing = True
        world.cluster.kill_target()
        put_back(world.cluster, kept)
        await asyncio.to_thread(world.cluster.restart_target)
        await theirs.compare_and_write(0, await theirs.read(0), pattern(0, 2))
        await theirs.write(1, pattern(1, 2))
        await theirs.deallocate(2, 1)
        await theirs.flush()
        world.proxy.is_refusing = False
        expected = [pattern(0, 2), pattern(1, 2), bytes(SECTOR), pattern(3, 1)]
        for queue in (ours, theirs):
            assert [await queue.read(lba) for lba in range(4)] == expected


async def test_late_journal_does_not_undo_what_another_gateway_did_before_the_restart(
    world: Attacked,
) -> None:
    """The same, where the other gateway was faster than the crash and made its writes durable."""
    async with (
        attacked(world.cluster, gateway="g2", volume=world.volume) as other,
        world.queue() as ours,
        other.queue() as theirs,
    ):
        await ours.write(0, b"".join(pattern(lba, 1) for lba in range(4)))
        await theirs.compare_and_write(0, await theirs.read(0), pattern(0, 2))
        await theirs.write(1, pattern(1, 2), is_forced=True)
        await theirs.deallocate(2, 1)
        await theirs.flush()
        world.proxy.is_refusing = True
        world.cluster.kill_target()
        await asyncio.to_thread(world.cluster.restart_target)
        expected = [pattern(0, 2), pattern(1, 2), bytes(SECTOR), pattern(3, 1)]
        assert [await theirs.read(lba) for lba in range(4)] == expected
        world.proxy.is_refusing = False
        for queue in (ours, theirs):
            assert [await queue.read(lba) for lba in range(4)] == expected


async def test_torn_state_older_than_the_last_flush_is_not_served_as_current(
    mortal_cluster: Cluster, tmp_path: Path
) -> None:
    """A drive loses flushed writes: sectors that the gateway remembers must not read old."""
    cluster, kept = mortal_cluster, tmp_path / "kept"
    # The target refuses such a store, so the read waits for as long as the gateway holds commands.
    with cluster.impatient_gateway("g2", hold_seconds=2):
        await _serve_torn_state(cluster, kept)


async def _serve_torn_state(cluster: Cluster, kept: Path) -> None:
    async with attacked(cluster, gateway="g2") as world, world.queue() as queue:
        await queue.write(0, pattern(0, 1))
        await queue.flush()
        snapshot(cluster, kept)
        await queue.write(0, pattern(0, 2))
        await queue.flush()
        cluster.kill_target()
        put_back(cluster, kept)
        await asyncio.to_thread(cluster.restart_target)
        pending = queue.start_read(0)
        outcome = await attempt(pending)
        assert not outcome.is_success or pending.result() == pattern(0, 2)


async def test_restart_that_is_hidden_from_the_old_queue_serves_no_old_data(
    world: Attacked, tmp_path: Path
) -> None:
    """The gateway must notice that its second queue meets a restarted target.

    The adversary keeps the old connection to the gateway open, so the only sign of the restart is
    the control channel's answer when the tenant opens another queue.
    """
    cluster, kept = world.cluster, tmp_path / "kept"
    world.proxy.is_hiding_ends = True
    async with world.queue() as first:
        await first.write(0, pattern(0, 1))
        await first.flush()
        snapshot(cluster, kept)
        await first.write(0, pattern(0, 2))
        cluster.kill_target()
        put_back(cluster, kept)
        await asyncio.to_thread(cluster.restart_target)
        async with queue_once_ready(world) as second:
            pending = second.start_read(0)
            outcome = await attempt(pending)
            assert outcome.is_success
            assert pending.result() == pattern(0, 2)


async def test_deallocated_sectors_stay_so_when_the_target_forgets_it(
    world: Attacked, tmp_path: Path
) -> None:
    cluster, kept = world.cluster, tmp_path / "kept"
    async with world.queue() as queue:
        for lba in range(4):
            await queue.write(lba, pattern(lba, 1))
        await queue.flush()
        snapshot(cluster, kept)
        await queue.deallocate(0, 2)
        await queue.write(1, pattern(1, 3))
        cluster.kill_target()
        put_back(cluster, kept)
        await asyncio.to_thread(cluster.restart_target)
        found = [await queue.read(lba) for lba in range(4)]
    assert found == [bytes(SECTOR), pattern(1, 3), pattern(2, 1), pattern(3, 1)]


async def test_sector_sent_again_after_a_restart_cannot_be_put_back(
    mortal_cluster: Cluster,
) -> None:
    """A gateway resends unflushed writes unchanged, so the log has the same write twice.

    Recovery had found the write and a read had returned it. So no read may return older data,
    whatever the drive holds, even through a gateway that doesn't know of the write.
    """
    cluster = mortal_cluster
    async with attacked(cluster) as world:
        async with world.queue() as queue:
            await queue.write(0, pattern(0, 1, 8))
            await queue.flush()
            old = [read_slot(world.store, lba) for lba in range(8)]
            await queue.write(0, pattern(0, 2, 8))
            cluster.kill_target()
            await asyncio.to_thread(cluster.restart_target)
            # Held until the gateway has resent its acknowledged writes.
            assert await queue.read(0, 8) == pattern(0, 2, 8)
        cluster.kill_gateway("g1")
        cluster.kill_target()
        for slot in old:
            write_slot(slot)
        await asyncio.to_thread(cluster.restart_target)
        async with attacked(cluster, gateway="g2", volume=world.volume) as other:
            async with other.queue() as queue:
                for lba in range(8):
                    outcome = await attempt(queue.read(lba))
                    assert not outcome.is_success, f"sector {lba} is read, older or unwritten"
            await other.refusal("sector.stale")
