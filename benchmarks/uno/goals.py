"""What the figures must show; a run that misses one of them fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.uno.networks import GEMINI, GEMINI_FAIR, UNO
from benchmarks.uno.report import Record, Value, times_of
from rich import box
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A mean over seeds and workloads, relative to another scheme's if one is named."""

    figure: str
    scheme: str
    measure: str
    value: Value
    most: float
    over: str = ""
    workload: str = ""

    @property
    def text(self) -> str:
        """Return what is compared."""
        where = f", {self.workload}" if self.workload else ""
        beside = f" / {self.over}" if self.over else ""
        return f"figure {self.figure}{where}: {self.measure} of {self.scheme}{beside}"

    def found(self, records: Sequence[Record]) -> float | None:
        """Return the value; None if there are no records for it."""
        mine = self._mean(records, self.scheme)
        if not self.over or mine is None:
            return mine
        other = self._mean(records, self.over)
        return mine / other if other else None

    def _mean(self, records: Sequence[Record], scheme: str) -> float | None:
        values = [
            value
            for record in records
            if record["figure"] == self.figure
            and record["scheme"] == scheme
            and self.workload in ("", record["workload"])
            and (value := self.value(record)) is not None
        ]
        return sum(values) / len(values) if values else None


def _wire(record: Record) -> float | None:
    return record["wire_per_payload"] or None


def _queue(record: Record) -> float | None:
    return record["queue_p99"]


_MEAN: Final[Callable[[Record], float | None]] = times_of("all", "mean")

GOALS: Final = (
    Goal(
        figure="10",
        scheme=UNO.name,
        over=GEMINI.name,
        measure="mean",
        value=_MEAN,
        most=0.5,
    ),
    Goal(
        figure="10",
        scheme=UNO.name,
        over=GEMINI.name,
        measure="near p99",
        value=times_of("near", "p99"),
        most=0.25,
    ),
    Goal(
        figure="10",
        scheme=UNO.name,
        over=GEMINI_FAIR.name,
        measure="mean",
        value=_MEAN,
        most=1.02,
    ),
    Goal(figure="10", scheme=UNO.name, measure="wire/payload", value=_wire, most=1.05),
    Goal(
        figure="8",
        workload="4 far + 4 near",
        scheme=UNO.name,
        over=GEMINI.name,
        measure="queue p99",
        value=_queue,
        most=0.2,
    ),
    Goal(
        figure="13",
        workload="dead link",
        scheme="UnoLB, (8, 2)",
        over="UnoLB",
        measure="mean",
        value=_MEAN,
        most=0.75,
    ),
    Goal(
        figure="13",
        workload="dead link",
        scheme="UnoLB, (8, 2)",
        over="spraying",
        measure="mean",
        value=_MEAN,
        most=0.36,
    ),
)


def missed(records: Sequence[Record]) -> list[Goal]:
    """Return the goals that the records contradict."""
    return [goal for goal in GOALS if (goal.found(records) or 0.0) > goal.most]


def table(records: Sequence[Record]) -> Table:
    """Return the goals with what was found."""
    shown = Table(title="Goals", box=box.SIMPLE_HEAD, title_justify="left")
    shown.add_column("what")
    shown.add_column("found", justify="right")
    shown.add_column("at most", justify="right")
    shown.add_column("")
    for goal in GOALS:
        found = goal.found(records)
        if found is not None:
            verdict = "" if found <= goal.most else "missed"
            shown.add_row(goal.text, f"{found:.3f}", f"{goal.most:g}", verdict)
    return shown
