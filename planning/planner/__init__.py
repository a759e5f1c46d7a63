"""Chooses schemes for messages: estimates a path's loss, ranks schemes, keeps a plan."""

from sealane.planning.planner.choice import (
    PARITY_BUDGET,
    SIZE_MAX,
    Candidate,
    Objective,
    Plan,
    PlanRow,
    evaluate,
    plan,
    plan_row,
    rank,
    row_length,
    row_lengths,
    scheme_text,
    why,
)
from sealane.planning.planner.estimate import (
    LossEstimate,
    LossEstimator,
    PathCounters,
    Planner,
    burst_packets,
)

__all__ = [
    "PARITY_BUDGET",
    "SIZE_MAX",
    "Candidate",
    "LossEstimate",
    "LossEstimator",
    "Objective",
    "PathCounters",
    "Plan",
    "PlanRow",
    "Planner",
    "burst_packets",
    "evaluate",
    "plan",
    "plan_row",
    "rank",
    "row_length",
    "row_lengths",
    "scheme_text",
    "why",
]
