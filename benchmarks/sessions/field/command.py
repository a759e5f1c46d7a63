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
    add("--condition", nargs="+", choices=[c.name for c in CONDITIONS], help="(default all)")
    grid.add_arguments(parser, LINKS, minutes=30.0, output="sealane-sessions/field")


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
    grid.say_rest(console, [result.void for result in results], len(wanted), output)
    return 0
