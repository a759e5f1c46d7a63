"""A plot for each experiment: points show the stack, lines of the same colour the model."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from benchmarks.sessions.simulate.cells import Cell, Measured
from benchmarks.sessions.simulate.curves import go_back_n
from benchmarks.sessions.simulate.experiments import (
    CODES,
    FAULT_SCHEMES,
    FAULTS,
    LATE_SLOTS,
    RING_LOSSES,
    fault_cell,
)
from benchmarks.sessions.simulate.report import Result, size_text
from benchmarks.sessions.simulate.ring import rings

from sealane.planning.model.paper import fallback_probability

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

GO_BACK_N_RUNS: Final = 200
LEGEND_SHARE: Final = 0.2
"""Height reserved for the legend, relative to the height of the curves."""
MARKERS: Final = "osD^v"
SHOWN: Final = {
    "E4": "Stack; in brackets where there were too few messages: model",
    "E5": "Points: stack; lines: model",
    "E8": "Points: stack; lines: model",
    "E12": "Stack",
    "E13": "Stack",
    "E14": "Stack",
}
"""Captions of plots without intervals."""
LINES: Final = "Points: stack; bars: 95 % confidence intervals of the mean; lines: model"


def draw(path: Path, result: Result) -> None:
    """Draw the plot of an experiment."""
    figure = DRAWINGS[result.experiment.name](result)
    figure.suptitle(f"{result.experiment.name}: {result.experiment.title}")
    legend = SHOWN.get(result.experiment.name, LINES)
    figure.text(
        0.5,
        0.005,
        f"{result.experiment.parameters}.\n{legend}.",
        ha="center",
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _schemes(measured: Iterable[Measured]) -> list[str]:
    return list(dict.fromkeys(one.cell.scheme.name for one in measured))


def _curves(axes: Axes, measured: Sequence[Measured], x: Callable[[Cell], float]) -> None:
    """Draw the slowdown over x for each scheme."""
    for index, name in enumerate(_schemes(measured)):
        mine = [one for one in measured if one.cell.scheme.name == name]
        at = [x(one.cell) for one in mine]
        means = np.array([one.slowdown for one in mine])
        ends = np.array([[end / m.cell.ideal for end in m.summary.mean_interval] for m in mine]).T
        errors = np.abs(ends - means)
        axes.errorbar(
            at, means, errors, color=f"C{index}", fmt=MARKERS[index], markersize=4, label=name
        )
        known = [(a, m.curve.mean / m.cell.ideal) for a, m in zip(at, mine, strict=True) if m.curve]
        axes.plot(*zip(*known, strict=True), color=f"C{index}", linewidth=1)
    axes.axhline(1, color="grey", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_ylabel("mean completion / ideal")


def _legend(axes: Axes) -> None:
    """Put the legend above the curves, so that it hides no interval."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + LEGEND_SHARE * (top - bottom))
    axes.legend(fontsize=8, loc="upper left", ncols=3)


