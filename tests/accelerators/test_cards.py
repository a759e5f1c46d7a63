"""A gateway whose card seals, fails, is killed, exchanged or not attested: real daemons."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from accelerators.cards import World, running_card, world
from control_plane import short_directory
from nonces import DIRECTORY, once_each, sealed
from sealane.client import connect
from sealane.client.disk import Disk

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
SIZE = 4 << 20


@pytest.fixture(scope="module")
def ledgers() -> Iterator[Path]:
    with short_directory() as root:
        os.environ[DIRECTORY] = str(root)
        yield root
        del os.environ[DIRECTORY]


@pytest.fixture(scope="module")
def site(ledgers: Path) -> Iterator[World]:
    del ledgers
    with short_directory() as root, world(root) as made:
        yield made


@contextlib.asynccontextmanager
async def disk(site: World) -> AsyncIterator[Disk]:
    """A new volume, opened by a host."""
    async with connect(site.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=SIZE)
        attached = await client.volumes.attach(volume.name, host_nqn=HOST)
        async with client.open(attached) as opened:
            yield opened
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)


class Contents:
    """What a disk must hold; writes at random, several at a time."""

    def __init__(self, disk: Disk, seed: int) -> None:
        self.disk = disk
        self.expected = bytearray(SIZE)
        self.random = random.Random(seed)

    async def write(self, count: int) -> None:
        """Write `count` times 16 places at once."""
        for _ in range(count):
            places = self.random.sample(range(0, SIZE, 64 << 10), 16)
            sizes = [4096 * self.random.randint(1, 16) for _ in places]
            for place, size in zip(places, sizes, strict=True):
                self.expected[place : place + size] = self.random.randbytes(size)
            await asyncio.gather(
                *(
                    self.disk.write(place, self.expected[place : place + size])
                    for place, size in zip(places, sizes, strict=True)
                )
            )

    async def check(self) -> None:
        """Read all of it."""
        await self.disk.flush()
        assert await self.disk.read(0, SIZE) == self.expected


async def test_a_card_seals_and_its_death_goes_unnoticed(site: World, ledgers: Path) -> None:
    known = len(site.nonces())
    with site.card_in_use():
        site.wait_for_log("accelerator_in_use", profile="bf3-dpdk")
        assert 'sealane_accelerator_state{label="card0",state="in_use"} 1.0' in site.metrics()
        before = site.statistic("sectors_accelerated")
        async with disk(site) as opened:
            contents = Contents(opened, seed=1)
            while site.statistic("sectors_accelerated") == before:
                await contents.write(1)
            await contents.check()
        counted = 'sealane_accelerator_job_seconds_count{operation="seal"}'
        (line,) = (each for each in site.metrics().splitlines() if each.startswith(counted))
        assert float(line.split()[1]) >= site.statistic("sectors_accelerated") - before
    # It is gone: the processor seals.
    async with disk(site) as opened:
        contents = Contents(opened, seed=2)
        await contents.write(4)
        await contents.check()
    site.wait_for_log("accelerator_not_in_use")
    assert 'sealane_accelerator_state{label="card0",state="not_in_use"} 1.0' in site.metrics()
    once_each(site.nonces()[known:])
    once_each(sealed(ledgers))


FAULTS = {
    "wrong": ("wrong-tag", "wrong-ciphertext", "refused"),
    "order": ("latency", "reorder", "late-write"),
    "lost": ("lost", "latency"),
    "lies": ("duplicate", "invented"),
    "overrun": ("overrun",),
    "nonces": ("old-nonce", "hidden-nonce"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_nothing_is_lost_whatever_a_card_does(site: World, ledgers: Path, name: str) -> None:
    chances = [f"--fault={fault}=0.02" for fault in FAULTS[name]]
    known = len(site.nonces())
    with site.card_in_use("--seed", "7", *chances):
        async with disk(site) as opened:
            contents = Contents(opened, seed=3)
            for _ in range(20):
                await contents.write(1)
                if len(site.nonces()) > known + 200:
                    break
            await contents.check()
    assert len(site.nonces()) > known, "the card was used"
    if name != "nonces":  # then it is the card that repeats them, and nothing of that is sent
        once_each(site.nonces()[known:])
    once_each(sealed(ledgers))


async def test_a_card_that_is_killed_and_stopped_under_load_loses_nothing(
    site: World, ledgers: Path
) -> None:
    async with disk(site) as opened:
        contents = Contents(opened, seed=4)
        for turn in range(4):
            with site.card_in_use() as process:
                await contents.write(2)
                writing = asyncio.ensure_future(contents.write(4))
                await asyncio.sleep(0.01)
                process.send_signal(signal.SIGSTOP if turn % 2 else signal.SIGKILL)
                await writing
        await contents.check()
    once_each(sealed(ledgers))


async def test_volumes_beyond_a_cards_places_are_sealed_by_the_processor(site: World) -> None:
    with site.card_in_use("--keys", "1"):
        count = sum(line["event"] == "accelerator_not_in_use" for line in site.gateway.log_lines())
        before = site.statistic("sectors_accelerated")
        async with disk(site) as first, disk(site) as second:
            contents = Contents(first, seed=8), Contents(second, seed=9)
            while site.statistic("sectors_accelerated") == before:
                await contents[0].write(1)
                await contents[1].write(1)
            await asyncio.gather(*(each.check() for each in contents))
        assert count == sum(
            line["event"] == "accelerator_not_in_use" for line in site.gateway.log_lines()
        )


async def test_another_card_at_the_socket_gets_no_keys(site: World) -> None:
    other, _ = site.maker.card("2")
    known = len(site.nonces())
    with running_card(site.socket, other):
        site.wait_for_log("accelerator_not_in_use", reason="attestation.card.changed")
        async with disk(site) as opened:
            contents = Contents(opened, seed=5)
            await contents.write(1)
            await contents.check()
    assert len(site.nonces()) == known


@pytest.mark.parametrize(
    ("case", "event"),
    [("unknown to the policy", "accelerator_not_in_use"), ("its bus", "devices_refused")],
)
async def test_a_card_that_the_policy_does_not_allow_gets_no_keys(case: str, event: str) -> None:
    knows, flags = case == "its bus", "{}"
    with short_directory() as root, world(root, knows=knows, flags=flags) as made:
        with made.card():
            made.wait_for_log(event)
            made.wait_for_log("accelerator_not_in_use", reason="accelerator.unattested")
            async with disk(made) as opened:
                contents = Contents(opened, seed=6)
                await contents.write(1)
                await contents.check()
        assert made.nonces() == []
