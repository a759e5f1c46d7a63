"""`python -m benchmarks.sessions workers`: goodput of a session against path threads, by a model.

Measures what a packet costs the threads of a session here, over loopback: at a series of rates, the
goodput is the highest at which less than 0.1 % of the packets were sent again; the costs are
medians of the runs with more than half of it. Those with one path thread go into a model of the
threads and their queues (`benchmarks/sessions/workers/model.py`). It predicts the goodput on the
cores of this machine for the path threads that were measured, and with a core for each thread for 1
to 8: as built, and if path threads also copied into the region, as the paper's do. Errors are
printed: beside this machine, beside what the threads should have done in the processor time they
got, and beside the rise that 16 other cores saw. From the same figures: what 400 Gbit/s would take.

Prints tables, saves `workers.json` and draws `workers.png`. `--runs` reads the runs of another
`workers.json` instead of measuring.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from benchmarks.sessions.threads_command import LOSS_MAX, UNITS
from benchmarks.sessions.workers.measure import Run, Shape, measured
from benchmarks.sessions.workers.model import (
    Costs,
    Line,
    landing_in_workers,
    packets_per_second,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

SUMMARY: Final = "goodput of a session against path threads, by a model of measured costs"
MEASURED: Final = (0, 1, 2)
MODELLED: Final = tuple(range(1, 9))
GOAL_BITS_PER_SECOND: Final = 400e9
UNBOUND_CORES: Final = 2 * (max(MODELLED) + 1)
"""One for each thread of both ends."""
STAGES: Final = ("sender_own", "sender_path", "receiver_path", "receiver_own")

SIXTEEN_CORES: Final = {
    1408: {1: 20.4e9, 2: 23.6e9, 4: 15.9e9, 8: 15.5e9},
    8896: {1: 26.2e9, 2: 41.8e9, 4: 43.2e9, 8: 39.1e9},
}
"""Goodput by path threads where each thread had a core (docs/decisions/0088-path-threads.md)."""

Measured = tuple[Shape, Run]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2, 4, 6, 8, 12, 16, 24], help="Gbit/s"
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds (default 1)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a run (default 0.6)")
    parser.add_argument("--runs", type=Path, help="a workers.json whose runs to use")
    parser.add_argument("--images", type=Path, help="where else to put the plot")
    parser.add_argument("--output", type=Path, default=Path("sealane-sessions/workers"))


def measure(arguments: argparse.Namespace) -> list[Measured]:
    """Make all runs; one that fails is reported and left out."""
    shapes = [
        Shape(
            unit_bytes=unit,
            workers=workers,
            rate_bits_per_second=round(rate * 1e9),
            seconds=arguments.seconds,
        )
        for _ in range(arguments.rounds)
        for rate in arguments.rates
        for workers in MEASURED
        for unit in UNITS
    ]
    runs = []
    for shape in track(shapes, description="runs"):
        try:
            runs.append((shape, measured(shape)))
        except subprocess.CalledProcessError as error:
            print(f"{shape}: {error.stderr.splitlines()[-1:]}", file=sys.stderr)
    return runs


def fast(runs: list[Measured], unit: int, workers: int) -> list[Run]:
    """Return the runs that the receiver kept up with, the fastest first; none of half its goodput.

    Raises ValueError if there is none.
    """
    found = sorted(
        (
            run
            for shape, run in runs
            if (shape.unit_bytes, shape.workers) == (unit, workers) and run.loss < LOSS_MAX
        ),
        key=lambda run: -run.goodput,
    )
    if not found:
        raise ValueError(f"no run with units of {unit} and {workers} path threads without losses")
    return [run for run in found if run.goodput > found[0].goodput / 2]


def costs_of(runs: list[Run]) -> Costs:
    """Return what a packet cost each thread: medians."""
    of = {
        stage: median(getattr(run, f"{stage}_nanos") / run.packets for run in runs)
        for stage in STAGES
    }
    return Costs(**of)


def analysed(runs: list[Measured], cores: int) -> dict[str, Any]:
    """Return costs, predictions and their errors."""
    good = {(unit, workers): fast(runs, unit, workers) for unit in UNITS for workers in MEASURED}
    costs = {at: costs_of(found) for at, found in good.items()}
    top = {at: found[0] for at, found in good.items()}
    of_one = {unit: costs[unit, 1] for unit in UNITS}
    lines = {
        stage: Line.through({unit: getattr(of_one[unit], stage) for unit in UNITS})
        for stage in STAGES
    }
    figures: dict[str, Any] = {
        "cores": cores,
        "costs_nanos": {f"{unit},{n}": asdict(cost) for (unit, n), cost in costs.items()},
        "lines_nanos": {stage: asdict(line) for stage, line in lines.items()},
        "measured_bits_per_second": {f"{unit},{n}": run.goodput for (unit, n), run in top.items()},
        "here": {},
        "rise_beside_16_cores": {},
        "unbound": {},
        "landing_in_workers": {},
        "paper_400_gbit": {},
    }
    for unit in UNITS:
        run = top[unit, 1]
        batch = run.packets / max(1, run.send_calls)

        def goodput(
            costs: Costs, workers: int, cores: int, unit: int = unit, batch: float = batch
        ) -> float:
            rate = packets_per_second(costs, workers=workers, batch_packets=batch, cores=cores)
            return rate * unit * 8

        landing = landing_in_workers(of_one[unit], unit_bytes=unit, copies=lines)
        for workers in MEASURED[1:]:
            made = top[unit, workers]
            said = goodput(of_one[unit], workers, cores)
            # On a machine that others use: what the model makes of the processor time it got.
            got = made.processor_nanos / made.seconds / of_one[unit].total * unit * 8
            figures["here"][f"{unit},{workers}"] = {
                "model": said,
                "measured": made.goodput,
                "error": said / made.goodput - 1,
                "model_of_processor_time": got,
                "error_of_processor_time": got / made.goodput - 1,
                "waited_part": made.waited_nanos / (made.waited_nanos + made.processor_nanos),
            }
            if workers > 1:
                one, more = (goodput(of_one[unit], count, UNBOUND_CORES) for count in (1, workers))
                found = SIXTEEN_CORES[unit][workers] / SIXTEEN_CORES[unit][1]
                figures["rise_beside_16_cores"][str(unit)] = {
                    "model": more / one,
                    "measured": found,
                    "error": more / one / found - 1,
                }
        for name, per_packet in (("unbound", of_one[unit]), ("landing_in_workers", landing)):
            figures[name][str(unit)] = [
                goodput(per_packet, workers, UNBOUND_CORES) for workers in MODELLED
            ]
        budget = unit * 8 / GOAL_BITS_PER_SECOND * 1e9
        figures["paper_400_gbit"][str(unit)] = {
            "packet_nanos": budget,
            **{f"{stage}_threads": ceil(getattr(of_one[unit], stage) / budget) for stage in STAGES},
            "sessions": ceil(max(of_one[unit].sender_own, of_one[unit].receiver_own) / budget),
            "sessions_landing_in_workers": max(
                1, ceil(max(landing.sender_own, landing.receiver_own) / budget)
            ),
            "workers_landing_in_workers": ceil(
                max(landing.sender_path, landing.receiver_path) / budget
            ),
        }
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table(title="ns of a packet, by thread")
    for column in ("unit", "path threads", *STAGES, "sum", "Gbit/s here"):
        table.add_column(column, justify="right")
    for at, costs in figures["costs_nanos"].items():
        unit, workers = at.split(",")
        cells = [f"{costs[stage]:.0f}" for stage in STAGES]
        rate = figures["measured_bits_per_second"][at] / 1e9
        table.add_row(unit, workers, *cells, f"{sum(costs.values()):.0f}", f"{rate:.2f}")
    console.print(table)
    table = Table(title=f"model beside what {figures['cores']} cores reached, Gbit/s")
    for column in ("unit", "path threads", "model", "measured", "error", "of processor time"):
        table.add_column(column, justify="right")
    table.add_column("waited for a core", justify="right")
    for at, row in figures["here"].items():
        rates = [f"{row[name] / 1e9:.2f}" for name in ("model", "measured")]
        errors = [f"{row[name]:+.0%}" for name in ("error", "error_of_processor_time")]
        table.add_row(*at.split(","), *rates, *errors, f"{row['waited_part']:.0%}")
    console.print(table)
    table = Table(title="goodput of two path threads over that of one, a core for each thread")
    for column in ("unit", "model", "16 cores", "error"):
        table.add_column(column, justify="right")
    for unit, row in figures["rise_beside_16_cores"].items():
        table.add_row(unit, f"{row['model']:.2f}", f"{row['measured']:.2f}", f"{row['error']:+.0%}")
    console.print(table)
    table = Table(title="model with a core for each thread, Gbit/s by path threads")
    for column in ("unit", "design", *map(str, MODELLED)):
        table.add_column(column, justify="right")
    for name, design in (("unbound", "as built"), ("landing_in_workers", "workers copy")):
        for unit in UNITS:
            rates = [f"{rate / 1e9:.1f}" for rate in figures[name][str(unit)]]
            table.add_row(str(unit), design, *rates)
    console.print(table)
    table = Table(title="400 Gbit/s on paper")
    for column in ("", *figures["paper_400_gbit"]):
        table.add_column(column, justify="right")
    for name in next(iter(figures["paper_400_gbit"].values())):
        values = (f"{row[name]:.0f}" for row in figures["paper_400_gbit"].values())
        table.add_row(name.replace("_", " "), *values)
    console.print(table)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw goodput against path threads."""
    figure, panels = plt.subplots(1, len(UNITS), figsize=(9, 3.8), layout="constrained")
    for axes, unit in zip(panels, UNITS, strict=True):
        for name, label, style in (
            ("unbound", "model, as built", "-"),
            ("landing_in_workers", "model, workers copy", "--"),
        ):
            rates = [rate / 1e9 for rate in figures[name][str(unit)]]
            axes.plot(MODELLED, rates, style, label=f"{label}, a core each")
        for kind, marker in (("model", "x"), ("measured", "o")):
            points = [figures["here"][f"{unit},{workers}"][kind] / 1e9 for workers in MEASURED[1:]]
            label = f"{kind}, {figures['cores']} cores for both ends"
            axes.plot(MEASURED[1:], points, marker, label=label)
        there = SIXTEEN_CORES[unit]
        axes.plot([*there], [rate / 1e9 for rate in there.values()], "s", label="16 other cores")
        axes.set(title=f"{unit} bytes a packet", xlabel="path threads of each end", xticks=MODELLED)
        axes.set_ylabel("goodput, Gbit/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[1].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read runs; model, print, save and draw."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.runs:
        document = json.loads(arguments.runs.read_text())
        runs = [(Shape(**one["shape"]), Run(**one["run"])) for one in document["runs"]]
        cores = document["figures"]["cores"]
    else:
        runs, cores = measure(arguments), os.cpu_count() or 1
    figures = analysed(runs, cores)
    document = {
        "runs": [{"shape": asdict(shape), "run": asdict(one)} for shape, one in runs],
        "figures": figures,
    }
    (arguments.output / "workers.json").write_text(json.dumps(document, indent=1) + "\n")
    console = Console()
    show(figures, console)
    plot(figures, arguments.output / "workers.png")
    if arguments.images:
        plot(figures, arguments.images / "session-workers.png")
    console.print(f"saved in {arguments.output}")
    return 0
