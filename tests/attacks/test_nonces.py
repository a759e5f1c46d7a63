"""Reference tests 1, 2, 3 and 5: no IV seals two plaintexts, whichever process dies when.

The ledger reads IVs off the wire like an adversary. So it sees every harmful use by any gateway,
including retries and writes released late.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from attacks.ledger import Iv, Ledger
from attacks.pdus import BLOCK, WRITE, Pdu, command
from attacks.proxy import Link, Proxy
from attacks.raw_host import RawQueue
from attacks.rules import Drop, is_command, is_response
from attacks.world import Attacked, Cluster, attacked, attempt, pattern
from sealane.errors import Error

pytestmark = pytest.mark.slow

LEASE_COUNTERS = 1 << 36
SECTORS = 32  # one command of the front end


def sealed(iv: int, byte: int) -> Pdu:
    block = bytearray(BLOCK)
    block[0] = byte
    block[4112:4124] = iv.to_bytes(12, "big")
    pdu = command(0, WRITE, 1, lba=3, data=bytes(block))
    pdu.entry = bytes(pdu.header[8:])
    return pdu


def test_ledger_finds_what_it_looks_for() -> None:
    ledger = Ledger()
    first = 1 << 80 | 2 << 56
    for pdu in (sealed(first | 256, 1), sealed(first | 256, 1), sealed(first | 512, 1)):
        assert ledger(pdu) == [pdu]
    assert (ledger.repeats, ledger.overlaps, ledger.sectors_seen) == ([], [], 3)
    ledger(sealed(first | 512, 2))
    ledger(sealed(first | 600, 3))
    assert ledger.repeats == [Iv(1, 2, 512)]
    assert ledger.overlaps == [Iv(1, 2, 512)]


@pytest.fixture
async def wire(mortal_cluster: Cluster) -> AsyncIterator[Proxy]:
    async with Proxy(mortal_cluster.data_address).listening() as proxy:
        yield proxy


def ledger_on(proxy: Proxy) -> Ledger:
    ledger = Ledger()
    proxy.rules.append(ledger)
    return ledger


def within_lease(ivs: set[Iv], of: Iv) -> list[Iv]:
    """Return the IVs of the lease that starts with `of`."""
    return [
        iv
        for iv in ivs
        if iv.start_epoch == of.start_epoch and 0 <= iv.counter - of.counter < LEASE_COUNTERS
    ]


async def test_2_killed_gateway_never_uses_its_old_range_again(
    mortal_cluster: Cluster, wire: Proxy
) -> None:
    ledger = ledger_on(wire)
    async with attacked(mortal_cluster, gateway="g2", proxy=wire) as world, world.queue() as queue:
        await queue.write(0, pattern(0, 1, SECTORS))
        volume = world.volume
        torn = [asyncio.ensure_future(attempt(queue.write(0, pattern(0, 2, 16)))) for _ in "123"]
        await asyncio.sleep(0)
        mortal_cluster.kill_gateway("g2")
        await asyncio.gather(*torn)
    before = set(ledger.uses)
    async with (
        attacked(mortal_cluster, gateway="g2", proxy=wire, volume=volume) as world,
        world.queue() as queue,
    ):
        await queue.write(0, pattern(0, 3, SECTORS))
        assert await queue.read(0, SECTORS) == pattern(0, 3, SECTORS)
    after = set(ledger.uses) - before
    assert len(before) >= SECTORS
    assert len(after) == SECTORS
    assert within_lease(after, min(before)) == []
    assert ledger.repeats == ledger.overlaps == []


async def test_3_killed_broker_grants_only_counters_of_a_new_start_epoch(
    mortal_cluster: Cluster, wire: Proxy
) -> None:
    ledger = ledger_on(wire)
    async with attacked(mortal_cluster, proxy=wire) as world, world.queue() as queue:
        await queue.write(0, pattern(0, 1))
    before = set(ledger.uses)
    mortal_cluster.restart_broker()
    async with attacked(mortal_cluster, proxy=wire) as world, world.queue() as queue:
        await queue.write(0, pattern(0, 1))
    after = set(ledger.uses) - before
    assert {iv.start_epoch for iv in after}.isdisjoint({iv.start_epoch for iv in before})
    assert min(iv.start_epoch for iv in after) > max(iv.start_epoch for iv in before)


class Tenant:
    """Writes at random, and checks each sector against its possible contents."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._version = 0
        self._may_hold: dict[int, set[int]] = {}

    async def write_some(self, queue: RawQueue, count: int) -> None:
        """Write; unacknowledged writes may or may not be stored."""
        for _ in range(count):
            blocks = self._random.choice([1, 1, 2, 16])
            lba = self._random.randrange(SECTORS - blocks)
            self._version += 1
            run = range(lba, lba + blocks)
            for each in run:
                self._may_hold.setdefault(each, {0}).add(self._version)
            outcome = await attempt(queue.write(lba, pattern(lba, self._version, blocks)))
            if not outcome.is_success:
                return
            for each in run:
                self._may_hold[each] = {self._version}

    async def check(self, queue: RawQueue) -> None:
        """Check that sectors hold the last acknowledged version or a later, unacknowledged one."""
        for lba, versions in self._may_hold.items():
            found = await queue.read(lba)
            allowed = {
                version: pattern(lba, version) if version else bytes(4096) for version in versions
            }
            here = [version for version, content in allowed.items() if content == found]
            assert here, f"LBA {lba} holds none of the versions {sorted(versions)}"
            self._may_hold[lba] = set(here)