def _plain_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Label a logarithmic x axis in plain numbers instead of powers of ten."""
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.minorticks_off()


def _go_back_n(axes: Axes, measured: Sequence[Measured], x: Callable[[Cell], float]) -> None:
    name = _schemes(measured)[0]
    cells = [one.cell for one in measured if one.cell.scheme.name == name]
    limit = axes.get_ylim()[1]
    means = [
        float(go_back_n(c.path, c.message_bytes, GO_BACK_N_RUNS, seed=1).mean()) / c.ideal
        for c in cells
    ]
    label = "Go-Back-N (Monte Carlo)"
    axes.plot([x(c) for c in cells], means, color="grey", linestyle=":", label=label)
    axes.set_ylim(0.8, min(limit, 16))


def _size_axis(axes: Axes, sizes: Iterable[int]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xticks(ticks, [size_text(size) for size in ticks], rotation=40, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("message size")


def _sizes(result: Result) -> Figure:
    losses = sorted({one.cell.loss for one in result.measured})
    figure, panels = plt.subplots(1, len(losses), figsize=(11, 4.6), squeeze=False)
    for axes, loss in zip(panels[0], losses, strict=True):
        mine = [one for one in result.measured if one.cell.loss == loss]
        _curves(axes, mine, lambda cell: cell.message_bytes)
        _go_back_n(axes, mine, lambda cell: cell.message_bytes)
        _size_axis(axes, (one.cell.message_bytes for one in mine))
        axes.set_title(f"P = {loss:.0e}", fontsize=10)
        _legend(axes)
    return figure


def _round_trips(result: Result) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 4.6))
    _curves(axes, result.measured, lambda cell: cell.round_trip * 1e3)
    axes.set_xlabel("round trip, ms")
    _legend(axes)
    _plain_ticks(axes, sorted({m.cell.round_trip * 1e3 for m in result.measured}))
    return figure


def _losses(result: Result) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 4.6))
    _curves(axes, result.measured, lambda cell: cell.loss)
    _go_back_n(axes, result.measured, lambda cell: cell.loss)
    axes.set_xlabel("packet loss probability, P")
    _legend(axes)
    return figure


def _map(result: Result) -> Figure:
    names = _schemes(result.measured)
    by = {(m.cell.scheme.name, m.cell.loss, m.cell.message_bytes): m for m in result.measured}
    losses = sorted({loss for _, loss, _ in by})
    sizes = sorted({size for _, _, size in by})
    figure, panels = plt.subplots(2, 2, figsize=(12, 7))
    kinds = product(("mean", "p99.9"), names[:2])
    for axes, (kind, name) in zip(panels.ravel(), kinds, strict=True):
        grid = np.full((len(losses), len(sizes)), np.nan)
        is_model = np.zeros(grid.shape, dtype=np.bool_)
        for (row, loss), (column, size) in product(enumerate(losses), enumerate(sizes)):
            ours, other = by[name, loss, size], by[names[2], loss, size]
            if kind == "mean":
                grid[row, column] = ours.summary.mean / other.summary.mean
            elif ours.summary.p999 is not None and other.summary.p999 is not None:
                grid[row, column] = ours.summary.p999 / other.summary.p999
            elif ours.curve is not None and other.curve is not None:
                grid[row, column] = ours.curve.p999 / other.curve.p999
                is_model[row, column] = True
        rows, columns = [f"{loss:.0e}" for loss in losses], [size_text(size) for size in sizes]
        _heat(axes, grid, rows, columns, is_model=is_model)
        axes.set_title(f"{kind}: {name} / {names[2]} (above 1: the code is faster)", fontsize=9)
        axes.set_ylabel("packet loss, P")
    return figure


def _heat(
    axes: Axes, grid: Any, rows: Sequence[str], columns: Sequence[str], *, is_model: Any = None
) -> None:
    axes.imshow(np.log2(grid), cmap="RdBu_r", vmin=-3.2, vmax=3.2, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        is_known = not np.isnan(value)
        text = f"{value:.2f}" if is_known else "too few"
        if is_model is not None and is_model[row, column]:
            text = f"({text})"
        colour = "white" if is_known and abs(np.log2(value)) > 2.2 else "black"
        size = 8 if is_known else 6
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=30)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)


def _codes(result: Result) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 4.6))
    for index, (k, m) in enumerate(CODES):
        mine = [one for one in result.measured if (one.cell.scheme.k, one.cell.scheme.m) == (k, m)]
        losses = [one.cell.loss for one in mine]
        axes.plot(losses, [one.fallbacks for one in mine], f"C{index}o", markersize=4)
        fine = np.geomspace(losses[0], losses[-1], 80)
        units = mine[0].cell.path.units(mine[0].cell.message_bytes)
        expected = [fallback_probability(loss, -(-units // k), k, m) for loss in fine]
        label = f"({k}, {m}), {m / k:.0%} parity"
        axes.plot(fine, expected, color=f"C{index}", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("packet loss probability, P")
    axes.set_ylabel("share of messages that fall back to retransmission")
    axes.legend(fontsize=8)
    return figure


def _products(result: Result) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 4.6))
    ordered = sorted(result.measured, key=lambda m: (m.cell.rate * m.cell.round_trip, m.cell.rate))
    _curves(axes, ordered, lambda cell: cell.rate * cell.round_trip / 8e6)
    axes.set_xlabel("bandwidth × round trip, MB")
    _legend(axes)
    _plain_ticks(axes, (50, 100, 200, 500, 1000, 2000, 5000))
    return figure


def _rings(result: Result) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    found = {(ring.sites, ring.loss, ring.scheme): ring for ring in rings(result.measured)}
    schemes = _schemes(result.measured)
    sites = sorted({number for number, _, _ in found})
    for axes, scheme in zip(panels, schemes[:2], strict=True):
        for index, loss in enumerate(RING_LOSSES):
            pairs = [(found[n, loss, scheme], found[n, loss, schemes[2]]) for n in sites]
            measured = [slow.p999 / fast.p999 for slow, fast in pairs]
            expected = [slow.model_p999 / fast.model_p999 for slow, fast in pairs]
            axes.plot(sites, measured, f"C{index}{MARKERS[index]}", label=f"P = {loss:.0e}")
            axes.plot(sites, expected, color=f"C{index}", linewidth=1)
        axes.set_title(f"{scheme} / {schemes[2]}", fontsize=10)
        axes.set_xlabel("sites")
        axes.set_xticks(sites)
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("ratio of p99.9 completion")
    return figure


def _faults(result: Result) -> Figure:
    by = {one.cell.key: one for one in result.measured}
    names = [name for name, _ in FAULTS]
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True)
    grids = np.full((2, len(FAULTS), len(FAULT_SCHEMES)), np.nan)
    for row, (_, faults) in enumerate(FAULTS):
        for column, scheme in enumerate(FAULT_SCHEMES):
            one = by[fault_cell(result.effort, faults, scheme).key]
            grids[0, row, column] = one.slowdown
            if one.summary.p99 is not None:
                grids[1, row, column] = one.summary.p99 / one.cell.ideal
    for axes, grid, kind in zip(panels, grids, ("mean", "p99"), strict=True):
        _heat(axes, grid, names, [scheme.name for scheme in FAULT_SCHEMES])
        axes.set_title(f"{kind} completion / ideal", fontsize=10)
    return figure


def _late(result: Result) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6))
    kinds = (
        ("late", "late units: all ignored, neither memory nor bitmap changed"),
        ("foreign_messages", "messages that a receiver without message numbers would get wrong"),
    )
    for axes, (kind, title) in zip(panels, kinds, strict=True):
        for index, name in enumerate(_schemes(result.measured)):
            mine = {one.cell.slots: one for one in result.measured if one.cell.scheme.name == name}
            counts = [mine[slots].counters[kind] for slots in LATE_SLOTS]
            at = np.arange(len(LATE_SLOTS)) + (index - 0.5) * 0.35
            axes.bar_label(axes.bar(at, counts, 0.3, label=name), fmt="{:,.0f}", fontsize=8)
        axes.set_xticks(range(len(LATE_SLOTS)), [f"{slots} slots" for slots in LATE_SLOTS])
        axes.set_title(title, fontsize=9)
        axes.margins(y=0.4)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        runs = f"{result.measured[0].cell.runs:,} messages"
        axes.legend(fontsize=8, loc="upper center", ncols=2, title=runs)
    return figure


def _tails(result: Result) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    rates = sorted({one.cell.rate for one in result.measured})
    for axes, rate in zip(panels, rates, strict=True):
        mine = [one for one in result.measured if one.cell.rate == rate]
        sizes = sorted({one.cell.message_bytes for one in mine})
        for index, size in enumerate(sizes):
            cells = [one for one in mine if one.cell.message_bytes == size]
            for one, place in zip(cells, np.arange(len(cells)) + (index - 1) * 0.2, strict=True):
                tail, ideal = one.summary.p99, one.cell.ideal
                axes.plot(place, one.summary.mean / ideal, f"C{index}o", markersize=4)
                if tail is not None:
                    axes.plot(place, tail / ideal, f"C{index}^", markersize=6)
                    name = one.cell.scheme.name
                    axes.text(
                        place, tail / ideal + 0.01, name, rotation=90, fontsize=6, ha="center"
                    )
            axes.plot([], [], f"C{index}^", label=f"p99, {size / 1024:.1f} KiB")
        losses = list(dict.fromkeys((one.cell.loss, one.cell.burst_packets) for one in mine))
        texts = [f"{loss:.0e}" + (", bursts" if burst > 1 else "") for loss, burst in losses]
        axes.set_xticks(range(len(texts)), texts, fontsize=8)
        axes.set_title(f"{rate / 1e6:g} Mbit/s", fontsize=10)
        axes.axhline(1.3, color="grey", linewidth=0.6, linestyle=":")
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.legend(fontsize=8, loc="upper left")
    panels[0].set_ylabel("completion / ideal (●: mean, ▲: p99)")
    panels[0].set_ylim(0.95, 1.5)
    return figure


DRAWINGS: Final[dict[str, Callable[[Result], Figure]]] = {
    "E1": _sizes,
    "E2": _round_trips,
    "E3": _losses,
    "E4": _map,
    "E5": _codes,
    "E7": _products,
    "E8": _rings,
    "E12": _faults,
    "E13": _late,
    "E14": _tails,
}
