"""Tables and the JSON document of the figures."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t distribution for a 95 % interval, from one degree of freedom on."""
NORMAL: Final = 2.0
"""Beyond them, within 2 %."""

Record = dict[str, Any]
Value = Callable[[Record], float | None]


def times_of(group: str, name: str) -> Value:
    """Return the access to a field of a class's completion times."""

    def value(record: Record) -> float | None:
        times = record[group]
        return None if times is None else float(times[name])

    return value


Columns = Mapping[str, tuple[Value, str]]
"""What a column shows of a record, and in what form, by its name."""

COLUMNS: Final[Columns] = {
    "mean, ms": (times_of("all", "mean"), "{:,.3f}"),
    "collective p99, ms": (
        lambda record: None if record["ideal"] is None else float(record["all"]["p99"]),
        "{:,.2f}",
    ),
    "ideal, ms": (lambda record: record["ideal"], "{:,.2f}"),
    "near mean, ms": (times_of("near", "mean"), "{:,.3f}"),
    "near p99, ms": (times_of("near", "p99"), "{:,.3f}"),
    "far mean, ms": (times_of("far", "mean"), "{:,.2f}"),
    "far p99, ms": (times_of("far", "p99"), "{:,.2f}"),
    "worst, ms": (times_of("all", "worst"), "{:,.2f}"),
    "wire/payload": (lambda record: record["wire_per_payload"] or None, "{:.2f}"),
    "Jain": (lambda record: record["jain"], "{:.3f}"),
    "near/far": (lambda record: record["near_per_far"], "{:.2f}"),
    "queue p99, kB": (
        lambda record: None if record["queue_p99"] is None else record["queue_p99"] / 1000,
        "{:,.0f}",
    ),
}


def grouped(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the records by workload and scheme, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["workload"], record["scheme"]].append(record)
    return dict(groups)


def mean_and_half(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of its 95 % interval by Student's t; None of a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL
    return mean, quantile * math.sqrt(variance / count)


def _text(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean, half = mean_and_half(known)
    text = form.format(mean)
    return text if half is None else f"{text} ± {form.format(half)}"


def table(title: str, records: Sequence[Record], columns: Columns = COLUMNS) -> Table:
    """Return a figure's results: means over seeds, with 95 % intervals."""
    shown = {
        name: column
        for name, column in columns.items()
        if any(column[0](record) is not None for record in records)
    }
    found = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    found.add_column("workload")
    found.add_column("scheme")
    found.add_column("seeds", justify="right")
    for name in shown:
        found.add_column(name, justify="right")
    last = ""
    for (workload, scheme), group in grouped(records).items():
        # The ablations end by their time.
        is_cut = group[0]["figure"] == "ablations"
        unfinished = 0 if is_cut else sum(record["unfinished"] for record in group)
        cells = [_text([value(record) for record in group], form) for value, form in shown.values()]
        name = f"{scheme} ({unfinished} flows unfinished)" if unfinished else scheme
        found.add_row(workload if workload != last else "", name, f"{len(group)}", *cells)
        last = workload
    return found
