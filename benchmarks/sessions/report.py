"""Tables and plot of the cost per packet."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.sessions.packets import PACED_WAYS, WAYS, Sample
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

NAMES: Final = {
    "session": "sealed session",
    "tls": "TLS 1.3 over TCP (rustls)",
    "quic": "QUIC (quinn)",
}
PROCESSOR_WANTED: Final = 0.5
"""Goal, in processor seconds per GB."""


def _of(samples: Sequence[Sample], way: str, mtu: int) -> list[Sample]:
    return [sample for sample in samples if (sample.way, sample.mtu) == (way, mtu)]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _part(samples: Sequence[Sample], part: str) -> str:
    """Return the median processor time of one part of the ends, in seconds per GB."""
    values = (getattr(sample, f"processor_{part}") / sample.bytes * 1e9 for sample in samples)
    return f"{statistics.median(values):.2f}"


def _relative(these: Sequence[Sample], those: Sequence[Sample]) -> str:
    """Return processor time of `these` over that of `those`, paired within a round."""
    pairs = zip(these, those, strict=True)
    return f"{statistics.median(a.processor_per_gb / b.processor_per_gb for a, b in pairs):.2f}"


def table(samples: Sequence[Sample]) -> Table:
    """Return a table of medians, and of each transport's cost relative to a session's."""
    found = Table(
        title="Bulk transfer over a clean, saturated link, medians over rounds",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for index, heading in enumerate(
        (
            "transport",
            "MTU",
            "processor s/GB (range)",
            "sender s/GB",
            "receiver s/GB",
            "of which jobs",
            "GB/s",
            "thousand packets/s per core",
            "cost / session",
        )
    ):
        found.add_column(heading, justify="left" if index == 0 else "right")
    for mtu in sorted({sample.mtu for sample in samples}):
        for way in WAYS:
            mine = _of(samples, way, mtu)
            found.add_row(
                NAMES[way],
                str(mtu),
                _spread([sample.processor_per_gb for sample in mine]),
                _part(mine, "sender"),
                _part(mine, "receiver"),
                _part(mine, "job"),
                f"{statistics.median(s.bytes / s.seconds / 1e9 for s in mine):.2f}",
                f"{statistics.median(s.packets_per_core_second / 1e3 for s in mine):,.0f}",
                _relative(mine, _of(samples, "session", mtu)),
            )
    return found


def paced_table(samples: Sequence[Sample]) -> Table:
    """Return a table of medians at each pace; "cost / TLS" is paired within a round."""
    found = Table(
        title="The same at a given pace, MTU 1500", box=box.SIMPLE_HEAD, title_justify="left"
    )
    headings = ("pace, Mbit/s", "transport", "processor s/GB (range)", "sender s/GB")
    for heading in (*headings, "receiver s/GB", "Mbit/s", "cost / TLS"):
        found.add_column(heading, justify="left" if heading == "transport" else "right")
    for pace in sorted({sample.pace for sample in samples}):
        here = [sample for sample in samples if sample.pace == pace]
        tls = [sample for sample in here if sample.way == "tls"]
        for way in PACED_WAYS:
            mine = [sample for sample in here if sample.way == way]
            found.add_row(
                f"{pace / 1e6:.0f}",
                NAMES[way],
                _spread([sample.processor_per_gb for sample in mine]),
                _part(mine, "sender"),
                _part(mine, "receiver"),
                f"{statistics.median(s.bytes * 8 / s.seconds / 1e6 for s in mine):.0f}",
                _relative(mine, tls),
            )
    return found


def profile_table(samples: Sequence[Sample], profiles: Mapping[int, Mapping[str, float]]) -> Table:
    """Return a table of a session's processor time by activity: shares, and parts of the median."""
    found = Table(
        title="Processor time of a session by activity", box=box.SIMPLE_HEAD, title_justify="left"
    )
    found.add_column("activity")
    parts: dict[str, None] = {}
    for mtu, shares in sorted(profiles.items()):
        found.add_column(f"MTU {mtu}: s/GB (share)", justify="right")
        parts |= dict.fromkeys(shares)
    medians = {
        mtu: statistics.median(s.processor_per_gb for s in _of(samples, "session", mtu))
        for mtu in profiles
    }
    for part in parts:
        cells = [(mtu, profiles[mtu].get(part, 0.0)) for mtu in sorted(profiles)]
        found.add_row(part, *(f"{medians[mtu] * share:.3f} ({share:.0%})" for mtu, share in cells))
    return found


def plot(path: Path, samples: Sequence[Sample]) -> None:
    """Draw processor seconds per GB by MTU: medians as bars, samples as points."""
    mtus = sorted({sample.mtu for sample in samples})
    figure, axes = plt.subplots(figsize=(7, 4))
    width = 0.8 / len(WAYS)
    for index, way in enumerate(WAYS):
        for place, mtu in enumerate(mtus):
            values = [sample.processor_per_gb for sample in _of(samples, way, mtu)]
            x = place + (index - (len(WAYS) - 1) / 2) * width
            label = NAMES[way] if place == 0 else None
            axes.bar(x, statistics.median(values), width * 0.9, color=f"C{index}", label=label)
            axes.plot([x] * len(values), values, "k.", markersize=3)
    axes.axhline(PROCESSOR_WANTED, color="grey", linestyle="--", linewidth=1, label="goal")
    axes.set_xticks(range(len(mtus)), [f"MTU {mtu}" for mtu in mtus])
    axes.set_ylabel("processor seconds per GB, both ends")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_paces(path: Path, samples: Sequence[Sample]) -> None:
    """Draw processor seconds per GB against the pace: medians as lines, samples as points."""
    paces = sorted({sample.pace for sample in samples})
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, way in enumerate(PACED_WAYS):
        mine = [sample for sample in samples if sample.way == way]
        costs = [[s.processor_per_gb for s in mine if s.pace == pace] for pace in paces]
        rates = [pace / 1e6 for pace in paces]
        axes.plot(rates, [statistics.median(c) for c in costs], f"C{index}o-", label=NAMES[way])
        for rate, found in zip(rates, costs, strict=True):
            axes.plot([rate] * len(found), found, "k.", markersize=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("pace, Mbit/s")
    axes.set_ylabel("processor seconds per GB, both ends")
    axes.set_title("MTU 1500; TLS is paced by the kernel", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
