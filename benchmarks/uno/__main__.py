"""`python -m benchmarks.uno [FIGURE …]`: Uno's evaluation in virtual time.

Runs missing cells on all cores until the time budget is used up; run it again to continue. Prints a
table for each complete figure, saves all records as JSON and draws plots. With the environment
variable SEALANE_UNO_TRAFFIC (a directory with the traffic matrices of Uno's released code), it also
replays these. Fails if a goal is missed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.digests import digest
from benchmarks.kept import Records, add_run_options, run_missing
from benchmarks.uno import cells, goals, networks, traffic
from benchmarks.uno.cells import Cell, call
from benchmarks.uno.figures import FIGURES, FULL, QUICK
from benchmarks.uno.plots import draw
from benchmarks.uno.report import table
from rich.console import Console

NAMES: Final = [figure.name for figure in FIGURES]
COLUMNS: Final = 190


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.uno",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "figures",
        nargs="*",
        choices=[[], *NAMES],
        metavar="FIGURE",
        help=f"figures to run, of {', '.join(NAMES)} (default: all)",
    )
    found.add_argument("--quick", action="store_true", help="one seed, short flows: a minute")
    add_run_options(found, output=".", group="sealane-uno")
    found.add_argument("--images", type=Path, help="also save the plots here")
    return found


def _cost(cell: Cell) -> int:
    return sum(flow[3] for flow in cell.flows)


def main() -> int:
    """Run the benchmark."""
    arguments = parser().parse_args()
    effort = QUICK if arguments.quick else FULL
    figures = [figure for figure in FIGURES if figure.name in (arguments.figures or NAMES)]
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    records = Records(
        output / f"cells{'-quick' if arguments.quick else ''}.jsonl",
        made_by=digest((cells, networks, traffic)),
    )
    wanted = {cell.key: cell for figure in figures for cell in figure.cells(effort)}
    missing = [cell for key, cell in wanted.items() if records.get(key) is None]
    missing.sort(key=_cost, reverse=True)
    run_missing(
        [call(cell) for cell in missing],
        lambda record: records.put(record["key"], record),
        total=len(wanted),
        minutes=arguments.minutes,
        jobs=arguments.jobs,
    )
    console = Console(width=COLUMNS)
    kept: list[dict[str, Any]] = []
    for figure in figures:
        keys = [cell.key for cell in figure.cells(effort)]
        found = [record for key in keys if (record := records.get(key)) is not None]
        if len(found) < len(keys):
            console.print(
                f"figure {figure.name}: {len(keys) - len(found)} cells left: run again to continue"
            )
        if not found or len(found) < len(keys):
            continue
        kept += found
        console.print(table(figure.title, found))
        for directory in filter(None, (output, arguments.images)):
            draw(directory / f"uno-{figure.name}.png", figure.name, figure.title, found)
    document = {"quick": arguments.quick, "cells": kept}
    (output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    seconds = sum(record["processor_seconds"] for record in kept)
    if goals.table(kept).row_count:
        console.print(goals.table(kept))
    console.print(f"{len(kept)} cells, {seconds:,.0f} s of processor time; saved in {output}")
    return 1 if goals.missed(kept) else 0


if __name__ == "__main__":
    sys.exit(main())
