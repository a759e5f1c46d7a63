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
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.digests import digest
from benchmarks.kept import Records
from benchmarks.sessions import packets
from benchmarks.sessions.lab import daemons, lanes, report, session_peer, tcp_peer
from benchmarks.sessions.lab.cells import (
    CONDITIONS,
    FULL,
    LINKS,
    QUICK,
    TRIAL,
    Cell,
    Condition,
    Effort,
    Links,
    cells,
)
from rich.console import Console
from rich.progress import Progress

from sealane.errors import UnavailableError

SUMMARY: Final = "completion times of messages over long links, compared with TCP and QUIC"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--quick", action="store_true", help="60 messages per cell and transport")
    add("--minutes", type=float, default=9.0, help="minutes after which no cell starts (default 9)")
    add("--links", nargs="+", choices=[k.name for k in LINKS], help="kinds of links (default all)")
    add("--loss", nargs="+", choices=[c.name for c in CONDITIONS], help="losses (default all)")
    add(
        "--rate",
        type=int,
        help="rate of the links in bit/s (default: the last run's, or what this machine sustains)",
    )
    add("--output", type=Path, default=Path("sealane-sessions/lab"), help="directory for results")
    add("--images", type=Path, help="also save the plot here, for the documentation")


async def choose_rate(links: Links) -> int:
    """Try the rates in turn; return the first that the machine sustains without disturbance."""
    for rate in links.rates:
        found = cells(links, links.conditions[0], rate)
        trial = max(found, key=lambda cell: (cell.connection == "warm", cell.bytes))
        trials = lanes.measure([trial], TRIAL, until=math.inf, attempts=1)
        voids = [measured.void async for measured in trials]
        if not any(voids):
            return rate
        print(f"{links.name} at {rate / 1e6:g} Mbit/s: {'; '.join(*voids)}")
    raise UnavailableError("lab.capacity", f"this machine is too busy for the {links.name} links")


def _rates(wanted: Sequence[Links], store: "Store", asked: int | None) -> dict[str, int]:
    """Return the rate by kind of link: as requested, as in earlier results, or as sustained."""
    return {
        links.name: asked or store.rate(links) or asyncio.run(choose_rate(links))
        for links in wanted
    }


class Store:
    """Results of this build and effort; void cells are kept but will be measured again."""

    def __init__(self, path: Path, effort: Effort) -> None:
        made_by = f"{digest([daemons, lanes, session_peer, tcp_peer])} {effort.count}"
        self._records = Records(path, made_by=made_by)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a cell, if there is one."""
        return self._records.get(json.dumps(cell.key))

    def rate(self, links: Links) -> int | None:
        """Return the rate of earlier results, which a continued run has to use."""
        known = self._records.all()
        rates = [int(found["rate"]) for found in known if found["links"] == links.name]
        return rates[-1] if rates else None

    def put(self, found: dict[str, Any]) -> None:
        """Save a result."""
        self._records.put(json.dumps([found[name] for name in report.KEY]), found)


async def _measure(wanted: Sequence[Cell], store: Store, effort: Effort, until: float) -> None:
    missing = [cell for cell in wanted if (found := store.get(cell)) is None or found["void"]]
    with Progress() as progress:
        task = progress.add_task("cells", total=len(wanted), completed=len(wanted) - len(missing))
        groups: dict[tuple[Links, Condition], list[Cell]] = {}
        for cell in missing:
            groups.setdefault((cell.links, cell.condition), []).append(cell)
        for mine in groups.values():
            if time.monotonic() > until:
                break
            async for measured in lanes.measure(mine, effort, until=until):
                store.put(lanes.to_dict(measured))
                progress.advance(task)


def run(arguments: argparse.Namespace) -> int:
    """Measure missing cells; print, save and draw all results."""
    packets.build()
    until = time.monotonic() + 60 * arguments.minutes
    effort = QUICK if arguments.quick else FULL
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    store = Store(output / "cells.jsonl", effort)
    kinds = [links for links in LINKS if not arguments.links or links.name in arguments.links]
    rates = _rates(kinds, store, arguments.rate)
    wanted = [
        cell
        for links in kinds
        for condition in links.conditions
        if not arguments.loss or condition.name in arguments.loss
        for cell in cells(links, condition, rates[links.name])
    ]
    asyncio.run(_measure(wanted, store, effort, until))
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
    if left := len(wanted) - sum(not result.void for result in results):
        console.print(f"{left} of {len(wanted)} cells void or not measured: run again to continue")
    console.print(f"saved in {output}")
    return 0
