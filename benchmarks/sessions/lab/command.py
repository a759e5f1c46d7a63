"""`python -m benchmarks.sessions lab`: completion times of messages beside TCP and QUIC.

One lab for each kind of link and loss, links of its own for each way of sending, all alike: 25
ms of round trip, one MTU, one rate, to which sessions and TCP also pace. Ways take turns.
Cells that the machine disturbed are repeated; what is measured is kept, and the same command again
goes on. Prints tables, keeps every time as JSON, draws a plot. Needs root (namespaces) and Cargo
(the QUIC peer).
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.sessions import packets
from benchmarks.sessions.digests import digest
from benchmarks.sessions.kept import Records
from benchmarks.sessions.lab import lanes, report, session_peer, tcp_peer
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

SUMMARY: Final = "completion times of messages over long links, beside TCP and QUIC"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command."""
    add = parser.add_argument
    add("--quick", action="store_true", help="60 messages of each kind")
    add("--minutes", type=float, default=9.0, help="start no cell after this time (9)")
    add("--links", nargs="+", choices=[links.name for links in LINKS], help="only these (all)")
    add("--loss", nargs="+", choices=[c.name for c in CONDITIONS], help="only these (all)")
    add(
        "--rate",
        type=int,
        help="of the links, bit/s (the last run's, or what this machine carries)",
    )
    add("--output", type=Path, default=Path("sealane-sessions/lab"), help="directory")
    add("--images", type=Path, help="keep the plot there, too, for the documentation")


async def choose_rate(links: Links) -> int:
    """Return the highest rate at which the machine disturbs nobody: each is tried."""
    for rate in links.rates:
        trial = max(cells(links, links.conditions[0], rate), key=lambda c: (not c.is_cold, c.bytes))
        trials = lanes.measure([trial], TRIAL, until=math.inf, attempts=1)
        found = [measured.void async for measured in trials]
        if not any(found):
            return rate
        print(f"{links.name} at {rate / 1e6:g} Mbit/s: {'; '.join(*found)}")
    raise UnavailableError("lab.capacity", f"this machine is too busy for the {links.name} links")


def _rates(wanted: Sequence[Links], store: "Store", asked: int | None) -> dict[str, int]:
    """Rates by kind of link: as asked, or those of what is known, or what the machine carries."""
    return {
        links.name: asked or store.rate(links) or asyncio.run(choose_rate(links))
        for links in wanted
    }


class Store:
    """What is known, of this build and effort only; void cells are known but not done."""

    def __init__(self, path: Path, effort: Effort) -> None:
        made_by = f"{digest([lanes, session_peer, tcp_peer])} {effort.count}"
        self._records = Records(path, made_by=made_by)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return what was measured, if it was."""
        return self._records.get(json.dumps(cell.key))

    def rate(self, links: Links) -> int | None:
        """Rate of what is known of such links: a run that goes on keeps to it."""
        known = self._records.all()
        rates = [int(found["rate"]) for found in known if found["links"] == links.name]
        return rates[-1] if rates else None

    def put(self, found: dict[str, Any]) -> None:
        """Keep it."""
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
    """Measure, print, keep, draw."""
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
        console.print(f"{left} of {len(wanted)} cells void or not measured: run again to go on")
    console.print(f"kept: {output}")
    return 0
