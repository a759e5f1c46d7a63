"""kill -9 of brokers, gateways and etcd members under load: no IV is reused, no lease lost."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kills.world import BROKERS, GATEWAYS, World, world
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.records import GrantRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.device.anchors.counter import FileCounter
from seeds import SEED

# `make kill-test` does dozens of kills; the seed only chooses victims and pauses.
KILLS = int(os.environ.get("SEALANE_KILLS", "6"))

_RECORD_BYTES = 56  # key epoch 4, IV 12, SHA-256 of the plaintext 32, LBA 8


def _ivs(ledger: Path) -> list[tuple[int, int, int]]:
    """Return broker instance, start epoch and counter of all seals of a volume, by any process."""
    content = ledger.read_bytes()
    whole = len(content) // _RECORD_BYTES * _RECORD_BYTES
    ivs = [content[at + 4 : at + 16] for at in range(0, whole, _RECORD_BYTES)]
    return [
        (
            int.from_bytes(iv[:2], "big"),
            int.from_bytes(iv[2:5], "big"),
            int.from_bytes(iv[5:], "big"),
        )
        for iv in ivs
    ]


async def _grants(made: World) -> list[GrantRecord]:
    store = await EtcdStore.open(made.etcd.endpoints, writer="checker", credentials=None)
    registry = await Registry.open(store, WrappingKey(bytes(range(32))), node="checker")
    try:
        page, has_more = await registry.grants.page(limit=1000)
        assert not has_more
        for instance, name in enumerate(BROKERS, start=1):
            stored = await registry.instances.get(f"{instance:05}")
            assert stored is not None
            counter = FileCounter(made.site.root / name / "starts.counter")
            assert stored.record.start_epoch == counter.read()
        return [stored.record for stored in page]
    finally:
        await registry.close()


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    monkeypatch.setenv("SEALANE_NONCE_LEDGERS", str(ledgers))
    async with world(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * KILLS)
async def test_kills_under_load_repeat_no_iv_and_lose_no_lease(
    running: World, tmp_path: Path
) -> None:
    print("SEALANE_SEED =", SEED)
    draw = random.Random(SEED)
    victims = [*BROKERS, *GATEWAYS, *(member.name for member in running.etcd.members)]
    kills: Counter[str] = Counter()
    async with asyncio.TaskGroup() as tasks:
        load = [tasks.create_task(running.load(name)) for name in GATEWAYS]
        await running.progressed()
        for kill in range(KILLS):
            await asyncio.sleep(draw.random() * 0.5)
            # Each kind at least once in a short run.
            victim = victims[kill * 2 % len(victims)] if kill < 6 else draw.choice(victims)
            await running.kill(victim)
            kills[victim] += 1
            if kill % 3 == 2:
                await running.progressed()
        await running.progressed()
        for task in load:
            task.cancel()
    print(dict(kills), dict(running.rounds), dict(running.failures))
    grants = await _grants(running)
    ledgers = [*(tmp_path / "ledgers").iterdir()]
    assert ledgers
    for ledger in ledgers:
        ivs = _ivs(ledger)
        assert len(set(ivs)) == len(ivs) > 0
        leased = [g for g in grants if str(g.volume_id) == ledger.name]
        for instance, epoch, counter in ivs:
            assert any(
                (g.broker_instance, g.start_epoch) == (instance, epoch)
                and g.counter_start <= counter < g.counter_end
                for g in leased
            )
    assert {g.broker_instance for g in grants} <= {1, 2}
