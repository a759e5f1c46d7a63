"""One volume of a target: its tickets, its queues, and its fences."""

import asyncio
import hmac
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sealane import _native
from sealane.crypto.exchange import wipe
from sealane.daemon.device.store_anchor import StoreAnchor
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.nvme.exported import (
    Admission,
    Association,
    ConnectRefusedError,
    Exported,
)
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.kept_jobs import VolumeJobs
from sealane.daemon.volume.store_calls import on_store_thread
from sealane.errors import UnavailableError, UsageError, VerificationError, foreign_reason
from sealane.protocol.nvme.connect import TICKET_OFFSET, Connect
from sealane.protocol.nvme.constants import (
    H2C_DATA_BYTES,
    IN_CAPSULE_BYTES,
    SECURE_TRANSFER_BYTES,
    Status,
)
from sealane.protocol.nvme.nqn import volume_nqn
from sealane.protocol.nvme.subsystem import Subsystem, volume_subsystem
from sealane.protocol.sector import METADATA_BYTES

GATEWAYS_MAX = 128
"""Largest number of gateways of one volume whose association epochs are kept."""
_EPOCH_OF_FORGOTTEN = 1 << 64
_NAMESPACE_ID = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Fence:
    """A gateway's fence: no command of its association epochs below the newest may run.

    Gateways don't fence each other: each has its own epochs.
    """

    host_nqn: str
    newest_epoch: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """Admits a single Connect until it expires."""

    secret: bytearray
    fence: Fence
    queue_id: int
    association_epoch: int
    incarnation: int
    gateway: PeerIncarnation | None
    permit: _native.Permit | None
    """Limits how long the gateway may act; None: no limit."""
    is_read_only: bool
    expires: int
    """Nanoseconds of `monotonic_ns`."""
    is_void: bool = False


@dataclass(slots=True, kw_only=True)
class _Admitted:
    """A queue whose ticket was accepted: it may start."""

    volume: "TargetSubsystem"
    association: Association
    connect: Connect
    ticket: Ticket

    def start(self, descriptor: int) -> None:
        if self.ticket.is_void:
            raise UnavailableError("authorization.lost", "the gateway is no longer authorized")
        if self.ticket.association_epoch < self.ticket.fence.newest_epoch:
            # Fenced since the ticket was checked: this queue must never run.
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
        # From here on, the association is fenced in its place.
        self.volume.starting.remove(self.ticket)

    def close(self) -> None:
        self.volume.starting.remove(self.ticket)
        wipe(self.ticket.secret)


