"""Tables and plot of completion times in the lab."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from benchmarks.sessions.intervals import Summary, summarize
from benchmarks.sessions.lab.cells import CONNECTIONS, FULL_RATE, MIB, WAYS, Cell
from rich import box
from rich.table import Table

from sealane.planning.model import ErasureCoded, SelectiveRepeat, completion

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OTHERS: Final = tuple(way for way in WAYS if way != "session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell, its summaries by transport, and the model's prediction; times in seconds."""

    cell: Cell
    summaries: dict[str, Summary]
    """Summaries of the transports that completed any message."""
    unfinished: dict[str, int]
    """Messages given up after 20 s or more; they are not in the summaries."""
    scheme: str
    model_p50: float
    model_p99: float
    void: list[str]
    idle: float
    load_average: float
    added_delay_p99: float
    times: dict[str, list[float]]

    @staticmethod
    def of(cell: Cell, found: dict[str, Any]) -> "Result":
        """Summarize a saved result."""
        k, m, depth = found["scheme"]
        scheme = ErasureCoded(k, m, depth) if k else SelectiveRepeat()
        model = completion(cell.path, cell.bytes, scheme)
        return Result(
            cell=cell,
            summaries={
                way: summarize(np.array(times), seed=1)
                for way, times in found["times"].items()
                if times
            },
            unfinished=found["unfinished"],
            scheme=f"({k}, {m}) × {depth}" if k else "SR",
            model_p50=model.quantile(0.5),
            model_p99=model.quantile(0.99),
            void=found["void"],
            idle=found["idle"],
            load_average=found["load_average"],
            added_delay_p99=found["added_delay_p99"],
            times=found["times"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        found = asdict(self)
        found["cell"] |= {
            "links": self.cell.links.name,
            "bytes": self.cell.bytes,
            "ideal": self.cell.ideal,
        }
        return found

    @property
    def title(self) -> str:
        """Message length before and after scaling."""
        return f"{self.cell.full_bytes // MIB} MiB: {size_text(self.cell.bytes)}"


def size_text(count: int) -> str:
    """Format a length."""
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def table(results: Sequence[Result]) -> Table:
    """Return a table of p50, p99 and count per transport; p99 only with 1000 messages or more."""
    found = Table(
        title="Completion in ms: p50, p99 (messages); round trip 25 ms, MTU 1500",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    headings = (
        "Mbit/s",
        "loss",
        "message",
        "connection",
        "ideal",
        "scheme if the loss were known",
        "its model",
    )
    for heading in (*headings, *WAYS.values(), "added delay p99, ms", "idle CPU"):
        found.add_column(heading, justify="right")
    for result in results:
        found.add_row(*_row(result))
    return found


def _row(result: Result) -> list[str]:
    cell = result.cell
    return [
        f"{cell.rate / 1e6:g}",
        cell.condition.name,
        result.title,
        cell.connection,
        _milliseconds(cell.ideal),
        result.scheme,
        f"{_milliseconds(result.model_p50)}, {_milliseconds(result.model_p99)}",
        *(_shown(result.summaries.get(way), result.unfinished[way]) for way in WAYS),
        _milliseconds(result.added_delay_p99) + (" VOID" if result.void else ""),
        f"{result.idle:.0%}",
    ]


def ratios(results: Sequence[Result]) -> Table:
    """Return a table of the other transports relative to the session."""
    found = Table(
        title="Completion / session's: p50, mean, p99 (above 1: the session is faster). "
        "P·M: mean losses per message",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in (
        "Mbit/s",
        "loss",
        "P·M",
        "message",
        "connection",
        "session p99 / ideal",
        *OTHERS,
    ):
        found.add_column(heading, justify="right")
    for result in results:
        found.add_row(*_ratio_row(result))
    return found


def _ratio_row(result: Result) -> list[str]:
    cell, ours = result.cell, result.summaries.get("session")
    tail = ours.p99 / cell.ideal if ours and ours.p99 is not None else None
    return [
        f"{cell.rate / 1e6:g}",
        cell.condition.name,
        f"{cell.expected_losses:.2g}",
        result.title,
        cell.connection,
        "–" if tail is None else f"{tail:.2f}",
        *(_ratio(result.summaries.get(way), ours) for way in OTHERS),
    ]


def _ratio(other: Summary | None, ours: Summary | None) -> str:
    if other is None or ours is None:
        return "–"
    both = ((other.p50, ours.p50), (other.mean, ours.mean), (other.p99, ours.p99))
    return ", ".join("–" if a is None or b is None else f"{a / b:.2f}" for a, b in both)


def markdown(results: Sequence[Result]) -> str:
    """Return both tables as Markdown for the documentation."""
    lines: list[str] = []
    for found, rows in (
        (table(results), [_row(result) for result in results]),
        (ratios(results), [_ratio_row(result) for result in results]),
    ):
        headings = [str(column.header) for column in found.columns]
        lines += [f"{found.title}", "", _line(headings), _line(["---"] * len(headings))]
        lines += [*map(_line, rows), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(summary: Summary | None, unfinished: int) -> str:
    given_up = f", {unfinished} given up" if unfinished else ""
    if summary is None:
        return f"–{given_up}"
    times = f"{_milliseconds(summary.p50)}, {_milliseconds(summary.p99)}"
    return f"{times} ({summary.count}{given_up})"


def plot(path: Path, results: Sequence[Result]) -> None:
    """Draw completion times by loss, a panel for each rate, length and state of the connection."""
    sizes = sorted({(r.cell.rate, r.cell.full_bytes) for r in results})
    figure, panels = plt.subplots(
        len(CONNECTIONS),
        len(sizes),
        figsize=(4.2 * len(sizes), 3.6 * len(CONNECTIONS)),
        squeeze=False,
        sharey=True,
    )
    for row, connection in zip(panels, CONNECTIONS, strict=True):
        for axes, size in zip(row, sizes, strict=True):
            _panel(
                axes,
                [
                    r
                    for r in results
                    if (r.cell.rate, r.cell.full_bytes, r.cell.connection) == (*size, connection)
                ],
            )
    figure.suptitle(
        f"Messages over long links, scaled from {FULL_RATE / 1e9:g} Gbit/s: round trip 25 ms, "
        "MTU 1500, same rate and buffer for all"
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Axes, results: Sequence[Result]) -> None:
    """Draw completion over the ideal of a session, whose headers are longer than TCP's."""
    axes.set_yscale("log")
    if not results:
        return
    place = np.arange(len(results))
    for index, (way, name) in enumerate(WAYS.items()):
        at = place + (index - (len(WAYS) - 1) / 2) * 0.2
        found = [
            (x, result.cell.ideal, result.summaries[way])
            for x, result in zip(at, results, strict=True)
            if way in result.summaries
        ]
        middle = [s.p50 / ideal for _, ideal, s in found]
        axes.plot([x for x, *_ in found], middle, f"C{index}o", markersize=4, label=f"{name}: p50")
        for x, ideal, s in found:
            if s.p99 is not None:
                axes.plot([x, x], [s.p50 / ideal, s.p99 / ideal], f"C{index}", linewidth=1)
                axes.plot([x], [s.p99 / ideal], f"C{index}^", markersize=5)
    axes.axhline(1, color="grey", linewidth=0.8, label="ideal (▲: p99)")
    axes.set_xticks(place, [r.cell.condition.name for r in results], fontsize=7, rotation=15)
    ticks = [1, 1.5, 2, 3, 5, 10, 20, 50, 100]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    connection = results[0].cell.connection
    title = f"{results[0].title} at {results[0].cell.rate / 1e6:g} Mbit/s, {connection}"
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("packet loss", fontsize=8)
    axes.set_ylabel("completion / ideal")
