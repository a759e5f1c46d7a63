"""The gateway's data path: exports each attached volume as a plain namespace to one host.

A front-end I/O queue is handed to the engine together with a secure back-end queue. The back-end
queue may be lost and replaced (`sealane.daemon.gateway.back_end`); the host notices only a pause.
"""

import asyncio
import contextlib
import ipaddress
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sealane import _native
from sealane.crypto.lease import CounterRange
from sealane.daemon.gateway.back_end import (
    AssociationEpochs,
    BackEnd,
    PreparedQueue,
    QueueName,
)
from sealane.daemon.gateway.cards import Cards
from sealane.daemon.gateway.counters import add_counters, replace_counters
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.filling_volume import FillingVolume
from sealane.daemon.gateway.grants import Export, OpenQueue, VolumeFailure, VolumeKey
from sealane.daemon.gateway.last_flush import flush_journal
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Provider,
)
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.listeners import Listen, listen_tcp
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import (
    FRONT_TRANSFER_BYTES,
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    NAMESPACE_ID,
    AnaState,
    IoOpcode,
    Status,
)
from sealane.protocol.nvme.nqn import check_nqn, export_nqn
from sealane.protocol.nvme.subsystem import BASIC_COMMANDS, Subsystem, volume_subsystem

FRONT_COMMANDS: Final = BASIC_COMMANDS | {
    IoOpcode.COMPARE,
    IoOpcode.WRITE_ZEROES,
    IoOpcode.DATASET_MANAGEMENT,
    IoOpcode.VERIFY,
}
FRONT_FUSED_BLOCKS: Final = 1
_ANSWER_SECONDS: Final = 0.05
"""Time to answer hosts that wait, before their connections are closed."""
EXPECTED_SECONDS: Final = 5.0
"""How long a connecting host waits for a volume that is being reattached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings for all volumes.

    `command_timeout_seconds`: time that the target may take for one command; `hold_seconds`: how
    long commands wait for a lost back end; `journal_bytes_max`: unflushed changes kept per volume;
    `journals_bytes_max`: those of all volumes together, beyond the 1 MiB that each may have;
    `commands_per_key_max`: commands on a queue before its keys are replaced;
    `nonce_ledgers`: directory with a record of every seal, one file per volume (tests only: it
    holds hashes of plaintext).
    """

    command_timeout_seconds: float = 30.0
    hold_seconds: float = 60.0
    journal_bytes_max: int = 64 << 20
    journals_bytes_max: int = 1 << 30
    commands_per_key_max: int = 1 << 48
    nonce_ledgers: Path | None = None


@dataclass(slots=True, kw_only=True)
class _Joined:
    """Both ends of a queue that is ready to start."""

    volume: "AttachedVolume"
    name: QueueName
    connect: Connect
    prepared: PreparedQueue | None
    """None at a standby of a fail-over group."""

    def start(self, descriptor: int) -> None:
        self.volume.native.start_queue(
            descriptor,
            association=self.name.association_id,
            queue_id=self.name.queue_id,
            queue_depth=self.connect.queue_size,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
            success_flag=self.connect.disable_flow_control,
            header_digest=self.connect.header_digest,
            data_digest=self.connect.data_digest,
        )
        if self.prepared is None:
            self.volume.back_end.join(self.name)
        else:
            self.volume.back_end.start(self.name, self.prepared)

    def close(self) -> None:
        if self.prepared is not None:
            self.volume.back_end.discard(self.prepared)