async def disturb(
    proxy: Proxy, links: list[Link], writing: "asyncio.Future[None]", chance: random.Random
) -> None:
    """Drop a completion or a command, if one comes; then cut the connections."""
    mine = {link.number for link in links}
    match = chance.choice([is_response(WRITE), is_command(WRITE)])
    lost = Drop(match=lambda pdu: pdu.link in mine and match(pdu))
    proxy.rules.append(lost)
    await proxy.until(lambda: lost.made or writing.done())
    proxy.rules.remove(lost)
    proxy.cut(*links)


async def rounds(cluster: Cluster, proxy: Proxy, gateway: str, seed: int, count: int) -> None:
    """Attach, write, get disturbed or killed, and restart; check after each restart."""
    chance, tenant = random.Random(seed), Tenant(seed)
    volume = None
    for turn in range(count):
        async with attacked(cluster, gateway=gateway, proxy=proxy, volume=volume) as world:
            volume = world.volume
            with contextlib.suppress(Error):
                async with world.queue() as queue:
                    await tenant.check(queue)
                    await tenant.write_some(queue, 10)
                    writing = asyncio.ensure_future(tenant.write_some(queue, 20))
                    if turn % 3 == 1:
                        await asyncio.to_thread(cluster.kill_gateway, gateway)
                    else:
                        await disturb(proxy, own_links(proxy, world), writing, chance)
                    await writing
    async with (
        attacked(cluster, gateway=gateway, proxy=proxy, volume=volume) as world,
        world.queue() as queue,
    ):
        await tenant.check(queue)


def own_links(proxy: Proxy, world: Attacked) -> list[Link]:
    name = world.volume.name.removeprefix("volumes/").encode()
    return [
        link for link in proxy.io_links() if any(name in pdu.data for pdu in list(link.history)[:4])
    ]


@pytest.mark.timeout(300)
async def test_1_ledger_of_four_gateways_of_two_tenants_shows_no_repeat(
    mortal_cluster: Cluster,
) -> None:
    """Kills, cuts, lost commands, lost completions, re-attached volumes."""
    ledgers = [Ledger() for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(Proxy(mortal_cluster.data_address).listening())
            for _ in range(4)
        ]
        for proxy, ledger in zip(proxies, ledgers, strict=True):
            proxy.rules.append(ledger)
        for name in ("g1", "g2", "g3", "g4"):
            await asyncio.to_thread(mortal_cluster.gateway, name)
        async with asyncio.TaskGroup() as tasks:
            for seed, (name, proxy) in enumerate(
                zip(("g1", "g2", "g3", "g4"), proxies, strict=True)
            ):
                tasks.create_task(rounds(mortal_cluster, proxy, name, seed, 5))
    for ledger in ledgers:
        assert ledger.sectors_seen > 250
        assert ledger.repeats == []
        assert ledger.overlaps == []
