"""A plot of each figure: one panel for each measure, a group of bars for each workload."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from benchmarks.uno.report import COLUMNS, Record, grouped, mean_and_half

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
    "ablations": ("Jain", "near/far"),
    "replay": ("mean, ms",),
    "lab": ("mean, ms", "near p99, ms", "worst, ms", "queue p99, kB"),
}
"""Measures that are drawn."""
WIDTH: Final = 4.6
HEIGHT: Final = 3.6
GROUP_WIDTH: Final = 0.85


def draw(path: Path, name: str, title: str, records: Sequence[Record]) -> None:
    """Draw a figure."""
    groups = grouped(records)
    workloads = list(dict.fromkeys(workload for workload, _ in groups))
    schemes = list(dict.fromkeys(scheme for _, scheme in groups))
    panels = PANELS[name]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(WIDTH * len(panels), HEIGHT), squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("tab20")(np.linspace(0, 1, 20))
    width = GROUP_WIDTH / len(schemes)
    for axis, panel in zip(axes[0], panels, strict=True):
        value, _ = COLUMNS[panel]
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
        axis.set_xticks(range(len(workloads)), workloads, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=min(4, len(schemes)), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
