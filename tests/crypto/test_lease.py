"""Counter leases: no counter twice, none of value 0, what comes back is checked, all is counted."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sealane.crypto.lease import (
    COUNTER_END,
    LEASE_COUNTERS,
    LEASE_RANGES_MAX,
    Arena,
    CounterRange,
    Lease,
    LeaseHolder,
)
from sealane.errors import LeaseError, UsageError

HOLDER = b"h" * 16
OTHER = b"o" * 16


def arena(start_epoch: int = 1, counter_start: int = 256) -> Arena:
    return Arena(broker_instance=1, start_epoch=start_epoch, counter_start=counter_start)


def counters(start: int, end: int, epoch: int = 1) -> CounterRange:
    return CounterRange(broker_instance=1, start_epoch=epoch, counter_start=start, counter_end=end)


def reason_of(call: object) -> str:
    assert isinstance(call, pytest.ExceptionInfo)
    assert isinstance(call.value, LeaseError)
    return call.value.reason


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, LEASE_COUNTERS)), min_size=1, max_size=30)
)
def test_grants_never_overlap(asked: list[tuple[int, int]]) -> None:
    arenas = [Arena(broker_instance=1 + i // 2, start_epoch=1 + i % 2) for i in range(4)]
    granted = [arenas[which].grant(count, incarnation=HOLDER) for which, count in asked]
    assert [g.count for g in granted] == [count for _, count in asked]
    ranges = [r for g in granted for r in g.ranges]
    assert all(r.counter_start > 0 for r in ranges)
    for i, one in enumerate(ranges):
        assert not any(one.overlaps(other) for other in ranges[:i])


class Books(RuleBasedStateMachine):
    """A small arena and its holders: every counter is free, out, returned or burned; never two."""

    SIZE = 4096

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena(counter_start=COUNTER_END - self.SIZE)
        self.out: dict[int, tuple[Lease, list[int], bytes]] = {}
        self.used: set[int] = set()
        self.burned = 0

    @rule(count=st.integers(1, 700), holder=st.sampled_from([HOLDER, OTHER]))
    def grant(self, count: int, holder: bytes) -> None:
        free, fragments = self.arena.counters_free, self.arena.fragments
        try:
            lease = self.arena.grant(count, incarnation=holder)
        except LeaseError:
            assert count > free or fragments >= LEASE_RANGES_MAX
            return
        assert lease.count == count
        self.out[lease.lease_id] = (lease, [r.counter_start for r in lease.ranges], holder)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        lease, marks, holder = self.out[data.draw(st.sampled_from([*self.out]))]
        for i, r in enumerate(lease.ranges):
            mark = data.draw(st.integers(marks[i], r.counter_end))
            spent = set(range(marks[i], mark))
            assert not spent & self.used
            self.used |= spent
            marks[i] = mark
        if data.draw(st.booleans()):
            self.arena.report(lease.lease_id, marks, incarnation=holder)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([*self.out]))
        lease, marks, holder = self.out.pop(lease_id)
        tails = sum(r.counter_end - m for r, m in zip(lease.ranges, marks, strict=True))
        assert self.arena.give_back(lease_id, marks, incarnation=holder) == tails
        self.burned += lease.count - tails
        with pytest.raises(LeaseError):
            self.arena.give_back(lease_id, marks, incarnation=holder)

    @rule(holder=st.sampled_from([HOLDER, OTHER]))
    def crash(self, holder: bytes) -> None:
        lost = [i for i, (_, _, h) in self.out.items() if h == holder]
        # Nobody has to notice: what never comes back is never granted again.
        self.burned += sum(self.out.pop(i)[0].count for i in lost)

    @invariant()
    def nothing_is_lost_from_the_books(self) -> None:
        out = sum(lease.count for lease, _, _ in self.out.values())
        assert self.arena.counters_free + out + self.burned == self.SIZE

    @invariant()
    def leases_that_are_out_are_disjoint(self) -> None:
        spans = sorted(
            (r.counter_start, r.counter_end)
            for lease, _, _ in self.out.values()
            for r in lease.ranges
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


TestBooks = Books.TestCase


def test_overlap_is_seen() -> None:
    assert counters(1, 10).overlaps(counters(9, 20))
    assert not counters(1, 10).overlaps(counters(10, 20))
    assert not counters(1, 10).overlaps(counters(1, 10, epoch=2))


def test_exhausted_arena_refuses_and_stays_refusing() -> None:
    last = arena(counter_start=COUNTER_END - 10)
    assert last.grant(10, incarnation=HOLDER).ranges[0].counter_end == COUNTER_END
    for _ in range(2):
        with pytest.raises(LeaseError) as caught:
            last.grant(1, incarnation=HOLDER)
        assert caught.value.reason == "lease.arena.exhausted"


def test_grant_that_does_not_fit_leaves_the_rest() -> None:
    last = arena(counter_start=COUNTER_END - 10)
    with pytest.raises(LeaseError):
        last.grant(11, incarnation=HOLDER)
    assert last.grant(10, incarnation=HOLDER).count == 10


@pytest.mark.parametrize(
    ("instance", "epoch", "start"),
    [(0, 1, 1), (1 << 16, 1, 1), (1, 0, 1), (1, 1 << 24, 1), (1, 1, 0)],
)
def test_arena_out_of_range_is_refused(instance: int, epoch: int, start: int) -> None:
    with pytest.raises(UsageError):
        Arena(broker_instance=instance, start_epoch=epoch, counter_start=start)


def test_what_comes_back_is_merged_and_granted_first() -> None:
    own = arena()
    leases = [own.grant(100, incarnation=HOLDER) for _ in range(4)]
    starts = [lease.ranges[0].counter_start for lease in leases]
    for i in (2, 0, 1):
        own.give_back(leases[i].lease_id, [starts[i] + (40 if i == 0 else 0)], incarnation=HOLDER)
    assert own.fragments == 1
    again = own.grant(300, incarnation=OTHER)
    assert [(r.counter_start, r.counter_end) for r in again.ranges] == [
        (starts[0] + 40, starts[2] + 100),
        (starts[3] + 100, starts[3] + 140),
    ]


def test_a_fragmented_arena_still_gives_a_whole_lease_in_pieces() -> None:
    own = arena(counter_start=COUNTER_END - 200 * LEASE_RANGES_MAX)
    leases = [own.grant(100, incarnation=HOLDER) for _ in range(2 * LEASE_RANGES_MAX)]
    for lease in leases[1::2]:
        own.give_back(lease.lease_id, [lease.ranges[0].counter_start + 1], incarnation=HOLDER)
    assert own.fragments == LEASE_RANGES_MAX
    lease = own.grant(99 * (LEASE_RANGES_MAX - 1), incarnation=HOLDER)
    assert len(lease.ranges) == LEASE_RANGES_MAX - 1
    assert own.counters_free == 99
    with pytest.raises(LeaseError):
        own.grant(100, incarnation=HOLDER)


def test_a_second_return_is_refused() -> None:
    own = arena()
    lease = own.grant(100, incarnation=HOLDER)
    start = lease.ranges[0].counter_start
    own.give_back(lease.lease_id, [start + 50], incarnation=HOLDER)
    with pytest.raises(LeaseError) as caught:
        own.give_back(lease.lease_id, [start], incarnation=HOLDER)
    assert reason_of(caught) == "lease.return.unknown"
    assert own.fragments == 1


def test_return_by_another_incarnation_is_refused() -> None:
    own = arena()
    lease = own.grant(100, incarnation=HOLDER)
    with pytest.raises(LeaseError) as caught:
        own.give_back(lease.lease_id, [lease.ranges[0].counter_start], incarnation=OTHER)
    assert reason_of(caught) == "lease.return.holder"


def test_return_of_a_used_prefix_is_refused_and_a_report_never_goes_back() -> None:
    own = arena()
    lease = own.grant(100, incarnation=HOLDER)
    start = lease.ranges[0].counter_start
    own.report(lease.lease_id, [start + 50], incarnation=HOLDER)
    for call in (own.give_back, own.report):
        with pytest.raises(LeaseError) as caught:
            call(lease.lease_id, [start + 49], incarnation=HOLDER)
        assert reason_of(caught) == "lease.return.used"
    assert own.give_back(lease.lease_id, [start + 50], incarnation=HOLDER) == 50


@pytest.mark.parametrize("change", [-1, 101])
def test_return_outside_the_lease_is_refused(change: int) -> None:
    own = arena()
    lease = own.grant(100, incarnation=HOLDER)
    start = lease.ranges[0].counter_start
    for touched in ([start + change], [], [start, start]):
        with pytest.raises(LeaseError) as caught:
            own.give_back(lease.lease_id, touched, incarnation=HOLDER)
        assert reason_of(caught) == "lease.return.malformed"


def test_holder_refuses_a_range_it_already_has() -> None:
    holder = LeaseHolder()
    granted = arena().grant(incarnation=HOLDER)
    holder.add(granted)
    with pytest.raises(LeaseError) as caught:
        holder.add(granted)
    assert caught.value.reason == "lease.overlap"
    assert holder.leased == LEASE_COUNTERS


def test_holder_knows_the_tails_and_burns_what_lies_between() -> None:
    own = arena()
    first, second = (own.grant(1000, incarnation=HOLDER) for _ in range(2))
    a, b = first.ranges[0].counter_start, second.ranges[0].counter_start
    holder = LeaseHolder()
    holder.add(first)
    holder.add(second)
    # A queue left 300…400 of the first lease; its end came back in two pieces that touch.
    left = [counters(a + 900, a + 1000), counters(a + 300, a + 400), counters(a + 800, a + 900)]
    assert holder.untouched(left) == [(first, [a + 800]), (second, [b + 1000])]
    # The same counters of another start are not these.
    assert holder.untouched([counters(a + 900, a + 1000, epoch=2)])[0][1] == [a + 1000]


def test_holder_asks_for_more_below_half_a_lease() -> None:
    holder = LeaseHolder()
    assert holder.needs_refill(LEASE_COUNTERS // 2 - 1)
    assert not holder.needs_refill(LEASE_COUNTERS // 2)
