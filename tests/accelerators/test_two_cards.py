"""A gateway with two cards, of which one dies, is stopped or is refused: real daemons."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from accelerators.cards import LABEL, SECOND, World, nonces_at, running_card, world
from accelerators.test_cards import Contents, disk
from control_plane import short_directory
from nonces import DIRECTORY, once_each, sealed
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.protocol.v1 import offload_pb2

pytestmark = pytest.mark.slow

STATES = offload_pb2.Accelerator


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with short_directory() as root:
        monkeypatch.setenv(DIRECTORY, str(root))
        yield root


@contextlib.contextmanager
def second_card(site: World) -> Iterator[Popen[str]]:
    assert site.second is not None
    with running_card(*site.second) as process:
        yield process


def second_nonces(site: World) -> list[bytes]:
    """Return the nonces that the second card has sealed with."""
    assert site.second is not None
    return nonces_at(site.second[0])


async def accelerators(site: World) -> dict[str, offload_pb2.Accelerator]:
    async with connect(site.gateway.socket) as client:
        answer = await client.offload.ListAccelerators(
            offload_pb2.ListAcceleratorsRequest(), timeout=5
        )
    return {card.label: card for card in answer.accelerators}


async def wait(site: World, **states: int) -> dict[str, offload_pb2.Accelerator]:
    """Wait until cards are in these states."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            cards = await accelerators(site)
            if all(cards[label].state == state for label, state in states.items()):
                return cards
            await asyncio.sleep(0.05)


async def wait_volumes(site: World, label: str, count: int) -> dict[str, offload_pb2.Accelerator]:
    """Wait until a card has so many volumes.

    On a busy machine a card may be lost for 50 ms of silence, and is trusted again after a minute.
    """
    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        while True:
            cards = await accelerators(site)
            if cards[label].volumes == count:
                return cards
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def disks(site: World) -> AsyncIterator[list[Contents]]:
    """Two volumes, each opened by a host."""
    async with disk(site) as first, disk(site) as second:
        yield [Contents(first, seed=31), Contents(second, seed=32)]


async def write(contents: list[Contents], count: int) -> None:
    await asyncio.gather(*(each.write(count) for each in contents))


async def test_two_cards_share_volumes_and_the_death_of_one_goes_unnoticed(ledgers: Path) -> None:
    assert os.environ[DIRECTORY]
    with short_directory() as root, world(root, second=True) as site:
        with site.card() as first, second_card(site):
            await wait(site, card0=STATES.IN_USE, card1=STATES.IN_USE)
            async with disks(site) as contents:
                await wait_volumes(site, LABEL, 1)
                await wait_volumes(site, SECOND, 1)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not (site.nonces() and second_nonces(site)):
                        await write(contents, 1)
                writing = asyncio.ensure_future(write(contents, 4))
                await asyncio.sleep(0.02)
                first.kill()
                await writing
                await wait(site, card0=STATES.NOT_IN_USE, card1=STATES.IN_USE)
                cards = await wait_volumes(site, SECOND, 2)
                before = len(second_nonces(site))
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while len(second_nonces(site)) == before:
                        await contents[0].write(1)
                    before = len(second_nonces(site))
                    while len(second_nonces(site)) == before:
                        await contents[1].write(1)
                for each in contents:
                    await each.check()
                assert cards[LABEL].losses
                assert cards[LABEL].sectors_sealed
        once_each(sealed(ledgers))


async def test_no_nonce_is_given_to_two_cards(ledgers: Path) -> None:
    with short_directory() as root, world(root, second=True) as site:
        async with disk(site) as opened:
            contents = Contents(opened, seed=34)
            with second_card(site):
                for _ in range(3):
                    with site.card("--fault", "latency=0.2") as first:
                        known = len(site.nonces()), len(second_nonces(site))
                        async with asyncio.timeout(PATIENCE_SECONDS):
                            while (len(site.nonces()), len(second_nonces(site))) == known:
                                await contents.write(1)
                        writing = asyncio.ensure_future(contents.write(2))
                        await asyncio.sleep(0.01)
                        first.kill()
                        await writing
            await contents.check()
        once_each(site.nonces() + second_nonces(site))
        once_each(sealed(ledgers))


async def test_a_refused_card_does_not_keep_the_other_from_being_used(ledgers: Path) -> None:
    with short_directory() as root, world(root, second=True, knows_second=False) as site:
        site.wait_for_log("devices_refused", labels=[SECOND])
        with site.card(), second_card(site):
            await wait(site, card0=STATES.IN_USE, card1=STATES.NOT_IN_USE)
            async with disk(site) as opened:
                contents = Contents(opened, seed=33)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not site.nonces():
                        await contents.write(1)
                await contents.check()
        assert second_nonces(site) == []
        once_each(sealed(ledgers))


async def test_each_card_is_stopped_by_its_label_and_the_other_takes_over(ledgers: Path) -> None:
    with (
        short_directory() as root,
        world(root, second=True) as site,
        site.card(),
        second_card(site),
    ):
        await wait(site, card0=STATES.IN_USE, card1=STATES.IN_USE)
        async with disks(site) as contents:
            async with connect(site.gateway.socket) as client:
                await client.offload.DisableAccelerator(
                    offload_pb2.DisableAcceleratorRequest(label=LABEL), timeout=5
                )
            await write(contents, 2)
            cards = await wait(site, card0=STATES.DISABLED, card1=STATES.IN_USE)
            known = len(site.nonces())
            cards = await wait_volumes(site, SECOND, 2)
            before = len(second_nonces(site))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(second_nonces(site)) == before:
                    await write(contents, 1)
            assert len(site.nonces()) == known
            assert cards[LABEL].refusals == cards[SECOND].refusals == 0
            for each in contents:
                await each.check()
        once_each(sealed(ledgers))
