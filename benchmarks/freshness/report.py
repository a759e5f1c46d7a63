"""Tables of the cost of freshness."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

Sample = Mapping[str, Any]
Samples = Sequence[Sample]

# Medians of the paper's figures 7 and 6 (arXiv:2510.18756): microseconds until the root covers a
# write, by number of writers; and updates per second with five hashers.
PAPER_WRITERS: Final = {1: 2.3, 2: 3.7, 4: 3.7, 8: 3.9, 16: 4.0, 32: 4.8, 64: 9.2}
PAPER_UPDATES_PER_CORE: Final = 1.06e6 / 5
UPDATES_WANTED: Final = 1e6
WRITES_WANTED: Final = 1.2
# Random 4 KiB reads in the paper's figure 9, relative to no pollution, by percent polluted.
PAPER_READS: Final = {0: 1.0, 20: 0.445, 40: 0.330, 60: 0.267, 80: 0.224, 100: 0.193}
# Goals for a device-bound volume, relative to a plain one.
READ_RATIO_WANTED: Final = 0.95
WRITE_RATIO_WANTED: Final = 0.85


def _table(title: str, headings: Sequence[str]) -> Table:
    found = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for index, heading in enumerate(headings):
        found.add_column(heading, justify="left" if index == 0 else "right")
    return found


def median(samples: Samples, value: Callable[[Sample], float], **keys: float) -> float:
    mine = [s for s in samples if all(s[key] == wanted for key, wanted in keys.items())]
    return statistics.median(value(s) for s in mine)


def values(samples: Samples, key: str) -> list[Any]:
    return list(dict.fromkeys(sample[key] for sample in samples))


def of(samples: Samples, what: str) -> list[Sample]:
    return [sample for sample in samples if sample["what"] == what]


def functions(samples: Samples) -> Table:
    """Tabulate the time of each function."""
    found = _table("Functions, one core", ("function", "ns per call"))
    named = [(name, value) for s in samples for name, value in s.items() if name != "what"]
    for name in dict.fromkeys(name for name, _ in named):
        median = statistics.median(value for other, value in named if other == name)
        found.add_row(name.replace("_", " "), f"{median:,.0f}")
    return found


def rate(sample: Sample) -> float:
    return float(sample["updates"] / sample["processor_seconds"])


def updates(samples: Samples) -> Table:
    """Tabulate updates per core and second by batch size and number of hashers."""
    mine = of(samples, "updates")
    hashers = values(mine, "hashers")
    title = "Million updates per core and second, uniform over 1 PB (goal: 1)"
    found = _table(title, ("updates\nper batch", *(f"{count:.0f} hashers" for count in hashers)))
    for batch in values(mine, "batch"):
        rates = [median(mine, rate, batch=batch, hashers=count) for count in hashers]
        found.add_row(f"{batch:,.0f}", *(f"{rate / 1e6:.2f}" for rate in rates))
    void = statistics.median(s["seconds"] for s in of(samples, "void_petabyte"))
    found.caption = f"Deallocating all of it took {void * 1e3:.0f} ms"
    return found


def writers(samples: Samples) -> Table:
    """Tabulate the latency of a write by number of writers."""
    figures = ("p50_nanos", "p95_nanos", "p99_nanos")
    ways = ("table", "root")
    headings = [f"{way}\n{figure.split('_')[0]} µs" for way in ways for figure in figures]
    found = _table(
        "Latency until a write is in the pending table, and in the root",
        ("writers", *headings, "paper, root\np50 µs"),
    )
    for count in values(samples, "writers"):
        medians = [
            median(samples, lambda s, f=figure: s[f], writers=count, waits_for_root=way)
            for way in (0, 1)
            for figure in figures
        ]
        cells = [f"{nanos / 1e3:,.1f}" for nanos in medians]
        found.add_row(f"{count:.0f}", *cells, str(PAPER_WRITERS[int(count)]))
    return found


def memory_ratio(sample: Sample) -> float:
    """Return the bytes of tree and copies over the formula's."""
    kept = sample["tree_bytes"] + sample["copies_bytes"]
    return float(kept / sample["formula_bytes"])


def memory(samples: Samples) -> Table:
    """Tabulate the memory of full trees and compare it with the formula."""
    headings = ("data", "formula MB", "tree MB", "copies MB", "measured\n/ formula", "resident MB")
    found = _table(
        "Memory of full stores, without leaf pages (goal: at most 1.05 of the formula)", headings
    )
    for sample in samples:
        found.add_row(
            f"{sample['data_bytes'] / 1e12:,.3f} TB",
            f"{sample['formula_bytes'] / 1e6:,.2f}",
            f"{sample['tree_bytes'] / 1e6:,.2f}",
            f"{sample['copies_bytes'] / 1e6:,.2f}",
            f"{memory_ratio(sample):.3f}",
            f"{sample['resident_bytes'] / 1e6:,.1f}",
        )
    return found