class AttachedVolume(Exported):
    """An attached volume: its plain subsystem, and its keys and counters in the engine."""

    def __init__(
        self,
        *,
        native: _native.GatewayVolume,
        subsystem: Subsystem,
        host_nqn: str,
        secret: HostSecret,
        back_end: BackEnd,
        gateway: "Gateway",
        feed: EventFeed,
    ) -> None:
        self.native = native
        self.back_end = back_end
        self._subsystem = subsystem
        self._host_nqn = host_nqn
        self._gateway = gateway
        self._feed = feed
        self._secret = secret
        feed.on_event = self._take_event

    def _take_event(self, event: StorageEvent) -> bool:
        if (cards := self._gateway.cards) is not None:
            if event.kind == "accelerator_lost":
                cards.check_losses()
            elif event.kind == "queue_opened":
                cards.renew(self.native)
        return self.back_end.take_event(event)

    @property
    def subsystem(self) -> Subsystem:
        """Return what the plain subsystem shows to hosts."""
        return self._subsystem

    def set_access(self, ana_state: AnaState) -> None:
        """Show this ANA state; the engine still carries out every command that arrives.

        A standby of a fail-over group is at best non-optimized.
        """
        if self.back_end.is_standby and ana_state == AnaState.OPTIMIZED:
            ana_state = AnaState.NON_OPTIMIZED
        self._subsystem = self._subsystem.with_access(ana_state)

    @property
    def export(self) -> Export:
        """Return the address and NQN that hosts connect to."""
        traddr, trsvcid = self._gateway.address
        return Export(
            traddr=traddr,
            trsvcid=trsvcid,
            subsystem_nqn=self._subsystem.nqn,
            namespace_id=NAMESPACE_ID,
        )

    @property
    def secret(self) -> HostSecret:
        """Secret that the host must prove to know; made for this attachment."""
        return self._secret

    def add_counters(self, granted: Iterable[CounterRange]) -> None:
        """Give the volume more counters; it uses them in this order, after those it has."""
        add_counters(self.native, granted)

    def add_key(self, key_epoch: int, key: bytearray) -> None:
        """Give the volume the key of a newer epoch, used for sealing from now on; wipes the key."""
        self.native.add_key(key_epoch=key_epoch, key=key)

    def replace_counters(self, granted: Sequence[CounterRange] = ()) -> list[CounterRange]:
        """Replace the counters that no queue has been given yet; return the old ones."""
        return replace_counters(self.native, granted)

    def counters_remaining(self) -> int:
        """Counters not yet handed to a queue."""
        return self.native.counters_remaining()

    def statistics(self) -> Mapping[str, int]:
        """Counters of the engine."""
        return self.native.statistics()

    def take_events(self) -> Sequence[StorageEvent]:
        """Return the events since the last call."""
        return self._feed.take()

    def fail(self, reason: VolumeFailure, detail: str) -> None:
        """Fail all commands in flight and all later ones."""
        self.native.fail(reason, detail)

    def settled_incarnation(self) -> int | None:
        """Return the incarnation that alone could lose what is acknowledged from now on."""
        return self.native.settled_incarnation

    async def leave(self) -> None:
        """Stop the export and its queues without a flush: another gateway serves the host."""
        await self._gateway.detach(self)
        await asyncio.to_thread(self.native.close_queues)
        await self.back_end.close()
        self._feed.close()

    async def detach(self, *, patience_seconds: float = 0) -> bool:
        """Stop the export and its queues, and flush; return whether all acknowledged data is safe.

        `patience_seconds` is how long it tries to flush after a first failure.

        A flush that fails is reported (`journal_dropped`) and does not keep the volume attached:
        then changes that no host flushed are lost if the target ends before it stores them.
        """
        await self._gateway.detach(self)
        await asyncio.to_thread(self.native.close_queues)
        try:
            await flush_journal(self.native, self.back_end, patience_seconds=patience_seconds)
        except UnavailableError as error:
            self._feed.publish(
                StorageEvent(kind="journal_dropped", reason=error.reason, detail=str(error.args[0]))
            )
            return False
        finally:
            await self.back_end.close()
            self._feed.close()
        return True

    async def suspend(self) -> str:
        """Stop the export and its queues, and flush; the volume stays open.

        Return why the flush failed; empty if all acknowledged data is durable.
        """
        await self._gateway.detach(self)
        await asyncio.to_thread(self.native.close_queues)
        try:
            await flush_journal(self.native, self.back_end)
        except UnavailableError as error:
            return f"{error.reason}: {error.args[0]}"
        return ""

    def resume(self) -> None:
        """Export the volume again after `suspend`."""
        self._gateway.export(self)

    async def wipe(self) -> None:
        """Wipe the keys and free all memory now, without waiting for garbage collection."""
        self._feed.on_event = None
        await asyncio.to_thread(self.native.close)

    def allows(self, host_nqn: str) -> bool:
        """Return whether this is the host that the volume is attached to."""
        return host_nqn == self._host_nqn

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Open the back-end queue for a front-end queue."""
        name = QueueName(association_id=association.association_id, queue_id=connect.queue_id)
        await self.back_end.stand_ready(partial(self._gateway.end_queues, self))
        prepared = None if self.back_end.is_standby else await self.back_end.prepare(name)
        return _Joined(volume=self, name=name, connect=connect, prepared=prepared)

    async def association_closed(self, association_id: int) -> None:
        """Stop the association's queues, wait for their commands at the target, and disconnect."""
        try:
            await asyncio.to_thread(self.native.close_queues, association_id)
            # Events from the end of these queues must not be taken for events of later queues with
            # their names.
            self._feed.drain()
        finally:
            # Must also run if a second cancellation arrives while the queues drain.
            await self.back_end.close_association(association_id)

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Disconnect from the target for a queue that has ended."""
        self.back_end.close_queue(QueueName(association_id=association_id, queue_id=queue_id))

    def secrets_of(self, host_nqn: str) -> tuple[HostSecret, HostSecret | None] | None:
        """Return the secret of the attached host; None for others, which `allows` refuses."""
        return (self._secret, None) if host_nqn == self._host_nqn else None

    def idle_ms(self, association_id: int) -> int | None:
        """Return the milliseconds since the host was last heard from on any I/O queue."""
        return self.native.idle_ms(association_id)

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


class Gateway(Provider):
    """NVMe/TCP front end of attached volumes; on loopback only, unless `allow_remote`."""

    def __init__(
        self,
        *,
        traddr: str,
        trsvcid: int,
        allow_remote: bool = False,
        settings: GatewaySettings | None = None,
        listen: Listen = listen_tcp,
    ) -> None:
        if not allow_remote and not ipaddress.ip_address(traddr).is_loopback:
            raise UsageError(
                "gateway.address",
                f"the plain front end would listen on {traddr}; allowed: a loopback address",
            )
        self._attached: dict[str, AttachedVolume] = {}
        self._expected: dict[str, asyncio.Event] = {}
        self._settings = settings or GatewaySettings()
        self._journals = _native.JournalPool(bytes_max=self._settings.journals_bytes_max)
        self._listener = Listener(
            self, traddr=traddr, trsvcid=trsvcid, offers_digests=True, listen=listen
        )
        self._access = AnaState.OPTIMIZED
        self._is_stopping = False
        self.cards: Cards | None = None
        """The cards that seal for volumes, if this gateway may have some."""

    @property
    def listener(self) -> Listener:
        """Listener that hosts connect to, for observers."""
        return self._listener

    @property
    def address(self) -> tuple[str, int]:
        """Address that hosts connect to."""
        return self._listener.address

    @property
    def journals(self) -> _native.JournalPool:
        """Journal memory of all volumes, and the number of open volumes."""
        return self._journals

    async def start(self) -> None:
        """Start to listen."""
        await self._listener.start()

    async def stop(self) -> None:
        """Detach all volumes and close the listener."""
        self._is_stopping = True
        self._answer_waiting()
        await asyncio.sleep(_ANSWER_SECONDS)
        leaving = list(self._attached.values())
        for attached in leaving:
            await attached.detach()
        await self._listener.stop()
        for attached in leaving:
            # Queues that were still being prepared.
            await attached.back_end.close()
            await attached.wipe()

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Return a subsystem by name, for the listener."""
        return self._attached.get(subsystem_nqn)

    def exported(self) -> Iterable[Exported]:
        """Return all attached volumes, for discovery."""
        return list(self._attached.values())

    async def awaited(self, subsystem_nqn: str) -> Exported | None:
        """Wait up to EXPECTED_SECONDS for a volume that is being reattached, and return it.

        ConnectRefusedError "Connect Controller Busy" if it is not attached by then, and at once
        during a drain or a stop: after this status a host retries; any other refusal would end its
        controller. A Linux host whose Connect gets no answer waits for a minute.
        """
        expected = self._expected.get(subsystem_nqn)
        if expected is None:
            return None
        if self._access == AnaState.OPTIMIZED and not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXPECTED_SECONDS):
                    await expected.wait()
        if subsystem_nqn in self._expected:
            raise ConnectRefusedError(
                "connect.reattaching",
                f"{subsystem_nqn} is being reattached: connect again later",
                status=Status.CONNECT_BUSY,
            )
        return self.find(subsystem_nqn)

    def expect(self, volume_id: str) -> None:
        """Ask hosts of an unexported volume to connect later, until `attach` or `forget`."""
        self._expected.setdefault(export_nqn(uuid.UUID(volume_id)), asyncio.Event())

    def forget(self, volume_id: str) -> None:
        """Refuse hosts of a volume that isn't exported."""
        self._arrived(export_nqn(uuid.UUID(volume_id)))

    def _answer_waiting(self) -> None:
        """Have the hosts that wait for a volume told to connect again later."""
        for nqn, expected in self._expected.items():
            self._expected[nqn] = asyncio.Event()
            expected.set()

    def _arrived(self, nqn: str) -> None:
        expected = self._expected.pop(nqn, None)
        if expected is not None:
            expected.set()

    async def attach(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        host_nqn: str,
        secret: HostSecret,
        open_queue: OpenQueue,
        epoch_floor: int = 0,
        member: GroupMember | None = None,
    ) -> AttachedVolume:
        """Export `volume` to `host_nqn`; wipes the keys. UsageError if it is already attached.

        The host must prove on each queue that it knows `secret`. `epoch_floor` is the newest
        association epoch of the volume that the target knows. A `member` of a fail-over group is on
        standby until it takes over.
        """
        nqn = export_nqn(volume.volume_id)
        if nqn in self._attached:
            raise UsageError("volume.attached", f"volume {volume.volume_id} is already attached")
        check_nqn(host_nqn)
        native, back_end, feed = self._open(volume, open_queue, epoch_floor, member)
        attached = AttachedVolume(
            native=native,
            subsystem=volume_subsystem(
                nqn=nqn,
                volume_id=volume.volume_id,
                serial=volume.volume_id.hex[:20],
                block_count=volume.sector_count,
                metadata_bytes=0,
                transfer_max=FRONT_TRANSFER_BYTES,
                commands=FRONT_COMMANDS - {IoOpcode.DATASET_MANAGEMENT}
                if volume.fully_sealed
                else FRONT_COMMANDS,
                fused_blocks=FRONT_FUSED_BLOCKS,
                is_write_protected=volume.read_only,
                is_multipath=True,
                ana_state=self._access,
            ),
            host_nqn=host_nqn,
            secret=secret,
            back_end=back_end,
            gateway=self,
            feed=feed,
        )
        attached.add_counters(counters)
        self.export(attached)
        return attached

    def export(self, attached: AttachedVolume) -> None:
        """Let the host of an open volume connect."""
        nqn = attached.subsystem.nqn
        self._attached[nqn] = attached
        # It may have changed while the volume was suspended.
        attached.set_access(self._access)
        if self.cards is not None:
            self.cards.add(attached.native)
        self._arrived(nqn)
        self._listener.changed()

    async def open_filling(
        self,
        volume: VolumeKey,
        *,
        counters: Iterable[CounterRange],
        open_queue: OpenQueue,
        epoch_floor: int = 0,
    ) -> FillingVolume:
        """Open a volume for filling, without exporting it; wipes the keys. The caller closes it."""
        native, back_end, feed = self._open(volume, open_queue, epoch_floor, None)
        filling = FillingVolume(
            native=native, back_end=back_end, feed=feed, sectors=volume.sector_count
        )
        filling.add_counters(counters)
        return filling

    def _open(
        self,
        volume: VolumeKey,
        open_queue: OpenQueue,
        epoch_floor: int,
        member: GroupMember | None,
    ) -> tuple[_native.GatewayVolume, BackEnd, EventFeed]:
        newest = max(volume.keys)
        ledgers = self._settings.nonce_ledgers
        native = _native.GatewayVolume(
            volume_id=volume.volume_id.bytes,
            generation=volume.generation,
            sector_count=volume.sector_count,
            oldest_key_epoch=min(volume.keys),
            key_epoch=newest,
            key=volume.keys[newest],
            command_timeout_seconds=self._settings.command_timeout_seconds,
            hold_seconds=self._settings.hold_seconds,
            journal_bytes_max=self._settings.journal_bytes_max,
            commands_per_key_max=self._settings.commands_per_key_max,
            nonce_ledger=None if ledgers is None else ledgers / str(volume.volume_id),
            fully_sealed=volume.fully_sealed,
            read_only=volume.read_only,
            journal_pool=self._journals,
        )
        for epoch in volume.keys.keys() - {newest}:
            native.add_key(key_epoch=epoch, key=volume.keys[epoch])
        feed = EventFeed(native, self._listener.queue_closed)
        back_end = BackEnd(
            native=native,
            volume_id=volume.volume_id.bytes,
            open_queue=open_queue,
            epochs=AssociationEpochs(floor=epoch_floor),
            report=feed.publish,
            member=member,
        )
        return native, back_end, feed

    def set_access(self, ana_state: AnaState) -> None:
        """Tell the hosts of all volumes, also of later ones, this ANA state."""
        self._access = ana_state
        if ana_state != AnaState.OPTIMIZED:
            self._answer_waiting()
        for attached in self._attached.values():
            attached.set_access(ana_state)
        self._listener.changed()

    def show_access(self, attached: AttachedVolume) -> None:
        """Tell a volume's host its ANA state again, which depends on who serves it."""
        attached.set_access(self._access)
        self._listener.changed()

    def idle_seconds(self, attached: AttachedVolume) -> float | None:
        """Return the time since the volume's host was last heard on an I/O queue; None without."""
        idle = [
            milliseconds / 1000
            for association in self._listener.associations
            if association.exported is attached
            and (milliseconds := attached.idle_ms(association.association_id)) is not None
        ]
        return min(idle, default=None)

    def unanswered(self, attached: AttachedVolume) -> int:
        """Return the number of commands that the volume's host has no answer to yet."""
        return sum(
            attached.native.unanswered(association.association_id)
            for association in self._listener.associations
            if association.exported is attached
        )

    async def end_queues(self, attached: AttachedVolume) -> None:
        """End the associations of a volume's host, which may connect again; wait until drained."""
        await self._listener.end_export(attached)

    async def detach(self, attached: AttachedVolume) -> None:
        """Remove a volume from the listener and wait until its associations are closed.

        Its queues may use a card until they have ended.
        """
        self._attached.pop(attached.subsystem.nqn, None)
        try:
            await self._listener.end_export(attached)
        finally:
            if self.cards is not None:
                await self.cards.remove(attached.native)
