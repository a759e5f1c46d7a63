"""Filling of volumes without unwritten sectors: sealed zeros before the first attach.

The broker knows which gateway fills a volume and releases the volume's key to no other gateway
until that one reports the end. Flushed progress survives the loss of the target; a restarted
gateway begins again. Filling continues until it has succeeded or the volume is deleted.
"""

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from sealane.daemon.gateway.back_ends import Via, VolumeBackEnds, storage_of
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.filling_volume import FillingVolume
from sealane.daemon.gateway.grants import VolumeKey
from sealane.daemon.gateway.leases import LeaseCache
from sealane.daemon.gateway.supply import released_keys
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.statistics import GatewayVolumeState, only_in
from sealane.daemon.volume.events import EventLog
from sealane.errors import Error, reason_of
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2
from sealane.transport.tasks import TaskOwner

FILLINGS_MAX: Final = 4
"""Volumes of one target that a gateway fills concurrently; further ones wait."""
_STEP_SECTORS: Final = 1024
_FLUSH_SECTORS: Final = 1 << 18
_RETRY_SECONDS_MIN: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0


@dataclass(slots=True, kw_only=True)
class _Filling:
    """Progress of filling one volume."""

    mode: str
    target: str
    size_bytes: int
    task: asyncio.Task[None] | None = None
    sectors: int = 0
    durable_sectors: int = 0


class Fillings:
    """Volumes that this gateway is filling."""

    def __init__(
        self,
        *,
        node: str,
        broker: BrokerClient,
        gateway: Gateway,
        leases: LeaseCache,
        back_ends: VolumeBackEnds,
        events: EventLog,
    ) -> None:
        self._node = node
        self._broker = broker
        self._gateway = gateway
        self._leases = leases
        self._back_ends = back_ends
        self._events = events
        self._fillings: dict[str, _Filling] = {}
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, FILLINGS_MAX)
        )
        self._tasks = TaskOwner()

    def start(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        """Fill a volume in the background, if this gateway must and isn't doing it already."""
        volume_id = descriptor.volume_id
        if descriptor.filling_gateway == self._node and volume_id not in self._fillings:
            filling = self._fillings[volume_id] = _Filling(
                mode=descriptor.mode,
                target=descriptor.target_node,
                size_bytes=descriptor.sector_count * SECTOR_BYTES,
            )
            filling.task = self._tasks.start(
                self._run(volume_id, filling), name=f"fill-{volume_id}"
            )

    def filled_bytes(self, volume_id: str) -> int:
        """Return how many bytes of a volume are filled; 0 if this gateway isn't filling it."""
        filling = self._fillings.get(volume_id)
        return 0 if filling is None else filling.sectors * SECTOR_BYTES

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return what is known of the volumes being filled, as of others; on any thread."""
        return {
            (volume_id, filling.mode, filling.target): {
                **only_in(GatewayVolumeState.FILLING),
                "size_bytes": filling.size_bytes,
            }
            for volume_id, filling in self._fillings.copy().items()
        }

    async def stop(self, volume_id: str) -> None:
        """Stop filling a volume that is being deleted; wait until no write is in flight."""
        filling = self._fillings.get(volume_id)
        if filling is not None and filling.task is not None:
            filling.task.cancel()
            await asyncio.wait((filling.task,))

    async def resume(self) -> None:
        """Resume fillings of an earlier process of this gateway, once a broker is reachable."""
        delay = _RETRY_SECONDS_MIN
        while True:
            try:
                token = ""
                while True:
                    page, token = await self._broker.descriptors(page_size=0, page_token=token)
                    for descriptor in page:
                        self.start(descriptor)
                    if not token:
                        return
            except Error as error:
                get_logger().warning("fillings_not_resumed", reason=error.reason)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_SECONDS_MAX)

    async def close(self) -> None:
        """Stop; the next process of this gateway begins again."""
        await self._tasks.close()

    async def _run(self, volume_id: str, filling: _Filling) -> None:
        delay, reported = _RETRY_SECONDS_MIN, ""
        try:
            while True:
                try:
                    if await self._fill(volume_id, filling):
                        return
                except (Error, OSError, TimeoutError) as error:
                    reason = reason_of(error, otherwise="connection.lost")
                    if reason == "volume.not_found":
                        return
                    if reason != reported:
                        reported = reason
                        self._events.report(
                            volume_id, "filling_delayed", reason=reason, detail=str(error)
                        )
                    filling.sectors = filling.durable_sectors
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RETRY_SECONDS_MAX)
        finally:
            del self._fillings[volume_id]

    async def _fill(self, volume_id: str, filling: _Filling) -> bool:
        """Fill what isn't durable yet; return whether nothing is left to do."""
        found = await self._broker.descriptor(volume_id)
        async with self._turns[storage_of(found)]:
            descriptor = await self._broker.descriptor(volume_id)
            if descriptor.filling_gateway != self._node:
                return True
            back_end = await self._back_ends.open(descriptor, via=Via())
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(back_end.close)
                async with (
                    self._leases.taken(descriptor) as (leases, counters),
                    released_keys(self._broker, descriptor) as keys,
                ):
                    port = await self._gateway.open_filling(
                        volume_key(descriptor, keys),
                        counters=counters,
                        open_queue=back_end.open_queue,
                        epoch_floor=back_end.epoch_floor,
                    )
                try:
                    while filling.durable_sectors < descriptor.sector_count:
                        await self._step(port, filling, descriptor.sector_count)
                        if leases.needs_refill(port.counters_remaining()):
                            granted = await self._broker.lease(descriptor)
                            leases.add(granted)
                            port.add_counters([granted.counters])
                finally:
                    await port.close()
                    self._events.report_native(volume_id, port.take_events())
                    await self._leases.keep(descriptor, leases, port.take_counters())
                    await port.wipe()
            await self._broker.finish_filling(volume_id)
            self._events.report(volume_id, "filled")
            return True

    async def _step(self, port: FillingVolume, filling: _Filling, sector_count: int) -> None:
        count = min(_STEP_SECTORS, sector_count - filling.sectors)
        await port.write_zeroes(filling.sectors, count)
        filling.sectors += count
        is_last = filling.sectors == sector_count
        if is_last or filling.sectors - filling.durable_sectors >= _FLUSH_SECTORS:
            await port.flush()
            filling.durable_sectors = filling.sectors


def volume_key(
    descriptor: broker_pb2.VolumeDescriptor,
    keys: Mapping[int, bytearray],
    *,
    read_only: bool = False,
) -> VolumeKey:
    """Return a volume's key material for the engine; the caller still wipes `keys`."""
    return VolumeKey(
        volume_id=uuid.UUID(descriptor.volume_id),
        generation=descriptor.generation,
        sector_count=descriptor.sector_count,
        keys=keys,
        fully_sealed=descriptor.fully_sealed,
        read_only=read_only,
    )
