"""Plans that the sessions of a path share.

A plan takes seconds of processor time where losses are high. Sessions of one path want nearly the
same: what they have measured differs by less than what makes a plan out of date. Therefore they are
planned for the same rounded values, and a plan that was made is used again.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from sealane.planning.model import Path
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.planning.planner.choice import Objective, Plan, longest_row, plan

STEP: Final = 1.1
"""Loss, bursts and round trip are rounded to powers of this. A plan is out of date at a factor of
1.5 at the earliest."""
_PLANS_KEPT: Final = 256
"""Each with some 2 KiB, and the `check` of whoever asked for it first."""
_LOOKS_SECONDS: Final = 0.1
"""Interval at which one that waits for another's plan looks whether it is still wanted."""

_planning = threading.Lock()
"""One plan is made at a time: another session may be waiting for the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    path: Path
    objective: Objective
    parity_budget: float
    caution: float
    message_bytes_max: int
    check: Callable[[], None] = field(compare=False)


def shared_plan(
    path: Path,
    objective: Objective,
    parity_budget: float,
    *,
    caution: float,
    message_bytes_max: int,
    check: Callable[[], None],
) -> Plan:
    """Return the plan for a path, with rows for nearly the same one, made now or earlier.

    Arguments and errors are those of `plan`.
    """
    wanted = _Wanted(
        path=_rounded(path),
        objective=objective,
        parity_budget=parity_budget,
        caution=_near(caution),
        message_bytes_max=longest_row(message_bytes_max),
        check=check,
    )
    check()
    while not _planning.acquire(timeout=_LOOKS_SECONDS):
        check()
    try:
        made = _made(wanted)
    finally:
        _planning.release()
    return replace(made, path=path, caution=caution)


def _rounded(path: Path) -> Path:
    rate = min(_near(path.loss.rate), max(path.loss.rate, PLANNED_LOSS_MAX))
    loss = replace(path.loss, rate=rate, burst_packets=_near(path.loss.burst_packets))
    return replace(path, loss=loss, round_trip_seconds=_near(path.round_trip_seconds))


def _near(value: float) -> float:
    return STEP ** round(math.log(value, STEP)) if value > 0 else 0.0


@lru_cache(maxsize=_PLANS_KEPT)
def _made(wanted: _Wanted) -> Plan:
    return plan(
        wanted.path,
        wanted.objective,
        wanted.parity_budget,
        caution=wanted.caution,
        message_bytes_max=wanted.message_bytes_max,
        check=wanted.check,
    )
