"""`python -m benchmarks.sessions simulate [E1 …]`: the paper's experiments in virtual time.

Measures missing cells on all cores until the time budget is used up; run it again to continue.
Prints how well the stack and the model agree, saves everything as JSON and draws a plot for each
experiment. Fails if a mean is more than 5 % off the model where the model is exact.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.kept import add_run_options, run_missing
from benchmarks.sessions.simulate import report
from benchmarks.sessions.simulate.cells import Cell, measure
from benchmarks.sessions.simulate.experiments import (
    EXPERIMENTS,
    FULL,
    QUICK,
    Effort,
    Experiment,
)
from benchmarks.sessions.simulate.plots import draw
from benchmarks.sessions.simulate.store import Store
from rich.console import Console

SUMMARY: Final = "the paper's experiments in virtual time, stack compared with model"
NAMES: Final = [experiment.name for experiment in EXPERIMENTS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add(
        "experiments",
        nargs="*",
        choices=[*NAMES, []],
        metavar="EXPERIMENT",
        help="experiments to run (default: all)",
    )
    add("--quick", action="store_true", help="fewer messages, no long ones")
    add_run_options(parser, output="simulate")
    add("--images", type=Path, help="also save the plots here, for the documentation")


def _wanted(experiments: list[Experiment], effort: Effort) -> dict[str, tuple[Cell, bool]]:
    """Return each cell once, by its key, and whether its samples are needed."""
    found: dict[str, tuple[Cell, bool]] = {}
    for experiment in experiments:
        for cell in experiment.cells(effort):
            _, keeps = found.get(cell.key, (cell, False))
            found[cell.key] = (cell, keeps or experiment.keeps_samples)
    return found


def _run_cells(
    wanted: dict[str, tuple[Cell, bool]], store: Store, *, minutes: float, jobs: int
) -> None:
    """Measure missing cells within the time budget, long ones first."""
    missing = [(c, k) for c, k in wanted.values() if store.get(c, with_samples=k) is None]
    missing.sort(key=lambda item: -item[0].message_bytes * item[0].runs)
    calls = [partial(measure, cell, keep_samples=keeps) for cell, keeps in missing]
    run_missing(calls, store.put, total=len(wanted), minutes=minutes, jobs=jobs)


def run(arguments: argparse.Namespace) -> int:
    """Measure missing cells; print, save and draw complete experiments."""
    names = arguments.experiments or NAMES
    experiments = [experiment for experiment in EXPERIMENTS if experiment.name in names]
    effort = QUICK if arguments.quick else FULL
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    store = Store(output / "cells.jsonl")
    wanted = _wanted(experiments, effort)
    _run_cells(wanted, store, minutes=arguments.minutes, jobs=arguments.jobs)
    console = Console(width=150)
    results: list[report.Result] = []
    for experiment in experiments:
        cells = list(experiment.cells(effort))
        found = [store.get(cell, with_samples=experiment.keeps_samples) for cell in cells]
        measured = [one for one in found if one is not None]
        if len(measured) < len(cells):
            left = len(cells) - len(measured)
            console.print(f"{experiment.name}: {left} cells left: run again to continue")
            continue
        result = report.Result(experiment=experiment, effort=effort, measured=measured)
        results.append(result)
        name = experiment.name.lower()
        document = json.dumps(report.document(result), indent=1)
        (output / f"{name}.json").write_text(document + "\n")
        draw(output / f"{name}.png", result)
        if arguments.images:
            draw(arguments.images / f"sessions-{name}.png", result)
        for table in report.tables(result):
            console.print(table)
    console.print(report.budget(results))
    console.print(report.agreement(results))
    console.print(f"saved in {output}")
    return 1 if report.disagreements(results) else 0
