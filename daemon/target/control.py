"""A target's control plane: namespaces, queue admission, events (`Storage`, mutual TLS).

The target takes a volume's properties only from its descriptor, signed by the broker.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import KemKey
from sealane.daemon.device.anchored_catalogue import AnchoredCatalogue
from sealane.daemon.device.directory import Device
from sealane.daemon.node.authorizations import NO_VOLUME, Authorizations, peer_of
from sealane.daemon.node.drain import refuse_new
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.space import Space
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.fail_over import FailOver, kept_with
from sealane.daemon.target.queue_admission import QueueAdmission
from sealane.daemon.target.reports import Reports
from sealane.daemon.target.unopened import Unopened
from sealane.daemon.volume.descriptors import lasting, open_descriptor
from sealane.daemon.volume.events import EVENT_POLL_SECONDS, EventLog
from sealane.daemon.volume.kept_jobs import VolumeJobs
from sealane.daemon.volume.store_status import opening_status, store_status
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind, Freshness, VolumeMode
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2, storage_pb2

NAMESPACES_MAX: Final = 4096
NAMESPACES_ASKED_MAX: Final = 1000
"""Namespaces that one call may ask about."""
_DESCRIBED_AT_ONCE: Final = 50
"""Namespaces described before other calls have their turn."""
_UNANCHORED: Final = {"anchor.timeout", "anchor.unreachable"}
_OPENED_AT_ONCE: Final = 8
"""Volumes opened at a time at start: half of the threads, so that others can be used meanwhile."""
_REOPEN_SECONDS: Final = 30.0
"""Interval at which stores that couldn't be opened are tried again, at least."""
_REOPEN_RATIO: Final = 20
"""The interval is at least this many times as long as the last try took."""


