"""The gateway's volumes: create, attach, leases, events; the gRPC service is in servicer.py.

The broker knows which volumes exist, the target stores them, this process attaches them: only it
holds their keys, and only while they are attached.
"""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from sealane.crypto.exchange import wipe
from sealane.crypto.lease import LeaseHolder
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.attachments import (
    Attachment,
    AttachmentFiles,
    SealedAttachment,
    open_attachment,
    seal_attachment,
)
from sealane.daemon.gateway.back_ends import (
    Via,
    VolumeBackEnds,
)
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.data_path import Gateway
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.gateway.filling import Fillings, volume_key
from sealane.daemon.gateway.last_flush import LEAVE_SECONDS
from sealane.daemon.gateway.leases import LeaseCache, Taken
from sealane.daemon.gateway.putting_aside import PuttingAside
from sealane.daemon.gateway.reattaching import Reattaching
from sealane.daemon.gateway.stores import VolumeStores
from sealane.daemon.gateway.supply import Supply, is_read_only, released_keys
from sealane.daemon.gateway.target_events import TargetEvents
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.third_party import ThirdPartyStores
from sealane.daemon.gateway.unflushed import Unflushed
from sealane.daemon.node.drain import refuse_new
from sealane.daemon.node.identity import Identity
from sealane.daemon.runtime.calls import parse_uuid
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.statistics import GatewayVolumeState, only_in
from sealane.daemon.volume.events import EVENT_POLL_SECONDS, EventLog
from sealane.daemon.volume.failures import STANDBY
from sealane.errors import Error, UnavailableError, UsageError, VerificationError, reason_of
from sealane.protocol.kinds import VolumeMode
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.nqn import NQN_BYTES_MAX
from sealane.protocol.v1 import broker_pb2

_STATUS_SECONDS: Final = 1.0


