"""Requests of a gateway to the stores of its volumes: background jobs and status."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.back_ends import CALL_SECONDS, VolumeBackEnds
from sealane.daemon.gateway.third_party import ThirdPartyVolume
from sealane.daemon.volume.job_calls import change_job, start_job
from sealane.daemon.volume.store_status import store_status
from sealane.errors import UsageError
from sealane.protocol.kinds import THIRD_PARTY, AnchorKind
from sealane.protocol.v1 import broker_pb2, storage_pb2, storage_pb2_grpc


class VolumeStores:
    """Stores of this gateway's volumes: at the target, or on a third party while attached."""

    def __init__(
        self,
        back_ends: VolumeBackEnds,
        *,
        attached: Mapping[str, Attached],
        own: Callable[[str], Awaitable[broker_pb2.VolumeDescriptor]],
    ) -> None:
        """Use `own` to get volumes of the gateway's tenant; it refuses those of others."""
        self._back_ends = back_ends
        self._attached = attached
        self._own = own

    async def start_job(self, volume_id: str, start: storage_pb2.JobStart) -> storage_pb2.VolumeJob:
        """Start a background job."""
        descriptor = await self._own(volume_id)
        if descriptor.third_party:
            return await start_job(self._third_party(descriptor).jobs, start)
        async with self._target() as target:
            request = storage_pb2.StartJobRequest(volume_id=volume_id, start=start)
            return await target.StartJob(request, timeout=CALL_SECONDS)

    async def change_job(
        self, volume_id: str, change: storage_pb2.JobChange
    ) -> storage_pb2.VolumeJob:
        """Pause, resume or cancel a background job, or set its rate."""
        descriptor = await self._own(volume_id)
        if descriptor.third_party:
            return await change_job(self._third_party(descriptor).jobs, change)
        async with self._target() as target:
            request = storage_pb2.ChangeJobRequest(volume_id=volume_id, change=change)
            return await target.ChangeJob(request, timeout=CALL_SECONDS)

    async def status(self, volume_id: str) -> storage_pb2.StoreStatus:
        """Return the status of the volume's store."""
        descriptor = await self._own(volume_id)
        if descriptor.third_party:
            store = self._third_party(descriptor)
            return store_status(
                kind=THIRD_PARTY,
                layout=store.layout,
                anchor=AnchorKind.BROKER if descriptor.device_id else AnchorKind.NONE,
                statistics=store.statistics(),
                jobs=store.jobs.list(),
            )
        async with self._target() as target:
            request = storage_pb2.GetNamespaceRequest(volume_id=volume_id)
            namespace = await target.GetNamespace(request, timeout=CALL_SECONDS)
        return namespace.status

    @contextlib.asynccontextmanager
    async def _target(self) -> "AsyncIterator[storage_pb2_grpc.StorageAsyncStub]":
        async with self._back_ends.target_channel() as channel:
            yield storage_pb2_grpc.StorageStub(channel)

    def _third_party(self, descriptor: broker_pb2.VolumeDescriptor) -> ThirdPartyVolume:
        attached = self._attached.get(str(uuid.UUID(descriptor.volume_id)))
        if attached is None or attached.back_end.third_party is None:
            raise UsageError(
                "volume.detached.state",
                f"volume {descriptor.volume_id} is on a third party: its store is open only while "
                "the volume is attached here",
            )
        return attached.back_end.third_party
