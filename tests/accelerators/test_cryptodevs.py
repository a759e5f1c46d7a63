"""A gateway whose card is a crypto device of DPDK: real daemons, a real engine, no huge pages."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerators.cards import World, world
from accelerators.cryptodevs import CRYPTODEVS, DRIVER, arguments
from accelerators.test_cards import Contents, disk, once_each
from control_plane import short_directory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DRIVER, reason="no driver of DPDK's devices: make test-accelerators"),
]


@pytest.mark.parametrize("name", CRYPTODEVS)
def test_a_device_conforms(name: str) -> None:
    subprocess.run(
        [
            *("cargo", "test", "--locked", "--quiet", "--package=sealane-dpu"),
            *("--test=conformance", "another_card", "--", "--ignored"),
        ],
        cwd=Path(__file__).parents[2] / "native",
        env={**os.environ, "SEALANE_CARD": " ".join(arguments(name))},
        check=True,
    )


@pytest.fixture(scope="module", params=CRYPTODEVS)
def site(request: pytest.FixtureRequest) -> Iterator[World]:
    name = request.param
    with (
        short_directory() as root,
        world(root, product=name, options=arguments(name)) as made,
    ):
        yield made


async def test_a_device_seals_and_its_end_goes_unnoticed(site: World) -> None:
    known = len(site.nonces())
    with site.card_in_use() as process:
        before = site.statistic("sectors_accelerated")
        async with disk(site) as opened:
            contents = Contents(opened, seed=1)
            while site.statistic("sectors_accelerated") < before + 100:
                await contents.write(1)
            await contents.check()
            assert site.statistic("accelerator_refusals") == 0
            writing = asyncio.ensure_future(contents.write(4))
            await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await writing
            await contents.check()
    once_each(site.nonces()[known:])


async def test_a_queue_that_ends_under_load_leaves_its_memory_alone(site: World) -> None:
    """Volumes come and go while others write: a device may not write to what is unmapped."""
    with site.card_in_use() as process:
        async with disk(site) as opened:
            contents = Contents(opened, seed=2)
            for turn in range(4):
                async with disk(site) as other:
                    passing = Contents(other, seed=3 + turn)
                    await asyncio.gather(contents.write(2), passing.write(2))
            await contents.check()
        assert process.poll() is None
        assert site.statistic("accelerators_lost") == 0
