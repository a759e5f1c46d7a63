"""Counter arenas: no counter twice, none of value 0, exhaustion is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealane.crypto.lease import COUNTER_END, LEASE_COUNTERS, Arena, CounterRange, LeaseHolder
from sealane.errors import LeaseError, UsageError


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, LEASE_COUNTERS)), min_size=1, max_size=30)
)
def test_grants_never_overlap(asked: list[tuple[int, int]]) -> None:
    arenas = [Arena(broker_instance=1 + i // 2, start_epoch=1 + i % 2) for i in range(4)]
    granted = [arenas[which].grant(count) for which, count in asked]
    assert [g.count for g in granted] == [count for _, count in asked]
    assert all(g.counter_start > 0 for g in granted)
    for i, one in enumerate(granted):
        assert not any(one.overlaps(other) for other in granted[:i])


def test_overlap_is_seen() -> None:
    def counters(start: int, end: int, epoch: int = 1) -> CounterRange:
        return CounterRange(
            broker_instance=1, start_epoch=epoch, counter_start=start, counter_end=end
        )

    assert counters(1, 10).overlaps(counters(9, 20))
    assert not counters(1, 10).overlaps(counters(10, 20))
    assert not counters(1, 10).overlaps(counters(1, 10, epoch=2))


def test_exhausted_arena_refuses_and_stays_refusing() -> None:
    arena = Arena(broker_instance=1, start_epoch=1, counter_start=COUNTER_END - 10)
    assert arena.grant(10).counter_end == COUNTER_END
    for _ in range(2):
        with pytest.raises(LeaseError) as caught:
            arena.grant(1)
        assert caught.value.reason == "lease.arena.exhausted"


def test_grant_that_does_not_fit_leaves_the_rest() -> None:
    arena = Arena(broker_instance=1, start_epoch=1, counter_start=COUNTER_END - 10)
    with pytest.raises(LeaseError):
        arena.grant(11)
    assert arena.grant(10).count == 10


@pytest.mark.parametrize(
    ("instance", "epoch", "start"),
    [(0, 1, 1), (1 << 16, 1, 1), (1, 0, 1), (1, 1 << 24, 1), (1, 1, 0)],
)
def test_arena_out_of_range_is_refused(instance: int, epoch: int, start: int) -> None:
    with pytest.raises(UsageError):
        Arena(broker_instance=instance, start_epoch=epoch, counter_start=start)


def test_holder_refuses_a_range_it_already_has() -> None:
    holder = LeaseHolder()
    granted = Arena(broker_instance=1, start_epoch=1).grant()
    holder.add(granted)
    with pytest.raises(LeaseError) as caught:
        holder.add(granted)
    assert caught.value.reason == "lease.overlap"
    assert holder.leased == LEASE_COUNTERS


def test_holder_asks_for_more_below_half_a_lease() -> None:
    holder = LeaseHolder()
    assert holder.needs_refill(LEASE_COUNTERS // 2 - 1)
    assert not holder.needs_refill(LEASE_COUNTERS // 2)
