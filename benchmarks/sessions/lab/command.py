"""`python -m benchmarks.sessions lab`: completion times of messages, compared with TCP and QUIC.

There is a lab for each kind of link and loss. Each transport has its own identical links: a round
trip of 25 ms, the same MTU and the same rate, to which sessions and TCP pace themselves. Sessions
are those of daemons as shipped, which know nothing of the link; messages are sent with `Auto()`.
Transports send in turn. Cells disturbed by other load on the machine are repeated. Results are
saved as they are measured; run the command again to continue. Prints tables, saves every time as
JSON and draws a plot. Needs root (namespaces) and Cargo (to build the QUIC peer).
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Final

from benchmarks.sessions import packets
from benchmarks.sessions.lab import grid, report
from benchmarks.sessions.lab.cells import CONDITIONS, FULL, LINKS, QUICK, cells
from rich.console import Console

SUMMARY: Final = "completion times of messages over long links, compared with TCP and QUIC"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--quick", action="store_true", help="60 messages per cell and transport")
    add("--loss", nargs="+", choices=[c.name for c in CONDITIONS], help="losses (default all)")
    grid.add_arguments(parser, LINKS, minutes=9.0, output="sealane-sessions/lab")


def run(arguments: argparse.Namespace) -> int:
    """Measure missing cells; print, save and draw all results."""
    packets.build()
    until = time.monotonic() + 60 * arguments.minutes
    effort = QUICK if arguments.quick else FULL
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    store = grid.Store(output / "cells.jsonl", effort)
    kinds = [links for links in LINKS if not arguments.links or links.name in arguments.links]
    rates = grid.rates(kinds, store, arguments.rate)
    wanted = [
        cell
        for links in kinds
        for condition in links.conditions
        if not arguments.loss or condition.name in arguments.loss
        for cell in cells(links, condition, rates[links.name])
    ]
    asyncio.run(grid.measure_missing(wanted, store, effort, until))
    results = [report.Result.of(cell, found) for cell in wanted if (found := store.get(cell))]
    console = Console(width=170)
    if results:
        console.print(report.table(results))
        console.print(report.ratios(results))
        document = [result.to_dict() for result in results]
        (output / "lab.json").write_text(json.dumps(document, indent=1) + "\n")
        (output / "lab.md").write_text(report.markdown(results))
        report.plot(output / "lab.png", results)
        if arguments.images:
            report.plot(arguments.images / "session-completion.png", results)
    grid.say_rest(console, [result.void for result in results], len(wanted), output)
    return 0
