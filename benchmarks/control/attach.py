"""Latency of attaching a volume: the first time, again, and many volumes at once.

Broker, target and gateway are real daemons on this machine, connected over mutual TLS. "cold" is
the first attach of a volume, which fetches key, lease, descriptor and namespace; "warm" is a later
one, whose lease is still valid. Enrolment happens at the daemon's start and isn't measured.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.control.result import Result
from rich import box
from rich.table import Table

import sealane.client
from sealane.cli.demo.cluster import ClusterBuilder
from sealane.client import Client, Volume
from sealane.errors import Error

HOST: Final = "nqn.2014-08.org.nvmexpress:uuid:0f0f0f0f-0000-4000-8000-00000000beef"
SIZE_BYTES: Final = 1 << 20
SINGLE: Final = 20
AT_ONCE: Final = 500


def run(arguments: argparse.Namespace) -> Result:
    """Measure for `arguments.rounds` rounds, each with its own volumes."""
    samples = asyncio.run(_measure(arguments.rounds))
    table = Table(
        title=f"Attach over the gateway's Unix socket, {SIZE_BYTES >> 20} MiB volumes",
        box=box.SIMPLE_HEAD,
    )
    for column in ("case", "attached", "failed", "p50 ms", "p99 ms", "max ms", "attaches/s"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for what in ("cold", "warm", f"{AT_ONCE} at once"):
        rounds = [sample for sample in samples if sample["what"] == what]
        times = sorted(t for sample in rounds for t in sample["milliseconds"])
        rate = statistics.median(s["succeeded"] / s["seconds"] for s in rounds)
        table.add_row(
            what,
            str(len(times)),
            str(sum(sample["failed"] for sample in rounds)),
            f"{_quantile(times, 0.5):.1f}",
            f"{_quantile(times, 0.99):.1f}",
            f"{times[-1]:.1f}",
            f"{rate:.0f}",
        )
    return Result(table, samples)


async def _measure(rounds: int) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sealane-benchmark-") as directory:
        builder = ClusterBuilder(Path(directory), announce=lambda _: None)
        async with (
            builder.storage(store="memory") as (_, _, gateway),
            sealane.client.connect(str(gateway.socket)) as client,
        ):
            for _ in range(rounds):
                few = await _volumes(client, SINGLE)
                samples.append(await _sample("cold", client, few, at_once=1))
                await _detach(client, few)
                samples.append(await _sample("warm", client, few, at_once=1))
                await _remove(client, few)
                many = await _volumes(client, AT_ONCE)
                samples.append(await _sample(f"{AT_ONCE} at once", client, many, at_once=AT_ONCE))
                await _remove(client, many)
    return samples


async def _sample(
    what: str, client: Client, volumes: Sequence[Volume], *, at_once: int
) -> dict[str, Any]:
    milliseconds: list[float] = []
    refusals: list[str] = []
    limit = asyncio.Semaphore(at_once)

    async def attach(volume: Volume) -> None:
        async with limit:
            began = time.perf_counter()
            try:
                await client.volumes.attach(volume.name, host_nqn=HOST)
            except Error as error:
                refusals.append(error.reason)
            else:
                milliseconds.append(1e3 * (time.perf_counter() - began))

    began = time.perf_counter()
    await asyncio.gather(*map(attach, volumes))
    return {
        "what": what,
        "seconds": time.perf_counter() - began,
        "succeeded": len(milliseconds),
        "failed": len(refusals),
        "refusals": refusals,
        "milliseconds": milliseconds,
    }


async def _volumes(client: Client, count: int) -> list[Volume]:
    return [
        await client.volumes.create(display_name=f"attach {i}", size_bytes=SIZE_BYTES)
        for i in range(count)
    ]


async def _detach(client: Client, volumes: Sequence[Volume]) -> None:
    for volume in volumes:
        await client.volumes.detach(volume.name)


async def _remove(client: Client, volumes: Sequence[Volume]) -> None:
    for volume in volumes:
        if (await client.volumes.get(volume.name)).attachment is not None:
            await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