@dataclass(slots=True, kw_only=True)
class _Served:
    """The I/O queues of one association."""

    controller: _native.Controller
    fence: Fence
    epoch: int
    gateway: PeerIncarnation | None
    permit: _native.Permit | None
    """Referenced while the queues run under it, since only referenced permits are extended."""
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
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    fences: dict[str, Fence] = field(default_factory=dict)
    starting: list[Ticket] = field(default_factory=list)
    served: dict[int, _Served] = field(default_factory=dict)
    past_refusals: int = 0

    def allows(self, host_nqn: str) -> bool:
        """Return True for gateways that were admitted on the control channel."""
        return host_nqn in self.fences

    async def admit(self, association: Association, connect: Connect) -> Admission:
        """Use up the ticket; ConnectRefusedError `queue.ticket` if it is invalid in any way."""
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

    def _spend(self, presented: bytes) -> Ticket | None:
        found = None
        for known in list(self.tickets):
            ticket = self.tickets[known]
            if ticket.expires <= monotonic_ns():
                wipe(self.tickets.pop(known).secret)
            elif hmac.compare_digest(known, presented):
                found = self.tickets.pop(known)
        return found

    def fence_of(self, host_nqn: str) -> Fence:
        """Return a gateway's fence, created if new; UnavailableError `queue.gateways`."""
        fence = self.fences.get(host_nqn)
        if fence is None:
            if len(self.fences) >= GATEWAYS_MAX:
                self._forget_idle()
            fence = self.fences[host_nqn] = Fence(host_nqn=host_nqn)
        return fence

    def _forget_idle(self) -> None:
        """Forget the gateway admitted first among those without queues or tickets."""
        busy = {id(served.fence) for served in self.served.values()}
        now = monotonic_ns()
        busy |= {id(ticket.fence) for ticket in self.tickets.values() if ticket.expires > now}
        idle = next((fence for fence in self.fences.values() if id(fence) not in busy), None)
        if idle is None:
            raise UnavailableError(
                "queue.gateways",
                f"volume {self.volume_id} is in use by {GATEWAYS_MAX} gateways, the maximum",
            )
        # So a queue of this gateway that was admitted but hasn't started never will.
        idle.newest_epoch = _EPOCH_OF_FORGOTTEN
        del self.fences[idle.host_nqn]

    async def close_older(self, fence: Fence, listener: Listener) -> None:
        """Drain and end the gateway's associations of epochs older than its newest."""
        older = [
            association_id
            for association_id, served in self.served.items()
            if served.fence is fence and served.epoch < fence.newest_epoch
        ]
        for association_id in older:
            await self.drain(association_id)
            listener.end_association(association_id)

    def serve(self, association: Association, ticket: Ticket) -> _native.Controller:
        """Return the engine's controller of an association, created for its first queue.

        UnavailableError `queue.association` if the ticket's authorization is another one.
        """
        served = self.served.get(association.association_id)
        if served is None:
            controller = _native.Controller(
                association=association.association_id,
                host_nqn=association.host_nqn,
                host_id=association.host_id.bytes,
                controller_id=association.controller_id,
                read_only=ticket.is_read_only,
                permit=ticket.permit,
            )
            controller.set_namespaces([(_NAMESPACE_ID, self.native, "optimized")])
            served = _Served(
                controller=controller,
                fence=ticket.fence,
                epoch=ticket.association_epoch,
                gateway=ticket.gateway,
                permit=ticket.permit,
                is_read_only=ticket.is_read_only,
            )
            self.served[association.association_id] = served
            self.feed.add(controller)
        elif (served.gateway, served.permit, served.is_read_only) != (
            ticket.gateway,
            ticket.permit,
            ticket.is_read_only,
        ):
            # An association has one authorization, which sets its rights.
            raise UnavailableError(
                "queue.association", "the association has a different authorization or access"
            )
        served.epoch = ticket.association_epoch
        return served.controller

    def gateways(self) -> Iterator[PeerIncarnation]:
        """Yield the gateways whose queues run or may start."""
        owners = [ticket.gateway for ticket in (*self.tickets.values(), *self.starting)]
        owners += [served.gateway for served in self.served.values()]
        yield from (owner for owner in owners if owner is not None)

    def users(self) -> set[str]:
        """Return the host NQNs of gateways whose queues run or may start."""
        now = monotonic_ns()
        tickets = [ticket for ticket in self.tickets.values() if ticket.expires > now]
        fences = [ticket.fence for ticket in (*tickets, *self.starting)]
        fences += [served.fence for served in self.served.values()]
        return {fence.host_nqn for fence in fences}

    async def fence_gateway(
        self, gateway: PeerIncarnation, reason: str, listener: Listener
    ) -> None:
        """Void a gateway's tickets and end its associations; return once they are drained."""
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
        """End all queues and make the store larger; gateways reconnect afterwards.

        UsageError `volume.resize.refused`, UnavailableError `store.extend`, `anchor.unreachable`;
        VerificationError `store.rolled_back`.
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
            self.subsystem = sealed_subsystem(self.volume_id, self.native)
        finally:
            self.is_resizing = False

    async def drain(self, association_id: int) -> None:
        """Stop and drain an association's queues; concurrent calls all wait for the end."""
        served = self.served.get(association_id)
        if served is not None:
            await on_store_thread(served.controller.close)

    async def association_closed(self, association_id: int) -> None:
        """Stop and drain the association's queues, and forget it."""
        await self.drain(association_id)
        served = self.served.pop(association_id, None)
        if served is not None:
            self.feed.remove(served.controller)
            self.past_refusals += served.controller.refusals()

    def queue_closed(self, association_id: int, queue_id: int) -> None:
        """Do nothing: a queue has no state here, since its keys and its ticket are gone.

        The association remains, and is fenced with its gateway, until it ends.
        """

    async def close(self, *, keep: bool) -> None:
        """Stop and drain all queues and close the store; `keep` flushes it and saves its jobs."""
        for association_id in [*self.served]:
            await self.association_closed(association_id)
        await self.jobs.close(keep=keep)
        self.feed.close()
        try:
            if keep:
                await on_store_thread(self.native.sync)
        except OSError as error:
            # Flushed writes are safe; for others, hosts have no promise.
            get_logger().warning(
                "store_not_flushed", volume_id=str(self.volume_id), detail=str(error)
            )
        finally:
            # The store anchors its last state when it closes, so the anchor is closed after it.
            await on_store_thread(self.native.close)
            if self.anchor is not None:
                await self.anchor.close()

    def statistics(self) -> dict[str, int]:
        """Return the counters of the namespace and of its queues. For any thread."""
        counters = self.native.statistics()
        controllers = [served.controller for served in [*self.served.values()]]
        counters["refusals"] += self.past_refusals + sum(each.refusals() for each in controllers)
        counters["queues_running"] = sum(each.queues_running() for each in controllers)
        return counters | self.jobs.statistics()

    async def observe_jobs(self) -> Sequence[Job]:
        """Record the progress of jobs; publish and return those that have ended."""
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


def sealed_subsystem(volume_id: uuid.UUID, native: _native.Namespace) -> Subsystem:
    """Return the description of a volume's secure subsystem."""
    return volume_subsystem(
        nqn=volume_nqn(volume_id),
        volume_id=volume_id,
        serial=volume_id.hex[:20],
        block_count=native.block_count,
        metadata_bytes=METADATA_BYTES,
        transfer_max=SECURE_TRANSFER_BYTES,
    )


async def extended(native: _native.Namespace, sector_count: int) -> None:
    """Make an unused namespace larger.

    UsageError `volume.resize.refused`, UnavailableError `store.extend`, `anchor.unreachable`;
    VerificationError `store.rolled_back`.
    """
    try:
        await on_store_thread(native.extend, sector_count)
    except ValueError as error:
        raise UsageError("volume.resize.refused", str(error)) from error
    except _native.StoreRefusedError as error:
        reason, text = foreign_reason(error.args[0]), error.args[1]
        if reason == "anchor.unreachable":
            raise UnavailableError(reason, text) from error
        raise VerificationError(reason, text) from error
    except OSError as error:
        raise UnavailableError(
            "store.extend", f"the store can't grow to {sector_count} sectors: {error}"
        ) from error


def _bad_ticket(why: str) -> ConnectRefusedError:
    return ConnectRefusedError(
        "queue.ticket",
        f"the queue ticket is {why}",
        status=Status.CONNECT_PARAMETERS,
        result=TICKET_OFFSET | 1 << 16,
    )
