"""A stock Linux host writes and checks while the gateway's card is killed again and again."""

import asyncio
import socket
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from accelerators.cards import World, world
from control_plane import short_directory
from kernel_lab.build import HOST_NQN
from kernel_lab.cluster import Disk
from kernel_lab.conftest import SIZE_MIB
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from nonces import DIRECTORY, once_each, sealed
from sealane.client import connect

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

ROUNDS = 3
"""Rounds with the card, each after one without it."""
ROUND_MIB = 8
LIFE_SECONDS = 1.0
LOOK_SECONDS = 0.05


@dataclass
class Killer:
    """Runs the gateway's card and kills it, again and again.

    A card lives for a second after the gateway uses it, and until it has had a sector.
    """

    site: World
    lives: list[int] = field(default_factory=list)
    """Sectors that each card was given."""
    _over: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _killing: Future[None] | None = None

    def begin(self, _: Guest) -> None:
        """Return when the gateway uses the card."""
        self._over.clear()
        used = threading.Event()
        self._killing = self._pool.submit(self._kill_on, used)
        while not used.wait(0.1):
            if self._killing.done():
                self._killing.result()

    def end(self, _: Guest) -> None:
        """Return when no card runs."""
        self._over.set()
        assert self._killing is not None
        self._killing.result()

    def _kill_on(self, used: threading.Event) -> None:
        while not self._over.is_set():
            with self.site.card_in_use() as process:
                before = self._jobs()
                used.set()
                self._over.wait(LIFE_SECONDS)
                while self._jobs() == before and not self._over.wait(LOOK_SECONDS):
                    pass
                process.kill()
                self.lives.append(self._jobs() - before)

    def _jobs(self) -> int:
        return self.site.statistic("accelerator_jobs")


def free_address() -> str:
    """Return an address that guests reach: they have 127.0.0.1 of this machine, no others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    path = tmp_path / "ledgers"
    path.mkdir()
    return path


@pytest.fixture
def site(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(DIRECTORY, str(ledgers))
    with short_directory() as root, world(root, listen=free_address()) as made:
        yield made


async def attach(site: World) -> Disk:
    async with connect(site.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=SIZE_MIB << 20)
        at = (await client.volumes.attach(volume.name, host_nqn=HOST_NQN)).attachment
    assert at is not None
    uuid = volume.name.removeprefix("volumes/")
    return Disk(at.subsystem_nqn, at.trsvcid, uuid, volume.name, at.dhchap_secret)


FIGURES = ("accelerator_jobs", "sectors_accelerated", "accelerators_lost", "refusals")


def test_a_verifying_host_does_not_notice_a_card_that_is_killed_again_and_again(
    lab: Lab, site: World, ledgers: Path
) -> None:
    disk, killer = asyncio.run(attach(site)), Killer(site)
    figures: dict[str, int] = {}

    def count(_: Guest) -> None:
        """Note the volume's figures, which are exported while a host uses it."""
        figures.update((name, site.statistic(name)) for name in FIGURES)

    steps = [
        step
        for number in range(ROUNDS)
        for step in (
            f"measured processor-{number} {ROUND_MIB}",
            "call killing",
            f"measured card-{number} {ROUND_MIB}",
            "call quiet",
        )
    ]
    ran = lab.run(
        disk.connect("-i 2"),
        *steps,
        "call count",
        "disconnect",
        calls={"killing": killer.begin, "quiet": killer.end, "count": count},
        options={"cpus": 2},
        timeout=900,
    )

    def rate(name: str) -> float:
        job = ran.json(name)["jobs"][0]
        assert job["error"] == 0
        wanted = ROUND_MIB * 256
        assert (job["write"]["total_ios"], job["read"]["total_ios"]) == (wanted, wanted)
        return float(job["write"]["iops"])

    pairs = [(rate(f"processor-{number}"), rate(f"card-{number}")) for number in range(ROUNDS)]
    for processor, card in pairs:
        print(f"IOPS: {processor:.0f} by the processor, {card:.0f} with the card")
    ratio = statistics.median(card / processor for processor, card in pairs)
    # How fast it is depends on the machine's other work: that is no test.
    print(f"median ratio {ratio:.2f}; sectors given to each card: {killer.lives}; {figures}")
    assert figures["refusals"] == 0
    # The first card of a round lives until the host writes.
    assert sum(jobs > 0 for jobs in killer.lives) >= ROUNDS
    assert figures["sectors_accelerated"] > 0
    assert figures["accelerators_lost"] > 0
    once_each(sealed(ledgers))
