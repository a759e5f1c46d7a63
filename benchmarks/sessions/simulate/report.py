"""Tables and JSON documents of the experiments."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.sessions.simulate.cells import Measured
from benchmarks.sessions.simulate.experiments import Effort, Experiment
from benchmarks.sessions.simulate.ring import Ring, rings
from rich import box
from rich.table import Table

ERROR_MAX: Final = 0.05
"""Goal for the stack's mean relative to the model's, where the model is exact."""
DEVIATIONS: Final = 4.0
"""Standard errors of a mean that are attributed to chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An experiment with the results of all its cells."""

    experiment: Experiment
    effort: Effort
    measured: Sequence[Measured]


def size_text(count: int) -> str:
    """Format a size."""
    for bit, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << bit:
            return f"{count / (1 << bit):.4g} {unit}"
    return f"{count} B"


def error(measured: Measured) -> float | None:
    """Return the stack's mean over the model's, minus 1; None without a model."""
    return None if measured.curve is None else measured.summary.mean / measured.curve.mean - 1


def is_beyond(measured: Measured) -> bool:
    """Return whether the mean contradicts an exact model, allowing for chance."""
    curve = measured.curve
    if curve is None or not curve.is_exact:
        return False
    chance = DEVIATIONS * curve.deviation / math.sqrt(measured.summary.count)
    return abs(measured.summary.mean - curve.mean) > ERROR_MAX * curve.mean + chance


def disagreements(results: Iterable[Result]) -> list[Measured]:
    """Return the cells whose mean contradicts an exact model."""
    found = {m.cell.key: m for result in results for m in result.measured if is_beyond(m)}
    return list(found.values())


def document(result: Result) -> dict[str, Any]:
    """Return the JSON document: parameters, results and the model's prediction for every cell."""
    experiment = result.experiment
    rows = []
    for measured in result.measured:
        row = measured.to_dict()
        del row["samples"]
        row["ideal"] = measured.cell.ideal
        row["slowdown"] = measured.slowdown
        row["mean_over_model"] = error(measured)
        rows.append(row)
    found: dict[str, Any] = {
        "experiment": experiment.name,
        "title": experiment.title,
        "parameters": experiment.parameters,
        "processor_seconds": sum(m.processor_seconds for m in result.measured),
        "cells": rows,
    }
    if experiment.keeps_samples:
        found["rings"] = [asdict(ring) for ring in rings(result.measured)]
    return found


def tables(result: Result) -> list[Table]:
    """Return a table of the cells, and of rings or slots where the experiment has them."""
    experiment = result.experiment
    table = Table(
        title=f"{experiment.name}: {experiment.title}; {experiment.parameters}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    headings = ("size", "loss", "round trip", "rate", "scheme", "messages", "mean ms")
    for heading in (
        *headings,
        "mean\n/ ideal",
        "mean\n/ model",
        "p50 ms",
        "p99 ms",
        "p99\n/ ideal",
        "p99.9 ms",
        "packets\nsent again",
        "late\nunits",
    ):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for measured in result.measured:
        table.add_row(*_row(measured))
    found = [table]
    if experiment.keeps_samples:
        found.append(_ring_table(rings(result.measured)))
    if experiment.is_about_slots:
        found.append(_foreign_table(result.measured))
    return found


def _foreign_table(found: Sequence[Measured]) -> Table:
    title = "A receiver with bitmaps but without message numbers, given the same packets"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("slots", "scheme", "messages", "late units", "foreign units", "wrong messages"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for measured in found:
        counts = (measured.counters[n] for n in ("late", "foreign_units", "foreign_messages"))
        cell = measured.cell
        table.add_row(str(cell.slots), cell.scheme.name, str(cell.runs), *map(str, counts))
    return table


def _row(measured: Measured) -> list[str]:
    cell, summary = measured.cell, measured.summary

    def quantile(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.1f}"

    against = error(measured)
    burst = f" × {cell.burst_packets:g}" if cell.burst_packets > 1 else ""
    return [
        size_text(cell.message_bytes),
        f"{cell.loss:.0e}{burst}",
        f"{cell.round_trip * 1e3:g} ms",
        f"{cell.rate / 1e9:g} G",
        cell.scheme.name,
        str(summary.count),
        f"{summary.mean * 1e3:.2f}",
        f"{measured.slowdown:.2f}",
        "" if against is None else f"{1 + against:.3f}",
        quantile(summary.p50),
        quantile(summary.p99),
        "" if summary.p99 is None else f"{summary.p99 / cell.ideal:.2f}",
        quantile(summary.p999),
        str(measured.counters["retransmitted_packets"]),
        str(measured.counters["late"]),
    ]


def _ring_table(found: Sequence[Ring]) -> Table:
    table = Table(title="Ring all-reduce, ms", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("sites", "loss", "scheme", "mean", "mean, model", "p99.9", "p99.9, model"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for ring in found:
        times = (ring.mean, ring.model_mean, ring.p999, ring.model_p999)
        cells = [f"{seconds * 1e3:.1f}" for seconds in times]
        table.add_row(str(ring.sites), f"{ring.loss:.0e}", ring.scheme, *cells)
    return table


def budget(results: Iterable[Result]) -> Table:
    """Return a table of cells, messages, packets and processor time per experiment."""
    table = Table(title="Work per experiment", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("experiment", "cells", "messages", "million packets", "processor s"):
        table.add_column(heading, justify="right")
    seen: dict[str, Measured] = {}
    for result in results:
        _budget_row(table, result.experiment.name, result.measured)
        seen |= {measured.cell.key: measured for measured in result.measured}
    _budget_row(table, "all, each cell once", list(seen.values()))
    return table


def _budget_row(table: Table, name: str, measured: Sequence[Measured]) -> None:
    table.add_row(
        name,
        str(len(measured)),
        f"{sum(m.summary.count for m in measured):,}",
        f"{sum(m.counters['packets'] for m in measured) / 1e6:.1f}",
        f"{sum(m.processor_seconds for m in measured):.1f}",
    )


def agreement(results: Sequence[Result]) -> Table:
    """Return a table of stack over model where it is exact, and where it is not."""
    table = Table(title="Mean of the stack / mean of the model", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    for heading in (
        "experiment",
        "cells,\nexact model",
        "min",
        "max",
        "more than\n5 % off",
        "cells,\napproximate",
        "min",
        "max",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        modelled = [(m, 1 + against) for m in result.measured if (against := error(m)) is not None]
        exact = [ratio for m, ratio in modelled if m.curve and m.curve.is_exact]
        other = [ratio for m, ratio in modelled if m.curve and not m.curve.is_exact]
        wrong = len(disagreements([result]))
        table.add_row(result.experiment.name, *_span(exact), str(wrong), *_span(other))
    return table


def _span(ratios: Sequence[float]) -> tuple[str, str, str]:
    if not ratios:
        return "0", "", ""
    return str(len(ratios)), f"{min(ratios):.3f}", f"{max(ratios):.3f}"
