"""`python -m benchmarks.sessions packets`: cost per packet compared with TLS over TCP and QUIC.

Bulk transfer in one direction between two network namespaces, over a veth pair with all offloads.
Each end is a process with its own core; each round measures every transport once. Processor time is
that of both processes, including the kernel; if the machine has other load, compare only within a
round. Prints tables, saves every sample as JSON and draws plots. If `perf` is installed, one more
transfer at each MTU shows what a session's time is spent on. Needs root (namespaces) and Cargo (to
build the peers).

At each `--pace`, sessions and TLS are compared again, limited to that rate: sessions by their own
pacing, TLS by the kernel's (SO_MAX_PACING_RATE).
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Final

from benchmarks.sessions import packets, report
from rich.console import Console

PACED_SECONDS: Final = 3
SUMMARY: Final = "cost per packet compared with TLS over TCP and QUIC"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--mtu", type=int, nargs="+", default=[1500, 9000], help="MTUs (default 1500 9000)")
    add("--rounds", type=int, default=5, help="rounds; the table shows medians (default 5)")
    add("--bytes", type=int, default=1 << 30, help="bytes per transfer (default 1 GiB)")
    add("--rate", type=int, default=40_000_000_000, help="session's rate, bit/s (default 40 G)")
    add(
        "--pace",
        type=int,
        nargs="+",
        default=[100_000_000, 300_000_000, 1_000_000_000],
        help="paces at which session and TLS are also compared, bit/s (default 100, 300 M, 1 G)",
    )
    add("--output", type=Path, default=Path("sealane-sessions"), help="directory for results")


async def _measure(arguments: argparse.Namespace) -> list[packets.Sample]:
    """Measure all transports in turn; each round starts with another one."""
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


async def _paced(arguments: argparse.Namespace) -> list[packets.Sample]:
    """Measure at each pace for `PACED_SECONDS`, in turn; MTU 1500."""
    samples = []
    for number in range(arguments.rounds):
        for pace in arguments.pace:
            size = min(arguments.bytes, pace // 8 * PACED_SECONDS)
            for way in packets.PACED_WAYS[:: 1 if number % 2 else -1]:
                sample = await packets.transfer(way, mtu=1500, size=size, pace=pace)
                samples.append(sample)
    return samples


async def _profiles(arguments: argparse.Namespace) -> dict[int, dict[str, float]]:
    size, rate = arguments.bytes, arguments.rate
    return {mtu: await packets.profile(mtu=mtu, size=size, rate=rate) for mtu in arguments.mtu}


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables, save results."""
    packets.build()
    samples = asyncio.run(_measure(arguments))
    paced = asyncio.run(_paced(arguments))
    profiles = asyncio.run(_profiles(arguments))
    console = Console(width=150)
    console.print(report.table(samples))
    console.print(report.paced_table(paced))
    console.print(report.profile_table(samples, profiles))
    arguments.output.mkdir(parents=True, exist_ok=True)
    document = {
        "load_average": os.getloadavg(),
        "rounds": arguments.rounds,
        "rate_bits_per_second": arguments.rate,
        "profiles": profiles,
        "samples": [sample.to_dict() for sample in samples],
        "paced": [sample.to_dict() for sample in paced],
    }
    (arguments.output / "packets.json").write_text(json.dumps(document, indent=1) + "\n")
    report.plot(arguments.output / "packets.png", samples)
    report.plot_paces(arguments.output / "paces.png", paced)
    return 0
