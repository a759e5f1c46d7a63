"""Keeps the plan of a session current: its counters give an estimate, the estimate gives a plan.

Needs numpy, so the fabric imports it with its first session.
"""

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sealane.daemon.fabric.known_paths import PathLoss
from sealane.daemon.fabric.planning_budget import PlanningBudget
from sealane.planning.model import Loss, Path
from sealane.planning.packet import PACKET_OVERHEAD_BYTES
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.planning.planner import (
    SIZE_MAX,
    LossEstimate,
    LossEstimator,
    Objective,
    PathCounters,
    Plan,
    Planner,
    burst_packets,
    row_length,
    row_lengths,
)

INTERVAL_SECONDS = 1.0
"""Interval at which counters are read."""
LEAST_READS: Final = 300
"""Reads over which the least round trip is taken: after as many, a longer one is the path's own."""
PATH_READS: Final = 30
"""Reads over which the least number of paths is taken, so that a path which comes and goes makes no
plan each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Estimate of a session's path, and the resulting plan for its messages."""

    plan: Plan
    estimate: LossEstimate


class Planned(Protocol):
    """The part of a session that planning needs."""

    outlook: Outlook | None

    def statistics(self) -> dict[str, int]:
        """Return the session's counters."""

    def message_sizes(self) -> int:
        """Return the lengths of the messages that follow the plan, as bits.

        Bit b: one has had at most 2^b bytes and more than half of that.
        """

    def install_plan(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Put rows of (length_max, k, m, depth, nanoseconds before parity) into force."""

    async def wait_closed(self) -> None:
        """Wait until the session is closed."""


class _Counters:
    """Converts a session's counters to its path's."""

    def __init__(self) -> None:
        self._round_trips: deque[int] = deque(maxlen=LEAST_READS)

    @property
    def round_trip_seconds(self) -> float:
        """The least round trip of the last LEAST_READS reads, of which there must be one."""
        return min(self._round_trips) / 1e9

    def read(self, statistics: dict[str, int]) -> PathCounters:
        """Return the path's counters."""
        self._round_trips.append(statistics["srtt_nanos"])
        return PathCounters(
            sent=statistics["clear_packets"],
            lost=statistics["clear_losses"],
            loss_runs=statistics["clear_runs"],
            local_drops=statistics["send_drops"],
            timed_runs=statistics["timed_runs"],
            timed_runs_nanos=statistics["timed_runs_nanos"],
            all_sent=statistics["packets_sent"],
            all_lost=statistics["lost_packets"],
            all_runs=statistics["lost_runs"],
        )


class _PathCount:
    """The number of paths with losses of their own that plans are made for.

    A path counts once it has been validated for PATH_READS reads, and no longer than it is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: deque[int] = deque(maxlen=PATH_READS)

    def read(self, statistics: dict[str, int]) -> int:
        """Return the number, at least one, with the present counters."""
        self._counts.append(max(1, min(self._most, statistics["paths_validated"])))
        return min(self._counts)


def _lengths(session: Planned, message_bytes_max: int) -> tuple[int, ...]:
    """Return the `length_max` of the rows for a session's messages, before the first one of all."""
    sizes = session.message_sizes()
    if not sizes:
        return row_lengths(message_bytes_max)
    sent = (1 << bit for bit in range(sizes.bit_length()) if sizes >> bit & 1)
    return tuple(sorted({row_length(size) for size in sent}))


async def keep_planned(
    session: Planned,
    *,
    rate_bits_per_second: int,
    unit_bytes: int,
    assumed: PathLoss,
    caution: float = 0.0,
    message_bytes_max: int = SIZE_MAX,
    objective: str = Objective.AUTO.value,
    waits_for_data: bool = False,
    path_count: int = 1,
    interval_seconds: float = INTERVAL_SECONDS,
    budget: PlanningBudget | None = None,
    measured: Callable[[PathLoss, float], None] = lambda *_: None,
) -> None:
    """Install a plan for the assumed loss, and a new one whenever the path proves different.

    A row of it costs up to a second of processor time. So it has rows for the lengths of messages
    that were sent, before the first one for all up to `message_bytes_max`, and none is made for an
    end that sends nothing: with `waits_for_data` the first one when data has left, and a new one
    only when more has. Returns when the session is closed. Then, or when cancelled, it abandons a
    plan in progress. `caution`: as for `plan`. `path_count`: paths whose losses are independent, as
    far as they are validated. `budget`: of all sessions together. `measured` gets each estimate,
    and the number of packets that it is based on.
    """
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise _GivenUpError

    statistics = session.statistics()
    paths = _PathCount(path_count)
    path = Path(
        rate_bits_per_second=rate_bits_per_second,
        round_trip_seconds=max(statistics["srtt_nanos"], 1) / 1e9,
        loss=Loss(rate=min(assumed.rate, PLANNED_LOSS_MAX), burst_packets=assumed.burst_packets),
        unit_bytes=unit_bytes,
        overhead_bytes=PACKET_OVERHEAD_BYTES,
        count=paths.read(statistics),
    )
    if assumed.burst_seconds:
        packets = burst_packets(assumed.burst_seconds, path.unit_seconds)
        path = replace(path, loss=replace(path.loss, burst_packets=packets, is_timed=True))
    try:
        async with asyncio.TaskGroup() as tasks:
            make = functools.partial(
                Planner, path, Objective(objective), caution=caution, check=check
            )
            keeping = tasks.create_task(
                _keep(
                    session,
                    make,
                    counters=_Counters(),
                    interval_seconds=interval_seconds,
                    estimator=LossEstimator(path.unit_seconds),
                    waits_for_data=waits_for_data,
                    paths=paths,
                    message_bytes_max=message_bytes_max,
                    budget=budget or PlanningBudget(),
                    measured=measured,
                )
            )
            await session.wait_closed()
            keeping.cancel()
    finally:
        # Otherwise the thread would continue, and the process would wait for it at exit.
        given_up.set()


class _GivenUpError(Exception):
    """The plan is no longer needed."""


async def _keep(
    session: Planned,
    make: Callable[..., Planner],
    *,
    counters: _Counters,
    interval_seconds: float,
    estimator: LossEstimator,
    waits_for_data: bool,
    paths: _PathCount,
    message_bytes_max: int,
    budget: PlanningBudget,
    measured: Callable[[PathLoss, float], None],
) -> None:
    planner: Planner | None = None
    sent = 0
    while True:
        if planner is None and (sent or not waits_for_data):
            lengths = _lengths(session, message_bytes_max)
            first = functools.partial(make, estimator=estimator, lengths=lengths)
            planner = await asyncio.to_thread(budget.run, first)
            _install(session, planner)
        await asyncio.sleep(interval_seconds)
        statistics = session.statistics()
        estimator.observe(counters.read(statistics))
        count = paths.read(statistics)
        estimate = estimator.estimate
        loss = estimate.loss
        known = PathLoss(
            rate=loss.rate,
            burst_packets=loss.burst_packets,
            burst_seconds=estimate.burst_seconds,
        )
        measured(known, estimate.packets)
        has_sent, sent = statistics["data_packets_sent"] > sent, statistics["data_packets_sent"]
        if planner is None:
            continue
        lengths = _lengths(session, message_bytes_max)
        update = functools.partial(planner.update, counters.round_trip_seconds, count, lengths)
        may_renew = has_sent and budget.allows_renewal()
        if may_renew and await asyncio.to_thread(budget.run, update) is not None:
            _install(session, planner)
        else:
            session.outlook = Outlook(plan=planner.plan, estimate=estimate)


def _install(session: Planned, planner: Planner) -> None:
    session.install_plan(
        [
            (row.length_max, row.k, row.m, row.depth, row.parity_gap_nanos)
            for row in planner.plan.rows
        ]
    )
    session.outlook = Outlook(plan=planner.plan, estimate=planner.estimator.estimate)
