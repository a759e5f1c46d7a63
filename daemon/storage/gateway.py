"""Gateway: exports each attached volume as a plain namespace to exactly one host.

Every front-end I/O queue is joined to a secure back-end queue of the same id, which the control
path opens (`open_queue`). Sealing and opening happen in the engine.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sealane import _native
from sealane.crypto.lease import CounterRange
from sealane.daemon.ports import Export, OpenQueue, QueueGrant, VolumeKey
from sealane.daemon.storage.events import EventFeed, StorageEvent
from sealane.daemon.storage.listener import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Listener,
)
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    FRONT_TRANSFER_BYTES,
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    NAMESPACE_ID,
    QUEUE_DEPTH_MAX,
    SECURE_TRANSFER_BYTES,
)
from sealane.protocol.nvme.nqn import check_nqn, export_nqn
from sealane.protocol.nvme.subsystem import Subsystem, volume_subsystem
from sealane.transport.nvme.initiator import ConnectedQueue, HostController


@dataclass(slots=True, kw_only=True)
class _Joined:
    """Both ends of a queue that may start."""

    volume: "AttachedVolume"
    association: Association
    connect: Connect
    back: ConnectedQueue
    secure: _native.SecureQueueParameters

    def start(self, descriptor: int) -> None:
        with contextlib.closing(self.back):
            self.volume.native.start_queue(
                descriptor,
                self.back.socket.fileno(),
                association=self.association.association_id,
                queue_id=self.connect.queue_id,
                front_queue_depth=self.connect.queue_size,
                front_h2c_data_max=H2C_DATA_BYTES,
                front_transfer_max=FRONT_TRANSFER_BYTES,
                success_flag=self.connect.disable_flow_control,
                back_queue_depth=self.back.queue_depth,
                back_h2c_data_max=self.back.h2c_data_max,
                back_transfer_max=self.back.transfer_max,
                back_in_capsule_max=self.back.in_capsule_max,
                secure=self.secure,
            )

    def close(self) -> None:
        self.back.close()


@dataclass(slots=True, kw_only=True)
class _BackEnd:
    """Association with the target on behalf of one front-end association."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    host: HostController | None = None


