"""A gateway's leases between grant and return.

A lease is kept when its volume is detached and used again at the next attach, so that a job that
comes back costs the broker nothing. What is evicted, and everything at the end, is returned as far
as no queue was given it: it no longer counts against the limit of the key epoch. Nothing is ever
written down: what a killed gateway held is burned.
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
"""The books of a volume's leases, and the counters of them that no queue was given."""


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
        """Return the books of a volume that is to be attached and the counters it starts with."""
        kept = self._kept.pop(_key(descriptor), None)
        if kept is not None and kept.counters:
            return kept.holder, kept.counters
        holder = LeaseHolder()
        lease = await self._broker.lease(descriptor)
        holder.add(lease)
        return holder, [lease.counters]

    @contextlib.asynccontextmanager
    async def taken(self, descriptor: broker_pb2.VolumeDescriptor) -> AsyncIterator[Taken]:
        """Take them for a block that hands them to the engine; if it fails, none of them was used.

        They are kept then, for the next attach.
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
        """Keep what a detached volume did not use; the longest kept gives way beyond KEPT_MAX."""
        self._kept[_key(descriptor)] = _Kept(holder=holder, counters=counters)
        if len(self._kept) > KEPT_MAX:
            (volume_id, _), oldest = self._kept.popitem(last=False)
            await self.give_back(volume_id, oldest.holder, oldest.counters)

    async def drop(self, volume_id: str) -> None:
        """Give back what is kept for a volume that is deleted."""
        for key in [key for key in self._kept if key[0] == volume_id]:
            kept = self._kept.pop(key)
            await self.give_back(volume_id, kept.holder, kept.counters)

    async def close(self) -> None:
        """Give everything back."""
        while self._kept:
            (volume_id, _), kept = self._kept.popitem()
            await self.give_back(volume_id, kept.holder, kept.counters)

    async def give_back(
        self, volume_id: str, holder: LeaseHolder, counters: list[CounterRange]
    ) -> None:
        """Give back what of a volume's leases is left in `counters`; the rest is burned."""
        for lease, touched in holder.untouched(counters):
            if touched == lease.counters.counter_end:
                continue
            try:
                returned = await self._broker.return_lease(volume_id, lease, touched)
            except Error as error:
                # Burned: nobody is ever granted these counters again, so there is nothing to do.
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
