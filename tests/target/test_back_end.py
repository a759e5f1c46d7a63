"""When a back end is reconnected, and when it is given up."""

import pytest

from sealane.daemon.gateway.back_end import (
    LOSS_WINDOW_SECONDS,
    RETRY_SECONDS_MAX,
    RETRY_SECONDS_MIN,
    AssociationEpochs,
    LossLimit,
    RetryDelays,
)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_epochs_grow_when_the_clock_does_not() -> None:
    times = iter([50, 50, 7, 51, 60])
    epochs = AssociationEpochs(now_ns=lambda: next(times))
    assert [epochs.next() for _ in range(5)] == [50, 51, 52, 53, 60]


def test_epochs_begin_above_what_the_target_knows() -> None:
    assert AssociationEpochs(floor=100, now_ns=lambda: 7).next() == 101
    assert AssociationEpochs(floor=100, now_ns=lambda: 700).next() == 700


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_delays_grow_with_the_outage_up_to_a_bound_within_their_jitter(share: float) -> None:
    clock = Clock()
    delays = RetryDelays(now=clock, uniform=lambda low, high: low + share * (high - low))
    begun = clock.now
    delays.lose()
    assert delays.next() == 0.0
    for lasted, longest in ((0.0, RETRY_SECONDS_MIN), (1.0, 0.25), (8.0, 2.0)):
        clock.now = begun + lasted
        assert delays.next() == pytest.approx(longest * (1 + share) / 2)
    clock.now = begun + LOSS_WINDOW_SECONDS * 100
    assert delays.next() == pytest.approx(RETRY_SECONDS_MAX * (1 + share) / 2)


def test_delays_double_when_losses_repeat_and_start_over_when_they_are_old() -> None:
    clock = Clock()
    delays = RetryDelays(now=clock, uniform=lambda _, high: high)
    first = []
    for _ in range(10):
        delays.lose()
        first.append(delays.next())
    longest = [min(RETRY_SECONDS_MIN * 2**index, RETRY_SECONDS_MAX) for index in range(9)]
    assert longest[-1] == RETRY_SECONDS_MAX
    assert first == [0.0, *longest]
    assert delays.next() == RETRY_SECONDS_MAX
    clock.now += LOSS_WINDOW_SECONDS  # All are on the window's edge.
    delays.lose()
    assert delays.next() == RETRY_SECONDS_MAX
    clock.now += LOSS_WINDOW_SECONDS + 1
    delays.lose()
    assert delays.next() == 0.0


def test_limit_is_exceeded_by_one_more_loss_within_the_window() -> None:
    clock = Clock()
    limit = LossLimit(2, now=clock)
    assert not limit.is_exceeded()
    clock.now += LOSS_WINDOW_SECONDS
    assert not limit.is_exceeded()
    assert limit.is_exceeded()
    clock.now += LOSS_WINDOW_SECONDS + 1
    assert not limit.is_exceeded()
