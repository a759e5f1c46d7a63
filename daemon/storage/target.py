"""Target: sealed volumes behind secure queues. It holds no data key.

A volume's subsystem can be reached only with a single-use ticket from the control channel; there
is no plain access to it.
"""

import asyncio
import hmac
import ipaddress
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sealane import _native
from sealane.crypto.exchange import wipe
from sealane.crypto.queue import MILESTONE_BYTES
from sealane.daemon.anchors.anchor import volume_record
from sealane.daemon.jobs import Job
from sealane.daemon.logs import get_logger
from sealane.daemon.ports import ROLLED_BACK, PeerIncarnation
from sealane.daemon.storage.catalogue import JOBS_SUFFIX, STORE_SUFFIX, make_directory
from sealane.daemon.storage.device import Device
from sealane.daemon.storage.drives import Drives
from sealane.daemon.storage.events import EventFeed, StorageEvent
from sealane.daemon.storage.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
    Provider,
)
from sealane.daemon.storage.listener import Listener
from sealane.daemon.storage.openings import Openings
from sealane.daemon.storage.store_anchor import StoreAnchor
from sealane.daemon.storage.volume_jobs import VolumeJobs
from sealane.errors import ProtocolError, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.connect import TICKET_BYTES, TICKET_OFFSET, Connect
from sealane.protocol.nvme.constants import (
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    SECURE_TRANSFER_BYTES,
    Status,
)
from sealane.protocol.nvme.nqn import check_nqn, volume_nqn
from sealane.protocol.nvme.subsystem import Subsystem, volume_subsystem

StoreKind: TypeAlias = Literal["emulated", "file", "inline", "memory", "nvme"]
TICKET_SECONDS = 30.0
GATEWAYS_MAX = 128
"""Gateways of one volume whose association epochs are known at a time."""
_TICKETS_MAX = 1024
_EPOCH_OF_FORGOTTEN = 1 << 64
KEPT_STORES: Final = ("file", "inline", "nvme")
"""Stores that outlive the process: a directory has their files, or links to their namespaces."""
_METADATA_BYTES = 64
_NAMESPACE_ID = 1


@dataclass(slots=True, kw_only=True, eq=False)
class _Fence:
    """A gateway of the volume: nothing of its association epochs below the newest may run.

    Gateways don't fence each other: each has epochs of its own.
    """

    host_nqn: str
    newest_epoch: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Ticket:
    secret: bytearray
    fence: _Fence
    queue_id: int
    association_epoch: int
    incarnation: int
    gateway: PeerIncarnation | None
    is_read_only: bool
    expires: float
    is_void: bool = False


@dataclass(slots=True, kw_only=True)
class _Admitted:
    """A ticket that was presented: the queue may start."""

    volume: "TargetSubsystem"
    association: Association
    connect: Connect
    ticket: _Ticket

    def start(self, descriptor: int) -> None:
        if self.ticket.is_void:
            raise UnavailableError("authorization.lost", "the gateway may not act any more")
        if self.ticket.association_epoch < self.ticket.fence.newest_epoch:
            # The fence came between the ticket's check and now: this queue must never run.
            raise UnavailableError("queue.epoch", "a newer association was opened meanwhile")
        secure = _native.SecureQueueParameters(
            secret=self.ticket.secret,
            volume_id=self.volume.volume_id.bytes,
            host_nqn=self.ticket.fence.host_nqn,
            queue_id=self.connect.queue_id,
            association_epoch=self.ticket.association_epoch,
            incarnation=self.ticket.incarnation,
        )
        controller = self.volume.serve(self.association, self.ticket)
        controller.start_queue(
            descriptor,
            queue_id=self.connect.queue_id,
            queue_depth=self.connect.queue_size,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=IN_CAPSULE_BYTES,
            transfer_max=SECURE_TRANSFER_BYTES,
            header_digest=self.connect.header_digest,
            data_digest=self.connect.data_digest,
            secure=secure,
        )
        # From here on the association stands for it.
        self.volume.starting.remove(self.ticket)

    def close(self) -> None:
        self.volume.starting.remove(self.ticket)
        wipe(self.ticket.secret)


