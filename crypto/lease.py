"""Counter leases: the arena that grants counters and the holder that uses them.

IV = broker instance 16 bit ‖ start epoch 24 bit ‖ counter 56 bit, big-endian. An arena lives in the
memory of one broker process and grants increasing counters per volume: none is granted twice for a
volume, whatever is lost, replayed or returned. Grants of two starts don't overlap, because no start
epoch is used twice. Two volumes may get the same counters: they have no key in common
(docs/decisions/0058-leases.md). Counters count AES blocks: 256 per sector.

A lease is one range of one arena, for one volume. Its holder takes counters from the front and may
return the rest: once, in the same incarnation, with the token that was sealed inside the grant.
Returned counters no longer count against the key epoch's limit, and that is the only effect.
`Arena.grant` is the only place in Sealane that gives out counters.
"""

import hmac
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from sealane.errors import LeaseError, UsageError, VerificationError

LEASE_COUNTERS: Final = 1 << 36  # 2^36 blocks of 16 bytes = 1 TiB of writes
SECTOR_COUNTERS: Final = 256
INSTANCE_MAX: Final = (1 << 16) - 1
START_EPOCH_MAX: Final = (1 << 24) - 1
COUNTER_END: Final = 1 << 56
# 4 PB under one key: beyond 2^48.5 blocks GCM could be distinguished from random with an advantage
# above 2^-32.
EPOCH_COUNTERS_MAX: Final = 4 * 10**15 // 16
RETURN_TOKEN_BYTES: Final = 16
RETURNABLE_MAX: Final = 65536
"""Leases of one arena that can still be returned; beyond this, the oldest no longer can be."""


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
                f"broker instance {self.broker_instance}; allowed: 1…{INSTANCE_MAX}",
            )
        if not 1 <= self.start_epoch <= START_EPOCH_MAX:
            raise UsageError(
                "lease.start_epoch",
                f"start epoch {self.start_epoch}; allowed: 1…{START_EPOCH_MAX}",
            )
        if not 0 < self.counter_start < self.counter_end <= COUNTER_END:
            raise UsageError(
                "lease.range",
                f"counters {self.counter_start}…{self.counter_end}; allowed: a range within 1…2^56",
            )

    @property
    def arena(self) -> tuple[int, int]:
        """Broker instance and start epoch."""
        return self.broker_instance, self.start_epoch

    @property
    def count(self) -> int:
        """Number of counters in the range."""
        return self.counter_end - self.counter_start

    def overlaps(self, other: "CounterRange") -> bool:
        """Return whether the ranges have an IV in common."""
        return (
            self.arena == other.arena
            and self.counter_start < other.counter_end
            and other.counter_start < self.counter_end
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A granted lease. `lease_id` is unique in the arena; only the holder has `return_token`."""

    lease_id: int
    counters: CounterRange
    return_token: bytes = field(repr=False)

    @property
    def arena(self) -> tuple[int, int]:
        """Broker instance and start epoch."""
        return self.counters.arena

    @property
    def count(self) -> int:
        """Number of counters granted."""
        return self.counters.count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A lease that can be returned, and its holder."""

    lease: Lease
    volume_id: uuid.UUID
    incarnation: bytes


class Arena:
    """The counters of one start of a broker. Not thread-safe: owned by the broker's event loop."""

    __slots__ = ("_counter_start", "_held", "_ids", "_next", "broker_instance", "start_epoch")

    def __init__(
        self, *, broker_instance: int, start_epoch: int, counter_start: int = SECTOR_COUNTERS
    ) -> None:
        # Checks the range of instance and epoch; counter 0 is never granted.
        CounterRange(
            broker_instance=broker_instance,
            start_epoch=start_epoch,
            counter_start=counter_start,
            counter_end=COUNTER_END,
        )
        self.broker_instance = broker_instance
        self.start_epoch = start_epoch
        self._counter_start = counter_start
        # Only increases; a volume's key epochs share one entry.
        self._next: dict[uuid.UUID, int] = {}
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._ids = itertools.count(1)

    def counters_free(self, volume_id: uuid.UUID) -> int:
        """Return how many counters a volume can still be granted."""
        return COUNTER_END - self._next.get(volume_id, self._counter_start)

    def grant(
        self,
        count: int = LEASE_COUNTERS,
        *,
        volume_id: uuid.UUID,
        incarnation: bytes,
        return_token: bytes,
    ) -> Lease:
        """Lease the next `count` counters of a volume to `incarnation`.

        `return_token` has RETURN_TOKEN_BYTES random bytes that only the holder learns. LeaseError
        `lease.arena.exhausted` if the volume has fewer counters left.
        """
        if count < 1 or len(return_token) != RETURN_TOKEN_BYTES:
            raise UsageError(
                "lease.count",
                f"{count} counters with a token of {len(return_token)} bytes; allowed: at least "
                f"1, {RETURN_TOKEN_BYTES} bytes",
            )
        if count > self.counters_free(volume_id):
            raise LeaseError(
                "lease.arena.exhausted",
                f"broker instance {self.broker_instance} has {self.counters_free(volume_id)} "
                f"counters left for volume {volume_id} in start epoch {self.start_epoch}, not "
                f"{count}: restart the broker",
            )
        start = self._next.get(volume_id, self._counter_start)
        self._next[volume_id] = start + count
        lease = Lease(
            lease_id=next(self._ids),
            counters=CounterRange(
                broker_instance=self.broker_instance,
                start_epoch=self.start_epoch,
                counter_start=start,
                counter_end=start + count,
            ),
            return_token=return_token,
        )
        self._held[lease.lease_id] = _Held(
            lease=lease, volume_id=volume_id, incarnation=incarnation
        )
        if len(self._held) > RETURNABLE_MAX:
            self._held.popitem(last=False)
        return lease

    def give_back(
        self,
        lease_id: int,
        touched: int,
        *,
        volume_id: uuid.UUID,
        incarnation: bytes,
        return_token: bytes,
    ) -> int:
        """End a lease that its holder used up to `touched`; return how many counters are left.

        They are never granted again. LeaseError `lease.return.unknown` (no such lease is
        outstanding), VerificationError `.holder` (of another volume or incarnation, or the wrong
        token), LeaseError `.malformed` (`touched` is not within the lease). A refused return
        changes nothing.
        """
        held = self._held.get(lease_id)
        if held is None:
            raise LeaseError("lease.return.unknown", f"no lease {lease_id} is outstanding")
        if (
            held.volume_id != volume_id
            or held.incarnation != incarnation
            or not hmac.compare_digest(held.lease.return_token, return_token)
        ):
            raise VerificationError(
                "lease.return.holder", f"the caller did not prove that it holds lease {lease_id}"
            )
        counters = held.lease.counters
        if not counters.counter_start <= touched <= counters.counter_end:
            raise LeaseError(
                "lease.return.malformed", f"counter {touched} is not within lease {lease_id}"
            )
        del self._held[lease_id]
        return counters.counter_end - touched


class LeaseHolder:
    """A gateway's leases of one volume: refuses repeated counters, and knows what can be returned.

    The engine takes counters lease by lease in the order they were added, each from its front, so
    the counters that it has not given to a queue are the end of the list (`untouched`).
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
        if any(lease.counters.overlaps(known.counters) for known in self._leases):
            raise LeaseError(
                "lease.overlap", "the broker granted counters that this volume already has"
            )
        self._leases.append(lease)

    def untouched(self, remaining: Iterable[CounterRange]) -> list[tuple[Lease, int]]:
        """Return each lease with its first counter such that no queue was given it or a later one.

        `remaining` are the counters that the engine still has. Ranges in the middle of a lease,
        left by a queue that ended, can't be returned and are burned.
        """
        pieces = sorted(remaining, key=lambda r: r.counter_start, reverse=True)
        marks = []
        for lease in self._leases:
            mark = lease.counters.counter_end
            for piece in pieces:
                is_within = (
                    piece.arena == lease.arena
                    and lease.counters.counter_start <= piece.counter_start
                )
                if is_within and piece.counter_end == mark:
                    mark = piece.counter_start
            marks.append((lease, mark))
        return marks

    def needs_refill(self, counters_remaining: int) -> bool:
        """Return whether the next lease should be fetched now."""
        return counters_remaining < self.refill_below
