"""Target: sealed volumes behind secure queues. It has no data key.

A volume's subsystem accepts only single-use tickets from the control channel; there is no plain
access to it.
"""

import asyncio
import ipaddress
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from sealane import _native
from sealane.crypto.exchange import wipe
from sealane.crypto.queue import MILESTONE_BYTES
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.daemon.device.catalogue import JOBS_SUFFIX, STORE_SUFFIX, make_directory
from sealane.daemon.device.directory import Device
from sealane.daemon.device.store_anchor import StoreAnchor
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.nvme.exported import (
    Exported,
    Provider,
)
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.listeners import Listen, listen_tcp
from sealane.daemon.runtime.reserve_file import RESERVE_NAME, keep_reserve
from sealane.daemon.target.drives import Drives
from sealane.daemon.target.openings import Openings
from sealane.daemon.target.store_flush import failures
from sealane.daemon.target.volume_subsystem import (
    TargetSubsystem,
    Ticket,
    sealed_subsystem,
)
from sealane.daemon.volume.engine_events import EventFeed, StorageEvent
from sealane.daemon.volume.failures import ROLLED_BACK
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.kept_jobs import VolumeJobs
from sealane.daemon.volume.store_calls import on_store_thread
from sealane.daemon.volume.store_kinds import STORE_KINDS
from sealane.errors import (
    ProtocolError,
    UnavailableError,
    UsageError,
    VerificationError,
    foreign_reason,
)
from sealane.protocol.kinds import StoreKind
from sealane.protocol.nvme.connect import TICKET_BYTES
from sealane.protocol.nvme.nqn import check_nqn, volume_nqn
from sealane.reasons import ReasonId

TICKET_SECONDS = 30.0
_TICKETS_MAX = 1024
STORE_FULL: Final = "store.full"
_NO_STORE: Final[dict[Literal["create", "open"], ReasonId]] = {
    "create": "store.create",
    "open": "store.open",
}


def _missing_room(path: Path | None) -> str | None:
    """Return how much space a newly created file lacks; None if it has enough or is no file."""
    if path is None or not path.is_file() or path.is_symlink():
        return None
    status, disk = path.stat(), shutil.disk_usage(path.parent)
    if status.st_size - status.st_blocks * 512 <= disk.free:
        return None
    reserve = path.with_name(RESERVE_NAME)
    kept = reserve.stat().st_size if reserve.exists() else 0
    return (
        f"it needs {status.st_size} bytes; {path.parent} has {disk.free} free of {disk.total}, and "
        f"{kept} in reserve"
    )


