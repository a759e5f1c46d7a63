"""Table, JSON and plot of the storage benchmark."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.storage.cells import Cell, Sample
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

MIB: Final = 1 << 20


def median_of(
    samples: Sequence[Sample], system: str, cell: Cell, value: Callable[[Sample], float]
) -> float:
    """Return the median over rounds."""
    return statistics.median(
        value(s) for s in samples if s.system == system and s.cell == cell.name
    )


def paired_ratio(samples: Sequence[Sample], over: str, under: str, cell: Cell) -> float:
    """Return the median ratio of commands per second, paired within rounds."""
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        if sample.cell == cell.name:
            by_round.setdefault(sample.round, {})[sample.system] = sample.commands_per_second
    ratios = [
        pair[over] / pair[under] for pair in by_round.values() if over in pair and under in pair
    ]
    return statistics.median(ratios)


def table(samples: Sequence[Sample], cells: Sequence[Cell], systems: Sequence[str]) -> Table:
    """Return a table with a row per cell and system; ratios are to the first system."""
    found = Table(
        title=f"NVMe/TCP, medians over rounds; ratio: IOPS over those of {systems[0]}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("cell", "QD", "queues", "system"):
        found.add_column(heading)
    processes = list(dict.fromkeys(p for system in systems for p in _processes(samples, system)))
    figures = ("IOPS", "MiB/s", "p50 µs", "p99 µs", "p99.9 µs")
    for heading in (*figures, *(f"{p}\nCPU µs/IO" for p in processes), "ratio"):
        found.add_column(heading, justify="right")
    for cell in cells:
        for index, system in enumerate(systems):
            of = _Medians(samples, system, cell)
            known = _processes(samples, system)
            cpu = [
                f"{of(lambda s, n=name: s.cpu_us_per_command[n]):.1f}" if name in known else ""
                for name in processes
            ]
            ratio = "" if index == 0 else f"{paired_ratio(samples, system, systems[0], cell):.2f}"
            found.add_row(
                cell.title if index == 0 else "",
                str(cell.depth) if index == 0 else "",
                str(cell.queues) if index == 0 else "",
                system,
                f"{of(lambda s: s.commands_per_second):,.0f}",
                f"{of(lambda s: s.bytes_per_second) / MIB:,.0f}",
                f"{of(lambda s: s.latency_p50_us):,.0f}",
                f"{of(lambda s: s.latency_p99_us):,.0f}",
                f"{of(lambda s: s.latency_p999_us):,.0f}",
                *cpu,
                ratio,
                end_section=index == len(systems) - 1,
            )
    return found


class _Medians:
    def __init__(self, samples: Sequence[Sample], system: str, cell: Cell) -> None:
        self._samples, self._system, self._cell = samples, system, cell

    def __call__(self, value: Callable[..., float]) -> float:
        return median_of(self._samples, self._system, self._cell, value)


def _processes(samples: Sequence[Sample], system: str) -> list[str]:
    return list(next(s for s in samples if s.system == system).cpu_us_per_command)


def write_json(
    path: Path,
    samples: Sequence[Sample],
    cells: Sequence[Cell],
    systems: Sequence[str],
    settings: dict[str, object],
) -> None:
    """Write every sample and the ratios."""
    ratios = {
        cell.name: {s: paired_ratio(samples, s, systems[0], cell) for s in systems[1:]}
        for cell in cells
    }
    document = {
        "settings": settings,
        "systems": list(systems),
        "ratios_to_first_system": ratios,
        "samples": [sample.to_json() for sample in samples],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(
    path: Path, samples: Sequence[Sample], cells: Sequence[Cell], systems: Sequence[str]
) -> None:
    """Draw IOPS and CPU time per I/O of the systems, a group of bars per cell."""
    figure, (rates, costs) = plt.subplots(2, 1, figsize=(11, 8), sharex=True, layout="constrained")
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        at = [place + index * width for place in range(len(cells))]
        of = [_Medians(samples, system, cell) for cell in cells]
        rates.bar(at, [m(lambda s: s.commands_per_second) for m in of], width, label=system)
        costs.bar(
            at, [m(lambda s: sum(s.cpu_us_per_command.values())) for m in of], width, label=system
        )
    rates.set(yscale="log", ylabel="I/Os per second", title="NVMe/TCP, medians over rounds")
    costs.set(yscale="log", ylabel="CPU time per I/O, all processes, µs")
    names = [f"{c.title}\nQD {c.depth}, queues: {c.queues}" for c in cells]
    middle = [place + 0.4 - width / 2 for place in range(len(cells))]
    costs.set_xticks(middle, names, rotation=60, ha="right", fontsize=8)
    rates.legend()
    for axes in (rates, costs):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
