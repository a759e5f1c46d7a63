"""Plots of the cost of freshness, one file per measurement."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.freshness.report import (
    PAPER_READS,
    PAPER_UPDATES_PER_CORE,
    PAPER_WRITERS,
    PROCESSOR_PAIRS,
    READ_RATIO_WANTED,
    UPDATES_WANTED,
    WRITE_RATIO_WANTED,
    WRITES_WANTED,
    Samples,
    median,
    memory_ratio,
    of,
    processor_micros,
    rate,
    ratio,
    values,
)

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

SIZE: Final = (6.4, 4.2)


def plot(directory: Path, what: str, samples: Samples) -> Path | None:
    """Draw one measurement and return the file; None if it has no plot."""
    panel = PANELS.get(what)
    if panel is None:
        return None
    figure, axis = plt.subplots(figsize=SIZE, layout="constrained")
    panel(axis, samples)
    axis.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    path = directory / f"freshness-{what}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plain_ticks(axis: Axes, ticks: list[float]) -> None:
    """Label a logarithmic x axis with the measured values."""
    axis.set_xticks(ticks)
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _plain_decades(axis: Axes, *, also: tuple[int, ...] = ()) -> None:
    """Label a logarithmic y axis in plain numbers: powers of ten, and their multiples by `also`."""
    axis.yaxis.set_major_locator(LogLocator(subs=(1, *also)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _updates(axis: Axes, samples: Samples) -> None:
    mine = of(samples, "updates")
    batches = values(mine, "batch")
    for count in values(mine, "hashers"):
        rates = [median(mine, rate, batch=batch, hashers=count) / 1e6 for batch in batches]
        axis.plot(batches, rates, marker="o", label=f"{count:.0f} hasher{'s' * (count > 1)}")
    axis.axhline(UPDATES_WANTED / 1e6, color="black", linestyle="--", label="goal")
    axis.axhline(
        PAPER_UPDATES_PER_CORE / 1e6, color="grey", linestyle=":", label="paper, 5 hashers"
    )
    axis.set(xscale="log", xlabel="updates per batch", ylabel="million updates per core and second")
    _plain_ticks(axis, batches)
    axis.set_ylim(bottom=0)
    axis.set_title("Updates of a tree over 1 PB of data")


def _writers(axis: Axes, samples: Samples) -> None:
    counts = values(samples, "writers")
    for way, name in ((0, "table"), (1, "root")):
        for figure, style in (("p50_nanos", "-"), ("p99_nanos", ":")):
            medians = [
                median(samples, lambda s, f=figure: s[f] / 1e3, writers=c, waits_for_root=way)
                for c in counts
            ]
            label = f"{name}, {figure.split('_')[0]}"
            axis.plot(counts, medians, style, marker="o", color=f"C{way}", label=label)
    paper = list(PAPER_WRITERS.values())
    axis.plot(list(PAPER_WRITERS), paper, "--", color="grey", label="paper, root, p50")
    axis.set(xscale="log", yscale="log", xlabel="writers", ylabel="latency, µs")
    _plain_ticks(axis, counts)
    _plain_decades(axis)
    axis.set_title("Latency until a write is in the pending table, and in the root")


def _memory(axis: Axes, samples: Samples) -> None:
    sizes = [sample["data_bytes"] / 1e12 for sample in samples]
    kept = [(s["tree_bytes"] + s["copies_bytes"]) / 1e6 for s in samples]
    axis.plot(sizes, kept, marker="o", label="measured: tree and copies")
    axis.plot(sizes, [s["formula_bytes"] / 1e6 for s in samples], "k--", label="formula")
    for size, bytes_kept, sample in zip(sizes, kept, samples, strict=True):
        axis.annotate(
            f"{memory_ratio(sample):.3f}",
            (size, bytes_kept),
            textcoords="offset points",
            xytext=(-8, 4),
            ha="right",
            fontsize=8,
        )
    axis.set(xscale="log", yscale="log", xlabel="data, TB", ylabel="memory, MB")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.margins(x=0.12, y=0.12)
    _plain_decades(axis)
    axis.set_title("Memory of a full store (labels: measured / formula)")


def _writes(axis: Axes, samples: Samples) -> None:
    sizes = [sample["gibibytes"] for sample in samples]
    axis.plot(sizes, [s["ours"] for s in samples], marker="o", label="Sealane, in place")
    for name, label in (("paper_5000_pages", "5000 pages"), ("paper_same_memory", "same memory")):
        axis.plot(sizes, [s[name] for s in samples], marker="s", label=f"paper, {label}")
    axis.axhline(WRITES_WANTED, color="black", linestyle="--", label="goal")
    axis.axhline(1, color="grey", linewidth=0.8, label="plain")
    axis.set(xscale="log", xlabel="working set, GiB", ylabel="device operations per write")
    _plain_ticks(axis, sizes)
    axis.set_ylim(0, 3.2)
    axis.set_title("Random 4 KiB writes, including log and merges")


def _reads(axis: Axes, samples: Samples) -> None:
    percents = [sample["polluted_percent"] for sample in samples]
    for way, label in (("ours", "Sealane, in place"), ("paper", "paper's scheme, run here")):
        axis.plot(percents, [1 / s[way] for s in samples], marker="o", label=label)
    axis.plot(
        list(PAPER_READS),
        list(PAPER_READS.values()),
        ":",
        color="grey",
        marker="s",
        label="paper, published figures",
    )
    axis.axhline(READ_RATIO_WANTED, color="black", linestyle="--", label="goal")
    axis.set(xlabel="polluted sets, %", ylabel="read rate / plain, device-bound")
    axis.set_ylim(0, 1.05)
    axis.set_title("Random 4 KiB reads, working set six times the cache")


def _drive(axis: Axes, samples: Samples) -> None:
    whats = values(samples, "what")
    places = range(len(whats))
    bars = axis.barh(places, [ratio(samples, what, "fresh") for what in whats], 0.6, label="fresh")
    axis.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=8)
    for place, what in zip(places, whats, strict=True):
        is_write = "paper" in of(samples, what)[0]
        wanted = WRITE_RATIO_WANTED if is_write else READ_RATIO_WANTED
        label = "goal" if place == 0 else None
        axis.vlines(wanted, place - 0.4, place + 0.4, color="black", label=label)
        if is_write:
            paper = ratio(samples, what, "paper")
            axis.vlines(
                paper, place - 0.4, place + 0.4, color="C3", label="paper's three I/Os per write"
            )
    axis.set_yticks(places, whats, fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="IOPS / IOPS of the plain drive", xlim=(0, 1.15))
    axis.set_title("Emulated 870 EVO, random 4 KiB, QD 32")


def _latency(axis: Axes, samples: Samples) -> None:
    for index, way in enumerate(("plain", "fresh")):
        mine = of(samples, way)
        counts = values(mine, "writers")
        for figure, style in (("p50_nanos", "-"), ("p95_nanos", "--"), ("p99_nanos", ":")):
            medians = [median(mine, lambda s, f=figure: s[f] / 1e3, writers=c) for c in counts]
            label = f"{way}, {figure.split('_')[0]}"
            axis.plot(counts, medians, style, marker="o", color=f"C{index}", label=label)
    axis.set(xscale="log", yscale="log", xlabel="writers", ylabel="latency, µs")
    _plain_ticks(axis, counts)
    _plain_decades(axis, also=(2, 3, 5))
    axis.set_title("Latency of 4 KiB writes, emulated 870 EVO")


def _processor(axis: Axes, samples: Samples) -> None:
    ways = [way for pair in PROCESSOR_PAIRS for way in pair]
    names = [f"{way.replace('_', ' ')}\n{what}" for what in ("read", "write") for way in ways]
    found = [processor_micros(samples, way, is_write) for is_write in (0, 1) for way in ways]
    own = [each[0] for each in found]
    axis.bar(names, own, 0.7, label="queue's thread")
    axis.bar(names, [max(each[1], 0) for each in found], 0.7, bottom=own, label="all other threads")
    axis.tick_params(axis="x", labelsize=7)
    axis.set(ylabel="processor time per operation, µs")
    # Stacked bars don't raise the limit set by the first ones.
    axis.set_ylim(0, 1.1 * max(sum(each) for each in found))
    axis.set_title("Random 4 KiB, QD 32, one flush per 1024 writes")


def _petabyte(axis: Axes, samples: Samples) -> None:
    names = ("answered", "flushed", "merged")
    times = [statistics.median(s[name] for s in samples) * 1e3 for name in names]
    bars = axis.bar(names, times, 0.6, label="measured")
    axis.bar_label(bars, fmt="%.3g ms", fontsize=8)
    axis.axhline(1000, color="black", linestyle="--", label="goal")
    axis.set(yscale="log", ylabel="time since the command, ms")
    _plain_decades(axis)
    axis.set_title("Deallocation of a petabyte")


PANELS: Final[Mapping[str, Callable[[Axes, Samples], None]]] = {
    "updates": _updates,
    "writers": _writers,
    "memory": _memory,
    "writes": _writes,
    "reads": _reads,
    "drive": _drive,
    "latency": _latency,
    "processor": _processor,
    "petabyte": _petabyte,
}
