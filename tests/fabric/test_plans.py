"""A session's plan follows the path's counters."""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.fabric import plans
from sealane.daemon.fabric.known_paths import PathLoss
from sealane.daemon.fabric.planning_budget import PlanningBudget
from sealane.daemon.fabric.plans import (
    LEAST_READS,
    PATH_READS,
    Outlook,
    _Counters,
    _PathCount,
    keep_planned,
)
from sealane.planning.model import Loss, Path

RATE = 1_000_000_000
INTERVAL = 0.001
ENDLESS = PlanningBudget(lambda: math.inf)


class FakeSession:
    """A path of 25 ms whose counters advance at every read."""

    def __init__(self, looks: int, **added: int) -> None:
        self.outlook: Outlook | None = None
        self.installed: list[list[tuple[int, int, int, int, int]]] = []
        self.sizes: Iterator[int] = itertools.repeat(0)
        self._looks = looks
        self._closed = asyncio.Event()
        self._added = {"data_packets_sent": added.get("clear_packets", 0)} | added
        self._counters = dict.fromkeys(
            (
                "data_packets_sent",
                "packets_sent",
                "lost_packets",
                "lost_runs",
                "clear_packets",
                "clear_losses",
                "clear_runs",
                "send_drops",
                "timed_runs",
                "timed_runs_nanos",
                "paths_validated",
            ),
            0,
        )

    def statistics(self) -> dict[str, int]:
        self._looks -= 1
        if self._looks < 0:
            self._closed.set()
        for name, value in self._added.items():
            self._counters[name] += value
        return {**self._counters, "srtt_nanos": 25_000_000}

    def message_sizes(self) -> int:
        return next(self.sizes)

    def install_plan(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        self.installed.append(rows)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def close(self) -> None:
        self._closed.set()


async def planned(
    assumed_loss: float,
    looks: int = 6,
    *,
    objective: str = "mean",
    caution: float = 0.0,
    waits_for_data: bool = False,
    **added: int,
) -> FakeSession:
    session = FakeSession(looks, **added)
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed=PathLoss(rate=assumed_loss),
        caution=caution,
        objective=objective,
        waits_for_data=waits_for_data,
        interval_seconds=INTERVAL,
        budget=ENDLESS,
    )
    return session


def is_coded(rows: list[tuple[int, int, int, int, int]], size: int) -> bool:
    return next(k for length, k, *_ in rows if size <= length) > 0


async def test_the_assumption_is_planned_for_at_once() -> None:
    clean, lossy = await planned(0.0, looks=1), await planned(1e-2, looks=1)

    assert not is_coded(clean.installed[0], 1 << 20)
    assert is_coded(lossy.installed[0], 1 << 20)
    assert lossy.outlook is not None
    assert lossy.outlook.plan.path.round_trip_seconds == 0.025


async def test_rows_are_made_for_the_lengths_that_were_sent() -> None:
    session = FakeSession(8, data_packets_sent=1)
    session.sizes = itertools.chain([0, 1 << 16, 1 << 16], itertools.repeat(1 << 3 | 1 << 16))
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-2),
        message_bytes_max=1 << 18,
        interval_seconds=INTERVAL,
        budget=ENDLESS,
    )
    lengths = [[length for length, *_ in rows] for rows in session.installed]
    assert lengths[0][-1] == 1 << 18
    assert lengths[1:] == [[1 << 16], [1 << 12, 1 << 16]]


def test_renewals_take_an_eighth_of_a_processor() -> None:
    now = [100.0]
    budget = PlanningBudget(lambda: now[0])
    assert budget.allows_renewal()

    def burn() -> float:
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:
            pass
        return time.thread_time() - begun

    spent = budget.run(burn)
    now[0] += 6.9 * spent
    assert not budget.allows_renewal()
    now[0] += 0.2 * spent + 0.01
    assert budget.allows_renewal()


async def test_no_plan_is_renewed_beyond_the_budget() -> None:
    budget = PlanningBudget(lambda: 0.0)
    losses = {"clear_packets": 10_000, "clear_losses": 200, "clear_runs": 100}
    session = FakeSession(6, data_packets_sent=10_000, **losses)
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-6),
        message_bytes_max=4096,
        interval_seconds=INTERVAL,
        budget=budget,
    )
    assert len(session.installed) == 1
    assert not budget.allows_renewal()


