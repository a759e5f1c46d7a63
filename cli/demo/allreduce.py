"""The demo's all-reduce: jobs at both sites sum an array over links like the haul's."""

import asyncio
import contextlib
import hashlib
from typing import Final

import numpy as np

import sealane.client
from sealane.cli.demo.cluster import Cluster
from sealane.cli.demo.link import LinkParameters, linked
from sealane.cli.demo.results import AllReduceRun
from sealane.cli.demo.sessions import (
    MODEL_SAMPLES,
    Advance,
    link_path,
    listening_address,
)
from sealane.client.collectives import Group, Member, join
from sealane.client.messages import ErasureCoded
from sealane.planning import model

ELEMENTS: Final = 1 << 20
REPEATS: Final = 10
SLOT_BYTES: Final = 256 << 10
SLOTS: Final = 16
CODE: Final = ErasureCoded(k=32, m=8)
SITES: Final = 2


async def run_all_reduce(
    cluster: Cluster, link: LinkParameters, *, seed: int, advance: Advance
) -> AllReduceRun:
    """Sum single-precision arrays REPEATS times; call `advance` after every sum."""
    fabrics = [cluster.fabric_near, cluster.fabric_far]
    members = [
        Member(node=fabric.name, address=fabric.addresses["fabric_control"]) for fabric in fabrics
    ]
    seeds = iter(range(seed, seed + 2 * SITES, 2))
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(sealane.client.connect(str(fabric.socket)))
            for fabric in fabrics
        ]

        async def route(display_name: str, member: Member) -> str:
            address = await listening_address(display_name, clients[members.index(member)])
            relay = linked(link, forward_to=address, seed=next(seeds))
            return (await stack.enter_async_context(relay)).address

        async def joined(rank: int) -> Group:
            joining = join(
                clients[rank],
                "demo all-reduce",
                rank=rank,
                members=members,
                rate_bits_per_second=link.rate_bits_per_second,
                reliability=CODE,
                slot_bytes=SLOT_BYTES,
                slots=SLOTS,
                route=route,
            )
            return await stack.enter_async_context(joining)

        groups = await asyncio.gather(*(joined(rank) for rank in range(SITES)))
        return await _measure(groups, link, seed, advance)


async def _measure(
    groups: list[Group], link: LinkParameters, seed: int, advance: Advance
) -> AllReduceRun:
    loop = asyncio.get_running_loop()
    # Whole numbers, so that sums are exact in any order.
    random = np.random.default_rng(seed)
    given = [random.integers(-999, 1000, ELEMENTS).astype(np.float32) for _ in groups]
    expected = hashlib.sha256(np.sum(given, axis=0).tobytes()).hexdigest()
    seconds, digests = [], set()
    for _ in range(REPEATS):
        arrays = [array.copy() for array in given]
        await asyncio.gather(*(group.barrier() for group in groups))
        started = loop.time()
        await asyncio.gather(*(group.all_reduce(arrays[group.rank]) for group in groups))
        seconds.append(loop.time() - started)
        digests |= {hashlib.sha256(array.tobytes()).hexdigest() for array in arrays}
        advance(1)
    path, array_bytes = link_path(link), ELEMENTS * 4
    pieces = -(-array_bytes // (SITES * SLOT_BYTES))
    samples = model.all_reduce(
        path,
        array_bytes,
        SITES,
        model.ErasureCoded(k=CODE.k, m=CODE.m),
        pieces=pieces,
        depth=SLOTS,
        count=MODEL_SAMPLES // pieces,
        random=random,
    )
    return AllReduceRun(
        sites=SITES,
        array_bytes=array_bytes,
        seconds=tuple(seconds),
        model_seconds=tuple(samples.tolist()),
        ideal_seconds=model.all_reduce_ideal(path, array_bytes, SITES, pieces=pieces),
        sha256_expected=expected,
        sha256_found=tuple(sorted(digests)),
    )
