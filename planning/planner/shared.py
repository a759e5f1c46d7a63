"""Rows of plans that the sessions of a path share.

A row takes tenths of a second of processor time where losses are high. Sessions of one path want
nearly the same: what they have measured differs by less than what makes a plan out of date.
Therefore they are planned for the same rounded values, and a row that was made is used again.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from sealane.planning.model import Path
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.planning.planner.choice import Objective, Plan, PlanRow, plan, plan_row

STEP: Final = 1.1
"""Loss, bursts and round trip are rounded to powers of this. A plan is out of date at a factor of
1.5 at the earliest."""
_ROWS_KEPT: Final = 4096
"""Each with some 500 bytes, and the `check` of whoever asked for it first."""
_LOOKS_SECONDS: Final = 0.1
"""Interval at which one that waits for another's row looks whether it is still wanted."""

_planning = threading.Lock()
"""One row is made at a time: another session may be waiting for the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    path: Path
    objective: Objective
    parity_budget: float
    caution: float
    length_max: int
    check: Callable[[], None] = field(compare=False)


def shared_plan(
    path: Path,
    objective: Objective,
    parity_budget: float,
    *,
    caution: float,
    lengths: Sequence[int],
    check: Callable[[], None],
) -> Plan:
    """Return the plan for a path, with rows for nearly the same one, made now or earlier.

    Arguments and errors are those of `plan`.
    """
    return plan(
        path,
        objective,
        parity_budget,
        caution=caution,
        lengths=lengths,
        check=check,
        row=_shared_row,
    )


def _shared_row(
    path: Path,
    length_max: int,
    objective: Objective,
    parity_budget: float,
    *,
    caution: float,
    check: Callable[[], None],
) -> PlanRow:
    wanted = _Wanted(
        path=_rounded(path),
        objective=objective,
        parity_budget=parity_budget,
        caution=_near(caution),
        length_max=length_max,
        check=check,
    )
    check()
    while not _planning.acquire(timeout=_LOOKS_SECONDS):
        check()
    try:
        return _made(wanted)
    finally:
        _planning.release()


def _rounded(path: Path) -> Path:
    rate = min(_near(path.loss.rate), max(path.loss.rate, PLANNED_LOSS_MAX))
    loss = replace(path.loss, rate=rate, burst_packets=_near(path.loss.burst_packets))
    return replace(path, loss=loss, round_trip_seconds=_near(path.round_trip_seconds))


def _near(value: float) -> float:
    return STEP ** round(math.log(value, STEP)) if value > 0 else 0.0


@lru_cache(maxsize=_ROWS_KEPT)
def _made(wanted: _Wanted) -> PlanRow:
    return plan_row(
        wanted.path,
        wanted.length_max,
        wanted.objective,
        wanted.parity_budget,
        caution=wanted.caution,
        check=wanted.check,
    )
