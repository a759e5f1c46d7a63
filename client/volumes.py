"""Calls about volumes."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, Final

import grpc

from sealane.client.calls import CALL_SECONDS, sayable, translated
from sealane.client.volume import Volume, VolumeEvent, event_of, volume_of
from sealane.client.volume_store import VolumeJob, job_of
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import JobState
from sealane.protocol.v1 import broker_pb2, storage_pb2, volumes_pb2, volumes_pb2_grpc

_REQUEST_RANGE: Final = "volume.request.range"
_RESIZE_SECONDS: Final = 120.0
_PAGE_SIZE: Final = 1000
_FILL_POLL_SECONDS: Final = 0.5
_JOB_POLL_SECONDS: Final = 0.5


class Volumes:
    """Calls about volumes; `name` is always "volumes/<UUID>"."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = volumes_pb2_grpc.VolumesStub(channel)

    async def create(
        self,
        *,
        size_bytes: int,
        display_name: str = "",
        target_node: str = "",
        third_party: str = "",
        mode: str = "",
        anchor: str = "",
        request_id: str = "",
    ) -> Volume:
        """Create a volume of `size_bytes`, a multiple of 4096.

        `third_party`: on the third party's target of that name in the gateway's configuration, in
        mode "local"; with `anchor` "none" a roll-back of the whole namespace while it is detached
        goes undetected. `mode` "off": without freshness (threat-model.md); such a volume is filled
        in the background before it can be attached, see `wait_filled`.
        """
        # With a request id, gRPC's transparent retries create only one volume.
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.CreateVolumeRequest(
                request_id=request_id or str(uuid.uuid4()),
                display_name=display_name,
                size_bytes=size_bytes,
                target_node=target_node,
                third_party=third_party,
                mode=mode,
                anchor=anchor,
            )
        with translated():
            return volume_of(await self._stub.CreateVolume(request, timeout=CALL_SECONDS))

    async def get(self, name: str, *, with_store: bool = False) -> Volume:
        """Return a volume; `with_store`: with the state of its store, fetched from its target."""
        request = volumes_pb2.GetVolumeRequest(name=name, with_store=with_store)
        with translated():
            return volume_of(await self._stub.GetVolume(request, timeout=CALL_SECONDS))

    async def wait_filled(
        self, name: str, *, progress: Callable[[Volume], None] | None = None
    ) -> Volume:
        """Wait until the volume is filled; `progress` is called twice a second."""
        while True:
            volume = await self.get(name)
            if volume.state != "filling":
                return volume
            if progress is not None:
                progress(volume)
            await asyncio.sleep(_FILL_POLL_SECONDS)

    async def list(self, *, with_store: bool = False) -> list[Volume]:
        """Return every volume of this tenant; `with_store`: with the states of their stores."""
        volumes: list[Volume] = []
        token = ""
        with translated():
            while True:
                request = volumes_pb2.ListVolumesRequest(
                    page_size=_PAGE_SIZE, page_token=token, with_store=with_store
                )
                page = await self._stub.ListVolumes(request, timeout=CALL_SECONDS)
                volumes += [volume_of(v) for v in page.volumes]
                token = page.next_page_token
                if not token:
                    return volumes

    async def delete(self, name: str) -> None:
        """Delete a detached volume and all its data."""
        request = volumes_pb2.DeleteVolumeRequest(name=name)
        with translated():
            await self._stub.DeleteVolume(request, timeout=CALL_SECONDS)

    async def attach(
        self,
        name: str,
        *,
        host_nqn: str,
        via_traddr: str = "",
        via_trsvcid: int = 0,
        fail_over: bool = False,
    ) -> Volume:
        """Export the volume to `host_nqn`; `via_…` replaces the target's data-path address.

        With `fail_over`, this gateway is one of several that serve the host, one at a time.
        """
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.AttachVolumeRequest(
                name=name,
                host_nqn=host_nqn,
                via_traddr=via_traddr,
                via_trsvcid=via_trsvcid,
                fail_over=fail_over,
            )
        with translated():
            return volume_of(await self._stub.AttachVolume(request, timeout=CALL_SECONDS))

    async def take_over(self, name: str, *, accept_loss: bool = False) -> Volume:
        """Serve the volume's host from this gateway of its fail-over group; fences the other one.

        With `accept_loss`, also if acknowledged writes may be lost that the other gateway kept for
        a target that has restarted.
        """
        request = volumes_pb2.TakeOverVolumeRequest(name=name, accept_loss=accept_loss)
        with translated():
            return volume_of(await self._stub.TakeOverVolume(request, timeout=CALL_SECONDS))

    async def detach(self, name: str) -> Volume:
        """Stop the export."""
        request = volumes_pb2.DetachVolumeRequest(name=name)
        with translated():
            return volume_of(await self._stub.DetachVolume(request, timeout=CALL_SECONDS))

    async def share(self, name: str, *, tenant: str, read_only: bool = False) -> Volume:
        """Let gateways of another tenant use the volume, or change their access."""
        with sayable(_REQUEST_RANGE):
            share = broker_pb2.VolumeShare(tenant=tenant, read_only=read_only)
            request = volumes_pb2.ShareVolumeRequest(name=name, share=share)
        with translated():
            return volume_of(await self._stub.ShareVolume(request, timeout=CALL_SECONDS))

    async def unshare(self, name: str, *, tenant: str) -> Volume:
        """End a share: within 30 s its gateways lose access; the volume gets a new key epoch."""
        request = volumes_pb2.UnshareVolumeRequest(name=name, tenant=tenant)
        with translated():
            return volume_of(await self._stub.UnshareVolume(request, timeout=CALL_SECONDS))

    async def start_job(self, name: str, kind: str, *, bytes_per_second: int = 0) -> VolumeJob:
        """Start the job "scrub" or "refresh" at the volume's target; a rate of 0 is no limit."""
        with sayable(_REQUEST_RANGE):
            start = storage_pb2.JobStart(kind=kind, bytes_per_second=bytes_per_second)
            request = volumes_pb2.StartVolumeJobRequest(name=name, start=start)
        with translated():
            return job_of(await self._stub.StartVolumeJob(request, timeout=CALL_SECONDS))

    async def change_job(
        self, name: str, kind: str, *, order: str = "", bytes_per_second: int | None = None
    ) -> VolumeJob:
        """Order a job to "pause", "resume" or "cancel", or change its rate."""
        with sayable(_REQUEST_RANGE):
            change = storage_pb2.JobChange(
                kind=kind, order=order, bytes_per_second=bytes_per_second
            )
            request = volumes_pb2.ChangeVolumeJobRequest(name=name, change=change)
        with translated():
            return job_of(await self._stub.ChangeVolumeJob(request, timeout=CALL_SECONDS))

    async def wait_job(
        self, name: str, kind: str, *, progress: Callable[[VolumeJob], None] | None = None
    ) -> VolumeJob:
        """Wait until a job has ended; `progress` is called twice a second."""
        while True:
            volume = await self.get(name, with_store=True)
            jobs = () if volume.store is None else volume.store.jobs
            job = next((job for job in jobs if job.kind == kind), None)
            if job is not None:
                if progress is not None:
                    progress(job)
                # Its daemon records the end of a job shortly after the job's last step.
                if job.ended is not None or job.state == JobState.INTERRUPTED:
                    return job
            elif volume.store is not None:
                raise UsageError("volume.job.over", f"no {kind} of {name} is running")
            # The store didn't answer: it may be opening.
            await asyncio.sleep(_JOB_POLL_SECONDS)

    async def resize(self, name: str, *, size_bytes: int) -> Volume:
        """Grow a volume to `size_bytes` in all, a multiple of 4096. Idempotent.

        The new range reads as zeros. Hosts see the new size at the next attachment; I/O of an
        attached host pauses meanwhile. UsageError `volume.resize.smaller`, `volume.resize.mode`,
        `volume.resize.refused`; UnavailableError `store.extend`: its store has no room.
        """
        with sayable(_REQUEST_RANGE):
            request = volumes_pb2.ResizeVolumeRequest(name=name, size_bytes=size_bytes)
        with translated():
            return volume_of(await self._stub.ResizeVolume(request, timeout=_RESIZE_SECONDS))

    async def clone(self, name: str, *, display_name: str = "") -> Volume:
        """Raise UsageError `volume.clone.unsupported`: sealed sectors can't be shared."""
        request = volumes_pb2.CloneVolumeRequest(name=name, display_name=display_name)
        with translated():
            return volume_of(await self._stub.CloneVolume(request, timeout=CALL_SECONDS))

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[AsyncIterator[VolumeEvent]]:
        """Subscribe to the volume's events; none is missed after the block is entered."""
        request = volumes_pb2.WatchVolumeRequest(name=name)
        call = self._stub.WatchVolume(request)
        try:
            with translated():
                await _metadata_of(call)
                if call.done():
                    # A refusal also ends the wait for metadata; the status has it.
                    await anext(aiter(call), None)
            yield _events(call)
        finally:
            call.cancel()


async def _metadata_of(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Wait until the server of a stream has accepted or refused the call."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await call.initial_metadata()
    except TimeoutError as error:
        raise UnavailableError(
            "peer.deadline_exceeded", f"sealaned did not answer within {CALL_SECONDS:.0f} s"
        ) from error


async def _events(call: AsyncIterable[storage_pb2.VolumeEvent]) -> AsyncIterator[VolumeEvent]:
    with translated():
        async for message in call:
            yield event_of(message)
