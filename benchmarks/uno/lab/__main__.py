"""`python -m benchmarks.uno.lab`: near and far traffic over real sockets.

Sessions of daemons as shipped, with each congestion controller, beside TCP CUBIC, TCP BBR and QUIC,
each alone in the same network (docs/understand/congestion.md, "On real sockets"). Results are saved
as they are measured; run the command again to continue. Runs that other load on the machine has
disturbed are marked, and measured again by the next command. Prints a table, saves JSON and draws a
plot. Needs root (namespaces) and Cargo (to build the QUIC peer).
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.digests import EMULATOR, digest
from benchmarks.kept import Records
from benchmarks.sessions import packets
from benchmarks.sessions.lab import daemons, tcp_peer
from benchmarks.uno.lab import arrivals, cells, fairness, flow_peer, measure, report, runs
from benchmarks.uno.lab.cells import QUICK, SCHEMES, TRAFFIC, Links, Scheme, Traffic
from benchmarks.uno.plots import draw
from rich.console import Console
from rich.progress import Progress

from sealane.errors import Error

TITLE: Final = "Near and far messages on real sockets, 50 Mbit/s, 10 and 160 ms"
COLUMNS: Final = 170
RUNS: Final = 5


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.uno.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--quick", action="store_true", help="two traffics, once, by two schemes: a minute")
    add("--runs", type=int, default=RUNS, help=f"runs of each traffic (default {RUNS})")
    add("--minutes", type=float, default=20.0, help="minutes after which no run starts")
    names = [scheme.name for scheme in SCHEMES]
    add("--scheme", nargs="+", choices=names, default=names, help="schemes (default: all)")
    known = [traffic.name for traffic in TRAFFIC]
    add("--traffic", nargs="+", choices=known, default=known, help="traffic (default: all)")
    add("--output", type=Path, default=Path("sealane-uno/lab"), help="directory for results")
    add("--images", type=Path, help="also save the plot here")
    return found


Wanted = dict[tuple[Scheme, Links], list[tuple[Traffic, int]]]
"""Runs by scheme, and by what happens to the links."""


Kept = dict[str, Records]
"""What is known, by scheme."""


def _kept(path: Path) -> Kept:
    modules = (arrivals, cells, daemons, fairness, flow_peer, measure, runs, tcp_peer)
    sessions = Records(path, made_by=digest(modules))
    # Of our engine, TCP and QUIC meet the emulator alone.
    others = Records(path, made_by=digest(modules, engine=EMULATOR))
    return {each.name: sessions if each.way == "session" else others for each in SCHEMES}


async def _measure(missing: Wanted, kept: Kept, minutes: float) -> None:
    until = time.monotonic() + 60 * minutes
    with Progress() as progress:
        task = progress.add_task("runs", total=sum(map(len, missing.values())))
        for (scheme, _), wanted in missing.items():
            if time.monotonic() > until:
                return
            try:
                async for found in measure.measure(scheme, wanted, until=until):
                    kept[scheme.name].put(found["key"], found)
                    progress.advance(task)
            except (OSError, RuntimeError, Error) as error:
                # The next command tries the rest of them again.
                progress.console.print(f"{scheme.name} stopped: {error}")


def main() -> int:
    """Run what is missing; print, save and draw all results."""
    arguments = parser().parse_args()
    packets.build()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    kept = _kept(output / f"runs{'-quick' if arguments.quick else ''}.jsonl")
    schemes = [scheme for scheme in SCHEMES if scheme.name in arguments.scheme]
    traffics = [traffic for traffic in TRAFFIC if traffic.name in arguments.traffic]
    if arguments.quick:
        schemes, traffics, arguments.runs = [SCHEMES[0], SCHEMES[-3]], list(QUICK), 1
    keys: list[tuple[str, str]] = []
    missing: Wanted = {}
    for scheme in schemes:
        for traffic in traffics:
            for number in range(arguments.runs):
                key = json.dumps([scheme.name, traffic.name, number])
                keys.append((scheme.name, key))
                known = kept[scheme.name].get(key)
                if known is None or known["void"]:
                    group = missing.setdefault((scheme, traffic.links), [])
                    group.append((traffic, number))
    asyncio.run(_measure(missing, kept, arguments.minutes))
    found = [record for name, key in keys if (record := kept[name].get(key)) is not None]
    found.sort(key=lambda record: [traffic.name for traffic in traffics].index(record["workload"]))
    console = Console(width=COLUMNS)
    if found:
        report.show(console, TITLE, found)
        (output / "results.json").write_text(json.dumps({"cells": found}, indent=1) + "\n")
        for directory in filter(None, (output, arguments.images)):
            draw(directory / "uno-lab.png", "lab", TITLE, found, report.COLUMNS)
    void: list[dict[str, Any]] = [record for record in found if record["void"]]
    for record in void:
        console.print(report.void(record))
    if left := len(keys) - len(found) + len(void):
        console.print(f"{left} of {len(keys)} runs void or not measured: run again to continue")
    console.print(f"saved in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
