"""Requests of a gateway to the stores of its volumes: background jobs and status."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.back_ends import CALL_SECONDS
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.third_party import ThirdPartyVolume
from sealane.daemon.volume.job_calls import change_job, start_job
from sealane.daemon.volume.store_status import store_status
from sealane.errors import Error, Reason, UsageError
from sealane.protocol.kinds import THIRD_PARTY, AnchorKind
from sealane.protocol.v1 import broker_pb2, storage_pb2, storage_pb2_grpc

ASKED_AT_ONCE: Final = 1000
"""Volumes that one call asks a target about."""


class VolumeStores:
    """Stores of this gateway's volumes: at their targets, or on a third party while attached."""

    def __init__(
        self,
        targets: Targets,
        *,
        attached: Mapping[str, Attached],
        own: Callable[[str], Awaitable[broker_pb2.VolumeDescriptor]],
        tenant: Callable[[], str],
    ) -> None:
        """Use `own` to get volumes of the gateway's `tenant`; it refuses those of others."""
        self._targets = targets
        self._attached = attached
        self._own = own
        self._tenant = tenant

    async def start_job(self, volume_id: str, start: storage_pb2.JobStart) -> storage_pb2.VolumeJob:
        """Start a background job."""
        descriptor = await self._own(volume_id)
        if descriptor.third_party:
            return await start_job(self._third_party(descriptor).jobs, start)
        async with self._targets.channel(descriptor.target_node) as channel:
            request = storage_pb2.StartJobRequest(volume_id=volume_id, start=start)
            return await storage_pb2_grpc.StorageStub(channel).StartJob(
                request, timeout=CALL_SECONDS
            )

    async def change_job(
        self, volume_id: str, change: storage_pb2.JobChange
    ) -> storage_pb2.VolumeJob:
        """Pause, resume or cancel a background job, or set its rate."""
        descriptor = await self._own(volume_id)
        if descriptor.third_party:
            return await change_job(self._third_party(descriptor).jobs, change)
        async with self._targets.channel(descriptor.target_node) as channel:
            request = storage_pb2.ChangeJobRequest(volume_id=volume_id, change=change)
            return await storage_pb2_grpc.StorageStub(channel).ChangeJob(
                request, timeout=CALL_SECONDS
            )

    async def statuses(
        self, descriptors: Sequence[broker_pb2.VolumeDescriptor]
    ) -> dict[str, storage_pb2.StoreStatus | Reason]:
        """Return the status of each volume's store, or the reason id why it is unknown.

        A target that was away at the last look isn't waited for.
        """
        found: dict[str, storage_pb2.StoreStatus | Reason] = {}
        asked: dict[str, list[str]] = defaultdict(list)
        tenant = self._tenant()
        for descriptor in descriptors:
            if descriptor.tenant != tenant:
                found[descriptor.volume_id] = "volume.tenant.refused"
            elif descriptor.third_party:
                found[descriptor.volume_id] = self._status_or_reason(descriptor)
            else:
                asked[descriptor.target_node].append(descriptor.volume_id)
        for answers in await asyncio.gather(*map(self._ask, asked, asked.values())):
            found |= answers
        return found

    def _status_or_reason(
        self, descriptor: broker_pb2.VolumeDescriptor
    ) -> storage_pb2.StoreStatus | Reason:
        try:
            store = self._third_party(descriptor)
        except Error as error:
            return error.reason
        return store_status(
            kind=THIRD_PARTY,
            layout=store.layout,
            anchor=AnchorKind.BROKER if descriptor.device_id else AnchorKind.NONE,
            statistics=store.statistics(),
            jobs=store.jobs.list(),
        )

    async def _ask(
        self, node: str, volume_ids: Sequence[str]
    ) -> dict[str, storage_pb2.StoreStatus | Reason]:
        found: dict[str, storage_pb2.StoreStatus | Reason] = {}
        for start in range(0, len(volume_ids), ASKED_AT_ONCE):
            found |= await self._ask_once(node, volume_ids[start : start + ASKED_AT_ONCE])
        return found

    async def _ask_once(
        self, node: str, volume_ids: Sequence[str]
    ) -> dict[str, storage_pb2.StoreStatus | Reason]:
        if (absence := self._targets.absence(node)) is not None:
            return dict.fromkeys(volume_ids, absence.reason)
        request = storage_pb2.BatchGetNamespacesRequest(volume_ids=volume_ids)
        try:
            async with self._targets.channel(node) as channel:
                answer = await storage_pb2_grpc.StorageStub(channel).BatchGetNamespaces(
                    request, timeout=CALL_SECONDS
                )
        except Error as error:
            return dict.fromkeys(volume_ids, error.reason)
        found: dict[str, storage_pb2.StoreStatus | Reason] = dict.fromkeys(
            volume_ids, "namespace.not_found"
        )
        # A target's answer about other volumes than those asked for is ignored.
        found.update((n.volume_id, n.status) for n in answer.namespaces if n.volume_id in found)
        return found

    def _third_party(self, descriptor: broker_pb2.VolumeDescriptor) -> ThirdPartyVolume:
        attached = self._attached.get(str(uuid.UUID(descriptor.volume_id)))
        if attached is None or attached.back_end.third_party is None:
            raise UsageError(
                "volume.detached.state",
                f"volume {descriptor.volume_id} is on a third party: its store is open only while "
                "the volume is attached here",
            )
        return attached.back_end.third_party
