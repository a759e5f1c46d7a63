"""Estimates a path's loss from its counters, with confidence intervals; decides when to replan.

Only unexplained losses count. The session leaves out those that come with a queue, which are for
the rate control to handle. Drops by this host's own queues didn't happen on the path; they are
reported as losses some time later, and not all among the packets that count. So a time with such
drops says nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Final

from sealane.planning.model import Loss, Path
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.planning.planner.choice import PARITY_BUDGET, Objective, Plan, row_lengths
from sealane.planning.planner.shared import shared_plan

QUANTILE: Final = 1.96
"""Quantile of the normal distribution, for two-sided intervals of 95 %."""
PRIOR_RUNS: Final = 0.5
"""Runs of losses assumed when none was seen, so that a clean path isn't taken for a perfect one."""
PRIOR_PACKETS: Final = 50_000
"""Packets assumed in addition, so that a new path is taken to have a loss of 1e-5."""
RECENT_RUNS: Final = 8
"""Runs of losses after which the recent evidence is merged into the steady one …"""
RECENT_PACKETS: Final = 1 << 16
"""… or packets, whichever comes first."""
CHANGE: Final = 3.0
"""Factor beyond an interval at which a path has changed, or a plan is out of date."""
CHANGE_RUNS_MIN: Final = 3
"""Fewer runs of losses don't show that a path has become worse."""
ROUND_TRIP_CHANGE: Final = 1.5
"""Factor beyond the planned round trip at which a plan is out of date …"""
ROUND_TRIP_CHANGE_SECONDS: Final = 1e-3
"""… if it also differs by more than this: below, plans hardly differ."""
BURST_MAX: Final = 1e4
RATE_MAX: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCounters:
    """Counters of one path since its opening, in packets.

    `sent`, `lost`, `loss_runs` and timed runs are without packets beside a queue; local drops are
    not told apart in any but their own.
    """

    sent: int = 0
    lost: int = 0
    loss_runs: int = 0
    """Runs of consecutive losses."""
    local_drops: int = 0
    """Packets that this host's own queues refused."""
    timed_runs: int = 0
    """Runs whose length in time is known …"""
    timed_runs_nanos: int = 0
    """… and the sum of these lengths."""
    all_sent: int = 0
    """Packets sent, also beside a queue; some may be in flight …"""
    all_lost: int = 0
    """… those lost for whatever reason …"""
    all_runs: int = 0
    """… and runs of these."""

    def since(self, older: "PathCounters") -> "PathCounters":
        """Return the increase since `older`; a counter that decreased was restarted from 0."""
        pairs = zip(astuple(self), astuple(older), strict=True)
        added = [new - old if new >= old else new for new, old in pairs]
        return PathCounters(
            sent=added[0],
            lost=added[1],
            loss_runs=added[2],
            local_drops=added[3],
            timed_runs=added[4],
            timed_runs_nanos=added[5],
            all_sent=added[6],
            all_lost=added[7],
            all_runs=added[8],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Packets and unexplained losses of one period of time."""

    sent: float = 0.0
    lost: float = 0.0
    runs: float = 0.0
    timed_runs: float = 0.0
    """Runs whose length in time is known …"""
    timed_seconds: float = 0.0
    """… and the sum of these lengths."""

    def plus(self, other: "Evidence") -> "Evidence":
        """Return the sum of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Evidence(
            **{known.name: sum(pair) for known, pair in zip(fields(self), pairs, strict=True)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossEstimate:
    """An estimate of a path's loss, with 95 % confidence intervals."""

    loss: Loss
    rate_low: float
    rate_high: float
    burst_low: float
    burst_high: float
    packets: float
    """Number of packets that it is based on."""
    burst_seconds: float = 0.0
    """Mean length of a burst in time; 0 if none was measured."""

    def is_beyond(self, planned: Loss) -> bool:
        """Return True if the planned loss is outside the intervals by a factor of CHANGE."""
        burst = planned.burst_packets
        return (
            planned.rate * CHANGE < self.rate_low
            or planned.rate > self.rate_high * CHANGE
            or burst * CHANGE < self.burst_low
            or burst > self.burst_high * CHANGE
        )


def estimate(evidence: Evidence, unit_seconds: float | None = None) -> LossEstimate:
    """Return the estimate from one period's evidence.

    Bursts last for a time: where it was measured, `burst_packets` is the number of packets sent
    back to back in it, `unit_seconds` being the time of one.

    The number of runs is Poisson (Wilson and Hilferty's approximation of the exact interval), their
    lengths are geometric. So the number of lost packets is compound Poisson: its variance is
    2 - 1/B times that of runs of the constant length B.
    """
    runs, lost = evidence.runs, max(evidence.lost, evidence.runs)
    burst = min(max(lost / runs, 1.0), BURST_MAX) if runs else 1.0
    spread = 2 - 1 / burst
    rate = lost / evidence.sent if lost else PRIOR_RUNS / (evidence.sent + PRIOR_PACKETS)
    rate = min(rate, RATE_MAX)
    low, high = poisson_interval(runs / spread)
    scale = burst * spread / evidence.sent if evidence.sent else math.inf
    is_timed = bool(unit_seconds and evidence.timed_runs)
    burst_seconds = 0.0
    if unit_seconds and is_timed:
        runs, burst_seconds = evidence.timed_runs, evidence.timed_seconds / evidence.timed_runs
        burst = burst_packets(burst_seconds, unit_seconds)
    error = QUANTILE * math.sqrt(burst * (burst - 1) / runs) if runs else 0.0
    rate_high = min(1.0, max(high * scale, rate)) if evidence.sent else 1.0
    return LossEstimate(
        loss=Loss(rate=rate, burst_packets=burst, is_timed=is_timed),
        rate_low=min(low * scale, rate) if low else 0.0,
        rate_high=rate_high,
        burst_low=max(1.0, burst - error),
        burst_high=burst + error if runs else BURST_MAX,
        packets=evidence.sent,
        burst_seconds=burst_seconds,
    )


def burst_packets(burst_seconds: float, unit_seconds: float) -> float:
    """Return the mean run of packets sent back to back that bursts of this mean length hit.

    At most BURST_MAX. A run of n packets was measured as the time from its first to its last, and
    half of the next packet's: n - 1/2 of them.
    """
    return min(max(1.0, burst_seconds / unit_seconds + 0.5), BURST_MAX)


def poisson_interval(count: float) -> tuple[float, float]:
    """Return the 95 % confidence interval for the mean of a Poisson variable, given a sample."""
    low = 0.0
    if count > 0:
        root = 1 - 1 / (9 * count) - QUANTILE / (3 * math.sqrt(count))
        low = count * max(root, 0.0) ** 3
    more = count + 1
    return low, more * (1 - 1 / (9 * more) + QUANTILE / (3 * math.sqrt(more))) ** 3


def _has_changed(steady: Evidence, recent: Evidence, unit_seconds: float | None) -> bool:
    """Return True if runs of losses have become more frequent, rarer, longer or shorter.

    Runs are compared, not packets: of long ones there are few, and their lengths vary so much that
    every period would seem to be another path.
    """
    if not steady.sent or not recent.sent:
        return False
    before = [bound / steady.sent for bound in poisson_interval(steady.runs)]
    now = [bound / recent.sent for bound in poisson_interval(recent.runs)]
    is_more_frequent = recent.runs >= CHANGE_RUNS_MIN and now[0] > before[1] * CHANGE
    is_rarer = now[1] * CHANGE < before[0]
    if min(steady.runs, recent.runs) < CHANGE_RUNS_MIN:
        return is_more_frequent or is_rarer
    old, new = estimate(steady, unit_seconds), estimate(recent, unit_seconds)
    is_longer = new.burst_low > old.burst_high * CHANGE
    is_shorter = new.burst_high * CHANGE < old.burst_low
    return is_more_frequent or is_rarer or is_longer or is_shorter


class LossEstimator:
    """Estimates one path's loss."""

    def __init__(self, unit_seconds: float | None = None) -> None:
        """Create it for a path on which a packet takes `unit_seconds`; None: bursts as packets."""
        self._unit_seconds = unit_seconds
        self._counters = PathCounters()
        self._steady = Evidence()
        self._recent = Evidence()
        self._all = Evidence()
        self._in_flight = 0
        self._had_drops = False
        self.local_drops = 0
        """Packets dropped by this host's own queues."""

    def observe(self, counters: PathCounters) -> None:
        """Process the present counters."""
        added = counters.since(self._counters)
        self._counters = counters
        self.local_drops += added.local_drops
        # What was sent since the last time may be lost without being reported yet.
        everything = Evidence(sent=self._in_flight, lost=added.all_lost, runs=added.all_runs)
        self._all, self._in_flight = self._all.plus(everything), added.all_sent
        has_drops, self._had_drops = self._had_drops, added.local_drops > 0
        if has_drops or self._had_drops:
            return
        lost = min(added.lost, added.sent)
        self._count(
            Evidence(
                sent=added.sent,
                lost=lost,
                runs=min(added.loss_runs, lost),
                timed_runs=added.timed_runs,
                timed_seconds=added.timed_runs_nanos / 1e9,
            )
        )

    @property
    def rate_high(self) -> float:
        """An upper bound of the path's loss, with 97.5 % confidence.

        Where queues leave little evidence, all losses together bound those of the path.
        """
        everything = replace(self._all, sent=max(self._all.sent, self._all.lost))
        return min(self.estimate.rate_high, estimate(everything).rate_high)

    @property
    def estimate(self) -> LossEstimate:
        """The present estimate."""
        return estimate(self._steady.plus(self._recent), self._unit_seconds)

    def _count(self, evidence: Evidence) -> None:
        self._recent = self._recent.plus(evidence)
        if _has_changed(self._steady, self._recent, self._unit_seconds):
            # The path has changed, so older evidence is worthless.
            self._steady, self._recent = self._recent, Evidence()
        elif self._recent.runs >= RECENT_RUNS or self._recent.sent >= RECENT_PACKETS:
            self._steady, self._recent = self._steady.plus(self._recent), Evidence()


class Planner:
    """Keeps one path's plan current. Sessions of one path share its rows."""

    def __init__(
        self,
        path: Path,
        objective: Objective = Objective.MEAN,
        parity_budget: float = PARITY_BUDGET,
        *,
        caution: float = 0.0,
        lengths: Sequence[int] | None = None,
        estimator: LossEstimator | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the first plan; `caution`, `lengths`, `check` and errors as in `plan`.

        `estimator` may have observed the path already. `caution` falls as packets arrive: to the
        estimator's upper bound.
        """
        self.estimator = estimator or LossEstimator(path.unit_seconds)
        self._lengths = tuple(lengths or row_lengths())
        self._plan = functools.partial(
            shared_plan, objective=objective, parity_budget=parity_budget, check=check
        )
        self.plan = self._plan(path, caution=caution, lengths=self._lengths)

    def update(
        self,
        round_trip_seconds: float | None = None,
        count: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Plan | None:
        """Return a new plan if loss, round trip or caution are far from the plan's, else None.

        `round_trip_seconds`: the path's round trip without queues; `count`: the number of paths
        whose losses are independent; `lengths`: of the rows. None: as planned.
        """
        path = self.plan.path
        found, planned = self.estimator.estimate, path.loss
        is_worst = min(found.loss.rate, planned.rate) >= PLANNED_LOSS_MAX
        if found.is_beyond(planned) and not is_worst:
            loss = replace(found.loss, rate=min(found.loss.rate, PLANNED_LOSS_MAX))
            path = replace(path, loss=loss)
        if round_trip_seconds and _is_far(round_trip_seconds, path.round_trip_seconds):
            path = replace(path, round_trip_seconds=round_trip_seconds)
        if count and count != path.count:
            path = replace(path, count=count)
        caution = self.plan.caution
        rate_high = self.estimator.rate_high
        if rate_high * CHANGE < caution:
            caution = rate_high
        wanted = self._lengths if lengths is None else tuple(lengths)
        if (path, caution, wanted) == (self.plan.path, self.plan.caution, self._lengths):
            return None
        self._lengths = wanted
        self.plan = self._plan(path, caution=caution, lengths=wanted)
        return self.plan


def _is_far(seconds: float, planned: float) -> bool:
    factor = max(seconds / planned, planned / seconds)
    return factor > ROUND_TRIP_CHANGE and abs(seconds - planned) > ROUND_TRIP_CHANGE_SECONDS
