"""kill -9 of target, gateway and broker under live load, with stores that keep freshness."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kills.storage_world import Tenant, storage_world
from kills.test_kills import KILLS, SEED

VICTIMS = ("s", "s", "s", "g", "broker")


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * KILLS)
@pytest.mark.parametrize(
    ("store", "anchor"),
    [("file", "broker"), ("inline", "broker"), ("file", "tpm2"), ("inline", "file")],
)
async def test_kills_under_load_lose_nothing_flushed_and_raise_no_alarm(
    store: str, anchor: str, tmp_path: Path
) -> None:
    print("SEALANE_KILL_SEED =", SEED)
    draw = random.Random(SEED)
    kills: Counter[str] = Counter()
    async with storage_world(store=store, anchor=anchor, scratch=tmp_path) as world:
        tenant = Tenant(world)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tenant.run())
            await tenant.progressed()
            for kill in range(KILLS):
                await asyncio.sleep(draw.random() * 0.3)
                victim = "s" if kill == 0 else draw.choice(VICTIMS)
                await world.kill(victim)
                kills[victim] += 1
                if draw.random() < 0.5:
                    await tenant.progressed()
            await tenant.progressed()
            tenant.is_leaving = True
        await tenant.check_all()
        print(dict(kills), dict(tenant.ended), dict(tenant.failures))
        assert world.alarms() == []
