"""A gateway's leases between grant and return.

When a volume is detached, its lease is kept and used again at the next attach, so that reattaching
costs the broker nothing. When a lease is evicted, and for all leases at shutdown, counters that no
queue was given are returned: they no longer count against the limit of the key epoch. Leases are
never saved: those of a killed gateway are burned.
"""

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from sealane.crypto.lease import CounterRange, LeaseHolder
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error
from sealane.protocol.v1 import broker_pb2

KEPT_MAX: Final = 64

Taken: TypeAlias = tuple[LeaseHolder, list[CounterRange]]
"""The record of a volume's leases, and the leased counters that no queue was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    holder: LeaseHolder
    counters: list[CounterRange]


class LeaseCache:
    """Leases of volumes that are not attached, by volume and key epoch."""

    def __init__(self, broker: BrokerClient) -> None:
        self._broker = broker
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()

    async def take(self, descriptor: broker_pb2.VolumeDescriptor) -> Taken:
        """Return the lease record of a volume to be attached, and its first counters."""
        kept = self._kept.pop(_key(descriptor), None)
        if kept is not None and kept.counters:
            return kept.holder, kept.counters
        holder = LeaseHolder()
        lease = await self._broker.lease(descriptor)
        holder.add(lease)
        return holder, [lease.counters]

    @contextlib.asynccontextmanager
    async def taken(self, descriptor: broker_pb2.VolumeDescriptor) -> AsyncIterator[Taken]:
        """Take leases for a block that hands them to the engine.

        If the block fails, none of them was used: they are kept for the next attach.
        """
        holder, counters = await self.take(descriptor)
        try:
            yield holder, counters
        except BaseException:
            await self.keep(descriptor, holder, counters)
            raise

    async def keep(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        holder: LeaseHolder,
        counters: list[CounterRange],
    ) -> None:
        """Keep the unused counters of a detached volume; beyond KEPT_MAX the oldest are evicted."""
        self._kept[_key(descriptor)] = _Kept(holder=holder, counters=counters)
        if len(self._kept) > KEPT_MAX:
            (volume_id, _), oldest = self._kept.popitem(last=False)
            await self.give_back(volume_id, oldest.holder, oldest.counters)

    async def drop(self, volume_id: str) -> None:
        """Return the leases kept for a volume that is being deleted."""
        for key in [key for key in self._kept if key[0] == volume_id]:
            kept = self._kept.pop(key)
            await self.give_back(volume_id, kept.holder, kept.counters)

    async def close(self) -> None:
        """Return all leases."""
        while self._kept:
            (volume_id, _), kept = self._kept.popitem()
            await self.give_back(volume_id, kept.holder, kept.counters)

    async def give_back(
        self, volume_id: str, holder: LeaseHolder, counters: list[CounterRange]
    ) -> None:
        """Return a volume's unused counters, those in `counters`; the rest is burned."""
        for lease, touched in holder.untouched(counters):
            if touched == lease.counters.counter_end:
                continue
            try:
                returned = await self._broker.return_lease(volume_id, lease, touched)
            except Error as error:
                # The counters are burned: they are never granted again, so nothing needs to be
                # done.
                get_logger().warning(
                    "lease_burned",
                    volume_id=volume_id,
                    lease_id=lease.lease_id,
                    reason=error.reason,
                    message=str(error),
                )
            else:
                get_logger().info(
                    "lease_returned",
                    volume_id=volume_id,
                    lease_id=lease.lease_id,
                    counters=returned,
                )


def _key(descriptor: broker_pb2.VolumeDescriptor) -> tuple[str, int]:
    return descriptor.volume_id, descriptor.key_epoch
