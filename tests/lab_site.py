"""One site of a ring in a lab: `lab_site.py DIRECTORY NAME ADDRESS RANK SIZE`.

Prints its fabric's address, reads those of all sites, computes, and prints the result.
"""

import asyncio
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import structlog

from fabrics import fabric, settings
from sealane.client.collectives import Member, join

LENGTH = 60_001
RATE = 50_000_000


def contribution(rank: int) -> Any:
    """Return integers, so that sums are exact in any order, in single precision and bfloat16."""
    return np.random.default_rng(rank).integers(-8, 9, LENGTH).astype(np.float32)


def digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


async def compute(fabric: Any, rank: int, members: list[Member]) -> dict[str, str]:
    client: Any = SimpleNamespace(sessions=fabric.sessions)
    single = contribution(rank)
    brief = (single.view(np.uint32) >> 16).astype(np.uint16)
    async with join(
        client, "lab", rank=rank, members=members, rate_bits_per_second=RATE, slot_bytes=1 << 14
    ) as group:
        await group.all_reduce(single)
        await group.all_reduce(brief, dtype="bfloat16")
        await group.barrier()
    return {"float32": digest(single), "bfloat16": digest(brief)}


async def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    directory, name, address, rank, size = sys.argv[1:]
    config = replace(settings(Path(directory), name), listen_data=(address,))
    async with fabric(config, name) as one:
        print(json.dumps({"node": name, "address": one.address}), flush=True)
        members = [Member(**json.loads(sys.stdin.readline())) for _ in range(int(size))]
        print(json.dumps(await compute(one, int(rank), members)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
