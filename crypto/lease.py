"""Counter leases (DESIGN §6): the arena that grants counters and the holder that uses them.

IV = broker instance 16 bit ‖ start epoch 24 bit ‖ counter 56 bit, big-endian. An arena lives in
the memory of one broker process, so its grants never overlap, whatever is lost of their record.
Grants of two starts don't overlap because no start epoch is served twice. Counters are counted in
AES blocks: 256 a sector.

A lease is some ranges of one arena, for one key epoch of one volume. Its holder takes counters from
the front of each range and may give what it never touched back: once, as the same incarnation,
above what it reported as touched. What came back is merged and granted before fresh counters; a
lease that never comes back is burned. `Arena.grant` is the one place in Sealane where counters are
given out.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sealane.errors import LeaseError, UsageError

LEASE_COUNTERS: Final = 1 << 36  # 2^36 blocks of 16 bytes = 1 TiB of writes
SECTOR_COUNTERS: Final = 256
INSTANCE_MAX: Final = (1 << 16) - 1
START_EPOCH_MAX: Final = (1 << 24) - 1
COUNTER_END: Final = 1 << 56
# 4 PB under one key: beyond 2^48.5 blocks GCM would be told from random with more than 2^-32.
EPOCH_COUNTERS_MAX: Final = 4 * 10**15 // 16
# A lease of returned counters may be in pieces, as many as one message carries.
LEASE_RANGES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRange:
    """Counters `counter_start` ≤ c < `counter_end` of one arena."""

    broker_instance: int
    start_epoch: int
    counter_start: int
    counter_end: int

    def __post_init__(self) -> None:
        if not 1 <= self.broker_instance <= INSTANCE_MAX:
            raise UsageError(
                "lease.instance",
                f"broker instance {self.broker_instance} is not within 1…{INSTANCE_MAX}",
            )
        if not 1 <= self.start_epoch <= START_EPOCH_MAX:
            raise UsageError(
                "lease.start_epoch",
                f"start epoch {self.start_epoch} is not within 1…{START_EPOCH_MAX}",
            )
        if not 0 < self.counter_start < self.counter_end <= COUNTER_END:
            raise UsageError(
                "lease.range",
                f"counters {self.counter_start}…{self.counter_end} are not within 1…2^56",
            )

    @property
    def arena(self) -> tuple[int, int]:
        """Broker instance and start epoch."""
        return self.broker_instance, self.start_epoch

    @property
    def count(self) -> int:
        """Counters in the range."""
        return self.counter_end - self.counter_start

    def overlaps(self, other: "CounterRange") -> bool:
        """Whether one IV lies in both."""
        return (
            self.arena == other.arena
            and self.counter_start < other.counter_end
            and other.counter_start < self.counter_end
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What one grant gives: one to LEASE_RANGES_MAX ranges; `lease_id` is unique in the arena."""

    lease_id: int
    ranges: tuple[CounterRange, ...]

    @property
    def arena(self) -> tuple[int, int]:
        """Broker instance and start epoch."""
        return self.ranges[0].arena

    @property
    def count(self) -> int:
        """Counters in all ranges."""
        return sum(r.count for r in self.ranges)


@dataclass(slots=True, kw_only=True)
class _Held:
    """A lease that is out; `touched[i]`: counters of range i below it may have been used."""

    lease: Lease
    incarnation: bytes
    touched: list[int]


