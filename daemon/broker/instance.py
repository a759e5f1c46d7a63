"""One of the brokers of a store: its number, its start epoch, and the head that it anchors.

It relies on two counters that can't be rolled back (sealane.daemon.device.anchors). **Starts**: a
start epoch is the value of an increment that no other start gets. So no arena is used twice,
whatever the store says. **Heads**: each head of this broker in the store has the value of its
counter at that time. A store without the last anchored head was rolled back, and this broker
refuses it.

The order of events for a head: the counter equals the last head's number; the next head is
committed; the counter is incremented. After a crash, or an increment that failed, the store is one
ahead, and the counter catches up before another head is written. A cancelled caller doesn't
interrupt this. Therefore each number belongs to one head of a start; if two heads shared one, a
store rolled back to the first would pass as current. After a commit with an unknown outcome the
head is read: if it is still the old one, the store may have been rolled back, and the broker ends.
Its next start has an epoch of its own.

In a store that was restored from a snapshot, brokers have instance numbers and counters that are
new there, and volumes begin other key epochs (sealane.daemon.broker.restored). Besides, a start
epoch is the counter's value plus the restore's random `epoch_base`: even a number that was used
after the snapshot, or after another restore of it, most probably gets other arenas.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sealane.crypto.lease import START_EPOCH_MAX, Arena
from sealane.daemon.broker.records import (
    LAST_RESTORE,
    HeadRecord,
    InstanceRecord,
    Stored,
    instance_name,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.device.anchors.counter import MonotonicCounter
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError

Cover = Callable[[int], Awaitable[None]]
"""Returns once a rollback of the store to before the revision would be detected:
`Instance.cover`."""

_UNUSED: Final = 0  # value of a counter before its first increment


class Instance:
    """This broker's identity in the store; created by `claim`."""

    def __init__(
        self,
        registry: Registry,
        *,
        name: str,
        arena: Arena,
        heads: MonotonicCounter,
        head: Stored[HeadRecord] | None,
    ) -> None:
        self.arena = arena
        self._registry = registry
        self._name = name
        self._heads = heads
        self._head = head
        # A head whose commit has, or had, an unknown outcome.
        self._attempted: HeadRecord | None = None
        self._covered = 0
        self._lock = asyncio.Lock()

    @classmethod
    async def claim(
        cls,
        registry: Registry,
        *,
        node: str,
        instance: int,
        starts: MonotonicCounter,
        heads: MonotonicCounter,
    ) -> "Instance":
        """Take the next start of broker `instance`, which belongs to the `node` that used it first.

        VerificationError `broker.store.rolled_back` or `broker.anchor.rolled_back`: store or anchor
        is older than the other. UsageError `broker.instance.claimed`: it is another node's.
        LeaseError `lease.start_epoch.exhausted`. UnavailableError `broker.instance.contended`:
        another process is starting as this broker.
        """
        name = instance_name(instance)
        stored = await registry.instances.get(name)
        if stored is not None and stored.record.node != node:
            raise UsageError(
                "broker.instance.claimed",
                f"broker instance {instance} belongs to {stored.record.node!r}; allowed for "
                f"{node!r}: a broker.instance that was never used",
            )
        restored = await registry.restores.get(LAST_RESTORE)
        if restored is not None and instance in restored.record.retired:
            raise UsageError(
                "broker.instance.retired",
                f"broker instance {instance} was in use before the store was restored from a "
                "snapshot; allowed: a broker.instance that was never used",
            )
        base = 0 if restored is None else restored.record.epoch_base
        # First, so that an exhausted counter says so at every start.
        last = await _last_start(instance, stored, counter=starts, base=base)
        head = await registry.heads.get(name)
        if head is None:
            await _first_value(heads, instance, at_most=_UNUSED)
        else:
            await _caught_up(heads, instance, "head", head.record.number)
        epoch = await _next_start(
            registry, instance, stored, node=node, counter=starts, base=base, value=last
        )
        claimed = cls(
            registry,
            name=name,
            arena=Arena(broker_instance=instance, start_epoch=epoch),
            heads=heads,
            head=head,
        )
        # At once, so that a store from before this start isn't accepted as the current one.
        await claimed.anchor()
        return claimed

    async def anchor(self) -> None:
        """Write the next head and increment its counter: this covers all earlier commits.

        VerificationError `broker.store.rolled_back`: the last head is missing.
        """
        await asyncio.shield(self._cover(None))

    async def cover(self, revision: int) -> None:
        """Return once a rollback to before the commit of that revision would be detected."""
        await asyncio.shield(self._cover(revision))

    async def keep_anchored(self, *, seconds: float) -> None:
        """Every `seconds`, anchor new commits and check the last head; never returns.

        Ends only with an error that must end the broker: VerificationError, or UnavailableError
        `broker.store.fenced`.
        """
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.inspect()
            except UnavailableError as error:
                if error.reason == "broker.store.fenced":
                    raise
                get_logger().error("head_not_anchored", reason=error.reason, message=error.args[0])

    async def inspect(self) -> None:
        """Check records and the last head; anchor a new head if anything was committed since."""
        await self._registry.store.inspect()
        await asyncio.shield(self._inspect_head())

    async def _inspect_head(self) -> None:
        async with self._lock:
            stored = await self._registry.heads.get(self._name)
            if not self._is_own(stored):
                self._adopt(stored)
            if await self._registry.store.revision() > self._covered:
                await self._anchor()

    async def _cover(self, revision: int | None) -> None:
        async with self._lock:
            if revision is None or self._covered < revision:
                await self._anchor()

    async def _anchor(self) -> None:
        table = self._registry.heads
        if self._attempted is not None:
            self._adopt(await table.get(self._name))
        if self._head is None:
            value = await _value(self._heads)
        else:
            instance = self.arena.broker_instance
            value = await _caught_up(self._heads, instance, "head", self._head.record.number)
        record = HeadRecord(number=value + 1, start_epoch=self.arena.start_epoch)
        self._attempted = record
        try:
            revision = await self._registry.commit(
                [table.unchanged(self._name, self._head)], table.sealed(self._name, record)
            )
        except UnavailableError as error:
            if error.reason != "broker.store.outcome_unknown":
                self._attempted = None
            raise
        self._attempted = None
        if revision is None:
            before = self._head
            if not self._is_own(await table.get(self._name)) or self._head is before:
                raise self._rolled_back()
            await self._anchor()
            return
        self._head = Stored(record, revision, self._name)
        await _increment(self._heads, to=record.number)
        self._covered = revision

    def _is_own(self, stored: Stored[HeadRecord] | None) -> bool:
        """Return whether it is this broker's last head, maybe with a MAC under another record key.

        Its content names it: no two heads of a start have one number.
        """
        if stored is None or self._head is None or stored.record != self._head.record:
            return False
        if stored.revision != self._head.revision:
            self._head = stored
        return True

    def _adopt(self, stored: Stored[HeadRecord] | None) -> None:
        """Accept a changed head if it is the one whose commit had an unknown outcome."""
        if self._attempted is None or stored is None:
            raise self._rolled_back()
        if self._is_own(stored):
            raise UnavailableError(
                "broker.store.fenced",
                f"the store lost head {self._attempted.number} of broker instance "
                f"{self.arena.broker_instance}, or may still get it: restart the broker",
            )
        if stored.record != self._attempted:
            raise self._rolled_back()
        self._head, self._attempted = stored, None

    def _rolled_back(self) -> VerificationError:
        number = 0 if self._head is None else self._head.record.number
        return VerificationError(
            "broker.store.rolled_back",
            f"head {number} of broker instance {self.arena.broker_instance} is no longer in the "
            "store: the store was rolled back, or another process runs as this broker",
        )


