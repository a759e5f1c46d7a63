"""Tables and the plot of what freshness costs."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Sample = Mapping[str, Any]
Samples = Sequence[Sample]

# Medians of the paper's figures 6 and 7 (arXiv:2510.18756): microseconds by writers, of waiting
# for the root, and updates per second with five hashers.
PAPER_WRITERS: Final = {1: 2.3, 2: 3.7, 4: 3.7, 8: 3.9, 16: 4.0, 32: 4.8, 64: 9.2}
PAPER_UPDATES_PER_CORE: Final = 1.06e6 / 5
UPDATES_WANTED: Final = 1e6
WRITES_WANTED: Final = 1.2


def _table(title: str, headings: Sequence[str]) -> Table:
    found = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for index, heading in enumerate(headings):
        found.add_column(heading, justify="left" if index == 0 else "right")
    return found


def _median(samples: Samples, value: Callable[[Sample], float], **keys: float) -> float:
    mine = [s for s in samples if all(s[key] == wanted for key, wanted in keys.items())]
    return statistics.median(value(s) for s in mine)


def _values(samples: Samples, key: str) -> list[Any]:
    return list(dict.fromkeys(sample[key] for sample in samples))


def _of(samples: Samples, what: str) -> list[Sample]:
    return [sample for sample in samples if sample["what"] == what]


def functions(samples: Samples) -> Table:
    """Show nanoseconds of each function."""
    found = _table("Functions, one core", ("function", "ns"))
    named = [(name, value) for s in samples for name, value in s.items() if name != "what"]
    for name in dict.fromkeys(name for name, _ in named):
        median = statistics.median(value for other, value in named if other == name)
        found.add_row(name.replace("_", " "), f"{median:,.0f}")
    return found


def _rate(sample: Sample) -> float:
    return float(sample["updates"] / sample["processor_seconds"])


def updates(samples: Samples) -> Table:
    """Show updates a second and core by size of the batch and number of hashers."""
    mine = _of(samples, "updates")
    hashers = _values(mine, "hashers")
    title = "Updates per second and core, millions, uniform over 1 PB (wanted: 1)"
    found = _table(title, ("batch", *(f"{count:.0f} hashers" for count in hashers)))
    for batch in _values(mine, "batch"):
        rates = [_median(mine, _rate, batch=batch, hashers=count) for count in hashers]
        found.add_row(f"{batch:,.0f}", *(f"{rate / 1e6:.2f}" for rate in rates))
    void = statistics.median(s["seconds"] for s in _of(samples, "void_petabyte"))
    found.caption = f"making all of it void took {void * 1e3:.0f} ms"
    return found


def writers(samples: Samples) -> Table:
    """Show what a writer waits for, by number of writers."""
    figures = ("p50_nanos", "p95_nanos", "p99_nanos")
    ways = ("in the table", "in the root")
    headings = [f"{way}\n{figure.split('_')[0]} µs" for way in ways for figure in figures]
    found = _table("Latency by writers", ("writers", *headings, "paper\np50 µs"))
    for count in _values(samples, "writers"):
        medians = [
            _median(samples, lambda s, f=figure: s[f], writers=count, waits_for_root=way)
            for way in (0, 1)
            for figure in figures
        ]
        cells = [f"{nanos / 1e3:,.1f}" for nanos in medians]
        found.add_row(f"{count:.0f}", *cells, str(PAPER_WRITERS[int(count)]))
    return found


def memory(samples: Samples) -> Table:
    """Show bytes of full trees beside the formula."""
    headings = ("data", "formula MB", "tree MB", "ratio", "resident MB")
    found = _table("Memory of full trees", headings)
    for sample in samples:
        found.add_row(
            f"{sample['data_bytes'] / 1e12:,.3f} TB",
            f"{sample['formula_bytes'] / 1e6:,.2f}",
            f"{sample['tree_bytes'] / 1e6:,.2f}",
            f"{sample['tree_bytes'] / sample['formula_bytes']:.3f}",
            f"{sample['resident_bytes'] / 1e6:,.1f}",
        )
    return found


def pending(samples: Samples) -> Table:
    """Show costs of the table of pending changes."""
    figures = [name for name in samples[0] if name not in {"what", "entries"}]
    found = _table("Pending changes, ns", ("", *(f"{s['entries']:,.0f}\nentries" for s in samples)))
    for figure in figures:
        found.add_row(figure.replace("_", " "), *(f"{s[figure]:,.0f}" for s in samples))
    return found


def writes(samples: Samples) -> Table:
    """Show device operations a random write by the size of the working set."""
    headings = ("working set", "ours", "of them\nreads", "paper, 5000\npages", "paper, our\nmemory")
    found = _table("Device operations a random 4 KiB write (wanted: 1.2)", headings)
    for sample in samples:
        cells = ("ours", "ours_read", "paper_5000_pages", "paper_same_memory")
        found.add_row(f"{sample['gibibytes']:.0f} GiB", *(f"{sample[c]:.2f}" for c in cells))
    return found


def plot(path: Path, found: Mapping[str, Samples]) -> None:
    """Draw what was measured, a panel each."""
    panels = {
        "updates": _plot_updates,
        "writers": _plot_writers,
        "memory": _plot_memory,
        "writes": _plot_writes,
    }
    drawn = {what: panel for what, panel in panels.items() if what in found}
    if not drawn:
        return
    figure, axes = plt.subplots(1, len(drawn), figsize=(5.5 * len(drawn), 4.2), squeeze=False)
    for axis, (what, panel) in zip(axes[0], drawn.items(), strict=True):
        panel(axis, found[what])
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _plot_updates(axis: Axes, samples: Samples) -> None:
    mine = _of(samples, "updates")
    batches = _values(mine, "batch")
    for count in _values(mine, "hashers"):
        rates = [_median(mine, _rate, batch=batch, hashers=count) / 1e6 for batch in batches]
        axis.plot(batches, rates, marker="o", label=f"{count:.0f} hashers")
    axis.axhline(UPDATES_WANTED / 1e6, color="black", linestyle="--", label="wanted")
    axis.axhline(PAPER_UPDATES_PER_CORE / 1e6, color="grey", linestyle=":", label="paper, of 5")
    axis.set(xscale="log", xlabel="updates of a batch", ylabel="million updates/s and core")
    axis.set_title("Updates of a 1 PB tree")


def _plot_writers(axis: Axes, samples: Samples) -> None:
    counts = _values(samples, "writers")
    for way, name in ((0, "in the table"), (1, "in the root")):
        for figure, style in (("p50_nanos", "-"), ("p99_nanos", ":")):
            medians = [
                _median(samples, lambda s, f=figure: s[f] / 1e3, writers=c, waits_for_root=way)
                for c in counts
            ]
            label = f"{name}, {figure.split('_')[0]}"
            axis.plot(counts, medians, style, marker="o", color=f"C{way}", label=label)
    paper = list(PAPER_WRITERS.values())
    axis.plot(list(PAPER_WRITERS), paper, "--", color="grey", label="paper, in the root, p50")
    axis.set(xscale="log", yscale="log", xlabel="writers", ylabel="µs")
    axis.set_title("What a writer waits for")


def _plot_memory(axis: Axes, samples: Samples) -> None:
    sizes = [sample["data_bytes"] / 1e12 for sample in samples]
    axis.plot(sizes, [s["tree_bytes"] / 1e6 for s in samples], marker="o", label="tree")
    axis.plot(sizes, [s["formula_bytes"] / 1e6 for s in samples], "k--", label="formula")
    axis.set(xscale="log", yscale="log", xlabel="TB of data", ylabel="MB of memory")
    axis.set_title("Memory of a full tree")


def _plot_writes(axis: Axes, samples: Samples) -> None:
    sizes = [sample["gibibytes"] for sample in samples]
    axis.plot(sizes, [s["ours"] for s in samples], marker="o", label="ours, in place")
    for name, label in (("paper_5000_pages", "5000 pages"), ("paper_same_memory", "our memory")):
        axis.plot(sizes, [s[name] for s in samples], marker="s", label=f"paper, {label}")
    axis.axhline(WRITES_WANTED, color="black", linestyle="--", label="wanted")
    axis.set(xscale="log", xlabel="GiB of working set", ylabel="device operations a write")
    axis.set_ylim(0, 3.2)
    axis.set_title("Random 4 KiB writes")
