"""The gateway's volumes: create, attach, leases, events (DESIGN §6); gRPC face in volumes_servicer.

The broker knows which volumes there are, the target stores them, this process attaches them: it
alone holds their keys, and only while they are attached.
"""

import asyncio
import contextlib
import datetime as dt
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc

from sealane.crypto.exchange import Exchange
from sealane.crypto.queue import NONCE_BYTES, TICKET_BYTES, QueueTranscript, derive_queue_secret
from sealane.daemon.attached import Attached
from sealane.daemon.broker_client import BrokerClient
from sealane.daemon.config import GatewayConfig
from sealane.daemon.events import Event, EventLog
from sealane.daemon.identity import Identity
from sealane.daemon.leases import LeaseCache
from sealane.daemon.logs import get_logger
from sealane.daemon.ports import (
    GatewayPort,
    OpenQueue,
    QueueGrant,
    ThirdPartyPort,
    ThirdPartyVolumePort,
    VolumeKey,
)
from sealane.daemon.storage_control import EVENT_POLL_SECONDS
from sealane.daemon.supply import Supply, released_keys
from sealane.errors import Error, ProtocolError, UsageError
from sealane.protocol.nvme.nqn import NQN_BYTES_MAX, gateway_nqn
from sealane.protocol.v1 import broker_pb2, storage_pb2, storage_pb2_grpc

_CALL_SECONDS: Final = 10.0
_FOLLOW_RETRY_SECONDS: Final = 1.0
MODE_LOCAL: Final = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Via:
    """Data-path address to use instead of the one the target announces; empty: none."""

    traddr: str = ""
    trsvcid: int = 0


