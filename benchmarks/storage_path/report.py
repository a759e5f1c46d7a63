"""Tables and the plot of the data path benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.storage.cells import Cell, Sample
from benchmarks.storage.report import median_of, paired_ratio
from benchmarks.storage_path.world import FRONT_END, PLAIN, SECURE, SYSTEMS
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

# Goals for secure over plain IOPS, device-bound, by pattern and operation.
RATIOS_WANTED: Final = {
    ("sequential", "read"): 0.97,
    ("sequential", "write"): 0.97,
    ("random", "read"): 0.95,
    ("random", "write"): 0.85,
}


def cpu_of(samples: Sequence[Sample], system: str, cell: Cell, role: str) -> float:
    """Return a role's median processor time per I/O in microseconds; 0 if it has no part."""
    return median_of(samples, system, cell, lambda sample: sample.cpu_us_per_command.get(role, 0.0))


def added(samples: Sequence[Sample], system: str, cell: Cell) -> tuple[float, float]:
    """Return the processor time per I/O in µs added at the initiator side and at the target."""
    initiator = sum(cpu_of(samples, system, cell, role) for role in ("load", "gateway"))
    return (
        initiator - cpu_of(samples, PLAIN, cell, "load"),
        cpu_of(samples, system, cell, "target") - cpu_of(samples, PLAIN, cell, "target"),
    )


def busiest(samples: Sequence[Sample], system: str, cell: Cell, rate: int) -> float:
    """Return the share of a core that the busiest thread needs at `rate` operations per second.

    Below 1, with a core for each thread, the drive is the bottleneck. The figure is computed from
    processor time, so other load doesn't change it.
    """
    costs = [cpu_of(samples, system, cell, role) for role in ("load", "gateway", "target")]
    return rate * max(costs) / 1e6


def bound_table(samples: Sequence[Sample], cells: Sequence[Cell], rates: dict[str, int]) -> Table:
    """Return the table of rates on a drive that the plain path isn't too slow for."""
    found = Table(
        title="Device-bound, medians over rounds", box=box.SIMPLE_HEAD, title_justify="left"
    )
    found.add_column("cell")
    headings = ("drive IOPS", *(f"{system} IOPS" for system in SYSTEMS))
    ratios = ("secure\n/ plain", "goal", "front end\n/ plain")
    for heading in (*headings, *ratios, "busiest core,\nsecure", "busiest core,\nfront end"):
        found.add_column(heading, justify="right")
    for cell in cells:
        medians = [
            f"{median_of(samples, system, cell, lambda s: s.commands_per_second):,.0f}"
            for system in SYSTEMS
        ]
        found.add_row(
            cell.title,
            f"{rates[cell.name]:,}",
            *medians,
            f"{paired_ratio(samples, SECURE, PLAIN, cell):.2f}",
            f"{RATIOS_WANTED[cell.pattern, cell.operation]:.2f}",
            f"{paired_ratio(samples, FRONT_END, PLAIN, cell):.2f}",
            *(f"{busiest(samples, s, cell, rates[cell.name]):.2f}" for s in (SECURE, FRONT_END)),
        )
    return found


def cost_table(samples: Sequence[Sample], cells: Sequence[Cell]) -> Table:
    """Return the table of processor time by role, and of what the secure path adds."""
    found = Table(
        title="Processor-bound: CPU time per I/O by role in µs, medians over rounds",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("cell", "path"):
        found.add_column(heading)
    roles = ("load", "gateway", "target")
    for heading in ("IOPS", "IOPS\n/ plain", *roles, "added at\ngateway", "added at\ntarget"):
        found.add_column(heading, justify="right")
    for cell in cells:
        for system in SYSTEMS:
            costs = [cpu_of(samples, system, cell, role) for role in roles]
            more = added(samples, system, cell)
            is_plain = system == PLAIN
            found.add_row(
                cell.title if is_plain else "",
                system,
                f"{median_of(samples, system, cell, lambda s: s.commands_per_second):,.0f}",
                "" if is_plain else f"{paired_ratio(samples, system, PLAIN, cell):.2f}",
                *(f"{cost:.2f}" if cost else "" for cost in costs),
                *("" if is_plain else f"{value:+.2f}" for value in more),
                end_section=system == SYSTEMS[-1],
            )
    return found


def plot(
    path: Path, bound: Sequence[Sample], costs: Sequence[Sample], cells: Sequence[Cell]
) -> None:
    """Draw device-bound ratios above, processor time by role below."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), layout="constrained")
    places = range(len(cells))
    width = 0.38
    for index, system in enumerate((SECURE, FRONT_END)):
        ratios = [paired_ratio(bound, system, PLAIN, cell) for cell in cells]
        above.bar([place + index * width for place in places], ratios, width, label=system)
    wanted = [RATIOS_WANTED[cell.pattern, cell.operation] for cell in cells]
    above.hlines(
        wanted,
        [place - width / 2 for place in places],
        [place + width * 1.5 for place in places],
        colors="black",
        label="goal (secure)",
    )
    above.axhline(1, color="grey", linewidth=0.8)
    names = [cell.title for cell in cells]
    above.set_xticks([place + width / 2 for place in places], names)
    above.set(ylabel="IOPS / plain IOPS", title="Device-bound, one queue, medians over rounds")
    above.legend(loc="upper left", ncols=3)
    bars = [(cell, system) for cell in cells for system in SYSTEMS]
    bottoms = [0.0] * len(bars)
    for role in ("load", "gateway", "target"):
        # Per 4 KiB, so that both I/O sizes fit one axis.
        heights = [
            cpu_of(costs, system, cell, role) * 4096 / cell.io_bytes for cell, system in bars
        ]
        below.bar(range(len(bars)), heights, 0.7, bottom=bottoms, label=role)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    labels = [f"{cell.pattern} {cell.operation}\n{system}" for cell, system in bars]
    below.set_xticks(range(len(bars)), labels, rotation=60, ha="right", fontsize=8)
    below.set(ylabel="CPU time per 4 KiB, µs", title="Processor-bound, medians over rounds")
    below.legend()
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