@dataclass(slots=True, kw_only=True)
class _Served:
    """The I/O queues of one association."""

    controller: _native.Controller
    fence: _Fence
    epoch: int
    gateway: PeerIncarnation | None
    is_read_only: bool


@dataclass(slots=True, kw_only=True, eq=False)
class TargetSubsystem(Exported):
    """One volume and its secure subsystem."""

    volume_id: uuid.UUID
    native: _native.Namespace
    subsystem: Subsystem
    feed: EventFeed
    path: Path | None
    jobs: VolumeJobs
    anchor: StoreAnchor | None = None
    is_resizing: bool = False
    tickets: dict[bytes, _Ticket] = field(default_factory=dict)
    fences: dict[str, _Fence] = field(default_factory=dict)
    starting: list[_Ticket] = field(default_factory=list)
    served: dict[int, _Served] = field(default_factory=dict)
    past_refusals: int = 0

    def allows(self, host_nqn: str) -> bool:
        """Only gateways that the control channel admitted."""
        return host_nqn in self.fences

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Spend the ticket; whatever is wrong with it, the answer is the same."""
        ticket = self._spend(connect.ticket)
        if ticket is None:
            raise _bad_ticket("unknown, spent or expired")
        fits = (
            ticket.fence.host_nqn == connect.host_nqn
            and ticket.queue_id == connect.queue_id
            and ticket.association_epoch >= ticket.fence.newest_epoch
        )
        if not fits:
            wipe(ticket.secret)
            raise _bad_ticket("made for another host, queue or association")
        self.starting.append(ticket)
        return _Admitted(volume=self, association=association, connect=connect, ticket=ticket)

    def _spend(self, presented: bytes) -> _Ticket | None:
        found = None
        for known in list(self.tickets):
            ticket = self.tickets[known]
            if ticket.expires <= time.monotonic():
                wipe(self.tickets.pop(known).secret)
            elif hmac.compare_digest(known, presented):
                found = self.tickets.pop(known)
        return found

    def fence_of(self, host_nqn: str) -> _Fence:
        """Return a gateway's fence, made if it is new; UnavailableError if there are too many."""
        fence = self.fences.get(host_nqn)
        if fence is None:
            if len(self.fences) >= GATEWAYS_MAX:
                self._forget_idle()
            fence = self.fences[host_nqn] = _Fence(host_nqn=host_nqn)
        return fence

    def _forget_idle(self) -> None:
        """Forget the gateway that was admitted first of those without queues or tickets."""
        busy = {id(served.fence) for served in self.served.values()}
        now = time.monotonic()
        busy |= {id(ticket.fence) for ticket in self.tickets.values() if ticket.expires > now}
        idle = next((fence for fence in self.fences.values() if id(fence) not in busy), None)
        if idle is None:
            raise UnavailableError(
                "queue.gateways", f"{GATEWAYS_MAX} gateways use volume {self.volume_id} already"
            )
        # A queue of its that was admitted and hasn't started yet never will.
        idle.newest_epoch = _EPOCH_OF_FORGOTTEN
        del self.fences[idle.host_nqn]

    async def close_older(self, fence: _Fence, listener: Listener) -> None:
        """Drain and end every association of the fence's gateway that is older than its newest."""
        older = [
            association_id
            for association_id, served in self.served.items()
            if served.fence is fence and served.epoch < fence.newest_epoch
        ]
        for association_id in older:
            await self.drain(association_id)
            listener.end_association(association_id)

    def serve(self, association: Association, ticket: _Ticket) -> _native.Controller:
        """Return the engine's controller of an association, made for its first queue."""
        served = self.served.get(association.association_id)
        if served is None:
            controller = _native.Controller(
                association=association.association_id,
                host_nqn=association.host_nqn,
                host_id=association.host_id.bytes,
                controller_id=association.controller_id,
                read_only=ticket.is_read_only,
            )
            controller.set_namespaces([(_NAMESPACE_ID, self.native, "optimized")])
            served = _Served(
                controller=controller,
                fence=ticket.fence,
                epoch=ticket.association_epoch,
                gateway=ticket.gateway,
                is_read_only=ticket.is_read_only,
            )
            self.served[association.association_id] = served
            self.feed.add(controller)
        elif (served.gateway, served.is_read_only) != (ticket.gateway, ticket.is_read_only):
            # An association lives by one authorization and may do what that one says.
            raise UnavailableError("queue.association", "the association has another access")
        served.epoch = ticket.association_epoch
        return served.controller

    def gateways(self) -> Iterator[PeerIncarnation]:
        """Yield whose queues run or may start."""
        owners = [ticket.gateway for ticket in (*self.tickets.values(), *self.starting)]
        owners += [served.gateway for served in self.served.values()]
        yield from (owner for owner in owners if owner is not None)

    async def fence_gateway(
        self, gateway: PeerIncarnation, reason: str, listener: Listener
    ) -> None:
        """Void a gateway's tickets and end its associations; return when they are drained."""
        for known in [known for known, old in self.tickets.items() if old.gateway == gateway]:
            wipe(self.tickets.pop(known).secret)
        for ticket in self.starting:
            ticket.is_void |= ticket.gateway == gateway
        ending = [number for number, served in self.served.items() if served.gateway == gateway]
        await asyncio.gather(*map(self.drain, ending))
        for association_id in ending:
            listener.end_association(association_id)
        if ending:
            self.feed.publish(
                StorageEvent(kind="gateway_fenced", reason=reason, detail=gateway.name)
            )

    async def resize(self, sector_count: int, listener: Listener) -> None:
        """Make the store larger while nobody uses it: gateways come back when it is over.

        UsageError `volume.resize.refused`, UnavailableError `store.extend`.
        """
        self.is_resizing = True
        try:
            for known in [*self.tickets]:
                wipe(self.tickets.pop(known).secret)
            for ticket in self.starting:
                ticket.is_void = True
            ending = [*self.served]
            await asyncio.gather(*map(self.association_closed, ending))
            for association_id in ending:
                listener.end_association(association_id)
            await self.jobs.close(keep=True)
            try:
                await extended(self.native, sector_count)
            finally:
                self.jobs.open(self.native)
            self.subsystem = _sealed_subsystem(self.volume_id, self.native)
        finally:
            self.is_resizing = False

    async def drain(self, association_id: int) -> None:
        """Stop an association's queues; who comes second waits as long as who came first."""
        served = self.served.get(association_id)
        if served is not None:
            await asyncio.to_thread(served.controller.close)

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues, and forget it."""
        await self.drain(association_id)
        served = self.served.pop(association_id, None)
        if served is not None:
            self.feed.remove(served.controller)
            self.past_refusals += served.controller.refusals()

    async def close(self, *, keep: bool) -> None:
        """Stop and drain every queue and let the store go; `keep`: with all that was written."""
        for association_id in [*self.served]:
            await self.association_closed(association_id)
        await self.jobs.close(keep=keep)
        self.feed.close()
        try:
            if keep:
                await asyncio.to_thread(self.native.sync)
        except OSError as error:
            # Hosts that flushed lost nothing; the others know that they didn't.
            get_logger().warning(
                "store_not_flushed", volume_id=str(self.volume_id), detail=str(error)
            )
        finally:
            # It anchors where it ends: the anchor answers until it is closed.
            await asyncio.to_thread(self.native.close)
            if self.anchor is not None:
                await self.anchor.close()

    def statistics(self) -> dict[str, int]:
        """Counters of the namespace and of its queues."""
        counters = self.native.statistics()
        controllers = [served.controller for served in self.served.values()]
        counters["refusals"] += self.past_refusals + sum(each.refusals() for each in controllers)
        counters["queues_running"] = sum(each.queues_running() for each in controllers)
        return counters | self.jobs.statistics()

    async def observe_jobs(self) -> Sequence[Job]:
        """Keep how far the jobs are, report those that have ended and return them."""
        ended = await self.jobs.observe()
        for job in ended:
            detail = f"{job.kind}: {job.checked} sectors checked, {job.found} found wrong"
            self.feed.publish(
                StorageEvent(
                    kind=f"job_{job.state}",
                    reason="",
                    detail=f"{detail}; {job.detail}" if job.detail else detail,
                )
            )
        return ended

    def refused(self, error: ConnectRefusedError, connect: Connect) -> None:
        """Report a refused Connect."""
        self.feed.publish(
            StorageEvent(
                kind="refused",
                reason=error.reason,
                detail=f"{error.args[0]}; host {connect.host_nqn!r}",
                queue_id=connect.queue_id,
            )
        )


class Target(Provider):
    """NVMe/TCP target of sealed volumes. No discovery log shows them: hosts bring a ticket.

    `store_kind` "file" keeps each volume in `directory`/`<uuid>.sectors`, "inline" too, but laid
    out as on a drive with metadata; "nvme" lays each out on one of `namespaces`, to which that is
    a link; "memory" keeps it in memory, as long as the process lives; "emulated" too, at the pace
    of the named `drive`.
    "file", "inline" and "nvme" keep freshness themselves, under keys of `device`, and are anchored
    as the device is: one that was rolled back while no process ran isn't opened. "emulated" keeps
    it, too, without an anchor; what "memory" holds is in this process.
    """

    def __init__(
        self,
        *,
        traddr: str,
        trsvcid: int,
        store_kind: StoreKind,
        drive: str | None = None,
        namespaces: Sequence[Path] = (),
        directory: Path | None = None,
        device: Device | None = None,
    ) -> None:
        if (store_kind in KEPT_STORES) != (directory is not None):
            raise UsageError("target.store", f"store {store_kind!r} with directory {directory}")
        if (store_kind == "nvme") != bool(namespaces):
            raise UsageError("target.store", f"store {store_kind!r} with namespaces {namespaces}")
        ipaddress.ip_address(traddr)
        self._store_kind = store_kind
        self._drive = drive
        self._directory = directory
        self._drives = Drives(namespaces, directory) if namespaces and directory else None
        self._device = device
        self._volumes: dict[str, TargetSubsystem] = {}
        self.openings = Openings()
        self._listener = Listener(self, traddr=traddr, trsvcid=trsvcid, offers_digests=True)

    @property
    def listener(self) -> Listener:
        """Where hosts connect, for other providers and observers."""
        return self._listener

    @property
    def address(self) -> tuple[str, int]:
        """Where the NVMe/TCP listener is."""
        return self._listener.address

    async def start(self) -> None:
        """Listen."""
        if self._directory is not None:
            make_directory(self._directory)
        await self._listener.start()

    async def stop(self) -> None:
        """Close every connection and wait for every queue."""
        await self._listener.stop()
        if self._device is not None:
            self._device.anchors.begin_end()
        for volume in self._volumes.values():
            await volume.close(keep=True)

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Subsystem by name, for the listener."""
        return self._volumes.get(subsystem_nqn)

    def subsystem_nqn(self, volume_id: uuid.UUID) -> str:
        """Name of the volume's secure subsystem."""
        return volume_nqn(volume_id)

    async def create_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        """Make an empty volume. UsageError if it exists, UnavailableError if the store can't."""
        await self._add(
            volume_id, sector_count, "create", freshness=freshness, generation=generation
        )

    async def open_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        """Open the store that an earlier process made. UnavailableError if it can't be opened.

        VerificationError `store.rolled_back` if its anchor knows of a later state, `sector.stale`
        if a part of it is older than the rest.
        """
        await self._add(volume_id, sector_count, "open", freshness=freshness, generation=generation)

    async def _add(
        self,
        volume_id: uuid.UUID,
        sector_count: int,
        exist: Literal["create", "open"],
        *,
        freshness: bool,
        generation: int,
    ) -> None:
        if volume_nqn(volume_id) in self._volumes:
            raise UsageError("volume.exists", f"volume {volume_id} exists already")
        secret, anchor = None, None
        # In mode off a store in place has nothing that a key would be for.
        is_in_place = self._store_kind in {"inline", "nvme"}
        keeps = self._store_kind == "file" or (is_in_place and freshness)
        if self._device is not None and keeps:
            secret = self._device.tree_secret(volume_id, generation=generation)
            if freshness and self._device.is_anchored:
                if exist == "create":
                    # Of one that was never finished: the catalogue knows of no such volume.
                    await self._device.anchors.forget(volume_record(volume_id))
                anchor = StoreAnchor(
                    self._device.anchors,
                    volume_id,
                    rarely=self._device.anchors_rarely,
                    believed=self._device.is_believed,
                )
        try:
            native = await self._open_store(
                volume_id, sector_count, exist, freshness=freshness, secret=secret, anchor=anchor
            )
        except BaseException:
            if anchor is not None:
                await anchor.close()
            raise
        jobs = VolumeJobs(self._path(volume_id, JOBS_SUFFIX))
        await jobs.load()
        self.serve_volume(volume_id, native, jobs=jobs, path=self._path(volume_id), anchor=anchor)

    async def _open_store(
        self,
        volume_id: uuid.UUID,
        sector_count: int,
        exist: Literal["create", "open"],
        *,
        freshness: bool,
        secret: bytearray | None,
        anchor: StoreAnchor | None,
    ) -> _native.Namespace:
        path = self._path(volume_id)
        if self._drives is not None and exist == "create":
            await asyncio.to_thread(self._drives.claim, volume_id, sector_count)
        try:
            with self.openings.shown(volume_id) as opening:
                return await asyncio.to_thread(
                    _native.Namespace,
                    store=self._store_kind,
                    block_count=sector_count,
                    sealed=True,
                    path=path,
                    exist=exist,
                    drive=self._drive,
                    freshness=freshness,
                    secret=secret,
                    anchor=None if anchor is None else anchor.native,
                    opening=opening,
                )
        except FileExistsError as error:
            raise UsageError(
                "volume.exists", f"{path} exists already; remove it or use another volume id"
            ) from error
        except _native.StoreRefusedError as error:
            reason, text = error.args
            if reason == "anchor.unreachable":
                raise UnavailableError(reason, f"{path}: {text}") from error
            raise VerificationError(reason, f"{path}: {text}") from error
        except (OSError, ValueError) as error:
            raise UnavailableError(f"store.{exist}", f"can't {exist} {path}: {error}") from error

    def opening_progress(self, volume_id: uuid.UUID) -> tuple[int, int]:
        """Return pages and records that its opening went through, and of how many."""
        return self.openings.progress(volume_id)

    def serve_volume(
        self,
        volume_id: uuid.UUID,
        native: _native.Namespace,
        *,
        jobs: VolumeJobs,
        path: Path | None = None,
        anchor: StoreAnchor | None = None,
    ) -> None:
        """Serve a sealed namespace that somebody made, and go on with its jobs.

        `close_volume` closes it.
        """
        if volume_nqn(volume_id) in self._volumes:
            raise UsageError("volume.exists", f"volume {volume_id} exists already")
        jobs.open(native)
        self._volumes[volume_nqn(volume_id)] = TargetSubsystem(
            volume_id=volume_id,
            native=native,
            subsystem=_sealed_subsystem(volume_id, native),
            feed=EventFeed(native, self._listener.queue_closed),
            path=path,
            jobs=jobs,
            anchor=anchor,
        )

    async def resize_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        """Make a volume larger; its queues end, and its gateways open others.

        UsageError `volume.resize.refused` for a size that its store can't take, UnavailableError
        `store.extend` if there is no room for it.
        """
        await self._volume(volume_id).resize(sector_count, self._listener)

    async def discard_store(self, volume_id: uuid.UUID) -> None:
        """Remove the store of a volume that isn't open, if there is one."""
        path = self._path(volume_id)
        if path is None or volume_nqn(volume_id) in self._volumes:
            return
        if self._drives is not None:
            await asyncio.to_thread(self._drives.release, volume_id)
        for gone in (path, path.with_suffix(JOBS_SUFFIX)):
            await asyncio.to_thread(gone.unlink, missing_ok=True)
        if self._device is not None:
            await self._device.anchors.forget(volume_record(volume_id))

    def _path(self, volume_id: uuid.UUID, suffix: str = STORE_SUFFIX) -> Path | None:
        return self._directory / f"{volume_id}{suffix}" if self._directory else None

    async def close_volume(self, volume_id: uuid.UUID) -> None:
        """Close the volume's queues and let its store go; what wasn't flushed may be lost."""
        volume = self._volume(volume_id)
        del self._volumes[volume_nqn(volume_id)]
        await self._listener.end_export(volume)
        await volume.close(keep=False)

    def admit_queue(
        self,
        ticket: bytes,
        *,
        volume_id: uuid.UUID,
        host_nqn: str,
        queue_id: int,
        secret: bytearray,
        association_epoch: int,
        incarnation: int,
        gateway: PeerIncarnation | None,
        is_read_only: bool = False,
    ) -> None:
        """Admit one Connect with `ticket` within 30 s. Takes over `secret` and wipes it later.

        Commands that change sectors are refused on the queue if it `is_read_only`. `gateway` is
        whose queue it is: `fence_gateway` ends it.
        """
        volume = self._volume(volume_id)
        check_nqn(host_nqn)
        if len(ticket) != TICKET_BYTES or not any(ticket) or ticket in volume.tickets:
            raise UsageError("queue.ticket", f"a ticket is {TICKET_BYTES} fresh random bytes")
        try:
            self._whole(volume_id)
        except UnavailableError:
            wipe(secret)
            raise
        newest = self.newest_epoch(volume_id, host_nqn)
        if association_epoch < newest:
            raise ProtocolError(
                "queue.epoch", f"association epoch {association_epoch} is older than {newest}"
            )
        now = time.monotonic()
        for known in [known for known, old in volume.tickets.items() if old.expires <= now]:
            wipe(volume.tickets.pop(known).secret)
        if len(volume.tickets) >= _TICKETS_MAX:
            raise UnavailableError("queue.ticket", "too many tickets wait to be used")
        fence = volume.fence_of(host_nqn)
        fence.newest_epoch = association_epoch
        own = bytearray(secret)
        wipe(secret)
        volume.tickets[bytes(ticket)] = _Ticket(
            secret=own,
            fence=fence,
            queue_id=queue_id,
            association_epoch=association_epoch,
            incarnation=incarnation,
            gateway=gateway,
            is_read_only=is_read_only,
            expires=now + TICKET_SECONDS,
        )

    def gateways(self) -> Iterable[PeerIncarnation]:
        """Gateways that have a queue or a ticket here."""
        return {gateway for volume in self._volumes.values() for gateway in volume.gateways()}

    async def fence_gateway(self, gateway: PeerIncarnation, reason: str) -> None:
        """End a gateway's tickets and queues; return when nothing of them is in flight."""
        fences = [v.fence_gateway(gateway, reason, self._listener) for v in self._volumes.values()]
        await asyncio.gather(*fences)

    def newest_epoch(self, volume_id: uuid.UUID, host_nqn: str) -> int:
        """Newest association epoch of a gateway; 0 if it has none."""
        fence = self._volume(volume_id).fences.get(host_nqn)
        return fence.newest_epoch if fence is not None else 0

    async def close_older_queues(
        self, volume_id: uuid.UUID, host_nqn: str, association_epoch: int
    ) -> None:
        """Refuse a gateway's older association epochs; return when their queues are drained."""
        volume = self._volume(volume_id)
        fence = volume.fence_of(host_nqn)
        fence.newest_epoch = max(fence.newest_epoch, association_epoch)
        await volume.close_older(fence, self._listener)

    def statistics(self, volume_id: uuid.UUID) -> Mapping[str, int]:
        """Counters of the engine."""
        return self._volume(volume_id).statistics()

    def layout(self, volume_id: uuid.UUID) -> str:
        """How its store lays sectors out; empty: it keeps no freshness."""
        return self._volume(volume_id).native.layout

    def milestone(self, volume_id: uuid.UUID) -> bytes:
        """How far its store has come; empty: it keeps no freshness.

        UnavailableError `namespace.resizing`.
        """
        return self._whole(volume_id).native.milestone

    def require_milestone(self, volume_id: uuid.UUID, milestone: bytes) -> None:
        """Refuse a gateway that was told of flushes which the volume's store doesn't contain.

        VerificationError `volume.rolled_back`; UnavailableError `namespace.resizing`; ProtocolError
        if it is no milestone.
        """
        if len(milestone) not in {0, MILESTONE_BYTES}:
            raise ProtocolError(
                "queue.milestone.malformed", f"a milestone has {MILESTONE_BYTES} bytes or none"
            )
        if not self._whole(volume_id).native.contains(milestone):
            raise VerificationError(
                ROLLED_BACK,
                f"volume {volume_id}: the store lacks what was flushed: it was put back to an "
                "older state, or the gateway was cut off for too many of its openings",
            )

    def jobs(self, volume_id: uuid.UUID) -> VolumeJobs:
        """Its background jobs."""
        return self._volume(volume_id).jobs

    async def observe_jobs(self) -> Sequence[tuple[uuid.UUID, Job]]:
        """Keep how far all jobs are, report those that have ended and return them."""
        ended: list[tuple[uuid.UUID, Job]] = []
        for volume in [*self._volumes.values()]:
            ended += [(volume.volume_id, job) for job in await volume.observe_jobs()]
        return ended

    def take_events(self, volume_id: uuid.UUID) -> Sequence[StorageEvent]:
        """Events since the last call."""
        return self._volume(volume_id).feed.take()

    def store_path(self, volume_id: uuid.UUID) -> Path | None:
        """File that holds the volume's sectors, if a file does."""
        return self._volume(volume_id).path

    def _volume(self, volume_id: uuid.UUID) -> TargetSubsystem:
        try:
            return self._volumes[volume_nqn(volume_id)]
        except KeyError:
            raise UsageError("volume.unknown", f"no volume {volume_id} here") from None

    def _whole(self, volume_id: uuid.UUID) -> TargetSubsystem:
        """Find a volume whose store may be asked: one that grows waits for this very loop."""
        volume = self._volume(volume_id)
        if volume.is_resizing:
            raise UnavailableError("namespace.resizing", f"volume {volume_id} is being resized")
        return volume


