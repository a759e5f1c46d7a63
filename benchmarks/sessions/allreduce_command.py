"""`python -m benchmarks.sessions allreduce`: rings of 2 to 8 sites in virtual time.

Real session machines run the client's schedule of an all-reduce of 128 MiB at 400 Gbit/s with a
round trip of 25 ms: as `rounds`, a segment at a time, each acknowledged before the next one is sent
(SDR-RDMA, Fig. 13), and in 16 overlapping pieces, as the client does it. Measures missing cells
until the time budget is used up; run it again to continue. Prints a table that compares the stack
with the model, saves JSON and draws a plot. Fails if a mean is more than 5 % off the model where
the model is exact.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.digests import MODEL, digest
from benchmarks.kept import Records, add_run_options, run_missing
from benchmarks.sessions import allreduce, intervals
from benchmarks.sessions.allreduce import LOSSES, Cell, Measured, cells, measure
from benchmarks.sessions.simulate import curves
from rich import box
from rich.console import Console
from rich.table import Table

import sealane.client.collectives.schedule

mpl.use("Agg")
from matplotlib import pyplot as plt

SUMMARY: Final = "all-reduces around rings in virtual time, stack compared with model"
PACKETS: Final = 4_000_000
PACKETS_QUICK: Final = 400_000
MARKERS: Final = "osD"
SOURCES: Final = (allreduce, intervals, curves, sealane.client.collectives.schedule)
"""Sources that results depend on, besides the engine and the model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    add = parser.add_argument
    add("--quick", action="store_true", help="a tenth of the rings")
    add_run_options(parser, output="allreduce")


def run(arguments: argparse.Namespace) -> int:
    """Measure missing cells; once all are there, print, save and draw the results."""
    wanted = list(cells(PACKETS_QUICK if arguments.quick else PACKETS))
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    records = Records(output / "cells.jsonl", made_by=digest(SOURCES, MODEL))
    _run_cells(wanted, records, minutes=arguments.minutes, jobs=arguments.jobs)
    found = [records.get(cell.key) for cell in wanted]
    measured = [Measured.from_dict(record) for record in found if record is not None]
    console = Console(width=130)
    if len(measured) < len(wanted):
        left = len(wanted) - len(measured)
        console.print(f"{left} of {len(wanted)} cells left: run again to continue")
        return 0
    rows = [one.to_dict() | {"ratio": one.ratio, "way": one.cell.way} for one in measured]
    (output / "allreduce.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(output / "allreduce.png", measured)
    console.print(table(measured))
    exact = [one.ratio for one in measured if one.cell.is_exact]
    other = [one.ratio for one in measured if not one.cell.is_exact]
    for name, ratios in (("model exact", exact), ("model approximate", other)):
        console.print(
            f"{name}: {len(ratios)} cells, mean of the stack over that of the model from "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    seconds = sum(one.processor_seconds for one in measured)
    packets = sum(one.packets for one in measured)
    console.print(f"{packets / 1e6:.0f} million packets, {seconds:.0f} s of processor time")
    console.print(f"saved in {output}")
    return 1 if any(one.is_beyond for one in measured) else 0


def _run_cells(wanted: Sequence[Cell], records: Records, *, minutes: float, jobs: int) -> None:
    """Measure missing cells within the time budget, long ones first."""
    missing = [cell for cell in wanted if records.get(cell.key) is None]
    missing.sort(key=lambda cell: -cell.packets)
    run_missing(
        [partial(measure, cell) for cell in missing],
        lambda one: records.put(one.cell.key, one.to_dict()),
        total=len(wanted),
        minutes=minutes,
        jobs=jobs,
    )


def table(measured: Sequence[Measured]) -> Table:
    """Return a table with a row per cell."""
    found = Table(
        title="All-reduce of 128 MiB around a ring; 400 Gbit/s, round trip 25 ms",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    headings = ("sites", "loss", "scheme", "schedule", "rings", "ideal ms", "mean ms")
    for heading in (*headings, "mean ms\n(model)", "ratio", "p99 ms", "p99 ms\n(model)"):
        found.add_column(heading, justify="left" if heading in {"scheme", "schedule"} else "right")
    for one in measured:
        cell, summary = one.cell, one.summary
        p99 = "" if summary.p99 is None else f"{summary.p99 * 1e3:.1f}"
        found.add_row(
            *(str(cell.sites), f"{cell.loss:g}", cell.scheme.name, cell.way, str(cell.rings)),
            *(f"{seconds * 1e3:.1f}" for seconds in (one.ideal, summary.mean, one.model_mean)),
            *(f"{one.ratio:.3f}", p99, f"{one.model_p99 * 1e3:.1f}"),
        )
    return found


def draw(path: Path, measured: Sequence[Measured]) -> None:
    """Draw means by number of sites, a panel for each loss and schedule."""
    ways = list(dict.fromkeys(one.cell.way for one in measured))
    schemes = list(dict.fromkeys(one.cell.scheme for one in measured))
    figure, panels = plt.subplots(
        len(ways), len(LOSSES), figsize=(13, 6.4), sharex=True, squeeze=False
    )
    for row, way in zip(panels, ways, strict=True):
        for axes, loss in zip(row, LOSSES, strict=True):
            for index, scheme in enumerate(schemes):
                mine = [
                    one
                    for one in measured
                    if (one.cell.way, one.cell.loss, one.cell.scheme) == (way, loss, scheme)
                ]
                sites = [one.cell.sites for one in mine]
                means = [one.summary.mean * 1e3 for one in mine]
                ends = [[end * 1e3 for end in one.summary.mean_interval] for one in mine]
                errors = [
                    [mean - low for mean, (low, _) in zip(means, ends, strict=True)],
                    [high - mean for mean, (_, high) in zip(means, ends, strict=True)],
                ]
                axes.errorbar(
                    *(sites, means, errors),
                    color=f"C{index}",
                    fmt=MARKERS[index],
                    markersize=4,
                    label=scheme.name,
                )
                axes.plot(sites, [one.model_mean * 1e3 for one in mine], f"C{index}", linewidth=1)
            ideals = {one.cell.sites: one.ideal * 1e3 for one in measured if one.cell.way == way}
            axes.plot(
                list(ideals), list(ideals.values()), color="grey", linestyle=":", label="ideal"
            )
            axes.set_title(f"{way}, P = {loss:g}", fontsize=10)
            axes.set_ylim(bottom=0)
        row[0].set_ylabel("mean completion, ms")
    for axes in panels[-1]:
        axes.set_xlabel("sites")
    panels[0][0].legend(fontsize=8)
    figure.suptitle("All-reduce of 128 MiB around a ring; 400 Gbit/s, round trip 25 ms")
    legend = (
        "Points: stack; bars: 95 % confidence intervals of the mean; lines: model. P: packet loss"
    )
    figure.text(0.5, 0.005, legend, ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
