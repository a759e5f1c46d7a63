"""Chooses schemes for messages: estimates a path's loss, ranks schemes, keeps a plan."""

from sealane.planning.planner.choice import (
    PARITY_BUDGET,
    Candidate,
    Objective,
    Plan,
    PlanRow,
    evaluate,
    plan,
    rank,
    scheme_text,
    why,
)
from sealane.planning.planner.estimate import LossEstimate, LossEstimator, PathCounters, Planner

__all__ = [
    "PARITY_BUDGET",
    "Candidate",
    "LossEstimate",
    "LossEstimator",
    "Objective",
    "PathCounters",
    "Plan",
    "PlanRow",
    "Planner",
    "evaluate",
    "plan",
    "rank",
    "scheme_text",
    "why",
]
