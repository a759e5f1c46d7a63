"""kill -9 of target, gateway and broker under load, with stores that keep freshness."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from kills.storage_world import Tenant, storage_world
from seeds import SEED

VICTIMS = ("s", "s", "s", "g", "broker")
CASES = [("file", "broker"), ("inline", "broker"), ("file", "tpm2"), ("inline", "file")]
# `make kill-test` sets the number and requires every case.
KILLS = int(os.environ.get("SEALANE_KILLS", "3"))
# A host leaves while its target is gone: the wait for cancelled commands, plus slack.
LEAVE_SECONDS = 30.0


@pytest.mark.slow
@pytest.mark.timeout(180 + 30 * KILLS)
@pytest.mark.parametrize(("store", "anchor"), CASES if "SEALANE_KILLS" in os.environ else CASES[:1])
async def test_kills_under_load_lose_nothing_flushed_and_raise_no_alarm(
    store: str, anchor: str, tmp_path: Path
) -> None:
    print("SEALANE_SEED =", SEED)
    draw = random.Random(SEED)
    kills: Counter[str] = Counter()
    async with storage_world(store=store, anchor=anchor, scratch=tmp_path) as world:
        tenant = Tenant(world)
        load = asyncio.ensure_future(tenant.run())
        await tenant.progressed(load)
        for kill in range(KILLS):
            await asyncio.sleep(draw.random() * 0.3)
            # Each kind at least once in a short run.
            victim = ("s", "g", "broker")[kill] if kill < 3 else draw.choice(VICTIMS)
            await world.kill(victim)
            kills[victim] += 1
            if draw.random() < 0.5:
                await tenant.progressed(load)
        await tenant.progressed(load)
        world.daemons["s"].kill()
        load.cancel()
        done, _ = await asyncio.wait({load}, timeout=LEAVE_SECONDS)
        assert done, "a host that leaves waits for a target that is gone"
        assert load.cancelled()
        await asyncio.to_thread(world.start, "s")
        await tenant.check_all()
        print(dict(kills), dict(tenant.ended), dict(tenant.failures))
        assert world.alarms() == []