def _sealed_subsystem(volume_id: uuid.UUID, native: _native.Namespace) -> Subsystem:
    return volume_subsystem(
        nqn=volume_nqn(volume_id),
        volume_id=volume_id,
        serial=volume_id.hex[:20],
        block_count=native.block_count,
        metadata_bytes=_METADATA_BYTES,
        transfer_max=SECURE_TRANSFER_BYTES,
    )


async def extended(native: _native.Namespace, sector_count: int) -> None:
    """Make a namespace that nobody uses larger.

    UsageError `volume.resize.refused`, UnavailableError `store.extend`, `anchor.unreachable`;
    VerificationError `store.rolled_back`.
    """
    try:
        await asyncio.to_thread(native.extend, sector_count)
    except ValueError as error:
        raise UsageError("volume.resize.refused", str(error)) from error
    except _native.StoreRefusedError as error:
        reason, text = error.args
        if reason == "anchor.unreachable":
            raise UnavailableError(reason, text) from error
        raise VerificationError(reason, text) from error
    except OSError as error:
        raise UnavailableError(
            "store.extend", f"the store can't have {sector_count} sectors: {error}"
        ) from error


def _bad_ticket(why: str) -> ConnectRefusedError:
    return ConnectRefusedError(
        "queue.ticket",
        f"the queue ticket is {why}",
        status=Status.CONNECT_PARAMETERS,
        result=TICKET_OFFSET | 1 << 16,
    )