class Target(Provider):
    """NVMe/TCP target of sealed volumes. They appear in no discovery log: hosts need a ticket.

    Kinds of stores (`store_kind`): "file" stores each volume in `directory`/`<uuid>.sectors`;
    "inline" does, too, but in the layout of a drive with metadata; "nvme" uses one of `namespaces`
    for each, with that path a link to it; "memory" stores volumes in memory, until the process
    ends; "emulated" does, too, at the speed of the drive model `drive`.

    "file", "inline" and "nvme" stores check freshness themselves, under keys of `device`, and are
    anchored as the device is: one that was rolled back while no process ran isn't opened.
    "emulated" stores check it, too, without an anchor. A "memory" store is within this process.

    A volume in a file gets its disk space when it is created, unless volumes are `thin`: then a
    write may find the file system full.
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
        thin: bool = False,
        listen: Listen = listen_tcp,
    ) -> None:
        kind = STORE_KINDS[store_kind]
        if kind.is_kept != (directory is not None):
            raise UsageError(
                "target.store", f"store {str(store_kind)!r} with directory {directory}"
            )
        if kind.lies_on_namespaces != bool(namespaces):
            raise UsageError(
                "target.store", f"store {str(store_kind)!r} with namespaces {namespaces}"
            )
        ipaddress.ip_address(traddr)
        self._store_kind = store_kind
        self._drive = drive
        self._directory = directory
        self._drives = Drives(namespaces, directory) if namespaces and directory else None
        self._device = device
        self._thin = thin
        self._volumes: dict[str, TargetSubsystem] = {}
        self.openings = Openings()
        self._listener = Listener(
            self, traddr=traddr, trsvcid=trsvcid, offers_digests=True, listen=listen
        )

    @property
    def listener(self) -> Listener:
        """The NVMe/TCP listener, for other providers and observers."""
        return self._listener

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of the NVMe/TCP listener."""
        return self._listener.address

    async def start(self) -> None:
        """Open, and accept hosts; errors of `open`."""
        await self.open()
        await self._listener.start()

    async def open(self) -> None:
        """Listen, but accept no host; UsageError `listener.address`, or for the directory."""
        if self._directory is not None:
            make_directory(self._directory)
            await asyncio.to_thread(keep_reserve, self._directory)
        self._listener.open()

    async def stop(self) -> None:
        """Close all connections, wait for all queues, and close the stores."""
        await self._listener.stop()
        if self._device is not None:
            self._device.anchors.begin_end()
        for volume in self._volumes.values():
            await volume.close(keep=True)

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Return a volume's subsystem by name, for the listener."""
        return self._volumes.get(subsystem_nqn)

    def subsystem_nqn(self, volume_id: uuid.UUID) -> str:
        """Return the NQN of the volume's secure subsystem."""
        return volume_nqn(volume_id)

    async def create_volume(
        self,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        freshness: bool = True,
        generation: int = 1,
    ) -> None:
        """Create an empty volume.

        UsageError `volume.exists`; UnavailableError `store.full`, `store.create`, `anchor.…`.
        """
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
        """Open a store that an earlier process created.

        UnavailableError `store.open`, `anchor.…` if it can't be opened; VerificationError
        `store.rolled_back` if its anchor has a later state, `sector.stale` if a part of it is older
        than the rest.
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
        takes_secret = STORE_KINDS[self._store_kind].takes_secret(freshness=freshness)
        if self._device is not None and takes_secret:
            secret = self._device.tree_secret(volume_id, generation=generation)
            if freshness and self._device.is_anchored:
                if exist == "create":
                    # An old record is of a volume that was never finished: it isn't catalogued.
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
                return await on_store_thread(
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
                    reserves=not self._thin,
                )
        except FileExistsError as error:
            raise UsageError(
                "volume.exists", f"{path} exists already; remove it or use another volume id"
            ) from error
        except _native.StoreRefusedError as error:
            reason, text = foreign_reason(error.args[0]), error.args[1]
            if reason == "anchor.unreachable":
                raise UnavailableError(reason, f"{path}: {text}") from error
            raise VerificationError(reason, f"{path}: {text}") from error
        except (OSError, ValueError) as error:
            missing = await asyncio.to_thread(_missing_room, path)
            if missing is not None and exist == "create":
                raise UnavailableError(
                    STORE_FULL,
                    f"no space for volume {volume_id}: {missing}; target.thin = true creates "
                    "volumes without reserving space",
                ) from error
            raise UnavailableError(_NO_STORE[exist], f"can't {exist} {path}: {error}") from error

    def opening_progress(self, volume_id: uuid.UUID) -> tuple[int, int]:
        """Return pages and records processed by its opening, and expected."""
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
        """Serve an open sealed namespace and resume its jobs; `close_volume` closes it.

        UsageError `volume.exists`.
        """
        if volume_nqn(volume_id) in self._volumes:
            raise UsageError("volume.exists", f"volume {volume_id} exists already")
        jobs.open(native)
        self._volumes[volume_nqn(volume_id)] = TargetSubsystem(
            volume_id=volume_id,
            native=native,
            subsystem=sealed_subsystem(volume_id, native),
            feed=EventFeed(native, self._listener.queue_closed),
            path=path,
            jobs=jobs,
            anchor=anchor,
        )

    async def resize_volume(self, volume_id: uuid.UUID, *, sector_count: int) -> None:
        """Make a volume larger; its queues end, and its gateways open new ones.

        UsageError `volume.resize.refused` for a size that its store doesn't support,
        UnavailableError `store.extend` if there is no space for it; others of `extended`.
        """
        await self._volume(volume_id).resize(sector_count, self._listener)

    async def discard_store(self, volume_id: uuid.UUID) -> None:
        """Remove the store of a volume that isn't open, if it exists.

        UnavailableError `store.remove`; errors of the device's anchor.
        """
        path = self._path(volume_id)
        if path is None or volume_nqn(volume_id) in self._volumes:
            return
        if self._drives is not None:
            await asyncio.to_thread(self._drives.release, volume_id)
        for gone in (path, path.with_suffix(JOBS_SUFFIX)):
            try:
                await asyncio.to_thread(gone.unlink, missing_ok=True)
            except OSError as error:
                raise UnavailableError(
                    "store.remove", f"can't remove the files of volume {volume_id}: {error}"
                ) from error
        if self._directory is not None:
            await asyncio.to_thread(keep_reserve, self._directory)
        if self._device is not None:
            await self._device.anchors.forget(volume_record(volume_id))

    def _path(self, volume_id: uuid.UUID, suffix: str = STORE_SUFFIX) -> Path | None:
        return self._directory / f"{volume_id}{suffix}" if self._directory else None

    async def close_volume(self, volume_id: uuid.UUID) -> None:
        """Close the volume's queues and its store; unflushed writes may be lost."""
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
        permit: _native.Permit | None,
        is_read_only: bool = False,
    ) -> None:
        """Admit one Connect with `ticket` within TICKET_SECONDS; wipes `secret`.

        If `is_read_only`, the queue refuses commands that change sectors. The queue belongs to
        `gateway`: `fence_gateway` ends it, and it stops working when `permit` expires. UsageError
        `queue.ticket`; ProtocolError `queue.epoch`; UnavailableError `queue.ticket`,
        `queue.gateways`, `namespace.resizing`.
        """
        volume = self._volume(volume_id)
        check_nqn(host_nqn)
        if len(ticket) != TICKET_BYTES or not any(ticket) or ticket in volume.tickets:
            raise UsageError("queue.ticket", f"a ticket has {TICKET_BYTES} new random bytes")
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
        now = monotonic_ns()
        for known in [known for known, old in volume.tickets.items() if old.expires <= now]:
            wipe(volume.tickets.pop(known).secret)
        if len(volume.tickets) >= _TICKETS_MAX:
            raise UnavailableError("queue.ticket", f"{_TICKETS_MAX} unused tickets, the maximum")
        fence = volume.fence_of(host_nqn)
        fence.newest_epoch = association_epoch
        own = bytearray(secret)
        wipe(secret)
        volume.tickets[bytes(ticket)] = Ticket(
            secret=own,
            fence=fence,
            queue_id=queue_id,
            association_epoch=association_epoch,
            incarnation=incarnation,
            gateway=gateway,
            permit=permit,
            is_read_only=is_read_only,
            expires=now + round(TICKET_SECONDS * 1e9),
        )

    def gateways(self) -> Iterable[PeerIncarnation]:
        """Return the gateways that have a queue or a ticket here."""
        return {gateway for volume in self._volumes.values() for gateway in volume.gateways()}

    def users(self) -> set[tuple[uuid.UUID, str]]:
        """Return the volumes that have queues, running or about to start, and whose they are."""
        return {
            (volume.volume_id, host_nqn)
            for volume in self._volumes.values()
            for host_nqn in volume.users()
        }

    @property
    def volume_ids(self) -> set[uuid.UUID]:
        """The volumes that are open here."""
        return {volume.volume_id for volume in self._volumes.values()}

    async def flush(self) -> dict[str, OSError]:
        """Make all volumes' stores durable; return the errors of those that fail, by volume."""
        syncs = {f"volumes/{v.volume_id}": v.native.sync for v in self._volumes.values()}
        return await failures(syncs)

    async def fence_gateway(self, gateway: PeerIncarnation, reason: str) -> None:
        """End a gateway's tickets and queues; return once none of their commands is in flight."""
        fences = [v.fence_gateway(gateway, reason, self._listener) for v in self._volumes.values()]
        await asyncio.gather(*fences)

    async def fence_epochs(self, volume_id: uuid.UUID, host_nqn: str) -> None:
        """End all queues and tickets of a gateway; return once nothing of them is in flight.

        Its next association has a newer epoch.
        """
        newest = self.newest_epoch(volume_id, host_nqn)
        await self.close_older_queues(volume_id, host_nqn, newest + 1)

    async def flush_volume(self, volume_id: uuid.UUID) -> None:
        """Make a volume's store durable; UnavailableError `namespace.flush`, or as `milestone`."""
        try:
            await on_store_thread(self._whole(volume_id).native.sync)
        except OSError as error:
            raise UnavailableError(
                "namespace.flush", f"the store of volume {volume_id} can't be flushed: {error}"
            ) from error

    def newest_epoch(self, volume_id: uuid.UUID, host_nqn: str) -> int:
        """Return the newest association epoch of a gateway; 0 if it has none."""
        fence = self._volume(volume_id).fences.get(host_nqn)
        return fence.newest_epoch if fence is not None else 0

    async def close_older_queues(
        self, volume_id: uuid.UUID, host_nqn: str, association_epoch: int
    ) -> None:
        """Refuse a gateway's older association epochs; return once their queues are drained."""
        volume = self._volume(volume_id)
        fence = volume.fence_of(host_nqn)
        fence.newest_epoch = max(fence.newest_epoch, association_epoch)
        await volume.close_older(fence, self._listener)

    def statistics(self, volume_id: uuid.UUID) -> Mapping[str, int]:
        """Return the engine's counters of a volume."""
        return self._volume(volume_id).statistics()

    def layout(self, volume_id: uuid.UUID) -> str:
        """Return the layout of its store; empty if the store doesn't check freshness."""
        return self._volume(volume_id).native.layout

    def milestone(self, volume_id: uuid.UUID) -> bytes:
        """Return the milestone of its store; empty if the store doesn't check freshness.

        UnavailableError `namespace.resizing`.
        """
        return self._whole(volume_id).native.milestone

    def require_milestone(self, volume_id: uuid.UUID, milestone: bytes) -> None:
        """Check that the volume's store contains the flushes up to a gateway's milestone.

        VerificationError `volume.rolled_back` if not; UnavailableError `namespace.resizing`;
        ProtocolError `queue.milestone.malformed`.
        """
        if len(milestone) not in {0, MILESTONE_BYTES}:
            raise ProtocolError(
                "queue.milestone.malformed", f"a milestone has {MILESTONE_BYTES} bytes or none"
            )
        if not self._whole(volume_id).native.contains(milestone):
            raise VerificationError(
                ROLLED_BACK,
                f"volume {volume_id}: the store lacks flushed writes: it was rolled back to an "
                "older state, or reopened too many times while the gateway was disconnected",
            )

    def jobs(self, volume_id: uuid.UUID) -> VolumeJobs:
        """Return the background jobs of a volume."""
        return self._volume(volume_id).jobs

    async def observe_jobs(self) -> Sequence[tuple[uuid.UUID, Job]]:
        """Record the progress of all jobs; publish and return those that have ended."""
        ended: list[tuple[uuid.UUID, Job]] = []
        for volume in [*self._volumes.values()]:
            ended += [(volume.volume_id, job) for job in await volume.observe_jobs()]
        return ended

    def take_events(self, volume_id: uuid.UUID) -> Sequence[StorageEvent]:
        """Return a volume's events since the last call."""
        return self._volume(volume_id).feed.take()

    def store_path(self, volume_id: uuid.UUID) -> Path | None:
        """Return the file with the volume's sectors; None if it isn't in a file."""
        return self._volume(volume_id).path

    def _volume(self, volume_id: uuid.UUID) -> TargetSubsystem:
        try:
            return self._volumes[volume_nqn(volume_id)]
        except KeyError:
            raise UsageError("volume.unknown", f"this target has no volume {volume_id}") from None

    def _whole(self, volume_id: uuid.UUID) -> TargetSubsystem:
        """Return a volume whose store may be called: while it grows, it waits for this loop."""
        volume = self._volume(volume_id)
        if volume.is_resizing:
            raise UnavailableError("namespace.resizing", f"volume {volume_id} is being resized")
        return volume