def pending(samples: Samples) -> Table:
    """Tabulate the cost of operations on the table of pending changes."""
    figures = [name for name in samples[0] if name not in {"what", "entries"}]
    found = _table(
        "Table of pending changes",
        ("operation", *(f"{s['entries']:,.0f}\nentries" for s in samples)),
    )
    for figure in figures:
        found.add_row(figure.replace("_", " "), *(f"{s[figure]:,.0f}" for s in samples))
    return found


def writes(samples: Samples) -> Table:
    """Tabulate device operations per random write by size of the working set."""
    headings = (
        "working set",
        "Sealane",
        "of which\nreads",
        "paper, 5000\npages",
        "paper, same\nmemory",
    )
    found = _table("Device operations per random 4 KiB write (goal: 1.2)", headings)
    for sample in samples:
        cells = ("ours", "ours_read", "paper_5000_pages", "paper_same_memory")
        found.add_row(f"{sample['gibibytes']:.0f} GiB", *(f"{sample[c]:.2f}" for c in cells))
    return found


def reads(samples: Samples) -> Table:
    """Tabulate device operations per random read by share of polluted sets."""
    headings = ("polluted sets", "Sealane", "paper's scheme", "CPU µs,\nSealane")
    found = _table("Device operations per random 4 KiB read, working set of 98,304 sets", headings)
    for sample in samples:
        found.add_row(
            f"{sample['polluted_percent']:.0f} %",
            f"{sample['ours']:.2f}",
            f"{sample['paper']:.2f}",
            f"{sample['nanos'] / 1e3:.1f}",
        )
    return found


def ratio(samples: Samples, what: str, way: str) -> float:
    """Return the median over rounds of the rate of `way` over the plain rate."""
    return statistics.median(sample[way] / sample["plain"] for sample in of(samples, what))


def drive(samples: Samples) -> Table:
    """Tabulate rates on the emulated drive."""
    headings = (
        "workload",
        "plain IOPS",
        "fresh IOPS",
        "fresh\n/ plain",
        "goal",
        "paper's 3 I/Os\n/ plain",
    )
    found = _table("Emulated 870 EVO, random 4 KiB, QD 32, medians", headings)
    for what in values(samples, "what"):
        mine = of(samples, what)
        is_write = "paper" in mine[0]
        found.add_row(
            what,
            f"{statistics.median(s['plain'] for s in mine):,.0f}",
            f"{statistics.median(s['fresh'] for s in mine):,.0f}",
            f"{ratio(samples, what, 'fresh'):.2f}",
            f"{WRITE_RATIO_WANTED if is_write else READ_RATIO_WANTED:.2f}",
            f"{ratio(samples, what, 'paper'):.2f}" if is_write else "",
        )
    return found


def latency(samples: Samples) -> Table:
    """Tabulate latencies of writes by number of writers."""
    figures = ("p50_nanos", "p95_nanos", "p99_nanos")
    headings = [
        f"{way}\n{figure.split('_')[0]} µs" for way in ("plain", "fresh") for figure in figures
    ]
    found = _table("Latency of 4 KiB writes, emulated 870 EVO", ("writers", *headings))
    for count in values(samples, "writers"):
        medians = [
            median(of(samples, way), lambda s, f=figure: s[f], writers=count)
            for way in ("plain", "fresh")
            for figure in figures
        ]
        found.add_row(f"{count:.0f}", *(f"{nanos / 1e3:,.0f}" for nanos in medians))
    return found


def processor_micros(samples: Samples, way: str, is_write: int) -> tuple[float, float]:
    """Return median processor time per operation: of the queue's thread, and of all others."""
    mine = of(samples, way)
    own, others = (
        median(mine, lambda s, f=figure: s[f], is_write=is_write)
        for figure in ("own_micros", "others_micros")
    )
    return own, others


PROCESSOR_PAIRS: Final = (("plain_file", "file"), ("memory", "in_place"))


def processor(samples: Samples) -> Table:
    """Tabulate processor time of each store."""
    headings = (
        "store",
        "read",
        "read, other\nthreads",
        "write",
        "write, other\nthreads",
        "added,\nread",
        "added,\nwrite",
    )
    found = _table(
        "Processor time per operation, µs: random 4 KiB, QD 32, one flush per 1024 writes", headings
    )
    for plain, fresh in PROCESSOR_PAIRS:
        for way in (plain, fresh):
            cells = [
                value for is_write in (0, 1) for value in processor_micros(samples, way, is_write)
            ]
            added = [
                sum(processor_micros(samples, fresh, is_write))
                - sum(processor_micros(samples, plain, is_write))
                for is_write in (0, 1)
            ]
            found.add_row(
                way.replace("_", " "),
                *(f"{value:.2f}" for value in cells),
                *(f"{value:+.2f}" if way == fresh else "" for value in added),
            )
    return found


def petabyte(samples: Samples) -> Table:
    """Tabulate how long deallocating a petabyte takes."""
    found = _table("Deallocation of a petabyte (goal: under 1 s)", ("until", "ms"))
    for figure in ("answered", "flushed", "merged"):
        found.add_row(figure, f"{statistics.median(s[figure] for s in samples) * 1e3:.2f}")
    return found
