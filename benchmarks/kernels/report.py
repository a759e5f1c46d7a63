"""Tables and the plot of the kernel benchmark."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS: Final = "sealane gfni"
DRAWN: Final = (
    ("encode", "(32, 8) 4096 B"),
    ("encode", "(32, 8) 1408 B"),
    ("decode", "(32, 8) 4096 B, 1 lost"),
    ("decode", "(32, 8) 4096 B, 8 lost"),
    ("seal", "1408 B"),
    ("seal", "4096 B"),
    ("seal", "8192 B"),
    ("open", "1408 B"),
    ("open", "4096 B"),
)
TITLES: Final = {
    "seal": "AES-256-GCM, sealing in place: GB/s, median (range)",
    "open": "AES-256-GCM, opening: GB/s, median (range)",
    "check": "Checks of a sector that an accelerator sealed: GB/s, median (range)",
    "write": "A sector through a gateway, journal of 64 MiB: GB/s, median (range)",
    "node": "Node functions of a Merkle tree: GB/s of children or entries, median (range)",
    "encode": "Erasure code, encoding: GB/s of data, median (range)",
    "parity": "Parity by a card: encoding, copies and checks: GB/s of data, median (range)",
    "decode": "Erasure code, decoding with the first symbols lost: GB/s of data, median (range)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One library's time for one call, in one round."""

    what: str
    shape: str
    who: str
    bytes: int
    round: int
    nanos: float

    @property
    def rate(self) -> float:
        """Bytes per nanosecond, which equals GB/s."""
        return self.bytes / self.nanos


def median_rate(samples: Iterable[Sample]) -> float:
    """Return the median in GB/s; 0 without samples."""
    rates = [sample.rate for sample in samples]
    return statistics.median(rates) if rates else 0.0


def select(samples: Iterable[Sample], what: str, shape: str, who: str) -> list[Sample]:
    """Return the samples of one case."""
    return [s for s in samples if (s.what, s.shape, s.who) == (what, shape, who)]


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Return a table per kind of work, one column per library."""
    found = []
    for what in dict.fromkeys(sample.what for sample in samples):
        mine = [sample for sample in samples if sample.what == what]
        libraries = list(dict.fromkeys(sample.who for sample in mine))
        table = Table(title=TITLES[what], box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("shape")
        for library in libraries:
            table.add_column(library, justify="right")
        for shape in dict.fromkeys(sample.shape for sample in mine):
            cells = []
            for library in libraries:
                rates = [sample.rate for sample in select(mine, what, shape, library)]
                cells.append(
                    f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"
                    if rates
                    else ""
                )
            table.add_row(shape, *cells)
        found.append(table)
    return found


def decode_table(samples: Sequence[Sample]) -> Table:
    """Compare decoding of e losses with the goal: the encoding rate times m / (2 e)."""
    table = Table(
        title="Decoding e lost symbols compared with encoding, GB/s",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("code", "lost, e", "decode", "encode x m / (2 e)", "20 GB/s x m / (2 e)"):
        table.add_column(heading, justify="right")
    for shape in dict.fromkeys(sample.shape for sample in samples if sample.what == "decode"):
        code, losses = shape.rsplit(", ", 1)
        lost = int(losses.split()[0])
        parity = int(code.split(",")[1].split(")")[0])
        decode = median_rate(select(samples, "decode", shape, OURS))
        encode = median_rate(select(samples, "encode", code, OURS))
        share = parity / (2 * lost)
        table.add_row(
            code, str(lost), f"{decode:.1f}", f"{encode * share:.1f}", f"{20 * share:.1f}"
        )
    return table


def plot(path: Path, samples: Sequence[Sample]) -> None:
    """Draw the most important cases as bars, one colour per library."""
    cases = [case for case in DRAWN if any((s.what, s.shape) == case for s in samples)]
    libraries = list(dict.fromkeys(s.who for s in samples if (s.what, s.shape) in cases))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(2.1 * len(cases) + 1, 4.6), layout="constrained", squeeze=False
    )
    colors = dict(zip(libraries, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for place, (what, shape) in zip(axes[0], cases, strict=True):
        shown = [name for name in libraries if select(samples, what, shape, name)]
        rates = [median_rate(select(samples, what, shape, name)) for name in shown]
        bars = place.bar(range(len(shown)), rates, color=[colors[name] for name in shown])
        place.bar_label(bars, fmt="%.1f", fontsize=7)
        place.set_xticks(range(len(shown)), shown, rotation=70, ha="right", fontsize=7)
        place.set_title(f"{what}\n{shape}", fontsize=8)
        place.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("GB/s on one core")
    figure.savefig(path, dpi=120)
    plt.close(figure)
