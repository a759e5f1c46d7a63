import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from sealane.planning.model import Loss, Path
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.planning.planner import (
    PARITY_BUDGET,
    Objective,
    Plan,
    PlanRow,
    evaluate,
    plan,
    plan_row,
    rank,
    shared,
)
from sealane.planning.planner.shared import STEP, shared_plan
from seeds import SEED

PATH = Path(
    rate_bits_per_second=1e9,
    round_trip_seconds=STEP**-40,
    loss=Loss(rate=STEP**-130, burst_packets=STEP**8, is_timed=True),
    unit_bytes=1400,
)
KIB = 1 << 10
LENGTH = 64 * KIB


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that rows were made for, with no row made before."""
    paths: list[Path] = []

    def counted(path: Path, *arguments: Any, **named: Any) -> PlanRow:
        paths.append(path)
        return plan_row(path, *arguments, **named)

    shared._made.cache_clear()
    monkeypatch.setattr(shared, "plan_row", counted)
    return paths


def planned(
    path: Path,
    objective: Objective = Objective.MEAN,
    *,
    caution: float = 0.0,
    budget: float = PARITY_BUDGET,
    lengths: Sequence[int] = (LENGTH,),
    check: Callable[[], None] = lambda: None,
) -> Plan:
    return shared_plan(path, objective, budget, caution=caution, lengths=lengths, check=check)


def like(factor: float) -> Path:
    burst = PATH.loss.burst_packets * factor
    loss = replace(PATH.loss, rate=PATH.loss.rate * factor, burst_packets=burst)
    return replace(PATH, loss=loss, round_trip_seconds=PATH.round_trip_seconds / factor)


def test_sessions_of_a_path_share_one_plan_and_keep_what_each_has_measured(
    made: list[Path],
) -> None:
    paths = [like(1 + share / 100) for share in range(-4, 5)]
    with ThreadPoolExecutor(len(paths)) as pool:
        plans = list(pool.map(planned, paths))
    assert len(made) == 1
    assert [each.path for each in plans] == paths
    assert len({each.rows for each in plans}) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: planned(like(STEP)),
        lambda: planned(replace(PATH, count=2)),
        lambda: planned(replace(PATH, rate_bits_per_second=2e9)),
        lambda: planned(replace(PATH, unit_bytes=8900)),
        lambda: planned(PATH, Objective.P99),
        lambda: planned(PATH, caution=0.01),
        lambda: planned(PATH, budget=0.1),
        lambda: planned(PATH, lengths=(2 * LENGTH,)),
    ],
)
def test_another_path_objective_or_caution_has_another_plan(
    made: list[Path], other: Callable[[], Plan]
) -> None:
    planned(PATH)
    other()
    assert len(made) == 2


def test_a_plan_for_one_more_length_makes_one_more_row(made: list[Path]) -> None:
    planned(PATH, lengths=(LENGTH, 4 * LENGTH))
    rows = planned(PATH, lengths=(LENGTH, 2 * LENGTH, 4 * LENGTH)).rows
    assert len(made) == 3
    assert rows[-1].length_max == 4 * LENGTH


def test_no_loss_and_the_largest_planned_loss_are_not_rounded(
    made: list[Path],
) -> None:
    worst = Loss(rate=PLANNED_LOSS_MAX)
    for loss in (Loss(rate=0.0), worst, replace(worst, rate=PLANNED_LOSS_MAX * 0.999)):
        planned(replace(PATH, loss=loss))
    assert [path.loss.rate for path in made] == [0.0, PLANNED_LOSS_MAX]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_shared_plan_is_nearly_as_good_as_the_best_scheme(number: int) -> None:
    random = Random(f"{SEED}/{number}")
    path = Path(
        rate_bits_per_second=10 ** random.uniform(8, 11),
        round_trip_seconds=10 ** random.uniform(-3, -1),
        loss=Loss(rate=10 ** random.uniform(-5, -2), burst_packets=random.choice([1.0, 4.0, 20.0])),
        unit_bytes=4096,
    )
    sizes = (64 * KIB, 4096 * KIB)
    rows = planned(path, Objective.P99, lengths=sizes)
    for size in sizes:
        best = rank(path, size, Objective.P99)[0]
        chosen = evaluate(path, size, rows.row(size).scheme)
        assert chosen.p99 <= 1.1 * best.p99, (path, size)


def test_a_plan_that_one_session_abandons_is_made_for_another(made: list[Path]) -> None:
    has_begun, given_up = threading.Event(), threading.Event()

    class _AbandonedError(Exception):
        pass

    def check() -> None:
        if made:
            has_begun.set()
            assert given_up.wait(10)
            raise _AbandonedError

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(planned, PATH, check=check)
        assert has_begun.wait(10)
        second = pool.submit(planned, PATH)
        given_up.set()
        assert second.result().rows == plan(PATH, Objective.MEAN, lengths=(LENGTH,)).rows
        with pytest.raises(_AbandonedError):
            first.result()
    assert len(made) == 2


def test_a_session_that_waits_for_anothers_plan_can_give_up(made: list[Path]) -> None:
    has_begun, given_up = threading.Event(), threading.Event()

    class _GivenUpError(Exception):
        pass

    def hold() -> None:
        if made:
            has_begun.set()
            assert given_up.wait(10)

    def give_up() -> None:
        if has_begun.is_set():
            raise _GivenUpError

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(planned, PATH, check=hold)
        assert has_begun.wait(10)
        waits = iter([None])
        try:
            with pytest.raises(_GivenUpError):
                planned(PATH, check=lambda: next(waits, None) or give_up())
        finally:
            given_up.set()
        first.result()