async def test_the_operator_says_what_is_to_be_small() -> None:
    # Three units, one of which is lost in every thirtieth message.
    mean = await planned(1e-2, looks=1)
    tail = await planned(1e-2, looks=1, objective="p99")

    assert not is_coded(mean.installed[0], 4096)
    assert is_coded(tail.installed[0], 4096)


async def test_parity_of_caution_ends_once_packets_have_arrived() -> None:
    session = await planned(1e-5, 6, objective="auto", caution=1e-2, clear_packets=100_000)
    first, last = session.installed[0], session.installed[-1]
    assert is_coded(first, 64 << 10)
    assert not is_coded(first, 64 << 20), "longer than a round trip"
    assert not is_coded(last, 64 << 10)


async def test_parity_of_caution_ends_beside_queues_too() -> None:
    sent = {"data_packets_sent": 100_000, "packets_sent": 100_000}
    session = await planned(1e-5, 6, objective="auto", caution=1e-2, **sent)
    first, last = session.installed[0], session.installed[-1]
    assert is_coded(first, 64 << 10)
    assert not is_coded(last, 64 << 10)
    lossy = {"lost_packets": 1000, "lost_runs": 1000}
    session = await planned(1e-5, 6, objective="auto", caution=1e-2, **sent, **lossy)
    assert len(session.installed) == 1, "what all packets lose bounds what the path loses"


@pytest.mark.slow
async def test_losses_that_nothing_explains_make_another_plan() -> None:
    session = await planned(1e-6, clear_packets=10_000, clear_losses=200, clear_runs=100)

    assert len(session.installed) == 2
    assert not is_coded(session.installed[0], 1 << 20)
    assert is_coded(session.installed[1], 1 << 20)
    assert session.outlook is not None
    assert session.outlook.estimate.rate_low < 0.02 < session.outlook.estimate.rate_high
    assert session.outlook.estimate.loss.burst_packets == 2.0


async def test_an_end_that_sends_no_data_plans_nothing() -> None:
    control = {"clear_packets": 10_000, "clear_losses": 200, "clear_runs": 100}
    receiver = await planned(1e-2, **control, data_packets_sent=0, waits_for_data=True)
    assert receiver.installed == []
    sender = await planned(1e-2, **control, waits_for_data=True)
    assert sender.installed
    # Nor does an end whose path has changed while it sends nothing.
    assert len((await planned(1e-6, **control, data_packets_sent=0)).installed) == 1


async def test_local_drops_make_none() -> None:
    losses = {"clear_packets": 10_000, "clear_losses": 200, "clear_runs": 100}
    assert len((await planned(1e-6, **losses, send_drops=200)).installed) == 1


def test_the_round_trip_is_the_least_of_the_last_reads() -> None:
    counters = _Counters()
    names = ("clear_packets", "clear_losses", "clear_runs", "send_drops")
    names += ("timed_runs", "timed_runs_nanos", "packets_sent", "lost_packets", "lost_runs")

    def read(milliseconds: int) -> float:
        counters.read(dict.fromkeys(names, 0) | {"srtt_nanos": milliseconds * 1_000_000})
        return counters.round_trip_seconds

    assert [read(each) for each in (25, 30, 20, 30)] == [0.025, 0.025, 0.02, 0.02]
    assert [read(30) for _ in range(LEAST_READS - 1)][-2:] == [0.02, 0.03]


@pytest.mark.slow
async def test_bursts_count_by_the_time_that_they_last() -> None:
    # Seen as two packets each, because messages are short; in truth 3.8 ms.
    losses = {"clear_packets": 10_000, "clear_losses": 100, "clear_runs": 50}
    timed = {"timed_runs": 50, "timed_runs_nanos": 50 * 3_800_000}
    told: list[PathLoss] = []
    session = FakeSession(6, **losses, **timed)
    await keep_planned(
        session,
        rate_bits_per_second=100_000_000,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-5),
        objective="p99",
        interval_seconds=INTERVAL,
        budget=ENDLESS,
        measured=lambda loss, _: told.append(loss),
    )
    loss = told[-1]
    assert loss.burst_seconds == pytest.approx(3.8e-3)
    assert loss.burst_packets == pytest.approx(32, rel=0.05)
    assert session.outlook is not None
    assert session.outlook.plan.path.loss.is_timed


