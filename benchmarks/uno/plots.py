"""A plot of each figure: one panel for each measure, a group of bars for each workload."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from benchmarks.uno.report import COLUMNS, Columns, Record, grouped, mean_and_half

mpl.use("Agg")
from matplotlib import pyplot as plt

PANELS: Final = {
    "8": ("mean, ms", "Jain", "queue p99, kB"),
    "4": ("near mean, ms", "near p99, ms"),
    "9": ("mean, ms", "far p99, ms"),
    "10": ("mean, ms", "near p99, ms", "far p99, ms"),
    "11": ("mean, ms", "near p99, ms"),
    "12": ("mean, ms", "near p99, ms"),
    "13": ("mean, ms", "worst, ms"),
    "all-reduce": ("mean, ms", "collective p99, ms"),
    "ablations": ("Jain", "near/far"),
    "replay": ("mean, ms",),
    "lab": (
        "mean, ms",
        "near p99, ms",
        "far p99, ms",
        "Jain, 100 ms",
        "queue p99, kB",
        "CPU, s/GB",
    ),
}
"""Measures that are drawn."""
PER_ROW: Final = {"lab": 2}
"""Panels beside each other, if not all of them."""
LOGARITHMIC: Final = {"lab": ("mean, ms", "near p99, ms", "far p99, ms", "CPU, s/GB")}
"""Measures that differ by more than a linear axis shows."""
WIDTH: Final = 4.6
WIDE: Final = 8.4
"""Width of the panels of a figure with several rows."""
HEIGHT: Final = 3.6
LABEL_LETTERS: Final = 12
"""Longer names of workloads take several lines."""
GROUP_WIDTH: Final = 0.85


def draw(
    path: Path, name: str, title: str, records: Sequence[Record], columns: Columns = COLUMNS
) -> None:
    """Draw a figure."""
    groups = grouped(records)
    workloads = list(dict.fromkeys(workload for workload, _ in groups))
    schemes = list(dict.fromkeys(scheme for _, scheme in groups))
    panels = PANELS[name]
    beside = PER_ROW.get(name, len(panels))
    rows = -(-len(panels) // beside)
    width_of_panel = WIDE if name in PER_ROW else WIDTH
    figure, axes = plt.subplots(
        rows,
        beside,
        figsize=(width_of_panel * beside, HEIGHT * rows),
        squeeze=False,
        layout="constrained",
    )
    colours = plt.get_cmap("tab20")(np.linspace(0, 1, 20))
    width = GROUP_WIDTH / len(schemes)
    for axis, panel in zip(axes.flat, panels, strict=True):
        value, _ = columns[panel]
        for index, scheme in enumerate(schemes):
            places, heights, errors = [], [], []
            for at, workload in enumerate(workloads):
                known = [value(record) for record in groups.get((workload, scheme), [])]
                values = [one for one in known if one is not None]
                if values:
                    mean, half = mean_and_half(values)
                    places.append(at + (index - (len(schemes) - 1) / 2) * width)
                    heights.append(mean)
                    errors.append(half or 0.0)
            axis.bar(
                places,
                heights,
                width,
                yerr=errors if any(errors) else None,
                color=colours[index % 20],
                label=scheme if axis is axes[0][0] else None,
                error_kw={"elinewidth": 0.8},
            )
        axis.set_title(panel, fontsize=10)
        labels = [textwrap.fill(workload, LABEL_LETTERS) for workload in workloads]
        axis.set_xticks(range(len(workloads)), labels, fontsize=8)
        is_empty = all(value(record) is None for record in records)
        if panel in LOGARITHMIC.get(name, ()) and not is_empty:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=min(4 * rows, len(schemes)), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
