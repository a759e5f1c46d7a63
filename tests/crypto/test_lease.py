"""Counter leases: counters are unique and not 0, returns are checked, all are accounted for."""

import itertools
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sealane.crypto import lease as leases
from sealane.crypto.lease import (
    COUNTER_END,
    LEASE_COUNTERS,
    Arena,
    CounterRange,
    Lease,
    LeaseHolder,
)
from sealane.errors import LeaseError, UsageError, VerificationError

HOLDER = b"h" * 16
OTHER = b"o" * 16
TOKEN = b"t" * 16
VOLUME = uuid.UUID(int=1)
ANOTHER = uuid.UUID(int=2)


def arena(start_epoch: int = 1, counter_start: int = 256) -> Arena:
    return Arena(broker_instance=1, start_epoch=start_epoch, counter_start=counter_start)


def granted(
    own: Arena,
    count: int = LEASE_COUNTERS,
    *,
    volume: uuid.UUID = VOLUME,
    holder: bytes = HOLDER,
    token: bytes = TOKEN,
) -> Lease:
    return own.grant(count, volume_id=volume, incarnation=holder, return_token=token)


def give_back(
    own: Arena,
    lease: Lease,
    touched: int,
    *,
    volume: uuid.UUID = VOLUME,
    holder: bytes = HOLDER,
    token: bytes = TOKEN,
) -> int:
    return own.give_back(
        lease.lease_id, touched, volume_id=volume, incarnation=holder, return_token=token
    )


def counters(start: int, end: int, epoch: int = 1) -> CounterRange:
    return CounterRange(broker_instance=1, start_epoch=epoch, counter_start=start, counter_end=end)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, LEASE_COUNTERS), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_grants_of_a_volume_never_overlap_whatever_is_returned(
    asked: list[tuple[int, int, bool]],
) -> None:
    arenas = [Arena(broker_instance=1 + i // 2, start_epoch=1 + i % 2) for i in range(4)]
    ranges: list[CounterRange] = []
    for which, count, returned in asked:
        lease = granted(arenas[which], count)
        assert lease.count == count
        ranges.append(lease.counters)
        if returned:
            assert give_back(arenas[which], lease, lease.counters.counter_start) == count
    assert all(r.counter_start > 0 for r in ranges)
    for i, one in enumerate(ranges):
        assert not any(one.overlaps(other) for other in ranges[:i])


class Books(RuleBasedStateMachine):
    """A small arena and its holders: no counter of a volume is granted twice."""

    SIZE = 4096

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena(counter_start=COUNTER_END - self.SIZE)
        self.out: dict[int, tuple[Lease, uuid.UUID, bytes]] = {}
        self.spans: dict[uuid.UUID, list[tuple[int, int]]] = {VOLUME: [], ANOTHER: []}

    @rule(
        count=st.integers(1, 700),
        holder=st.sampled_from([HOLDER, OTHER]),
        volume=st.sampled_from([VOLUME, ANOTHER]),
    )
    def grant(self, count: int, holder: bytes, volume: uuid.UUID) -> None:
        try:
            lease = granted(self.arena, count, volume=volume, holder=holder)
        except LeaseError:
            assert count > self.arena.counters_free(volume)
            return
        assert lease.count == count
        self.out[lease.lease_id] = (lease, volume, holder)
        self.spans[volume].append((lease.counters.counter_start, lease.counters.counter_end))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease, volume, holder = self.out.pop(data.draw(st.sampled_from([*self.out])))
        span = lease.counters
        mark = data.draw(st.integers(span.counter_start, span.counter_end))
        left = give_back(self.arena, lease, mark, volume=volume, holder=holder)
        assert left == span.counter_end - mark
        with pytest.raises(LeaseError):
            give_back(self.arena, lease, mark, volume=volume, holder=holder)

    @invariant()
    def nothing_is_lost_from_the_books(self) -> None:
        for volume, spans in self.spans.items():
            assert self.arena.counters_free(volume) + sum(b - a for a, b in spans) == self.SIZE

    @invariant()
    def leases_of_a_volume_are_disjoint(self) -> None:
        for spans in self.spans.values():
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


TestBooks = Books.TestCase


def test_overlap_is_seen() -> None:
    assert counters(1, 10).overlaps(counters(9, 20))
    assert not counters(1, 10).overlaps(counters(10, 20))
    assert not counters(1, 10).overlaps(counters(1, 10, epoch=2))


def test_exhausted_volume_refuses_and_stays_refusing_while_others_go_on() -> None:
    last = arena(counter_start=COUNTER_END - 10)
    lease = granted(last, 10)
    assert lease.counters.counter_end == COUNTER_END
    give_back(last, lease, lease.counters.counter_start)
    for _ in range(2):
        with pytest.raises(LeaseError) as caught:
            granted(last, 1)
        assert caught.value.reason == "lease.arena.exhausted"
    assert granted(last, 10, volume=ANOTHER).counters == lease.counters


def test_grant_that_does_not_fit_leaves_the_rest() -> None:
    last = arena(counter_start=COUNTER_END - 10)
    with pytest.raises(LeaseError):
        granted(last, 11)
    assert granted(last, 10).count == 10


@pytest.mark.parametrize(
    ("instance", "epoch", "start"),
    [(0, 1, 1), (1 << 16, 1, 1), (1, 0, 1), (1, 1 << 24, 1), (1, 1, 0)],
)
def test_arena_out_of_range_is_refused(instance: int, epoch: int, start: int) -> None:
    with pytest.raises(UsageError):
        Arena(broker_instance=instance, start_epoch=epoch, counter_start=start)


@pytest.mark.parametrize("token", [b"", b"t" * 15, b"t" * 17])
def test_a_grant_needs_a_whole_token(token: bytes) -> None:
    with pytest.raises(UsageError):
        granted(arena(), 1, token=token)


def test_a_lease_does_not_show_its_token() -> None:
    assert "return_token" not in repr(granted(arena()))


def test_a_second_return_is_refused() -> None:
    own = arena()
    lease = granted(own, 100)
    start = lease.counters.counter_start
    assert give_back(own, lease, start + 50) == 50
    with pytest.raises(LeaseError) as caught:
        give_back(own, lease, start)
    assert caught.value.reason == "lease.return.unknown"


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"holder": OTHER}, "lease.return.holder"),
        ({"volume": ANOTHER}, "lease.return.holder"),
        ({"token": b"x" * 16}, "lease.return.holder"),
        ({"token": b""}, "lease.return.holder"),
        ({"token": TOKEN[:15]}, "lease.return.holder"),
        ({"touched": 255}, "lease.return.malformed"),
        ({"touched": 357}, "lease.return.malformed"),
    ],
)
def test_a_return_that_does_not_match_changes_nothing(
    shown: dict[str, object], reason: str
) -> None:
    own = arena()
    lease = granted(own, 100)
    with pytest.raises((LeaseError, VerificationError)) as caught:
        give_back(own, lease, **{"touched": 256, **shown})  # type: ignore[arg-type]
    assert isinstance(caught.value, VerificationError) == (reason == "lease.return.holder")
    assert caught.value.reason == reason
    assert give_back(own, lease, 256) == 100


