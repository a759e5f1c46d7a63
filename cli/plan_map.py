"""The map of `sealanectl session plan`: the chosen scheme and its gain, by size and loss."""

from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sealane.cli.plots import pyplot
from sealane.planning.model import Loss, Path, SelectiveRepeat, ideal
from sealane.planning.planner import Objective, rank, scheme_text

SIZES: Final = tuple(1 << bit for bit in range(14, 36, 2))
LOSSES: Final = tuple(10.0**power for power in np.arange(-7, -0.9, 0.5))
GAIN_MAX: Final = 8.0


def draw_map(
    file: FilePath, path: Path, objective: Objective, parity_budget: float, *, size_bytes: int
) -> None:
    """Draw two ratios of times: selective repeat to the choice, and the choice to the ideal.

    UsageError `plots.library` without matplotlib.
    """
    plt = pyplot()
    gains = np.empty((len(LOSSES), len(SIZES)))
    slowdowns = np.empty_like(gains)
    names: list[list[str]] = []
    for row, rate in enumerate(LOSSES):
        at = replace(path, loss=Loss(rate=rate, burst_packets=path.loss.burst_packets))
        names.append([])
        for column, size in enumerate(SIZES):
            ranked = rank(at, size, objective, parity_budget)
            wanted = objective.of(at, size)
            best = ranked[0].score(wanted)
            repeat = next(c for c in ranked if isinstance(c.scheme, SelectiveRepeat))
            gains[row, column] = repeat.score(wanted) / best
            slowdowns[row, column] = best / ideal(at, size)
            names[-1].append(_short(scheme_text(ranked[0].scheme)))
    figure, axes = plt.subplots(2, 1, figsize=(12, 11), layout="constrained")
    _heat(axes[0], gains, names, "selective repeat over the choice")
    texts = [[f"{value:.2f}" for value in row] for row in slowdowns]
    _heat(axes[1], slowdowns, texts, "the choice over ideal")
    here = np.interp(np.log2(size_bytes), np.log2(SIZES), range(len(SIZES)))
    if path.loss.rate > 0:
        there = np.interp(np.log10(path.loss.rate), np.log10(LOSSES), range(len(LOSSES)))
        for place in axes:
            place.plot(here, there, marker="o", markersize=14, markerfacecolor="none", color="red")
    bursts = f", bursts of {path.loss.burst_packets:g}" if path.loss.burst_packets > 1 else ""
    figure.suptitle(
        f"{objective.value} completion, {path.rate_bits_per_second / 1e9:g} Gbit/s, "
        f"{path.round_trip_seconds * 1e3:g} ms, units of {path.unit_bytes} B{bursts}, "
        f"parity up to {parity_budget:.0%}"
    )
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


def _heat(axes: Any, values: NDArray[np.float64], texts: list[list[str]], title: str) -> None:
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="YlGnBu", norm="log", vmin=1, vmax=GAIN_MAX
    )
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_ticks([1, 2, 4, GAIN_MAX], labels=["1", "2", "4", f"{GAIN_MAX:g}"])
    bar.minorticks_off()
    middle = np.sqrt(GAIN_MAX)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            color = "white" if values[row, column] > middle else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(SIZES)), [_size(size) for size in SIZES])
    axes.set_yticks(range(len(LOSSES)), [f"{rate:.1e}" for rate in LOSSES])
    axes.set(title=title, xlabel="message", ylabel="loss")


def _short(name: str) -> str:
    if name == "selective repeat":
        return "SR"
    code = name.split(" ", 1)[1].replace(", ", ",")
    return code.replace(" depth ", "\n×")


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