class VolumeService:
    """Everything a job asks of the gateway. `run` must run while it serves."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        identity: Identity,
        broker: BrokerClient,
        gateway: GatewayPort,
        third_parties: ThirdPartyPort,
    ) -> None:
        self._third_parties = third_parties
        self._config = config
        self._identity = identity
        self._broker = broker
        self._gateway = gateway
        self._leases = LeaseCache(broker)
        self._attached: dict[str, Attached] = {}
        self._changing: set[str] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._followers: dict[str, asyncio.Task[None]] = {}
        self.events = EventLog(identity.node)
        self._supply = Supply(
            self._attached, broker=broker, leases=self._leases, events=self.events
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll events, refill leases; on the way out detach every volume."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            loops = [
                tasks.create_task(self._poll_events(), name="volume-events"),
                tasks.create_task(self._supply.run(), name="volume-supply"),
            ]
            try:
                yield
            finally:
                # All at once: each waits for its target, which may be gone.
                await asyncio.gather(*map(self._leave, [*self._attached]))
                await self._leases.close()
                for task in loops:
                    task.cancel()
                self._tasks = None

    def bar(self, reason: str) -> None:
        """Fail and leave every volume at once: this gateway may not act any more.

        Commands under way end with an error. Counters are given back as far as the broker still
        takes them, and burned otherwise.
        """
        for attached in self._attached.values():
            attached.port.fail(f"the gateway has no certificate any more: {reason}")
        if self._tasks is not None:
            self._tasks.create_task(self._abandon(), name="volumes-abandon")

    async def _abandon(self) -> None:
        await asyncio.gather(*map(self._leave, [*self._attached]))
        await self._leases.close()

    async def create(
        self,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        third_party: str = "",
    ) -> broker_pb2.VolumeDescriptor:
        """Register a volume and make its namespace at the target, or lay it out on a third party.

        A volume on a third party has mode "local" and belongs to this gateway.
        """
        if third_party:
            return await self._create_local(
                request_id=request_id,
                display_name=display_name,
                size_bytes=size_bytes,
                target_node=target_node,
                third_party=third_party,
            )
        target = target_node or self._config.target_node
        if target != self._config.target_node:
            raise UsageError(
                "volume.target",
                f"target {target!r}; allowed: this gateway's target {self._config.target_node!r}",
            )
        descriptor, registered = await self._broker.register(
            request_id=request_id or str(uuid.uuid4()),
            display_name=display_name,
            size_bytes=size_bytes,
            target_node=target,
        )
        try:
            async with self._target_channel() as channel:
                await storage_pb2_grpc.StorageStub(channel).CreateNamespace(
                    storage_pb2.CreateNamespaceRequest(descriptor=registered.volume),
                    timeout=_CALL_SECONDS,
                )
        except (Error, asyncio.CancelledError):
            # Nothing half-made stays: a retry registers it anew. But what an earlier call with
            # this request id made may hold data by now.
            if registered.is_new:
                with contextlib.suppress(Error):
                    await self._delete_namespace(descriptor.volume_id)
                with contextlib.suppress(Error):
                    await self._broker.unregister(descriptor.volume_id)
            raise
        return descriptor

    async def _create_local(
        self,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        third_party: str,
    ) -> broker_pb2.VolumeDescriptor:
        if target_node not in {"", self._identity.node}:
            raise UsageError(
                "volume.target",
                f"target {target_node!r}; allowed with a third party: none, the volume belongs to "
                "this gateway",
            )
        descriptor, registered = await self._broker.register(
            request_id=request_id or str(uuid.uuid4()),
            display_name=display_name,
            size_bytes=size_bytes,
            target_node=self._identity.node,
            mode=MODE_LOCAL,
            third_party=third_party,
        )
        try:
            await self._third_parties.create(
                third_party,
                uuid.UUID(descriptor.volume_id),
                sector_count=descriptor.sector_count,
            )
        except (Error, asyncio.CancelledError):
            # What a cancelled call has laid out by now, only an operator can take off.
            if registered.is_new:
                with contextlib.suppress(Error):
                    await self._broker.unregister(descriptor.volume_id)
            raise
        return descriptor

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
            if volume_id in self._attached:
                raise UsageError(
                    "volume.attached.state", f"volume {volume_id} is attached: detach it"
                )
            descriptor = await self._broker.descriptor(volume_id)
            await self._leases.drop(volume_id)
            if descriptor.mode:
                self._check_ours(descriptor)
                await self._third_parties.delete(descriptor.third_party, uuid.UUID(volume_id))
            else:
                await self._delete_namespace(volume_id)
            await self._broker.unregister(volume_id)

    async def _delete_namespace(self, volume_id: str) -> None:
        request = storage_pb2.DeleteNamespaceRequest(volume_id=volume_id)
        try:
            async with self._target_channel() as channel:
                await storage_pb2_grpc.StorageStub(channel).DeleteNamespace(
                    request, timeout=_CALL_SECONDS
                )
        except UsageError as error:
            # The target may have lost it already; the broker's record goes in any case.
            if error.reason != "namespace.not_found":
                raise

    def attached(self, volume_id: str) -> Attached | None:
        """Return the attachment of a volume, if there is one here."""
        return self._attached.get(volume_id)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return the engine's statistics of every attached volume, for the metrics."""
        # Called from the metrics' thread: a copy, because the event loop changes the original.
        return {v: dict(a.port.statistics()) for v, a in self._attached.copy().items()}

    async def attach(
        self, volume_id: str, *, host_nqn: str, via: Via
    ) -> broker_pb2.VolumeDescriptor:
        """Fetch key and lease and export the volume to `host_nqn`."""
        if not host_nqn.startswith("nqn.") or len(host_nqn.encode()) > NQN_BYTES_MAX:
            raise UsageError(
                "volume.host_nqn",
                f"host NQN {host_nqn[:80]!r}; allowed: nqn.…, at most {NQN_BYTES_MAX} bytes",
            )
        with self._change(volume_id):
            known = self._attached.get(volume_id)
            if known is not None:
                raise UsageError(
                    "volume.attached.state",
                    f"volume {volume_id} is already attached to {known.host_nqn}",
                )
            descriptor = await self._broker.descriptor(volume_id)
            if descriptor.mode:
                attached = await self._attach_local(descriptor, host_nqn=host_nqn, via=via)
            else:
                attached = await self._attach_remote(descriptor, host_nqn=host_nqn, via=via)
            self._attached[volume_id] = attached
            if self._tasks is not None and not descriptor.mode:
                self._followers[volume_id] = self._tasks.create_task(
                    self._follow_target(volume_id), name=f"follow-{volume_id}"
                )
            self.events.report(volume_id, "attached", detail=host_nqn)
        return descriptor

    async def _attach_remote(
        self, descriptor: broker_pb2.VolumeDescriptor, *, host_nqn: str, via: Via
    ) -> Attached:
        # A target that restarted has lost the volume: said here, not at the first read.
        async with self._target_channel() as channel:
            namespace = await storage_pb2_grpc.StorageStub(channel).GetNamespace(
                storage_pb2.GetNamespaceRequest(volume_id=descriptor.volume_id),
                timeout=_CALL_SECONDS,
            )
        return await self._attach(
            descriptor,
            host_nqn=host_nqn,
            open_queue=partial(self._open_queue, descriptor=descriptor, via=via),
            epoch_floor=namespace.association_epoch,
        )

    async def _attach_local(
        self, descriptor: broker_pb2.VolumeDescriptor, *, host_nqn: str, via: Via
    ) -> Attached:
        self._check_ours(descriptor)
        if via != Via():
            raise UsageError(
                "volume.via",
                "allowed for volumes on a target of ours only; the operator names "
                "the addresses of third parties",
            )
        third_party = await self._third_parties.attach(
            descriptor.third_party,
            uuid.UUID(descriptor.volume_id),
            sector_count=descriptor.sector_count,
        )
        try:
            return await self._attach(
                descriptor,
                host_nqn=host_nqn,
                open_queue=third_party.open_queue,
                third_party=third_party,
            )
        except BaseException:
            await third_party.close()
            raise

    async def _attach(
        self,
        descriptor: broker_pb2.VolumeDescriptor,
        *,
        host_nqn: str,
        open_queue: OpenQueue,
        epoch_floor: int = 0,
        third_party: ThirdPartyVolumePort | None = None,
    ) -> Attached:
        """Fetch lease and key, and export the volume."""
        leases, counters = await self._leases.take(descriptor)
        async with released_keys(self._broker, descriptor) as keys:
            port = await self._gateway.attach(
                VolumeKey(
                    volume_id=uuid.UUID(descriptor.volume_id),
                    generation=descriptor.generation,
                    sector_count=descriptor.sector_count,
                    keys=keys,
                ),
                counters=counters,
                host_nqn=host_nqn,
                open_queue=open_queue,
                epoch_floor=epoch_floor,
            )
        return Attached(
            descriptor=descriptor,
            port=port,
            leases=leases,
            host_nqn=host_nqn,
            third_party=third_party,
        )

    def _check_ours(self, descriptor: broker_pb2.VolumeDescriptor) -> None:
        """Refuse a mode that isn't offered, and a volume that another gateway owns."""
        if descriptor.mode != MODE_LOCAL:
            raise UsageError(
                "volume.mode", f"volume mode {descriptor.mode[:80]!r}; allowed here: remote, local"
            )
        if descriptor.target_node != self._identity.node:
            raise UsageError(
                "volume.owner",
                f"volume {descriptor.volume_id} belongs to gateway {descriptor.target_node!r}: "
                "only that one can use it",
            )

    async def detach(self, volume_id: str) -> broker_pb2.VolumeDescriptor:
        """Stop the export; the volume's key goes with it, unused counters are kept."""
        with self._change(volume_id):
            attached = self._attached.pop(volume_id, None)
            if attached is None:
                raise UsageError(
                    "volume.detached.state", f"volume {volume_id} is not attached here"
                )
            await attached.port.detach()
            await self._leases.keep(
                attached.descriptor, attached.leases, attached.port.replace_counters()
            )
            if attached.third_party is not None:
                await attached.third_party.close()
            self._drain_events(volume_id, attached)
            follower = self._followers.pop(volume_id, None)
            if follower is not None:
                follower.cancel()
            self.events.report(volume_id, "detached")
        return attached.descriptor

    async def _leave(self, volume_id: str) -> None:
        with contextlib.suppress(Error):
            await self.detach(volume_id)

    async def _open_queue(
        self,
        queue_id: int,
        association_epoch: int,
        *,
        descriptor: broker_pb2.VolumeDescriptor,
        via: Via,
    ) -> QueueGrant:
        """Exchange keys with the target for one secure queue."""
        own = Exchange()
        host_nqn = gateway_nqn(self._identity.node)
        request = storage_pb2.OpenQueueRequest(
            volume_id=descriptor.volume_id,
            host_nqn=host_nqn,
            queue_id=queue_id,
            public_key=own.public_key,
            nonce=secrets.token_bytes(NONCE_BYTES),
            association_epoch=association_epoch,
        )
        async with self._target_channel() as channel:
            answer = await storage_pb2_grpc.StorageStub(channel).OpenQueue(
                request, timeout=_CALL_SECONDS
            )
        if len(answer.ticket) != TICKET_BYTES:
            raise ProtocolError("queue.ticket.malformed", f"a ticket has {TICKET_BYTES} bytes")
        secret = derive_queue_secret(
            own,
            peer_key=answer.public_key,
            transcript=QueueTranscript(
                volume_id=uuid.UUID(descriptor.volume_id),
                host_nqn=host_nqn,
                target_node=descriptor.target_node,
                gateway_node=self._identity.node,
                queue_id=queue_id,
                association_epoch=association_epoch,
                target_incarnation=answer.target_incarnation,
                gateway_nonce=request.nonce,
                target_nonce=answer.nonce,
                gateway_key=own.public_key,
                target_key=answer.public_key,
            ),
        )
        return QueueGrant(
            ticket=answer.ticket,
            secret=secret,
            association_epoch=association_epoch,
            target_incarnation=answer.target_incarnation,
            traddr=via.traddr or answer.traddr,
            trsvcid=via.trsvcid or answer.trsvcid,
            subsystem_nqn=answer.subsystem_nqn,
            host_nqn=host_nqn,
        )

    @contextlib.contextmanager
    def _change(self, volume_id: str) -> Iterator[None]:
        """Let one caller at a time change a volume; a second one is refused, not queued."""
        if volume_id in self._changing:
            raise UsageError("volume.busy.state", f"volume {volume_id} is being changed: try again")
        self._changing.add(volume_id)
        try:
            yield
        finally:
            self._changing.discard(volume_id)

    def _target_channel(self) -> contextlib.AbstractAsyncContextManager[grpc.aio.Channel]:
        config = self._config
        return self._identity.channel(config.target_address, config.target_node, "target")

    async def _poll_events(self) -> None:
        while True:
            for volume_id, attached in [*self._attached.items()]:
                self._drain_events(volume_id, attached)
            await asyncio.sleep(EVENT_POLL_SECONDS)

    def _drain_events(self, volume_id: str, attached: Attached) -> None:
        self.events.report_native(volume_id, attached.port.take_events())
        if attached.third_party is not None:
            self.events.report_native(volume_id, attached.third_party.take_events())

    async def _follow_target(self, volume_id: str) -> None:
        """Publish the target's events here while the volume is attached."""
        request = storage_pb2.WatchEventsRequest(volume_id=volume_id)
        while True:
            try:
                async with self._target_channel() as channel:
                    stream = storage_pb2_grpc.StorageStub(channel).WatchEvents(request)
                    async for message in stream:
                        self.events.publish(
                            Event(
                                volume_id=volume_id,
                                kind=message.kind,
                                reason=message.reason,
                                lba=message.lba,
                                detail=message.detail,
                                origin=message.origin,
                                time=message.time.ToDatetime(tzinfo=dt.UTC),
                            )
                        )
            except UsageError as error:
                if error.reason == "namespace.not_found":
                    self.events.report(
                        volume_id, "lost_by_target", reason=error.reason, detail=str(error.args[0])
                    )
                    return
                get_logger().warning("target_events_interrupted", reason=error.reason)
            except Error as error:
                get_logger().info("target_events_interrupted", reason=error.reason)
            except (ValueError, OverflowError):
                get_logger().warning("target_events_interrupted", reason="event.time.malformed")
            await asyncio.sleep(_FOLLOW_RETRY_SECONDS)
