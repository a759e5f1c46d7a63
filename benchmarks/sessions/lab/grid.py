"""A grid of cells: choice of a rate that the machine sustains, kept results, continued runs."""

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
from benchmarks.sessions.lab import daemons, lanes, session_peer, tcp_peer
from benchmarks.sessions.lab.cells import KEY, TRIAL, Cell, Condition, Effort, Links, cells
from rich.console import Console
from rich.progress import Progress

from sealane.errors import UnavailableError

TRIAL_BYTES: Final = 1 << 23
"""Longer messages take too long for a trial."""


def add_arguments(
    parser: argparse.ArgumentParser, kinds: Sequence[Links], *, minutes: float, output: str
) -> None:
    """Add the options of a measurement of these kinds of links that can be continued."""
    add = parser.add_argument
    add(
        "--minutes",
        type=float,
        default=minutes,
        help=f"minutes after which no cell starts (default {minutes:g})",
    )
    add("--links", nargs="+", choices=[k.name for k in kinds], help="kinds of links (default all)")
    add(
        "--rate",
        type=int,
        help="rate of the links in bit/s (default: the last run's, or what this machine sustains)",
    )
    add("--output", type=Path, default=Path(output), help="directory for results")
    add("--images", type=Path, help="also save the plot here, for the documentation")


def say_rest(console: Console, voids: Sequence[Sequence[str]], wanted: int, output: Path) -> None:
    """Print how many cells are missing, given why each result is void, and where results are."""
    if left := wanted - sum(not void for void in voids):
        console.print(f"{left} of {wanted} cells void or not measured: run again to continue")
    console.print(f"saved in {output}")


async def choose_rate(links: Links) -> int:
    """Try the rates in turn; return the first that the machine sustains without disturbance."""
    for rate in links.rates:
        found = cells(links, links.conditions[0], rate)
        warm = [cell for cell in found if cell.connection == "warm"]
        trial = max(warm, key=lambda cell: (cell.bytes <= TRIAL_BYTES, cell.bytes))
        trials = lanes.measure([trial], TRIAL, until=math.inf, attempts=1)
        voids = [measured.void async for measured in trials]
        if not any(voids):
            return rate
        print(f"{links.name} at {rate / 1e6:g} Mbit/s: {'; '.join(*voids)}")
    raise UnavailableError("lab.capacity", f"this machine is too busy for the {links.name} links")


def rates(kinds: Sequence[Links], store: "Store", asked: int | None) -> dict[str, int]:
    """Return the rate by kind of link: as requested, as in earlier results, or as sustained."""
    return {
        links.name: asked or store.rate(links) or asyncio.run(choose_rate(links)) for links in kinds
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
        self._records.put(json.dumps([found[name] for name in KEY]), found)


async def measure_missing(
    wanted: Sequence[Cell], store: Store, effort: Effort, until: float
) -> None:
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
