"""gRPC servicer of a target's volumes (`Storage`, mutual TLS)."""

# ruff: noqa: N802, ARG002 - names and arguments are those of the generated base classes

from collections.abc import AsyncIterator

from google.protobuf import empty_pb2

from sealane.daemon.runtime.authorizers import Authorizer, Context
from sealane.daemon.runtime.traces import opened
from sealane.daemon.target.control import StorageService
from sealane.daemon.volume.events import event_message
from sealane.daemon.volume.job_calls import change_job, start_job
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc


class StorageServicer(storage_pb2_grpc.StorageServicer):
    """gRPC servicer in front of `StorageService`."""

    def __init__(self, service: StorageService, authorizer: Authorizer) -> None:
        self._service = service
        self._caller = authorizer.caller

    async def CreateNamespace(
        self, request: storage_pb2.CreateNamespaceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Create a namespace."""
        await self._service.create(self._caller(context), request.descriptor)
        return empty_pb2.Empty()

    async def DeleteNamespace(
        self, request: storage_pb2.DeleteNamespaceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Delete a namespace."""
        await self._service.delete(self._caller(context), request.volume_id)
        return empty_pb2.Empty()

    async def ResizeNamespace(
        self, request: storage_pb2.ResizeNamespaceRequest, context: Context
    ) -> empty_pb2.Empty:
        """Make a namespace larger."""
        await self._service.resize(self._caller(context), request.descriptor)
        return empty_pb2.Empty()

    async def OpenQueue(
        self, request: storage_pb2.OpenQueueRequest, context: Context
    ) -> storage_pb2.OpenQueueResponse:
        """Admit a queue."""
        return await self._service.open_queue(self._caller(context), request)

    async def ReleaseFailOverGroup(
        self, request: storage_pb2.ReleaseFailOverGroupRequest, context: Context
    ) -> empty_pb2.Empty:
        """End the term of a fail-over group's serving gateway."""
        await self._service.release_group(self._caller(context), request)
        return empty_pb2.Empty()

    async def GetTarget(
        self, request: storage_pb2.GetTargetRequest, context: Context
    ) -> storage_pb2.TargetStatus:
        """Describe the target to a gateway that chooses one."""
        self._caller(context)
        return self._service.status()

    async def GetNamespace(
        self, request: storage_pb2.GetNamespaceRequest, context: Context
    ) -> storage_pb2.Namespace:
        """Describe a namespace."""
        return await self._service.namespace(
            self._caller(context), request.volume_id, group=request.fail_over_group
        )

    async def BatchGetNamespaces(
        self, request: storage_pb2.BatchGetNamespacesRequest, context: Context
    ) -> storage_pb2.BatchGetNamespacesResponse:
        """Describe several namespaces."""
        caller = self._caller(context)
        found = await self._service.namespaces(caller, request.volume_ids)
        return storage_pb2.BatchGetNamespacesResponse(namespaces=found)

    async def StartJob(
        self, request: storage_pb2.StartJobRequest, context: Context
    ) -> storage_pb2.VolumeJob:
        """Start a background job."""
        jobs = self._service.jobs(self._caller(context), request.volume_id)
        return await start_job(jobs, request.start)

    async def ChangeJob(
        self, request: storage_pb2.ChangeJobRequest, context: Context
    ) -> storage_pb2.VolumeJob:
        """Pause, resume, cancel a background job, or set its rate."""
        jobs = self._service.jobs(self._caller(context), request.volume_id)
        return await change_job(jobs, request.change)

    async def WatchEvents(
        self, request: storage_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[storage_pb2.VolumeEvent]:
        """Stream events from now on."""
        self._service.check_watch(self._caller(context), request.volume_id)
        with self._service.events.subscribed(request.volume_id) as events:
            # Tells the caller that it misses no event from now on.
            await context.send_initial_metadata(())
            opened()
            async for event in events:
                yield event_message(event)
