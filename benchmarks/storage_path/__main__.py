"""`python -m benchmarks.storage_path`: cost of the secure data path compared with the plain one.

Load, gateway and target are threads of this process. Each round runs three paths alternately:
plain (load, target), secure (load on the gateway's own queue, target: the gateway is the initiator,
as in the sNVMe-oF paper) and front end (load, gateway's front end, target).

It prints two tables. Processor-bound: the store is memory (with --files, a file), and the table
shows the processor time per I/O that the secure path adds. Device-bound: both namespaces are on an
emulated drive, a WD SN655 as in the paper. For each cell the drive is slowed down until the plain
path needs SHARE of one core, computed from its processor-bound cost in the same run.
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
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.storage_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--seconds", type=float, default=0.6, help="seconds per cell, path and round (default 0.6)")
    add("--rounds", type=int, default=5, help="rounds; tables show medians (default 5)")
    add("--depth", type=int, default=32, help="commands outstanding (default 32)")
    add("--span-mib", type=int, default=256, help="size of the namespace in MiB (default 256)")
    add("--share", type=float, default=0.6, help="share of a core for the plain path (default 0.6)")
    add("--files", type=Path, metavar="DIRECTORY", help="use files there instead of memory")
    add("--only", metavar="TEXT", help="only cells whose name contains TEXT")
    add("--output", type=Path, default=Path("sealane-storage-path"), help="directory for results")
    return found


def rounds(world: World, cell: Cell, arguments: argparse.Namespace) -> list[Sample]:
    """Measure one cell on every path, round by round; each round starts with another path."""
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
    """Return the rate (IOPS) at which the plain path uses `share` of a core, and a drive of it."""
    costs = [sum(s.cpu_us_per_command.values()) for s in samples if s.system == PLAIN]
    rate = int(share * 1e6 / statistics.median(costs))
    return rate, Drive.of_rate(rate, cell)


def measure_cell(
    cell: Cell, arguments: argparse.Namespace, console: Console
) -> tuple[list[Sample], list[Sample], int]:
    """Return processor-bound samples, device-bound samples and the drive's rate."""
    span_bytes = arguments.span_mib << 20
    with contextlib.ExitStack() as stack:
        world = World(stack, span_bytes=span_bytes, directory=arguments.files)
        # Files: twice, because a file system allocates blocks at their first write.
        for _ in range(1 if arguments.files is None else 2):
            world.prefill((PLAIN, FRONT_END))
        costs = rounds(world, cell, arguments)
    rate, drive = drive_for(costs, cell, arguments.share)
    console.print(f"{cell.title}: drive of {rate:,} IOPS; plain path: {arguments.share} of a core")
    with contextlib.ExitStack() as stack:
        world = World(stack, span_bytes=span_bytes, drive=drive)
        world.prefill((PLAIN, FRONT_END))
        bound = rounds(world, cell, arguments)
    return costs, bound, rate


def main() -> int:
    """Run both comparisons; print tables, save JSON and the plot."""
    arguments = parser().parse_args()
    console = Console(width=TABLE_COLUMNS) if not sys.stdout.isatty() else Console()
    cells = [
        cell
        for cell in all_cells((arguments.depth,), (1,))
        if not arguments.only or arguments.only in cell.name
    ]
    if not cells:
        raise SystemExit(f"--only {arguments.only}: no cell name contains it")
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
