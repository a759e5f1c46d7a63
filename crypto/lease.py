"""Counter leases (DESIGN §6): the arena that grants counters and the holder that uses them.

IV = broker instance 16 bit ‖ start epoch 24 bit ‖ counter 56 bit, big-endian. An arena lives in
the memory of one broker process, so its grants never overlap, whatever is lost of their record.
Grants of two starts don't overlap because no start epoch is served twice: that rests on a store
that is never rolled back, which nothing detects yet (docs/threat-model.md). Counters are counted
in AES blocks: 256 a sector.

`Arena._next` is the one place in Sealane where counters are given out.
"""

from dataclasses import dataclass
from typing import Final

from sealane.errors import LeaseError, UsageError

LEASE_COUNTERS: Final = 1 << 36  # 2^36 blocks of 16 bytes = 1 TiB of writes
SECTOR_COUNTERS: Final = 256
INSTANCE_MAX: Final = (1 << 16) - 1
START_EPOCH_MAX: Final = (1 << 24) - 1
COUNTER_END: Final = 1 << 56


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
    def count(self) -> int:
        """Counters in the range."""
        return self.counter_end - self.counter_start

    def overlaps(self, other: "CounterRange") -> bool:
        """Whether one IV lies in both."""
        return (
            (self.broker_instance, self.start_epoch) == (other.broker_instance, other.start_epoch)
            and self.counter_start < other.counter_end
            and other.counter_start < self.counter_end
        )


class Arena:
    """All counters of one start of one broker. Not thread-safe: one owner, the broker's loop."""

    __slots__ = ("_next", "broker_instance", "start_epoch")

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

    def grant(self, count: int = LEASE_COUNTERS) -> CounterRange:
        """Grant the next `count` counters; LeaseError when the arena can't give that many."""
        if count < 1:
            raise UsageError("lease.count", f"{count} counters can't be granted")
        if count > COUNTER_END - self._next:
            raise LeaseError(
                "lease.arena.exhausted",
                f"broker instance {self.broker_instance} has {COUNTER_END - self._next} counters "
                f"left in start epoch {self.start_epoch}, not {count}: restart the broker",
            )
        granted = CounterRange(
            broker_instance=self.broker_instance,
            start_epoch=self.start_epoch,
            counter_start=self._next,
            counter_end=self._next + count,
        )
        self._next += count
        return granted


class LeaseHolder:
    """What a gateway holds for one volume: refuses a range it already had.

    The native engine consumes the counters; this keeps the books that decide when to ask for more.
    """

    __slots__ = ("_ranges", "refill_below")

    def __init__(self, *, refill_below: int = LEASE_COUNTERS // 2) -> None:
        self._ranges: list[CounterRange] = []
        self.refill_below = refill_below

    @property
    def leased(self) -> int:
        """Counters leased since the volume was attached."""
        return sum(r.count for r in self._ranges)

    def add(self, granted: CounterRange) -> None:
        """Record a lease; LeaseError if any of its counters was leased before."""
        if any(granted.overlaps(r) for r in self._ranges):
            raise LeaseError(
                "lease.overlap", "the broker granted counters that this volume already has"
            )
        self._ranges.append(granted)

    def needs_refill(self, counters_remaining: int) -> bool:
        """Whether the next lease should be fetched now."""
        return counters_remaining < self.refill_below
