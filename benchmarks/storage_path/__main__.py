"""`python -m benchmarks.storage_path`: what the secure path costs beside the plain one.

Load, gateway and target are threads of this process. Three ways run alternately in each round:
plain (load, target), secure (load at the gateway's own queue, target: the gateway is the initiator
as in the sNVMe-oF paper) and through the gateway's front end (load, gateway, target).

Two tables. Processor-bound: the store is memory (--files: a file); what the secure path adds in
processor time an I/O. Device-bound: both namespaces lie on an emulated drive, the paper's WD SN655
made so slow, in this run and for each cell, that SHARE of one core would do for the plain path
at what an I/O costs it in memory.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Final

from benchmarks.storage.cells import Cell, Sample, all_cells
from benchmarks.storage.report import write_json
from benchmarks.storage_path.drive import Drive
from benchmarks.storage_path.report import bound_table, cost_table, plot
from benchmarks.storage_path.world import FRONT_END, PLAIN, SYSTEMS, World
from rich.console import Console

TABLE_COLUMNS: Final = 132


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.storage_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--seconds", type=float, default=0.6, help="time per cell, way and round (0.6)")
    add("--rounds", type=int, default=5, help="rounds; medians are shown (5)")
    add("--depth", type=int, default=32, help="commands outstanding (32)")
    add("--span-mib", type=int, default=256, help="MiB of the namespace (256)")
    add("--share", type=float, default=0.6, help="of a core, for the plain path (0.6)")
    add("--files", type=Path, metavar="DIRECTORY", help="files there, instead of memory")
    add("--only", metavar="TEXT", help="only cells whose name contains TEXT")
    add("--output", type=Path, default=Path("sealane-storage-path"), help="directory")
    return found


def rounds(world: World, cell: Cell, arguments: argparse.Namespace) -> list[Sample]:
    """Measure one cell on every way, round by round, each round starting with another way."""
    return [
        world.measure(
            SYSTEMS[(turn + round_) % len(SYSTEMS)],
            cell,
            seconds=arguments.seconds,
            round_=round_ + 1,
        )
        for round_ in range(arguments.rounds)
        for turn in range(len(SYSTEMS))
    ]


def drive_for(samples: list[Sample], cell: Cell, share: float) -> tuple[int, Drive]:
    """Operations per second at which the plain path uses `share` of a core, and that drive."""
    costs = [sum(s.cpu_us_per_command.values()) for s in samples if s.system == PLAIN]
    rate = int(share * 1e6 / statistics.median(costs))
    return rate, Drive.of_rate(rate, cell)


def measure_cell(
    cell: Cell, arguments: argparse.Namespace, console: Console
) -> tuple[list[Sample], list[Sample], int]:
    """Processor-bound samples, device-bound samples, and the drive's rate."""
    span_bytes = arguments.span_mib << 20
    with contextlib.ExitStack() as stack:
        world = World(stack, span_bytes=span_bytes, directory=arguments.files)
        # Twice: a file system gives blocks out at their first write.
        for _ in range(1 if arguments.files is None else 2):
            world.prefill((PLAIN, FRONT_END))
        costs = rounds(world, cell, arguments)
    rate, drive = drive_for(costs, cell, arguments.share)
    console.print(f"{cell.title}: the plain path uses {arguments.share} of a core at {rate:,} IOPS")
    with contextlib.ExitStack() as stack:
        world = World(stack, span_bytes=span_bytes, drive=drive)
        world.prefill((PLAIN, FRONT_END))
        bound = rounds(world, cell, arguments)
    return costs, bound, rate


def main() -> int:
    """Run both comparisons; show tables, keep JSON and plot."""
    arguments = parser().parse_args()
    console = Console(width=TABLE_COLUMNS) if not sys.stdout.isatty() else Console()
    cells = [
        cell
        for cell in all_cells((arguments.depth,), (1,))
        if not arguments.only or arguments.only in cell.name
    ]
    if not cells:
        raise SystemExit(f"--only {arguments.only}: no cell's name contains it")
    costs: list[Sample] = []
    bound: list[Sample] = []
    rates: dict[str, int] = {}
    for cell in cells:
        of_memory, of_drive, rates[cell.name] = measure_cell(cell, arguments, console)
        costs += of_memory
        bound += of_drive
    console.print(bound_table(bound, cells, rates), cost_table(costs, cells))
    arguments.output.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(arguments).items()} | {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg(),
        "drive_iops": rates,
    }
    for name, samples in (("processor-bound", costs), ("device-bound", bound)):
        write_json(arguments.output / f"{name}.json", samples, cells, SYSTEMS, settings)
    plot(arguments.output / "storage-path.png", bound, costs, cells)
    console.print(f"JSON and storage-path.png in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