class VolumeService:
    """Operations on volumes that jobs can request. Requires `running` to be entered."""

    def __init__(
        self,
        targets: Targets,
        *,
        identity: Identity,
        broker: BrokerClient,
        devices: DeviceClient,
        gateway: Gateway,
        third_parties: ThirdPartyStores,
        files: AttachmentFiles,
    ) -> None:
        self._targets = targets
        self._identity = identity
        self._broker = broker
        self._gateway = gateway
        self._files = files
        self._kept: list[SealedAttachment] | None = None
        self._leases = LeaseCache(broker)
        self._back_ends = VolumeBackEnds(
            targets,
            identity=identity,
            broker=broker,
            devices=devices,
            third_parties=third_parties,
        )
        self.events = EventLog(identity.node)
        self._target_events = TargetEvents(targets, self.events)
        self._fillings = Fillings(
            node=identity.node,
            broker=broker,
            gateway=gateway,
            leases=self._leases,
            back_ends=self._back_ends,
            events=self.events,
        )
        self._attached: dict[str, Attached] = {}
        self.serving = asyncio.Event()
        """Clear during a drain: nothing is attached, and nothing comes back."""
        self.serving.set()
        self._returning = Reattaching(
            files,
            gateway=gateway,
            find=broker.descriptor,
            reattach=self._reattach,
            events=self.events,
            serving=self.serving,
        )
        self.put_aside = PuttingAside(self._put_aside)
        self.stores = VolumeStores(
            targets,
            attached=self._attached,
            own=self._own,
            tenant=lambda: identity.subject.tenant,
        )
        self._changing: set[str] = set()
        self._creating: set[uuid.UUID] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._supply = Supply(
            self._attached,
            tenant=lambda: identity.subject.tenant,
            targets=lambda: targets.nodes,
            broker=broker,
            leases=self._leases,
            events=self.events,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restore attachments, poll events and refill leases for the duration of the block.

        On exit every volume is flushed and closed, and stays attached for the next process.
        """
        if self._kept is None:
            await self.expect_kept()
        self._returning.start(self._kept or ())
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            loops = [
                tasks.create_task(self._poll_events(), name="volume-events"),
                tasks.create_task(self._supply.run(), name="volume-supply"),
                tasks.create_task(self.resume_fillings(), name="volume-fillings"),
                tasks.create_task(self._targets.keep_looked_at(), name="volume-targets"),
            ]
            try:
                yield
            finally:
                # The loops change volumes, too, and a volume that is being changed can't be left.
                for task in loops:
                    task.cancel()
                await asyncio.wait(loops)
                await self.put_aside.ended()
                await self._returning.close()
                # Concurrently: each waits for its target, which may be gone.
                await asyncio.gather(*map(self._leave, [*self._attached]))
                await self._fillings.close()
                await self._leases.close()
                await self._target_events.close()
                self._tasks = None

    async def expect_kept(self) -> None:
        """Read the attachments of an earlier process, and report those that are refused.

        Call before anything listens: the hosts of these volumes must not be refused.
        """
        self._kept = await self._files.load()
        for each in self._kept:
            self._gateway.expect(each.volume_id)
        for name, error in self._files.refused.items():
            get_logger().error(
                "attachment_refused", volume_id=name, reason=error.reason, message=str(error)
            )

    def bar(self, reason: str) -> None:
        """Fail and detach all volumes at once: this gateway may no longer act.

        Commands in flight end with an error. Counters are returned to the broker if it still
        accepts them, and burned otherwise.
        """
        for attached in self._attached.values():
            attached.port.fail(
                "gateway.barred", f"the gateway no longer has a certificate: {reason}"
            )
        if self._tasks is not None:
            self._tasks.create_task(self._abandon(), name="volumes-abandon")

    async def _abandon(self) -> None:
        # Hosts receive the status of their commands before their connections are closed.
        await asyncio.sleep(_STATUS_SECONDS)
        # Meanwhile a volume is neither attached nor returning.
        await self.put_aside.ended()
        await asyncio.gather(*map(self._drop_unusable, [*self._attached, *self._returning]))
        await self._leases.close()

    async def create(
        self,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        third_party: str = "",
        mode: str = "",
        anchor: str = "",
    ) -> broker_pb2.VolumeDescriptor:
        """Register a volume and create its namespace at a target, or lay it out on a third party.

        Without `target_node`, the gateway chooses the target (`Targets.chosen`). A volume on a
        third party belongs to this gateway. A volume of mode "off" has no unwritten
        sectors: it is filled in the background, and can't be attached until that is done.
        UsageError `volume.busy.state` while another call with this request id is in progress.
        """
        default_mode = VolumeMode.LOCAL if third_party else VolumeMode.REMOTE
        if mode not in {"", default_mode, VolumeMode.OFF}:
            raise UsageError(
                "volume.mode",
                f"volume mode {mode[:80]!r}; allowed here: {default_mode}, {VolumeMode.OFF}",
            )
        own = self._identity.node
        if third_party and target_node not in {"", own}:
            raise UsageError(
                "volume.target", f"target {target_node[:80]!r}; allowed: none with a third party"
            )
        request = parse_uuid(request_id, what="request id") if request_id else uuid.uuid4()
        register = partial(
            self._broker.register,
            request_id=str(request),
            display_name=display_name,
            size_bytes=size_bytes,
            mode=mode if mode == VolumeMode.OFF else VolumeMode.LOCAL if third_party else "",
            third_party=third_party,
            anchor=anchor,
        )
        with self._creation(request):
            if third_party:
                return await self._create(*await register(target_node=own))
            async with self._targets.chosen(
                target_node,
                size_bytes=size_bytes,
                earlier=partial(self._broker.target_of_request, str(request)),
            ) as chosen:
                return await self._create(
                    *await register(target_node=chosen, any_target=not target_node)
                )

    @contextlib.contextmanager
    def _creation(self, request: uuid.UUID) -> Iterator[None]:
        """Allow one call with a request id at a time: if the first fails, it removes the volume."""
        if request in self._creating:
            raise UsageError(
                "volume.busy.state", f"request {request} is still creating its volume: try again"
            )
        self._creating.add(request)
        try:
            yield
        finally:
            self._creating.discard(request)

    async def _create(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        registered: broker_pb2.RegisterVolumeResponse,
    ) -> broker_pb2.VolumeDescriptor:
        """Make a registered volume where its descriptor says."""
        try:
            await self._back_ends.create(registered)
        except (Error, asyncio.CancelledError):
            # A volume from an earlier call with this request id may hold data by now.
            if registered.is_new:
                await self._remove_new(descriptor, revision=registered.revision)
            raise
        _warn(descriptor)
        self._fillings.start(descriptor)
        return descriptor

    async def _remove_new(self, descriptor: broker_pb2.VolumeDescriptor, *, revision: int) -> None:
        """Leave nothing half-made, unless another call has taken the volume up.

        The target may have made the volume although its answer didn't arrive, and another gateway
        may have returned it for the same request. So the broker decides first, and what is stored
        is removed only once nobody can be given the volume: a retry registers another one. Only an
        operator can remove what a cancelled call has laid out on a third party.
        """
        try:
            await self._broker.unregister_new(descriptor.volume_id, revision=revision)
        except Error as error:
            if error.reason != "volume.not_found":
                get_logger().warning(
                    "volume_create_incomplete", volume_id=descriptor.volume_id, reason=error.reason
                )
                # This gateway fills it, whichever one returned it.
                self._fillings.start(descriptor)
                return
        if not descriptor.third_party:
            with contextlib.suppress(Error):
                await self._back_ends.delete_namespace(descriptor)

    async def on_targets(self, nodes: Collection[str]) -> dict[str, str]:
        """Return the tenant's volumes on these targets, and those used here, with their targets.

        Used are the attached ones, those being attached, and those being reattached. By name, in
        the form `volumes/{uuid}`.
        """
        on_them: list[broker_pb2.VolumeDescriptor] = []
        token, tenant = "", self.tenant
        while True:
            page, token = await self._broker.descriptors(page_size=0, page_token=token)
            on_them += [d for d in page if not d.third_party and d.target_node in nodes]
            if not token:
                break
        # All at once, after the last wait: an attach may have begun meanwhile.
        used = {*self._attached, *self._returning, *self._changing}
        return {
            f"volumes/{d.volume_id}": d.target_node
            for d in on_them
            if d.tenant == tenant or d.volume_id in used
        }

    async def get(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Return a volume's descriptor."""
        return await self._broker.descriptor(volume_id)

    async def list(
        self, *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.VolumeDescriptor], str]:
        """Return a page of the tenant's volumes."""
        return await self._broker.descriptors(page_size=page_size, page_token=page_token)

    async def delete(self, volume_id: str) -> None:
        """Delete a detached volume, its sectors and its key."""
        with self._change(volume_id):
            if volume_id in self._attached or self.is_returning(volume_id):
                raise UsageError(
                    "volume.attached.state", f"volume {volume_id} is attached: detach it first"
                )
            descriptor = await self._own(volume_id)
            await self._fillings.stop(volume_id)
            try:
                await self._leases.drop(volume_id)
                await self._back_ends.delete(descriptor)
                await self._broker.unregister(volume_id)
            except Error:
                # It still exists, and a filling continues.
                self._fillings.start(descriptor)
                raise

    async def resize(self, volume_id: str, *, size_bytes: int) -> broker_pb2.VolumeDescriptor:
        """Make a volume larger. A repeated call continues one that was interrupted.

        Gateways that have it attached see a pause, and its new size at the next attach. A volume on
        a third party must be detached.
        """
        with self._change(volume_id):
            descriptor = await self._own(volume_id)
            is_attached = volume_id in self._attached or self.is_returning(volume_id)
            if descriptor.third_party and is_attached:
                raise UsageError(
                    "volume.attached.state",
                    f"volume {volume_id} is on a third party and attached: detach it first",
                )
            larger = await self._broker.begin_resize(volume_id, size_bytes=size_bytes)
            await self._back_ends.resize(descriptor, larger)
            grown = await self._broker.finish_resize(volume_id, size_bytes=size_bytes)
            self.events.report(
                volume_id,
                "resized",
                detail=f"{descriptor.sector_count} sectors before, {grown.sector_count} now",
            )
        return grown

    async def share(
        self, volume_id: str, *, tenant: str, read_only: bool
    ) -> broker_pb2.VolumeDescriptor:
        """Share a volume of this tenant with the gateways of another tenant."""
        return await self._broker.share(volume_id, tenant=tenant, read_only=read_only)

    async def unshare(self, volume_id: str, *, tenant: str) -> broker_pb2.VolumeDescriptor:
        """Stop sharing a volume with a tenant.

        If the volume is attached here, it switches to its new key epoch at once.
        """
        descriptor = await self._broker.unshare(volume_id, tenant=tenant)
        await self._supply.follow(volume_id)
        return descriptor

    @property
    def tenant(self) -> str:
        """This gateway's tenant. Verifies the certificate: use it once for many volumes."""
        return self._identity.subject.tenant

    def is_read_only(self, descriptor: broker_pb2.VolumeDescriptor) -> bool:
        """Return whether this gateway may only read a volume."""
        return is_read_only(descriptor, self.tenant)

    async def _own(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Return the descriptor of this tenant's own volume; raise if it is only shared with it."""
        descriptor = await self._broker.descriptor(volume_id)
        if descriptor.tenant != self._identity.subject.tenant:
            raise VerificationError(
                "volume.tenant.refused",
                f"volume {volume_id} is only shared with this gateway's tenant",
            )
        return descriptor

    def attached(self, volume_id: str) -> Attached | None:
        """Return the attachment of a volume, or None if it is not attached here."""
        return self._attached.get(volume_id)

    @property
    def attachments(self) -> Mapping[str, Attached]:
        """The attached volumes, by id."""
        return self._attached

    @property
    def changing(self) -> Collection[str]:
        """The volumes that are being attached or changed."""
        return self._changing

    def is_returning(self, volume_id: str) -> bool:
        """Return whether it stays attached but is not exported: after a restart, or drained."""
        return volume_id in self._returning

    async def resume_fillings(self) -> None:
        """Resume fillings that an earlier process of this gateway had begun."""
        await self._fillings.resume()

    def filled_bytes(self, volume_id: str) -> int:
        """Return how many bytes of a volume this gateway has filled."""
        return self._fillings.filled_bytes(volume_id)

    def statistics(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Return the statistics of each volume that is used here, for the metrics.

        By id, mode and target. Mode and target of one that is being reattached aren't known (""),
        nor is its size.
        """
        # Called from the metrics' thread, hence the copy: the event loop changes the original.
        return {
            **{(v, "", ""): only_in(GatewayVolumeState.REATTACHING) for v in self._returning},
            **self._fillings.statistics(),
            **{
                (v, a.descriptor.mode or VolumeMode.REMOTE, a.target): a.statistics()
                for v, a in self._attached.copy().items()
            },
        }

    async def attach(
        self, volume_id: str, *, host_nqn: str, via: Via, fail_over: bool = False
    ) -> broker_pb2.VolumeDescriptor:
        """Fetch key and lease, and export the volume to `host_nqn`.

        With `fail_over`, this gateway begins on standby, as one of several that serve the host.
        """
        if not host_nqn.startswith("nqn.") or len(host_nqn.encode()) > NQN_BYTES_MAX:
            raise UsageError(
                "volume.host_nqn",
                f"host NQN {host_nqn[:80]!r}; allowed: nqn.…, at most {NQN_BYTES_MAX} bytes",
            )
        if not self.serving.is_set():
            raise refuse_new("attachments")
        # Reattaching is a change as well; the answer is the same before, during and after it.
        if self.is_returning(volume_id):
            raise UsageError(
                "volume.attached.state",
                f"volume {volume_id} is already attached to a host, and is being reattached",
            )
        with self._change(volume_id):
            known = self._attached.get(volume_id)
            if known is not None:
                raise UsageError(
                    "volume.attached.state",
                    f"volume {volume_id} is already attached to {known.host_nqn}",
                )
            descriptor = await self._broker.descriptor(volume_id)
            if descriptor.filling_gateway:
                raise UsageError(
                    "volume.filling.state",
                    f"volume {volume_id} is being filled by gateway "
                    f"{descriptor.filling_gateway!r}: wait until it is filled",
                )
            attachment = Attachment(
                volume_id=volume_id,
                host_nqn=host_nqn,
                secret=HostSecret.generate(secrets.token_bytes),
                generation=descriptor.generation,
                sector_count=descriptor.sector_count,
                is_read_only=self.is_read_only(descriptor),
                via_traddr=via.traddr,
                via_trsvcid=via.trsvcid,
                fail_over=fail_over,
            )
            await self._export(descriptor, attachment)
            self.events.report(volume_id, "attached", detail=host_nqn)
        return descriptor

    async def _reattach(
        self, kept: SealedAttachment, descriptor: broker_pb2.VolumeDescriptor
    ) -> None:
        """Export a volume as an earlier process did.

        VerificationError `attachment.…` if the attachment can never be restored.
        """
        volume_id = kept.volume_id
        with self._change(volume_id):
            attachment = await self._opened(kept, descriptor)
            read_only = self.is_read_only(descriptor)
            if attachment.generation != descriptor.generation or (
                read_only and not attachment.is_read_only
            ):
                raise VerificationError(
                    "attachment.volume",
                    f"volume {volume_id} is no longer the volume that its host was given: attach "
                    "it again",
                )
            await self._export(descriptor, attachment, kept)
            self.events.report(volume_id, "reattached", detail=attachment.host_nqn)

    async def _opened(
        self, kept: SealedAttachment, descriptor: broker_pb2.VolumeDescriptor
    ) -> Attachment:
        """Open a saved attachment with the volume's key, if the broker still releases that key."""
        oldest = descriptor.oldest_key_epoch or descriptor.key_epoch
        if not oldest <= kept.key_epoch <= descriptor.key_epoch:
            raise VerificationError(
                "attachment.key_epoch",
                f"the attachment of volume {kept.volume_id} is sealed under key epoch "
                f"{kept.key_epoch}; the volume has {oldest} to {descriptor.key_epoch}",
            )
        key = await self._broker.key(descriptor, key_epoch=kept.key_epoch)
        try:
            return open_attachment(kept, key=key, node=self._identity.node)
        finally:
            wipe(key)

    async def _export(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        attachment: Attachment,
        kept: SealedAttachment | None = None,
    ) -> None:
        """Export a volume, watch over it, and save its attachment for the next process."""
        volume_id = attachment.volume_id
        attached = await self._attach(descriptor, attachment, kept)
        if kept is None:
            try:
                await self._files.put(attached.unflushed.kept)
            except BaseException:
                await self._end_export(volume_id, attached)
                raise
        _warn(descriptor)
        self._attached[volume_id] = attached
        is_own = descriptor.tenant == self._identity.subject.tenant
        place = attached.back_end.place
        if self._tasks is not None and is_own and place is not None:
            self._target_events.follow(volume_id, place)

    async def _attach(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        attachment: Attachment,
        kept: SealedAttachment | None,
    ) -> Attached:
        """Open the back end, fetch lease and keys, export the volume, seal a new attachment."""
        read_only = self.is_read_only(descriptor)
        via = Via(traddr=attachment.via_traddr, trsvcid=attachment.via_trsvcid)
        member = (
            GroupMember(volume_id=uuid.UUID(descriptor.volume_id), host_nqn=attachment.host_nqn)
            if attachment.fail_over
            else None
        )
        back_end = await self._back_ends.open(
            descriptor, via=via, read_only=read_only, member=member
        )
        try:
            async with (
                self._counters(descriptor, read_only=read_only) as (leases, counters),
                released_keys(self._broker, descriptor) as keys,
            ):
                kept = kept or seal_attachment(
                    attachment,
                    key=keys[descriptor.key_epoch],
                    key_epoch=descriptor.key_epoch,
                    node=self._identity.node,
                )
                if kept.is_of_earlier_boot and member is None:
                    # No host is left that expects its unflushed writes to be there.
                    kept = replace(kept, target_incarnation=0)
                unflushed = Unflushed(
                    back_end.open_queue, files=self._files, kept=kept, member=member
                )
                # A returning host must find the size that it knows, even if the volume has grown
                # since.
                volume = volume_key(descriptor, keys, read_only=read_only)
                port = await self._gateway.attach(
                    replace(volume, sector_count=attachment.sector_count),
                    counters=counters,
                    host_nqn=attachment.host_nqn,
                    secret=attachment.secret,
                    # A reader has no acknowledged writes.
                    open_queue=back_end.open_queue if read_only else unflushed,
                    epoch_floor=back_end.epoch_floor,
                    member=member,
                )
        except BaseException:
            await back_end.close()
            raise
        attached = Attached(
            descriptor=descriptor,
            port=port,
            leases=leases,
            host_nqn=attachment.host_nqn,
            back_end=back_end,
            unflushed=unflushed,
            member=member,
            is_read_only=read_only,
        )
        if member is not None:
            port.back_end.on_serving = partial(self._serving_changed, attached)
        return attached

    async def take_over(self, volume_id: str, *, accepts_loss: bool) -> broker_pb2.VolumeDescriptor:
        """Serve a volume's host here, and fence the gateway of the group that served it so far.

        UsageError `volume.detached.state`, `volume.fail_over.state`; UnavailableError
        `queue.take_over.…`.
        """
        if not self.serving.is_set():
            raise refuse_new("take-overs")
        with self._change(volume_id):
            attached = self._attached.get(volume_id)
            if attached is None:
                raise UsageError(
                    "volume.detached.state", f"volume {volume_id} is not attached here"
                )
            if attached.member is None:
                raise UsageError(
                    "volume.fail_over.state",
                    f"volume {volume_id} is attached without fail-over: attach it with it",
                )
            await attached.port.back_end.take_over(
                partial(self._gateway.end_queues, attached.port), accepts_loss=accepts_loss
            )
        return attached.descriptor

    def _serving_changed(self, attached: Attached) -> None:
        """Show who serves, after a take-over by this gateway or another."""
        self._gateway.show_access(attached.port)
        if attached.port.back_end.is_fenced:
            volume_id = attached.descriptor.volume_id
            get_logger().warning("fenced", volume_id=volume_id, host_nqn=attached.host_nqn)
            self.events.report(volume_id, "fenced", reason=STANDBY)

    async def _stand_by(self, volume_id: str, attached: Attached) -> None:
        """Drop all of a fenced volume, and export it again as a standby.

        The take-over has flushed what was acknowledged; the host repeats the rest on its other
        path. What can't be done now is done after a later poll.
        """
        try:
            with self._change(volume_id):
                if self._attached.get(volume_id) is not attached:
                    return
                self._gateway.expect(volume_id)
                del self._attached[volume_id]
                kept = replace(attached.unflushed.kept, target_incarnation=0)
                try:
                    await self._end_export(volume_id, attached)
                    # Without it, the next process asks the target who served last.
                    kept = await attached.unflushed.fence()
                finally:
                    self._returning.start([kept])
        except (Error, OSError) as error:
            reason = reason_of(error, otherwise="connection.lost")
            get_logger().error("stand_by_incomplete", volume_id=volume_id, reason=reason)

    def _counters(
        self, descriptor: broker_pb2.VolumeDescriptor, *, read_only: bool
    ) -> contextlib.AbstractAsyncContextManager[Taken]:
        """Return the counters that a volume starts with; a reader needs none."""
        if read_only:
            return contextlib.nullcontext((LeaseHolder(), []))
        return self._leases.taken(descriptor)

    async def detach(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Stop the export and wipe the volume's keys; unused counters are kept.

        The saved attachment is removed first: if that fails, nothing else has happened.
        """
        if self.is_returning(volume_id):
            await self._files.remove(volume_id)
            await self._returning.give_up(volume_id)
            if volume_id not in self._attached:
                self.events.report(volume_id, "detached")
                try:
                    return await self._broker.descriptor(volume_id)
                except Error:
                    # It is detached in any case; the rest of the descriptor can be requested later.
                    return broker_pb2.VolumeDescriptor(volume_id=volume_id)
        with self._change(volume_id):
            attached = self._attached.get(volume_id)
            if attached is None:
                raise UsageError(
                    "volume.detached.state", f"volume {volume_id} is not attached here"
                )
            await attached.unflushed.forget()
            del self._attached[volume_id]
            await self._end_export(volume_id, attached)
            self.events.report(volume_id, "detached")
        return attached.descriptor

    async def _end_export(
        self,
        volume_id: str,
        attached: Attached,
        *,
        patience_seconds: float = 0,
    ) -> bool:
        """End an export; return whether all acknowledged data is durable.

        After a fence it is, and the journal is dropped.

        On return, all keys and buffers of the volume are gone.
        """
        self._target_events.leave(volume_id)
        is_durable = True
        if attached.is_fenced:
            await attached.port.leave()
        else:
            is_durable = await attached.port.detach(patience_seconds=patience_seconds)
            if is_durable and attached.member is not None:
                await self._release(volume_id, attached)
        if not attached.is_read_only:
            await self._leases.keep(
                attached.descriptor, attached.leases, attached.port.replace_counters()
            )
        await attached.back_end.close()
        self._drain_events(volume_id, attached)
        await attached.port.wipe()
        return is_durable

    async def _release(self, volume_id: str, attached: Attached) -> None:
        """Let another gateway of the group serve without a fence; if it fails, with one."""
        try:
            await attached.port.back_end.release()
        except (Error, TimeoutError, OSError) as error:
            reason = reason_of(error, otherwise="connection.lost")
            get_logger().warning("fail_over_not_released", volume_id=volume_id, reason=reason)

    async def _leave(self, volume_id: str) -> None:
        """End an export that the next process of this gateway continues."""
        with contextlib.suppress(Error), self._change(volume_id):
            attached = self._attached.pop(volume_id, None)
            if attached is not None:
                self._gateway.expect(volume_id)
                if await self._end_export(volume_id, attached, patience_seconds=LEAVE_SECONDS):
                    await attached.unflushed.clear()

    async def _put_aside(self, volume_id: str) -> str:
        """End a volume's export until `serving` is set again; return why it can't be flushed.

        It stays exported, with its journal, if it can't be flushed.
        """
        with self._change(volume_id):
            attached = self._attached[volume_id]
            self._gateway.expect(volume_id)
            problem = "interrupted"
            try:
                problem = await attached.port.suspend()
            finally:
                if problem:
                    attached.port.resume()
            if problem:
                return f"not flushed: {problem}"
            del self._attached[volume_id]
            try:
                await self._end_export(volume_id, attached)
                await attached.unflushed.clear()
            finally:
                self._returning.start([attached.unflushed.kept])
        self.events.report(volume_id, "drained")
        return ""

    async def _drop_unusable(self, volume_id: str) -> None:
        """Detach a volume that this gateway may no longer use."""
        try:
            await self.detach(volume_id)
        except Error as error:
            get_logger().error("detach_failed", volume_id=volume_id, reason=error.reason)

    @contextlib.contextmanager
    def _change(self, volume_id: str) -> Iterator[None]:
        """Allow one change of a volume at a time; a second caller is refused, not queued."""
        if volume_id in self._changing:
            raise UsageError("volume.busy.state", f"volume {volume_id} is being changed: try again")
        self._changing.add(volume_id)
        try:
            yield
        finally:
            self._changing.discard(volume_id)

    async def _poll_events(self) -> None:
        while True:
            for volume_id, attached in [*self._attached.items()]:
                self._drain_events(volume_id, attached)
                self._drive_fail_over(volume_id, attached)
                await self._settle(volume_id, attached)
            await asyncio.sleep(EVENT_POLL_SECONDS)

    def _drive_fail_over(self, volume_id: str, attached: Attached) -> None:
        """Serve a volume on standby whose host sends commands here; put a fenced one on standby."""
        if attached.member is None or volume_id in self._changing:
            return
        attached.port.back_end.confirm(attached.port.settled_incarnation())
        if attached.is_fenced:
            if self._tasks is not None:
                self._tasks.create_task(self._stand_by(volume_id, attached), name="stand-by")
        elif self._is_standby_used(attached, attached.member):
            attached.port.back_end.begin_take_over(partial(self._gateway.end_queues, attached.port))

    def _is_standby_used(self, attached: Attached, member: GroupMember) -> bool:
        return (
            self.serving.is_set()
            and not member.is_serving
            and self._gateway.unanswered(attached.port) > 0
        )

    async def _settle(self, volume_id: str, attached: Attached) -> None:
        """Save which target process may hold unflushed writes."""
        # Not counted as a change: it must not cause a concurrent caller to be refused.
        if volume_id in self._changing or self._attached.get(volume_id) is not attached:
            return
        try:
            await attached.unflushed.settle(attached.port.settled_incarnation())
        except UnavailableError as error:
            get_logger().error("attachment_not_kept", volume_id=volume_id, reason=error.reason)

    def _drain_events(self, volume_id: str, attached: Attached) -> None:
        self.events.report_native(volume_id, attached.port.take_events())
        if attached.back_end.third_party is not None:
            self.events.report_native(volume_id, attached.back_end.third_party.take_events())


def _warn(descriptor: broker_pb2.VolumeDescriptor) -> None:
    """Log a warning about what a volume doesn't protect against."""
    if descriptor.mode == VolumeMode.OFF:
        get_logger().warning(
            "volume_without_freshness",
            volume_id=descriptor.volume_id,
            mode=VolumeMode.OFF,
            message="mode off: a sector that the storage replaces with an older copy is not "
            "detected; docs/understand/threat-model.md says what is still protected",
        )
