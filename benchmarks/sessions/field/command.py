"""`python -m benchmarks.sessions field`: messages over links as they are in the field.

Like `lab`, with more of what links do: round trips of 5, 25 and 100 ms, losses of 1e-5 to 5e-2,
bursts of 8 to 128 packets, lost acknowledgements, jitter, reordering, duplication and outages, and
messages of 64 KiB to 64 MiB that keep their length. Daemons are as shipped and know nothing of the
link. Results are saved as they are measured; run the command again to continue: all of it takes
hours. Needs root (namespaces) and Cargo (to build the QUIC peer).
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Final

from benchmarks.sessions import packets
from benchmarks.sessions.field import report
from benchmarks.sessions.field.cells import (
    CONDITIONS,
    FULL,
    LINKS,
    QUICK,
    QUICK_BYTES_MAX,
    QUICK_CONDITIONS,
)
from benchmarks.sessions.lab import grid
from benchmarks.sessions.lab.cells import Cell, cells
from rich.console import Console

SUMMARY: Final = "messages over links with jitter, bursts, outages and more, beside TCP and QUIC"
QUICK_LINKS: Final = LINKS[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--quick", action="store_true", help="a part of it with few messages: 5 minutes")
    add("--minutes", type=float, default=30.0, help="minutes after which no cell starts (30)")
    add("--links", nargs="+", choices=[k.name for k in LINKS], help="round trips (default all)")
    add("--condition", nargs="+", choices=[c.name for c in CONDITIONS], help="(default all)")
    add("--rate", type=int, help="rate of the links in bit/s (default: as `lab`)")
    add("--output", type=Path, default=Path("sealane-sessions/field"), help="results' directory")
    add("--images", type=Path, help="also save the plot here, for the documentation")


def _wanted(arguments: argparse.Namespace, rate: int) -> list[Cell]:
    """Return the cells asked for; those of one lab follow each other."""
    conditions = arguments.condition or (QUICK_CONDITIONS if arguments.quick else ())
    kinds = arguments.links or ([QUICK_LINKS.name] if arguments.quick else ())
    return [
        cell
        for links in LINKS
        if not kinds or links.name in kinds
        for condition in CONDITIONS
        if not conditions or condition.name in conditions
        for cell in cells(links, condition, rate)
        if not arguments.quick or (cell.full_bytes <= QUICK_BYTES_MAX and cell.connection == "warm")
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measure missing cells; print, save and draw all results."""
    packets.build()
    until = time.monotonic() + 60 * arguments.minutes
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    effort = QUICK if arguments.quick else FULL
    store = grid.Store(output / "cells.jsonl", effort)
    rate = arguments.rate or store.rate(QUICK_LINKS) or asyncio.run(grid.choose_rate(QUICK_LINKS))
    wanted = _wanted(arguments, rate)
    asyncio.run(grid.measure_missing(wanted, store, effort, until))
    results = [report.Result.of(cell, found) for cell in wanted if (found := store.get(cell))]
    console = Console(width=170)
    if results:
        console.print(report.table(results))
        console.print(report.summary(results))
        rows = [row for result in results for row in result.rows()]
        (output / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        report.plot(output / "field.png", results)
        if arguments.images:
            report.plot(arguments.images / "session-field.png", results)
    if left := len(wanted) - sum(not result.void for result in results):
        console.print(f"{left} of {len(wanted)} cells void or not measured: run again to continue")
    console.print(f"saved in {output}")
    return 0