class StorageService:
    """The namespaces of one target process."""

    def __init__(
        self,
        target: Target,
        *,
        node: str,
        store: str,
        store_anchor: str = AnchorKind.NONE,
        anchors: TrustAnchors,
        kem: KemKey,
        authorizations: Authorizations,
        device: Device | None = None,
        catalogue: AnchoredCatalogue | None = None,
        room: Callable[[], Space | None] = lambda: None,
        reports: Reports | None = None,
    ) -> None:
        """Serve `target`, whose attested KEM key is `kem`.

        `store_anchor` is the kind of anchor of its stores. Volumes that outlive the process are on
        `device`, in `catalogue`. Take-overs go to `reports`. `room` is the space for new volumes,
        None: unknown.
        """
        self._room = room
        self._failed: Sequence[uuid.UUID] = ()
        self._target = target
        self._authorizations = authorizations
        self._device = device
        self._catalogue = catalogue
        self.reports = reports
        self._loss: Error | None = None
        self._node = node
        self._store = store
        self._store_anchor = store_anchor
        self._anchors = anchors
        self._descriptors: dict[str, broker_pb2.VolumeDescriptor] = {}
        self._fail_over: dict[str, FailOver] = {}
        self._kept_groups: dict[str, storage_pb2.FailOverGroups] = {}
        """Fail-over groups found with volumes that aren't open yet."""
        self._signed: dict[str, broker_pb2.SignedVolumeDescriptor] = {}
        self._opening: dict[str, broker_pb2.VolumeDescriptor] = {}
        """Volumes of an earlier process that aren't open yet."""
        self._is_restoring = catalogue is not None
        self._changing = asyncio.Lock()
        self.is_draining = False
        """Set during a drain: no new volumes."""
        self.events = EventLog(node)
        self.unopened = Unopened(partial(self._report, "skipped"))
        self.admission = QueueAdmission(target, node=node, kem=kem, authorizations=authorizations)

    async def create(self, caller: Subject, signed: broker_pb2.SignedVolumeDescriptor) -> None:
        """Create the namespace of a descriptor; idempotent, even after a resize.

        UsageError `namespace.…`; UnavailableError `namespace.limit`; VerificationError
        `volume.descriptor.…`; errors of `Target.create_volume`.
        """
        descriptor = self._own_descriptor(signed, is_restored=False)
        if descriptor.tenant != caller.tenant:
            raise self._not_found(descriptor.volume_id)
        await self._create(descriptor, _bare(signed))

    def _own_descriptor(
        self, signed: broker_pb2.SignedVolumeDescriptor, *, is_restored: bool
    ) -> broker_pb2.VolumeDescriptor:
        """Verify a descriptor; a restored one dates from its volume's creation or last resize."""
        anchors = self._anchors.with_retired if is_restored else self._anchors
        descriptor = open_descriptor(anchors, signed)
        if descriptor.third_party or descriptor.mode not in {"", VolumeMode.OFF}:
            raise UsageError(
                "namespace.mode",
                f"volume {descriptor.volume_id} has mode {descriptor.mode!r} on third party "
                f"{descriptor.third_party!r}; allowed here: {VolumeMode.REMOTE}, "
                f"{VolumeMode.OFF}, and no third party",
            )
        self._check_place(descriptor, is_restored=is_restored)
        # A device that moves to another target takes its volumes along.
        descriptor.target_node = self._node
        # Transient: `filling_gateway` ends with the filling, and the broker knows current shares.
        descriptor.ClearField("filling_gateway")
        descriptor.ClearField("shares")
        return descriptor

    def _check_place(self, descriptor: broker_pb2.VolumeDescriptor, *, is_restored: bool) -> None:
        own = "" if self._device is None else str(self._device.device_id)
        # Created before devices existed: it is where its target stored it then.
        is_older = not descriptor.device_id and (
            is_restored or descriptor.volume_id in self._descriptors
        )
        if descriptor.device_id != own and not is_older:
            raise UsageError(
                "namespace.device",
                f"volume {descriptor.volume_id} is on device {descriptor.device_id!r}; this target "
                f"serves device {own!r}",
            )
        has_moved = is_restored and bool(descriptor.device_id)
        if descriptor.target_node != self._node and not has_moved:
            raise UsageError(
                "namespace.target",
                f"volume {descriptor.volume_id} is for target {descriptor.target_node!r}; "
                f"this is target {self._node!r}",
            )

    async def _create(
        self, descriptor: broker_pb2.VolumeDescriptor, signed: broker_pb2.SignedVolumeDescriptor
    ) -> None:
        async with self._changing:
            self._check_held()
            await self._settle()
            known = self._descriptors.get(descriptor.volume_id)
            if known is None:
                if self.is_draining:
                    raise refuse_new("volumes")
                if len(self._descriptors) >= NAMESPACES_MAX:
                    raise UnavailableError(
                        "namespace.limit",
                        f"target {self._node} has {NAMESPACES_MAX} volumes, the maximum",
                    )
                await self._make(descriptor, signed.SerializeToString())
                self._serve(descriptor, signed)
                self.events.report(descriptor.volume_id, "created")
            elif lasting(known) != lasting(descriptor):
                raise UsageError(
                    "namespace.exists",
                    f"volume {descriptor.volume_id} exists with other properties",
                )

    async def resize(self, caller: Subject, signed: broker_pb2.SignedVolumeDescriptor) -> None:
        """Enlarge a namespace to the size in its new descriptor; idempotent.

        UsageError `namespace.resize` if the descriptor differs from the volume here in anything
        but size, key and name, or has a smaller size; errors of `Target.resize_volume`.
        """
        descriptor = self._own_descriptor(signed, is_restored=False)
        self._own(caller, descriptor.volume_id)
        await self._resize(caller, descriptor, _bare(signed))

    async def _resize(
        self,
        caller: Subject,
        descriptor: broker_pb2.VolumeDescriptor,
        signed: broker_pb2.SignedVolumeDescriptor,
    ) -> None:
        async with self._changing:
            known = self._own(caller, descriptor.volume_id)
            await self._settle()
            if lasting(known) != lasting(descriptor):
                raise UsageError(
                    "namespace.resize",
                    f"volume {descriptor.volume_id} exists here with other properties",
                )
            if descriptor.sector_count < known.sector_count:
                raise UsageError(
                    "namespace.resize",
                    f"volume {descriptor.volume_id} has {known.sector_count} sectors here and "
                    f"can't shrink to the {descriptor.sector_count} of this descriptor",
                )
            if descriptor.sector_count == known.sector_count:
                return
            volume_id = uuid.UUID(descriptor.volume_id)
            await self._target.resize_volume(volume_id, sector_count=descriptor.sector_count)
            # Enlarge the store before the descriptor: a store larger than its descriptor offers
            # only the descriptor's size, but a smaller one would look rolled back.
            groups = self._fail_over[descriptor.volume_id].kept()
            await self._keep(volume_id, signed, groups)
            self._descriptors[descriptor.volume_id] = descriptor
            self._signed[descriptor.volume_id] = signed
            self.events.report(
                descriptor.volume_id,
                "resized",
                detail=f"{known.sector_count} sectors before, {descriptor.sector_count} now",
            )

    async def delete(self, caller: Subject, volume_id: str) -> None:
        """Close the namespace's queues and remove its store, even one that couldn't be opened.

        UsageError `namespace.not_found`.
        """
        async with self._changing:
            self._check_held()
            is_unopened = self.unopened.is_of(caller.tenant, volume_id)
            if not is_unopened:
                self._own(caller, volume_id)
            await self._settle()
            if self._catalogue is not None:
                await self._catalogue.begin_removal(uuid.UUID(volume_id))
            if is_unopened:
                self.unopened.forget(volume_id)
                self._signed.pop(volume_id, None)
                self._kept_groups.pop(volume_id, None)
            else:
                # Forget it first, so that event poller and metrics don't access it meanwhile.
                self._forget(volume_id)
                await self._target.close_volume(uuid.UUID(volume_id))
            await self._settle(uuid.UUID(volume_id))
            self.events.report(volume_id, "deleted")

    async def abandon(self, loss: Error) -> None:
        """Stop serving all volumes: the device has another owner, or its anchor failed."""
        self._loss = loss
        async with self._changing:
            abandoned = [*self._descriptors]
            for volume_id in abandoned:
                self._forget(volume_id)
            self.unopened.clear()
            for volume_id in abandoned:
                await self._target.close_volume(uuid.UUID(volume_id))
                self.events.report(volume_id, "abandoned", reason=loss.reason)

    async def resume(self) -> None:
        """Serve the volumes of the device again, after it was moved back to this target."""
        self.admission.begin_incarnation()
        self._loss, self._is_restoring = None, True
        await self.restore()

    def _check_held(self) -> None:
        if self._loss is not None:
            raise self._loss

    async def _make(self, descriptor: broker_pb2.VolumeDescriptor, signed: bytes) -> None:
        """Create the store, and add it to the catalogue once it is complete."""
        volume_id = uuid.UUID(descriptor.volume_id)
        create = partial(
            self._target.create_volume,
            volume_id,
            sector_count=descriptor.sector_count,
            freshness=descriptor.mode != VolumeMode.OFF,
            generation=descriptor.generation,
        )
        if self._catalogue is None:
            await create()
            return
        await self._catalogue.begin(volume_id, signed)
        try:
            await create()
        except Error as error:
            # There was no store before, so anything there now is half-created.
            if error.reason in _UNANCHORED:
                # Discarding it would wait for the anchor once more, longer than our caller waits.
                self._catalogue.leave(volume_id)
            else:
                await self._discard(self._catalogue, volume_id)
            raise
        try:
            await self._catalogue.finish(volume_id)
        except Error:
            # It is unknown whether the catalogue has it: its store stays until it certainly hasn't.
            await self._target.close_volume(volume_id)
            raise

    async def _settle(self, deleted: uuid.UUID | None = None) -> None:
        """Remove the stores of volumes that were removed from the catalogue.

        Only the failure of the one that is being `deleted` is raised; others are tried again later.
        """
        if self._catalogue is not None:
            for volume_id in await self._catalogue.settle():
                if volume_id == deleted:
                    await self._discard(self._catalogue, volume_id)
                    continue
                with self._reported(volume_id, "kept"):
                    await self._discard(self._catalogue, volume_id)

    async def _discard(self, catalogue: AnchoredCatalogue, volume_id: uuid.UUID) -> None:
        await self._target.discard_store(volume_id)
        await catalogue.forget(volume_id)

    async def restore(self) -> None:
        """Open the volumes of an earlier process; report and keep those that can't be opened."""
        if self._catalogue is None:
            return
        async with self._changing:
            await self._restore_all(self._catalogue)
            self._is_restoring = False

    async def _restore_all(self, catalogue: AnchoredCatalogue) -> None:
        found = await catalogue.scan()
        for volume_id in found.unfinished:
            catalogue.leave(volume_id)
            with self._reported(volume_id, "kept"):
                await self._discard(catalogue, volume_id)
                self.events.report(str(volume_id), "discarded", reason="volume.unfinished")
        for name, why in found.strays:
            get_logger().warning("stray_file", name=name, detail=why)
        for volume_id, content in found.volumes:
            with self.unopened.kept(str(volume_id)):
                self._opening[str(volume_id)] = self._restorable(volume_id, content)
        await self._restore_opening()

    async def _restore_opening(self) -> None:
        limit = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def restore(volume_id: str, descriptor: broker_pb2.VolumeDescriptor) -> None:
            async with limit:
                with self.unopened.kept(volume_id, descriptor):
                    await self._restore(descriptor)
                del self._opening[volume_id]

        async with asyncio.TaskGroup() as tasks:
            for volume_id, descriptor in self._opening.items():
                tasks.create_task(restore(volume_id, descriptor), name="volume-opening")

    async def keep_opening(self) -> None:
        """Try stores that couldn't be opened again and again, until cancelled."""
        taken = 0.0
        while True:
            # Nothing can be created or deleted meanwhile.
            await asyncio.sleep(max(_REOPEN_SECONDS, _REOPEN_RATIO * taken))
            began = time.monotonic()
            await self.reopen()
            taken = time.monotonic() - began

    async def reopen(self) -> None:
        """Open the stores that couldn't be opened, unless they are damaged or rolled back."""
        async with self._changing:
            if self._loss is None:
                self._opening.update(self.unopened.passing())
                await self._restore_opening()

    @contextlib.contextmanager
    def _reported(self, volume_id: uuid.UUID, kind: str) -> Iterator[None]:
        """Publish an event for a volume that can't be discarded, with the reason."""
        try:
            yield
        except Error as error:
            self._report(kind, str(volume_id), error)

    def _report(self, kind: str, volume_id: str, error: Error) -> None:
        self.events.report(volume_id, kind, reason=error.reason, detail=str(error))

    def _restorable(self, volume_id: uuid.UUID, content: bytes) -> broker_pb2.VolumeDescriptor:
        """Verify the descriptor of a volume of an earlier process.

        It may be signed by a retired authority: that it is the one on the anchored list proves that
        it was stored, and verified, before.
        """
        if self._catalogue is not None:
            self._catalogue.check_listed(volume_id, content)
        try:
            signed = broker_pb2.SignedVolumeDescriptor.FromString(content)
            groups = storage_pb2.FailOverGroups.FromString(content)
        except DecodeError as error:
            raise VerificationError(
                "volume.descriptor.malformed", "the descriptor file can't be parsed"
            ) from error
        descriptor = self._own_descriptor(signed, is_restored=True)
        if descriptor.volume_id != str(volume_id):
            raise VerificationError(
                "volume.descriptor.other",
                f"the descriptor file is of volume {descriptor.volume_id}",
            )
        if len(self._opening) >= NAMESPACES_MAX:
            raise UnavailableError(
                "namespace.limit", f"a target has at most {NAMESPACES_MAX} volumes"
            )
        self._signed[str(volume_id)] = _bare(signed)
        self._kept_groups[str(volume_id)] = groups
        return descriptor

    async def _restore(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        await self._target.open_volume(
            uuid.UUID(descriptor.volume_id),
            sector_count=descriptor.sector_count,
            freshness=descriptor.mode != VolumeMode.OFF,
            generation=descriptor.generation,
        )
        volume_id = descriptor.volume_id
        self._serve(descriptor, self._signed[volume_id], self._kept_groups.pop(volume_id, None))
        self.events.report(volume_id, "restored")

    def _serve(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        signed: broker_pb2.SignedVolumeDescriptor,
        groups: storage_pb2.FailOverGroups | None = None,
    ) -> None:
        volume_id = descriptor.volume_id
        fail_over = FailOver(_FencedVolume(self, self._target, uuid.UUID(volume_id)))
        if groups is not None:
            fail_over.restore(groups)
        self._fail_over[volume_id] = fail_over
        self._descriptors[volume_id] = descriptor
        self._signed[volume_id] = signed

    def _forget(self, volume_id: str) -> None:
        for known in (self._descriptors, self._fail_over, self._signed):
            del known[volume_id]

    async def keep_groups(self, volume_id: uuid.UUID, groups: storage_pb2.FailOverGroups) -> None:
        """Anchor the fail-over groups of a volume, with its descriptor.

        UsageError `namespace.not_found`; UnavailableError `anchor.timeout`: it is unknown whether
        they are anchored.
        """
        async with self._changing:
            signed = self._signed.get(str(volume_id))
            if signed is None:
                raise self._not_found(str(volume_id))
            await self._settle()
            await self._keep(volume_id, signed, groups)

    async def _keep(
        self,
        volume_id: uuid.UUID,
        signed: broker_pb2.SignedVolumeDescriptor,
        groups: storage_pb2.FailOverGroups,
    ) -> None:
        if self._catalogue is not None:
            await self._catalogue.replace(volume_id, kept_with(signed.SerializeToString(), groups))

    async def open_queue(
        self, caller: Subject, request: storage_pb2.OpenQueueRequest
    ) -> storage_pb2.OpenQueueResponse:
        """Derive the queue's secret and admit one Connect with a new ticket.

        UsageError `namespace.not_found`; errors of `QueueAdmission.open_queue`.
        """
        descriptor, gateway = await self._usable(
            caller, request.volume_id, is_read_only=request.read_only
        )
        return await self.admission.open_queue(
            caller,
            request,
            volume_id=uuid.UUID(descriptor.volume_id),
            gateway=gateway,
            fail_over=self._fail_over[descriptor.volume_id],
        )

    async def release_group(
        self, caller: Subject, request: storage_pb2.ReleaseFailOverGroupRequest
    ) -> None:
        """End the caller's term in a fail-over group of its tenant.

        UsageError `namespace.not_found`; errors of `FailOver.release`.
        """
        descriptor, gateway = await self._usable(caller, request.volume_id, is_read_only=True)
        await self._authorizations.require(gateway)
        await self._fail_over[descriptor.volume_id].release(
            (caller.tenant, request.group), gateway_nqn(caller.node), request.term
        )

    async def namespace(
        self, caller: Subject, volume_id: str, *, group: bytes = b""
    ) -> storage_pb2.Namespace:
        """Return a namespace's properties and counters, or the progress of its opening.

        If `group` isn't empty, also which gateway serves this fail-over group of the caller's
        tenant, and its term.

        UsageError `namespace.not_found`.
        """
        opening = self._opening.get(volume_id)
        if opening is not None and opening.tenant == caller.tenant:
            return self._described_opening(opening)
        descriptor, _ = await self._usable(caller, volume_id, is_read_only=True)
        described = self._described(caller, descriptor)
        if group:
            term, host_nqn = self._fail_over[descriptor.volume_id].state((caller.tenant, group))
            described.fail_over_term, described.fail_over_host_nqn = term, host_nqn
        return described

    async def namespaces(
        self, caller: Subject, volume_ids: Sequence[str]
    ) -> list[storage_pb2.Namespace]:
        """Return those of these namespaces that are the caller's tenant's; others are left out.

        UsageError `namespace.batch.limit`; UnavailableError `namespace.opening`.
        """
        if len(volume_ids) > NAMESPACES_ASKED_MAX:
            raise UsageError(
                "namespace.batch.limit",
                f"{len(volume_ids)} namespaces; allowed: {NAMESPACES_ASKED_MAX} at a time",
            )
        self._check_held()
        found = []
        for number, volume_id in enumerate(volume_ids):
            if number % _DESCRIBED_AT_ONCE == 0:
                await asyncio.sleep(0)
            opening, descriptor = self._opening.get(volume_id), self._descriptors.get(volume_id)
            if opening is not None and opening.tenant == caller.tenant:
                found.append(self._described_opening(opening))
            elif descriptor is not None and descriptor.tenant == caller.tenant:
                found.append(self._described(caller, descriptor))
            elif self._is_restoring:
                raise self._not_found(volume_id)
        return found

    def _described_opening(self, opening: broker_pb2.VolumeDescriptor) -> storage_pb2.Namespace:
        done, expected = self._target.opening_progress(uuid.UUID(opening.volume_id))
        return storage_pb2.Namespace(
            volume_id=opening.volume_id,
            sector_count=opening.sector_count,
            store=self._store,
            status=opening_status(self._store, done=done, expected=expected),
        )

    def _described(
        self, caller: Subject, descriptor: broker_pb2.VolumeDescriptor
    ) -> storage_pb2.Namespace:
        name = uuid.UUID(descriptor.volume_id)
        statistics, layout = self._target.statistics(name), self._target.layout(name)
        status = store_status(
            kind=self._store,
            layout=layout,
            anchor=self._store_anchor,
            statistics=statistics,
            jobs=self._target.jobs(name).list(),
        )
        freshness = Freshness.TREE if layout else Freshness.OWN_MEMORY
        return storage_pb2.Namespace(
            volume_id=descriptor.volume_id,
            sector_count=descriptor.sector_count,
            sectors_written=statistics.get("sectors_written", 0),
            reads=statistics.get("host_reads", 0),
            writes=statistics.get("host_writes", 0),
            refusals=statistics.get("refusals", 0),
            freshness=Freshness.NONE if descriptor.mode == VolumeMode.OFF else freshness,
            store=self._store,
            association_epoch=self._target.newest_epoch(name, gateway_nqn(caller.node)),
            # Tenants that it is shared with don't see its store's status.
            status=status if descriptor.tenant == caller.tenant else None,
            fail_over=True,
        )

    def jobs(self, caller: Subject, volume_id: str) -> VolumeJobs:
        """Return the jobs of a volume of the caller's tenant; UsageError `namespace.not_found`."""
        self._own(caller, volume_id)
        return self._target.jobs(uuid.UUID(volume_id))

    def volume_ids(self) -> Sequence[uuid.UUID]:
        """Return the volumes being served."""
        return [uuid.UUID(volume_id) for volume_id in self._descriptors]

    def status(self) -> storage_pb2.TargetStatus:
        """Return what gateways compare when they choose a target for a new volume.

        A store that failed since the last `failed_stores` isn't noticed.
        """
        is_well = not (self._loss or self._is_restoring or self.unopened.ids())
        answer = storage_pb2.TargetStatus(
            draining=self.is_draining,
            healthy=is_well and not self._failed,
            volumes=len(self._descriptors),
            volumes_max=NAMESPACES_MAX,
        )
        space = self._room()
        if space is not None and space.capacity:
            is_usable = space.state not in {"full", "unknown"}
            answer.capacity_bytes = space.capacity
            answer.free_bytes = max(0, space.free - space.promised) if is_usable else 0
        return answer

    def failed_stores(self) -> Sequence[uuid.UUID]:
        """Return the volumes whose stores failed and must be opened again."""
        self._failed = [
            volume_id
            for volume_id in self.volume_ids()
            if self._target.statistics(volume_id).get("failed")
        ]
        return self._failed

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return the engine's statistics by volume and mode, for the metrics.

        A store that couldn't be opened counts as failed.
        """
        # Called from the metrics thread: uses a copy, since a volume may be deleted meanwhile.
        found = self.unopened.statistics()
        for volume_id, descriptor in [*self._descriptors.items()]:
            with contextlib.suppress(UsageError, KeyError):
                mode = descriptor.mode or VolumeMode.REMOTE
                statistics = dict(self._target.statistics(uuid.UUID(volume_id)))
                fail_over = self._fail_over[volume_id]
                size = {"size_bytes": descriptor.sector_count * SECTOR_BYTES}
                found[volume_id, mode] = statistics | fail_over.statistics() | size
        return found

    def check_watch(self, caller: Subject, volume_id: str) -> None:
        """Raise unless the volume is of the caller's tenant: events reveal all its users.

        Of a volume that isn't open yet, raise why, if that may pass: it isn't lost.
        """
        if volume_id not in self._descriptors:
            self.unopened.check(caller.tenant, volume_id)
        self._own(caller, volume_id)

    async def poll_events(self) -> None:
        """Publish the engine's events until cancelled."""
        while True:
            for volume_id in [*self._descriptors]:
                taken = self._target.take_events(uuid.UUID(volume_id))
                self.events.report_native(volume_id, taken)
            await asyncio.sleep(EVENT_POLL_SECONDS)

    def _own(self, caller: Subject, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Return a volume of the caller's tenant; UsageError `namespace.not_found`."""
        self._check_held()
        descriptor = self._descriptors.get(volume_id)
        if descriptor is None or descriptor.tenant != caller.tenant:
            raise self._not_found(volume_id)
        return descriptor

    async def _usable(
        self, caller: Subject, volume_id: str, *, is_read_only: bool
    ) -> tuple[broker_pb2.VolumeDescriptor, PeerIncarnation]:
        """Return a volume that the caller may use, and the peer whose authorization that needs."""
        self._check_held()
        descriptor = self._descriptors.get(volume_id)
        if descriptor is not None and descriptor.tenant == caller.tenant:
            return descriptor, peer_of(caller)
        # Its gateway tries again, as the target does.
        self.unopened.check(caller.tenant, volume_id)
        # Ask the broker whether or not the volume is here, so that an unauthorized caller can't
        # distinguish the two cases.
        use = replace(peer_of(caller), volume_id=volume_id[:80], is_read_only=is_read_only)
        try:
            await self._authorizations.require(use)
        except VerificationError as error:
            if error.reason != NO_VOLUME:
                raise
            raise self._not_found(volume_id) from error
        descriptor = self._descriptors.get(volume_id)
        if descriptor is None:
            raise self._not_found(volume_id)
        return descriptor, use

    def _not_found(self, volume_id: str) -> Error:
        """Return the same error for volumes that aren't here and for those of others."""
        if self._is_restoring:
            return UnavailableError(
                "namespace.opening", f"target {self._node} is still opening its volumes"
            )
        return UsageError(
            "namespace.not_found",
            f"target {self._node} has no volume {volume_id[:80]} for this caller: it was deleted, "
            "is not shared with the caller, or could not be opened when the target restarted",
        )


@dataclass(frozen=True, slots=True)
class _FencedVolume:
    """A volume as its fail-over groups need it."""

    service: StorageService
    target: Target
    volume_id: uuid.UUID

    def has_queues(self, host_nqn: str) -> bool:
        return (self.volume_id, host_nqn) in self.target.users()

    async def fence(self, host_nqn: str) -> None:
        await self.target.fence_epochs(self.volume_id, host_nqn)

    async def flush(self) -> None:
        await self.target.flush_volume(self.volume_id)

    async def keep(self, groups: storage_pb2.FailOverGroups) -> None:
        await self.service.keep_groups(self.volume_id, groups)

    def report(self, take_over: TakeOver) -> None:
        if self.service.reports is not None:
            self.service.reports.note_take_over(self.volume_id, take_over)


def _bare(signed: broker_pb2.SignedVolumeDescriptor) -> broker_pb2.SignedVolumeDescriptor:
    """Return a descriptor without a caller's unknown fields: the kept file has more in them."""
    return broker_pb2.SignedVolumeDescriptor(
        descriptor=signed.descriptor, signature=signed.signature
    )
