"""Tables, JSON rows and plot of the field: a session beside the best of its rivals in each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from benchmarks.sessions.intervals import Summary, summarize
from benchmarks.sessions.lab.cells import WAYS, Cell
from benchmarks.sessions.lab.jobs import Job
from benchmarks.sessions.lab.report import size_text
from rich import box
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm

RIVALS: Final = tuple(way for way in WAYS if way != "session")
WORSE: Final = 1.05
"""A session's time beyond this multiple of the best rival's is worse."""
IDEAL: Final = 1.3
"""Wanted multiple of the ideal completion time."""
TAIL: Final = ("p99", "p90")
"""The quantile that is compared, and the one where messages don't suffice for it."""
LISTED: Final = 20
GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell, and what each transport did in it; times in seconds."""

    cell: Cell
    summaries: dict[str, Summary]
    """Of the transports that completed any message."""
    unfinished: dict[str, int]
    processor_seconds_per_gb: dict[str, float]
    void: list[str]

    @staticmethod
    def of(cell: Cell, found: dict[str, Any]) -> "Result":
        """Summarize a saved result."""
        job = Job(bytes=cell.bytes, count=0, seconds=0.0, connection=cell.connection)
        warm_up = job.warm_up * cell.links.lanes
        times: dict[str, list[float]] = found["times"]
        return Result(
            cell=cell,
            summaries={
                way: summarize(np.array(mine), seed=1) for way, mine in times.items() if mine
            },
            unfinished=found["unfinished"],
            processor_seconds_per_gb={
                way: found["processor_seconds"][way] / ((len(mine) + warm_up) * cell.bytes / GB)
                for way, mine in times.items()
                if mine
            },
            void=found["void"],
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each transport."""
        return [
            {
                "round_trip": self.cell.links.round_trip,
                "condition": self.cell.condition.name,
                "bytes": self.cell.bytes,
                "connection": self.cell.connection,
                "rate": self.cell.rate,
                "ideal": self.cell.ideal,
                "way": way,
                "n": summary.count,
                "unfinished": self.unfinished[way],
                "p50": summary.p50,
                "p90": summary.p90,
                "p99": summary.p99,
                "processor_seconds_per_gb": self.processor_seconds_per_gb[way],
                "void": self.void,
            }
            for way, summary in self.summaries.items()
        ]

    def beside_best(self, *quantiles: str) -> float | None:
        """Return the session's time relative to the best rival's.

        Of the first of these `quantiles` that the session and a rival have; None: of none.
        """
        ours = self.summaries.get("session")
        for name in quantiles if ours else ():
            mine = getattr(ours, name)
            rivals = [getattr(self.summaries[way], name) for way in RIVALS if way in self.summaries]
            known = [found for found in rivals if found is not None]
            if mine is not None and known:
                return float(mine / min(known))
        return None


def tail(summary: Summary) -> float | None:
    """Return the p99, or the p90 where messages don't suffice for it."""
    return summary.p90 if summary.p99 is None else summary.p99


def table(results: Sequence[Result]) -> Table:
    """Return a table with the completion times of all transports in each cell."""
    found = Table(
        title="Completion in ms: p50, p99 (messages); ~: p90, for want of messages",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    headings = ("round trip", "condition", "message", "connection", "ideal", *WAYS.values())
    for heading in (*headings, "CPU s/GB of each"):
        found.add_column(heading, justify="right")
    for result in results:
        cell = result.cell
        spent = result.processor_seconds_per_gb
        found.add_row(
            cell.links.name,
            cell.condition.name + (" VOID" if result.void else ""),
            size_text(cell.bytes),
            cell.connection,
            f"{cell.ideal * 1e3:.1f}",
            *(_shown(result.summaries.get(way), result.unfinished[way]) for way in WAYS),
            ", ".join(f"{spent[way]:.1f}" if way in spent else "–" for way in WAYS),
        )
    return found


def _shown(summary: Summary | None, unfinished: int) -> str:
    given_up = f", {unfinished} given up" if unfinished else ""
    if summary is None:
        return f"–{given_up}"
    late = tail(summary)
    text = "–" if late is None else f"{'~' if summary.p99 is None else ''}{late * 1e3:.1f}"
    return f"{summary.p50 * 1e3:.1f}, {text} ({summary.count}{given_up})"


def summary(results: Sequence[Result]) -> Table:
    """Return how often sessions reach their goals, and the cells in which they are worst."""
    found = Table(
        title=f"Session / best rival: goal at most {WORSE:g}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("", "p50", "p99 or p90"):
        found.add_column(heading, justify="left" if not heading else "right")
    both = [(r, r.beside_best("p50"), r.beside_best(*TAIL)) for r in results if not r.void]
    found.add_row("cells within the goal", *(_share([b[i] for b in both]) for i in (1, 2)))
    ours = [(r.summaries["session"], r.cell.ideal) for r, *_ in both if "session" in r.summaries]
    found.add_row(
        f"cells within {IDEAL:g} of the ideal",
        _share([mine.p50 / ideal for mine, ideal in ours], IDEAL),
        _share([late / ideal for mine, ideal in ours if (late := tail(mine))], IDEAL),
    )
    worst = sorted(both, key=lambda b: max(b[1] or 0, b[2] or 0), reverse=True)
    for result, *pair in worst[:LISTED]:
        if max(ratio or 0 for ratio in pair) > WORSE:
            found.add_row(
                _name(result), *("–" if ratio is None else f"{ratio:.2f}" for ratio in pair)
            )
    return found


def _share(ratios: Sequence[float | None], most: float = WORSE) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(ratio <= most for ratio in known)} of {len(known)}"


def _name(result: Result) -> str:
    cell = result.cell
    return f"{cell.links.name}, {cell.condition.name}, {size_text(cell.bytes)}, {cell.connection}"


def plot(path: Path, results: Sequence[Result]) -> None:
    """Draw the session's time relative to the best rival's: conditions by links and messages."""
    columns = sorted({(r.cell.links.round_trip, r.cell.connection, r.cell.bytes) for r in results})
    conditions = list(dict.fromkeys(r.cell.condition.name for r in results))
    grids = {}
    for quantiles, name in ((("p50",), "p50"), (TAIL, "p99, or p90 where messages don't suffice")):
        grid = np.full((len(conditions), len(columns)), np.nan)
        for result in results:
            cell = result.cell
            place = (
                conditions.index(cell.condition.name),
                columns.index((cell.links.round_trip, cell.connection, cell.bytes)),
            )
            ratio = result.beside_best(*quantiles)
            if ratio is not None and not result.void:
                grid[place] = ratio
        if not np.isnan(grid).all():
            grids[name] = grid
    if not grids:
        return
    size = (4 + 0.62 * len(columns), 1 + len(grids) * (1.2 + 0.35 * len(conditions)))
    figure, panels = plt.subplots(len(grids), 1, figsize=size, squeeze=False)
    figure.suptitle("Session's completion time / the best rival's", fontsize=10)
    for axes, (name, grid) in zip(panels[:, 0], grids.items(), strict=True):
        axes.imshow(grid, cmap="RdYlGn_r", norm=LogNorm(0.25, 4), aspect="auto")
        for (row, column), ratio in np.ndenumerate(grid):
            if not np.isnan(ratio):
                axes.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(conditions)), conditions, fontsize=8)
        axes.set_xticks(
            range(len(columns)),
            [f"{trip * 1e3:g} ms\n{kind}\n{size_text(size)}" for trip, kind, size in columns],
            fontsize=6,
        )
        axes.set_title(name, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
