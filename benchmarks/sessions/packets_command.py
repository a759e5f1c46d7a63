"""`python -m benchmarks.sessions packets`: what a packet costs, beside TLS over TCP and QUIC.

Two network namespaces and a veth pair with all its offloads, one process at each end on a core of
its own, bulk one way; every way once a round. Processor time is of both processes, kernel included;
with other load on the machine compare within a round only. Prints a table, keeps every sample as
JSON and draws a plot. Where `perf` is installed, one more transfer at each MTU tells where a
session's time goes. Needs root (namespaces) and Cargo (the peers).
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Final

from benchmarks.sessions import packets, report
from rich.console import Console

SUMMARY: Final = "what a packet costs, beside TLS over TCP and QUIC"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command."""
    add = parser.add_argument
    add("--mtu", type=int, nargs="+", default=[1500, 9000], help="of the cable (1500 9000)")
    add("--rounds", type=int, default=5, help="rounds; medians are shown (5)")
    add("--bytes", type=int, default=1 << 30, help="of one transfer (1 GiB)")
    add("--rate", type=int, default=40_000_000_000, help="of the session, in bit/s (40 G)")
    add("--output", type=Path, default=Path("sealane-sessions"), help="directory")


async def _measure(arguments: argparse.Namespace) -> list[packets.Sample]:
    """Take turns; each round begins with another way."""
    samples = []
    for number in range(arguments.rounds):
        for mtu in arguments.mtu:
            start = number % len(packets.WAYS)
            for way in packets.WAYS[start:] + packets.WAYS[:start]:
                sample = await packets.transfer(
                    way, mtu=mtu, size=arguments.bytes, rate=arguments.rate
                )
                samples.append(sample)
    return samples


async def _profiles(arguments: argparse.Namespace) -> dict[int, dict[str, float]]:
    size, rate = arguments.bytes, arguments.rate
    return {mtu: await packets.profile(mtu=mtu, size=size, rate=rate) for mtu in arguments.mtu}


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, keep."""
    packets.build()
    samples = asyncio.run(_measure(arguments))
    profiles = asyncio.run(_profiles(arguments))
    console = Console(width=150)
    console.print(report.table(samples))
    console.print(report.profile_table(samples, profiles))
    arguments.output.mkdir(parents=True, exist_ok=True)
    document = {
        "load_average": os.getloadavg(),
        "rounds": arguments.rounds,
        "rate_bits_per_second": arguments.rate,
        "profiles": profiles,
        "samples": [sample.to_dict() for sample in samples],
    }
    (arguments.output / "packets.json").write_text(json.dumps(document, indent=1) + "\n")
    report.plot(arguments.output / "packets.png", samples)
    return 0