async def _last_start(
    instance: int, stored: Stored[InstanceRecord] | None, *, counter: MonotonicCounter, base: int
) -> int:
    """Return the counter's value, that of the last start; LeaseError if it can't count on."""
    room = START_EPOCH_MAX - base
    if stored is not None and stored.record.is_anchored:
        served = stored.record.start_epoch - base
        value = await _caught_up(counter, instance, "start epoch", served)
    else:
        # The epoch was served by a version without anchors: the counter continues from it.
        reached = _UNUSED if stored is None else stored.record.start_epoch
        value = await _first_value(counter, instance, at_most=reached, below=room)
        while value < reached:
            value = await _increment(counter, to=value + 1)
    if value >= room:
        raise _exhausted(instance, value)
    return value


async def _next_start(
    registry: Registry,
    instance: int,
    stored: Stored[InstanceRecord] | None,
    *,
    node: str,
    counter: MonotonicCounter,
    base: int,
    value: int,
) -> int:
    """Claim the next start epoch: the value of the counter's next increment, plus `base`."""
    epoch = base + value + 1
    table, name = registry.instances, instance_name(instance)
    revision = await registry.commit(
        [table.unchanged(name, stored)],
        table.sealed(name, InstanceRecord(node=node, start_epoch=epoch)),
    )
    if revision is None:
        raise UnavailableError(
            "broker.instance.contended",
            f"another process is starting as broker instance {instance}",
        )
    return base + await _increment(counter, to=value + 1)