class AttachedVolume:
    """One attached volume: its plain subsystem, its key and counters in the engine."""

    def __init__(
        self,
        *,
        native: _native.GatewayVolume,
        subsystem: Subsystem,
        host_nqn: str,
        open_queue: OpenQueue,
        gateway: "Gateway",
        feed: EventFeed,
    ) -> None:
        self.native = native
        self._subsystem = subsystem
        self._host_nqn = host_nqn
        self._open_queue = open_queue
        self._gateway = gateway
        self._feed = feed
        self._back_ends: dict[int, _BackEnd] = {}

    @property
    def subsystem(self) -> Subsystem:
        """What the plain subsystem shows."""
        return self._subsystem

    @property
    def export(self) -> Export:
        """Where hosts connect."""
        traddr, trsvcid = self._gateway.address
        return Export(
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self._subsystem.nqn,
            namespace_id=NAMESPACE_ID,
        )

    def add_counters(self, granted: CounterRange) -> None:
        """Give the volume another lease."""
        self.native.add_counters(
            broker_instance=granted.broker_instance,
            start_epoch=granted.start_epoch,
            start=granted.counter_start,
            end=granted.counter_end,
        )

    def counters_remaining(self) -> int:
        """Counters not yet handed to a queue."""
        return self.native.counters_remaining()

    def statistics(self) -> Mapping[str, int]:
        """Counters of the engine."""
        return self.native.statistics()

    def take_events(self) -> Sequence[StorageEvent]:
        """Events since the last call."""
        return self._feed.take()

    async def detach(self) -> None:
        """Stop the export and its queues; the key goes with them."""
        await self._gateway.detach(self)
        await asyncio.to_thread(self.native.close_queues)
        self._feed.close()

    def allows(self, host_nqn: str) -> bool:
        """Only the host the volume is attached to."""
        return host_nqn == self._host_nqn

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Open the back-end queue for a front-end one."""
        grant = await self._open_queue(connect.queue_id)
        try:
            secure = _native.SecureQueueParameters(
                secret=grant.secret,
                volume_id=self._subsystem.namespaces[0].namespace_uuid.bytes,
                host_nqn=grant.host_nqn,
                queue_id=connect.queue_id,
                association_epoch=grant.association_epoch,
                incarnation=grant.target_incarnation,
            )
        finally:
            grant.secret[:] = bytes(len(grant.secret))
        host = await self._back_end(association, grant)
        back = await host.connect_queue(
            connect.queue_id, queue_depth=QUEUE_DEPTH_MAX, ticket=grant.ticket
        )
        # Limits are ours and the descriptor's; what Identify says can only lower them.
        bounded = ConnectedQueue(
            socket=back.socket,
            queue_id=back.queue_id,
            queue_depth=back.queue_depth,
            h2c_data_max=min(back.h2c_data_max, H2C_DATA_BYTES),
            transfer_max=min(back.transfer_max, SECURE_TRANSFER_BYTES),
            in_capsule_max=min(back.in_capsule_max, IN_CAPSULE_BYTES),
        )
        return _Joined(
            volume=self, association=association, connect=connect, back=bounded, secure=secure
        )

    async def association_closed(self, association_id: int) -> None:
        """Stop the association's queues and leave the target."""
        back_end = self._back_ends.pop(association_id, None)
        try:
            await asyncio.to_thread(self.native.close_queues, association_id)
        finally:
            # Also when a second cancellation comes while the queues drain.
            if back_end is not None and back_end.host is not None:
                await back_end.host.close()

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Report a refused Connect."""
        self._feed.publish(
            StorageEvent(
                kind="refused",
                reason=error.reason,
                detail=f"{error.args[0]}; host {connect.host_nqn!r}",
                queue_id=connect.queue_id,
            )
        )

    async def _back_end(self, association: Association, grant: QueueGrant) -> HostController:
        back_end = self._back_ends.setdefault(association.association_id, _BackEnd())
        async with back_end.turn:
            if back_end.host is None:
                host = HostController(
                    traddr=grant.traddr,
                    trsvcid=grant.trsvcid,
                    subsystem_nqn=grant.subsystem_nqn,
                    host_nqn=grant.host_nqn,
                )
                await host.connect()
                if association.is_closed:
                    # It closed while this connected; nobody else would close the back end.
                    self._back_ends.pop(association.association_id, None)
                    await host.close()
                    raise UnavailableError("connection.lost", "the association ended meanwhile")
                back_end.host = host
            return back_end.host


class Gateway:
    """NVMe/TCP front end of attached volumes; loopback only unless told otherwise."""

    def __init__(self, *, traddr: str, trsvcid: int, allow_remote: bool = False) -> None:
        if not allow_remote and not ipaddress.ip_address(traddr).is_loopback:
            raise UsageError(
                "gateway.address",
                f"the plain front end would listen on {traddr}; allowed: a loopback address",
            )
        self._attached: dict[str, AttachedVolume] = {}
        self._listener = Listener(self, traddr=traddr, trsvcid=trsvcid)

    @property
    def address(self) -> tuple[str, int]:
        """Where hosts connect."""
        return self._listener.address

    async def start(self) -> None:
        """Listen."""
        await self._listener.start()

    async def stop(self) -> None:
        """Detach everything and close the address."""
        for attached in list(self._attached.values()):
            await attached.detach()
        await self._listener.stop()

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Subsystem by name, for the listener."""
        return self._attached.get(subsystem_nqn)

    async def attach(
        self,
        volume: VolumeKey,
        *,
        counters: CounterRange,
        host_nqn: str,
        open_queue: OpenQueue,
    ) -> AttachedVolume:
        """Export `volume` to `host_nqn`; wipes the key. UsageError if it is attached already."""
        nqn = export_nqn(volume.volume_id)
        if nqn in self._attached:
            raise UsageError("volume.attached", f"volume {volume.volume_id} is attached already")
        check_nqn(host_nqn)
        native = _native.GatewayVolume(
            volume_id=volume.volume_id.bytes,
            generation=volume.generation,
            sector_count=volume.sector_count,
            key_epoch=volume.key_epoch,
            key=volume.key,
        )
        attached = AttachedVolume(
            native=native,
            subsystem=volume_subsystem(
                nqn=nqn,
                volume_id=volume.volume_id,
                serial=volume.volume_id.hex[:20],
                block_count=volume.sector_count,
                metadata_bytes=0,
                transfer_max=FRONT_TRANSFER_BYTES,
            ),
            host_nqn=host_nqn,
            open_queue=open_queue,
            gateway=self,
            feed=EventFeed(native, self._listener.queue_closed),
        )
        attached.add_counters(counters)
        self._attached[nqn] = attached
        return attached

    async def detach(self, attached: AttachedVolume) -> None:
        """Take a volume out of the listener and wait until its associations are closed."""
        self._attached.pop(attached.subsystem.nqn, None)
        await self._listener.end_export(attached)