def test_only_so_many_leases_can_be_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RETURNABLE_MAX", 2)
    own = arena()
    first, second, third = (granted(own, 100) for _ in range(3))
    with pytest.raises(LeaseError) as caught:
        give_back(own, first, first.counters.counter_start)
    assert caught.value.reason == "lease.return.unknown"
    for lease in (second, third):
        assert give_back(own, lease, lease.counters.counter_start) == 100


def test_holder_refuses_a_range_it_already_has() -> None:
    holder = LeaseHolder()
    lease = granted(arena())
    holder.add(lease)
    with pytest.raises(LeaseError) as caught:
        holder.add(lease)
    assert caught.value.reason == "lease.overlap"
    assert holder.leased == LEASE_COUNTERS


def test_holder_knows_the_tails_and_burns_what_lies_between() -> None:
    own = arena()
    first, second = (granted(own, 1000) for _ in range(2))
    a, b = first.counters.counter_start, second.counters.counter_start
    holder = LeaseHolder()
    holder.add(first)
    holder.add(second)
    # A queue left 300…400 of the first lease; its end was returned in two adjacent pieces.
    left = [counters(a + 900, a + 1000), counters(a + 300, a + 400), counters(a + 800, a + 900)]
    assert holder.untouched(left) == [(first, a + 800), (second, b + 1000)]
    # The same counters of another start don't count.
    assert holder.untouched([counters(a + 900, a + 1000, epoch=2)])[0][1] == a + 1000


def test_holder_asks_for_more_below_half_a_lease() -> None:
    holder = LeaseHolder()
    assert holder.needs_refill(LEASE_COUNTERS // 2 - 1)
    assert not holder.needs_refill(LEASE_COUNTERS // 2)