async def _caught_up(counter: MonotonicCounter, instance: int, what: str, number: int) -> int:
    """Return the counter's value once it equals the number in the store.

    After a crash between record and increment the counter is behind by one.
    """
    value = await _value(counter)
    if number < value:
        raise _store_behind(instance, f"{what} {number}", value)
    if number > value + 1:
        raise VerificationError(
            "broker.anchor.rolled_back",
            f"the store has {what} {number} of broker instance {instance}, but its anchor counts "
            f"{value}: the anchor is another machine's, or was rolled back; give this broker a "
            "new broker.instance",
        )
    return value if value == number else await _increment(counter, to=number)


async def _first_value(
    counter: MonotonicCounter, instance: int, *, at_most: int, below: int | None = None
) -> int:
    """Return the value of a counter that was never used as far as the store knows.

    LeaseError if it isn't `below` that: no start can have used it.
    """
    try:
        value = await _value(counter)
    except VerificationError as error:
        if error.reason != "counter.missing":
            raise
        # A TPM creates a counter by its first increment, and the first value can be anything.
        return await asyncio.to_thread(counter.increment)
    if below is not None and value >= below:
        raise _exhausted(instance, value)
    if value > at_most:
        raise _store_behind(instance, "nothing" if at_most == _UNUSED else f"{at_most}", value)
    return value


async def _value(counter: MonotonicCounter) -> int:
    return await asyncio.to_thread(counter.read)


async def _increment(counter: MonotonicCounter, *, to: int) -> int:
    value = await asyncio.to_thread(counter.increment)
    if value != to:
        raise UnavailableError(
            "broker.instance.contended",
            f"a counter of this broker went to {value}, not {to}: another process uses it",
        )
    return value


def _exhausted(instance: int, value: int) -> LeaseError:
    return LeaseError(
        "lease.start_epoch.exhausted",
        f"broker instance {instance} has no start epochs left: its counter is at {value}, and with "
        f"the base of a restore, if there was one, they end at {START_EPOCH_MAX}. Set a new "
        "broker.instance and broker.counter_index; a TPM that has counted so far for others begins "
        "there, so use another machine, or restore the snapshot again, with another base",
    )


def _store_behind(instance: int, found: str, value: int) -> VerificationError:
    return VerificationError(
        "broker.store.rolled_back",
        f"the store has {found} of broker instance {instance}, but its anchor counts {value}: the "
        "store was rolled back",
    )