async def test_a_burst_known_in_time_is_planned_for_at_any_rate() -> None:
    session = FakeSession(1)
    await keep_planned(
        session,
        rate_bits_per_second=10_000_000,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-3, burst_packets=32.0, burst_seconds=11.9e-3),
        interval_seconds=INTERVAL,
        budget=ENDLESS,
    )
    assert session.outlook is not None
    loss = session.outlook.plan.path.loss
    assert loss.is_timed
    assert loss.burst_packets == pytest.approx(10.5, rel=0.05)


async def test_paths_count_once_they_are_validated() -> None:
    async def count(validated: int) -> int:
        session = FakeSession(1, paths_validated=validated)
        await keep_planned(
            session,
            rate_bits_per_second=RATE,
            unit_bytes=1408,
            assumed=PathLoss(rate=0.0),
            path_count=2,
            interval_seconds=INTERVAL,
            budget=ENDLESS,
        )
        assert session.outlook is not None
        return session.outlook.plan.path.count

    assert [await count(validated) for validated in (0, 1, 2, 3)] == [1, 1, 2, 2]


def test_a_path_counts_once_it_has_been_valid_for_long_and_no_longer_than_it_is() -> None:
    paths = _PathCount(2)

    def read(validated: int) -> int:
        return paths.read({"paths_validated": validated})

    assert [read(1), *(read(2) for _ in range(PATH_READS))][-2:] == [1, 2]
    assert read(1) == 1
    flapping = [read(count % 2 + 1) for count in range(3 * PATH_READS)]
    assert set(flapping) == {1}


async def test_a_path_that_comes_and_goes_makes_one_plan() -> None:
    session = FakeSession(40, clear_packets=1000)
    counted = session.statistics

    def flaps() -> dict[str, int]:
        found = counted()
        return found | {"paths_validated": 1 + found["data_packets_sent"] // 1000 % 2}

    session.statistics = flaps  # type: ignore[method-assign]
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-5),
        path_count=2,
        interval_seconds=INTERVAL,
        budget=ENDLESS,
    )
    # One for the two paths of the first reading at most, and one for the path that stays.
    assert len(session.installed) <= 2


@pytest.mark.slow
async def test_what_is_measured_is_told() -> None:
    told: list[tuple[PathLoss, float]] = []
    session = FakeSession(looks=6, clear_packets=10_000, clear_losses=200, clear_runs=100)
    await keep_planned(
        session,
        rate_bits_per_second=RATE,
        unit_bytes=1408,
        assumed=PathLoss(rate=1e-5),
        interval_seconds=INTERVAL,
        budget=ENDLESS,
        measured=lambda loss, packets: told.append((loss, packets)),
    )
    loss, packets = told[-1]
    assert loss.rate == pytest.approx(0.02, rel=0.2)
    assert loss.burst_packets == 2.0
    assert packets >= 10_000


class EndlessPlanner:
    """Plans until cancelled, as real planners do for seconds."""

    begun = threading.Event()
    ended = threading.Event()
    path: Path

    def __init__(
        self, path: Path, _: object, *, check: Callable[[], None], **_options: object
    ) -> None:
        type(self).path = path
        self.begun.set()
        try:
            while not self.ended.wait(0.001):
                check()
        finally:
            self.ended.set()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> type[EndlessPlanner]:
    kind = type("Endless", (EndlessPlanner,), {n: threading.Event() for n in ("begun", "ended")})
    monkeypatch.setattr(plans, "Planner", kind)
    return kind


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["closed", "stopped"])
async def test_a_plan_in_the_making_is_given_up_when_nobody_waits_for_it(
    endless: type[EndlessPlanner], is_cancelled: bool
) -> None:
    session = FakeSession(looks=60)
    keeping = asyncio.ensure_future(
        keep_planned(
            session,
            rate_bits_per_second=RATE,
            unit_bytes=1408,
            assumed=PathLoss(rate=0.5, burst_packets=4.0),
        )
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await asyncio.to_thread(endless.begun.wait, PATIENCE_SECONDS)
            if is_cancelled:
                keeping.cancel()
            else:
                session.close()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
        assert await asyncio.to_thread(endless.ended.wait, PATIENCE_SECONDS)
    finally:
        endless.ended.set()

    assert session.installed == []
    assert endless.path.loss == Loss(rate=0.1, burst_packets=4.0), "the most that is planned for"