class Arena:
    """All counters of one start of one broker. Not thread-safe: one owner, the broker's loop."""

    __slots__ = ("_free", "_held", "_ids", "_next", "broker_instance", "start_epoch")

    def __init__(
        self, *, broker_instance: int, start_epoch: int, counter_start: int = SECTOR_COUNTERS
    ) -> None:
        # Proves the bounds of instance and epoch; counter 0 is never granted.
        CounterRange(
            broker_instance=broker_instance,
            start_epoch=start_epoch,
            counter_start=counter_start,
            counter_end=COUNTER_END,
        )
        self.broker_instance = broker_instance
        self.start_epoch = start_epoch
        self._next = counter_start
        # What came back: disjoint, sorted, merged where spans touch.
        self._free: list[tuple[int, int]] = []
        self._held: dict[int, _Held] = {}
        self._ids = itertools.count(1)

    @property
    def counters_free(self) -> int:
        """Counters that can still be granted."""
        return COUNTER_END - self._next + sum(end - start for start, end in self._free)

    @property
    def fragments(self) -> int:
        """Spans of counters that came back, after merging."""
        return len(self._free)

    def grant(self, count: int = LEASE_COUNTERS, *, incarnation: bytes) -> Lease:
        """Lease `count` counters to `incarnation`, those that came back first.

        LeaseError `lease.arena.exhausted` when the arena can't give that many in
        LEASE_RANGES_MAX ranges.
        """
        if count < 1:
            raise UsageError("lease.count", f"{count} counters can't be granted")
        spans, rest = _cut(self._free, count)
        if len(spans) >= LEASE_RANGES_MAX:
            spans, rest = spans[: LEASE_RANGES_MAX - 1], self._free[LEASE_RANGES_MAX - 1 :]
        fresh = count - sum(end - start for start, end in spans)
        if fresh > COUNTER_END - self._next:
            raise LeaseError(
                "lease.arena.exhausted",
                f"broker instance {self.broker_instance} has {self.counters_free} counters left "
                f"in start epoch {self.start_epoch}, not {count}: restart the broker",
            )
        self._free = rest
        if fresh:
            spans.append((self._next, self._next + fresh))
            self._next += fresh
        lease = Lease(
            lease_id=next(self._ids),
            ranges=tuple(
                CounterRange(
                    broker_instance=self.broker_instance,
                    start_epoch=self.start_epoch,
                    counter_start=start,
                    counter_end=end,
                )
                for start, end in spans
            ),
        )
        self._held[lease.lease_id] = _Held(
            lease=lease,
            incarnation=incarnation,
            touched=[r.counter_start for r in lease.ranges],
        )
        return lease

    def report(self, lease_id: int, touched: Sequence[int], *, incarnation: bytes) -> None:
        """Note the first counter of every range that its holder has not handed out yet.

        LeaseError `lease.return.…` as for `give_back`.
        """
        self._checked(lease_id, touched, incarnation).touched = [*touched]

    def give_back(self, lease_id: int, touched: Sequence[int], *, incarnation: bytes) -> int:
        """Take back every range from `touched` to its end; returns how many counters that is.

        Ends the lease: a second return finds none. LeaseError `lease.return.unknown` (no such
        lease is out), `.holder` (another incarnation's), `.malformed` (not within the ranges),
        `.used` (below what was reported).
        """
        held = self._checked(lease_id, touched, incarnation)
        del self._held[lease_id]
        tails = [
            (mark, r.counter_end)
            for mark, r in zip(touched, held.lease.ranges, strict=True)
            if mark < r.counter_end
        ]
        for start, end in tails:
            self._put(start, end)
        return sum(end - start for start, end in tails)

    def _checked(self, lease_id: int, touched: Sequence[int], incarnation: bytes) -> _Held:
        held = self._held.get(lease_id)
        if held is None:
            raise LeaseError("lease.return.unknown", f"no lease {lease_id} is out")
        if held.incarnation != incarnation:
            raise LeaseError("lease.return.holder", f"lease {lease_id} is another incarnation's")
        ranges = held.lease.ranges
        if len(touched) != len(ranges) or any(
            not r.counter_start <= mark <= r.counter_end
            for mark, r in zip(touched, ranges, strict=True)
        ):
            raise LeaseError(
                "lease.return.malformed", f"the counters are not those of lease {lease_id}"
            )
        if any(new < old for new, old in zip(touched, held.touched, strict=True)):
            raise LeaseError(
                "lease.return.used", f"counters of lease {lease_id} may have been used"
            )
        return held

    def _put(self, start: int, end: int) -> None:
        """Add a span that is in none of the free ones, merging it with those it touches."""
        at = bisect.bisect(self._free, (start, end))
        first = last = at
        if at and self._free[at - 1][1] == start:
            start, first = self._free[at - 1][0], at - 1
        if at < len(self._free) and self._free[at][0] == end:
            end, last = self._free[at][1], at + 1
        self._free[first:last] = [(start, end)]


def _cut(
    spans: Iterable[tuple[int, int]], count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split `spans` into their first `count` counters and the rest."""
    taken: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for start, end in spans:
        cut = min(end, start + count)
        if start < cut:
            taken.append((start, cut))
        if cut < end:
            rest.append((cut, end))
        count -= cut - start
    return taken, rest


class LeaseHolder:
    """A gateway's leases of one volume: refuses counters it had, knows what it may give back.

    The engine takes counters range by range in the order they were added, each from its front, so
    the counters it has not handed to a queue are the end of the list (`untouched`).
    """

    __slots__ = ("_leases", "refill_below")

    def __init__(self, *, refill_below: int = LEASE_COUNTERS // 2) -> None:
        self._leases: list[Lease] = []
        self.refill_below = refill_below

    @property
    def leased(self) -> int:
        """Counters leased since the volume was attached."""
        return sum(lease.count for lease in self._leases)

    def add(self, lease: Lease) -> None:
        """Record a lease; LeaseError if any of its counters was leased before."""
        had = [r for known in self._leases for r in known.ranges]
        if any(new.overlaps(old) for new in lease.ranges for old in had):
            raise LeaseError(
                "lease.overlap", "the broker granted counters that this volume already has"
            )
        self._leases.append(lease)

    def untouched(self, remaining: Iterable[CounterRange]) -> list[tuple[Lease, list[int]]]:
        """Return every lease with the first counter of each of its ranges that no queue was given.

        `remaining` are the counters the engine still has. Pieces in the middle of a range, left by
        a queue that ended, can't be given back and are burned.
        """
        pieces = sorted(remaining, key=lambda r: r.counter_start, reverse=True)
        marks = []
        for lease in self._leases:
            touched = []
            for r in lease.ranges:
                mark = r.counter_end
                for piece in pieces:
                    if piece.arena == r.arena and r.counter_start <= piece.counter_start:
                        mark = piece.counter_start if piece.counter_end == mark else mark
                touched.append(mark)
            marks.append((lease, touched))
        return marks

    def needs_refill(self, counters_remaining: int) -> bool:
        """Whether the next lease should be fetched now."""
        return counters_remaining < self.refill_below
