"""Volumes on targets that aren't ours (docs/third-party.md).

A gateway serves such a volume to itself: through a target of its own process, whose store lies on
the third party's plain namespace. Everything between front end and store is what `remote` volumes
have; when the third party is lost, its store is opened again, and the gateway sees a target that
restarted.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from sealane import _native
from sealane.crypto.exchange import wipe
from sealane.crypto.queue import TICKET_BYTES
from sealane.daemon.ports import QueueGrant
from sealane.daemon.storage.events import StorageEvent
from sealane.daemon.storage.target import Target
from sealane.daemon.storage.volume_jobs import JOBS_SECONDS, VolumeJobs
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Digests
from sealane.transport.nvme.initiator import (
    ConnectedQueue,
    ControllerEvent,
    EventKind,
    HostController,
)
from sealane.transport.tasks import TaskOwner

KEEP_ALIVE_MS: Final = 5000
_SECRET_BYTES: Final = 32
_QUEUE_ID: Final = 1
_DATA_BYTES: Final = 4096
_METADATA_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdParty:
    """A namespace of somebody else's, as the operator names it; it holds at most one volume."""

    name: str
    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
    credentials: Credentials | None = None
    digests: Digests = field(default_factory=Digests)
    command_timeout_seconds: float = 20.0


class _Association:
    """A connection with the third party: one controller and one I/O queue."""

    def __init__(self, party: ThirdParty, *, host_nqn: str, keep_alive_ms: int) -> None:
        self._party = party
        self._queue: ConnectedQueue | None = None
        self._host = HostController(
            traddr=party.traddr,
            trsvcid=party.trsvcid,
            subsystem_nqn=party.subsystem_nqn,
            host_nqn=host_nqn,
            keep_alive_ms=keep_alive_ms,
            credentials=party.credentials,
            digests=party.digests,
            events=self._happened,
        )

    @property
    def name(self) -> str:
        """The operator's name of the third party."""
        return self._party.name

    async def open(self) -> _native.RemoteDevice:
        """Connect and check that the namespace is one that a volume can lie on."""
        party = self._party
        await self._host.connect()
        await self._host.request_queues(1)
        namespace = await self._host.identify_namespace(party.namespace_id)
        check_format(party, namespace)
        queue = await self._host.connect_queue(_QUEUE_ID)
        self._queue = queue
        try:
            return _native.RemoteDevice(
                queue.describe(
                    block_bytes=namespace.block_bytes + namespace.metadata_bytes,
                    nsid=party.namespace_id,
                ),
                block_count=namespace.block_count,
                timeout_seconds=party.command_timeout_seconds,
            )
        except ValueError as error:
            raise UsageError("third_party.format", f"{party.name!r}: {error}") from error

    async def close(self) -> None:
        """End both."""
        self._end_queue()
        if self._queue is not None:
            self._queue.close()
        await self._host.close()

    def _happened(self, event: ControllerEvent) -> None:
        if event.kind is EventKind.LOST:
            self._end_queue()

    def _end_queue(self) -> None:
        """Have the engine, which holds a duplicate of the socket, see the end now."""
        if self._queue is not None:
            with contextlib.suppress(OSError):
                self._queue.socket.shutdown(2)


class _Claim:
    """The one process of this node that uses a third party's namespace.

    The file is locked while it does, and says "in use" until it has ended in good order: then no
    command of it can be on its way any more.
    """

    def __init__(self, path: Path, name: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise UnavailableError(
                "third_party.busy", f"{name!r} is in use by a volume of this gateway"
            ) from error
        self.was_in_use = bool(os.pread(self._descriptor, 1, 0))
        os.pwrite(self._descriptor, b"in use\n", 0)
        os.fsync(self._descriptor)

    def release(self, *, is_clean: bool) -> None:
        """Let others use it."""
        if is_clean:
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """Which store a volume has on a namespace, and the key that authenticates it."""

    volume_id: uuid.UUID
    sector_count: int
    store_key: bytearray = field(repr=False)
    freshness: bool = True


class ThirdPartyVolume:
    """An attached volume's back end; `open_queue` is what the gateway asks for queues."""

    def __init__(
        self, stores: "ThirdPartyStores", party: ThirdParty, identity: "StoreIdentity"
    ) -> None:
        self._stores = stores
        self._party = party
        self._identity = identity
        self._volume_id = identity.volume_id
        self._claim: _Claim | None = None
        self._association: _Association | None = None
        self._native: _native.Namespace | None = None
        self.jobs = VolumeJobs()
        """They go on when the store is opened again, and end with this."""
        self._turn = asyncio.Lock()
        self._epoch = 0
        self._incarnation = 0
        self._is_fresh = False
        self._is_closed = False

    async def open(self) -> None:
        """Claim the namespace and open the store on it."""
        self._claim = await asyncio.to_thread(self._stores.claim, self._party)
        try:
            if self._claim.was_in_use:
                await self._stores.wait_for_fence()
            await self._open_store()
            self._is_fresh = True
        except BaseException:
            await self.close()
            raise

    async def open_queue(self, queue_id: int, association_epoch: int) -> QueueGrant:
        """Admit a queue. The first one of a newer epoch fences all older ones."""
        async with self._turn:
            if self._is_closed:
                raise UnavailableError("third_party.closed", "the volume is being detached")
            if association_epoch < self._epoch:
                raise VerificationError(
                    "queue.association.stale",
                    f"association epoch {association_epoch}; allowed: {self._epoch} and up",
                )
            if association_epoch > self._epoch:
                if not self._is_fresh:
                    await self._reopen()
                self._epoch = association_epoch
                self._is_fresh = False
            target = self._stores.target
            ticket = secrets.token_bytes(TICKET_BYTES)
            secret = secrets.token_bytes(_SECRET_BYTES)
            target.admit_queue(
                ticket,
                volume_id=self._volume_id,
                host_nqn=self._stores.host_nqn,
                queue_id=queue_id,
                secret=bytearray(secret),
                association_epoch=association_epoch,
                incarnation=self._incarnation,
                gateway=None,
            )
            traddr, trsvcid = target.address
            return QueueGrant(
                ticket=ticket,
                secret=bytearray(secret),
                association_epoch=association_epoch,
                target_incarnation=self._incarnation,
                traddr=traddr,
                trsvcid=trsvcid,
                subsystem_nqn=target.subsystem_nqn(self._volume_id),
                host_nqn=self._stores.host_nqn,
            )

    @property
    def layout(self) -> str:
        """How its store lays sectors out; empty: it keeps no freshness, or isn't open."""
        return "" if self._native is None else self._native.layout

    def statistics(self) -> Mapping[str, int]:
        """Counters of the store; none while it is being opened again."""
        return {} if self._native is None else self._native.statistics()

    def take_events(self) -> Sequence[StorageEvent]:
        """Take the target's events since the last call."""
        if self._native is None:
            return ()
        return self._stores.target.take_events(self._volume_id)

    async def close(self) -> None:
        """Make everything durable, close the store, leave the third party."""
        async with self._turn:
            self._is_closed = True
            is_clean = False
            if self._native is not None:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(self._native.sync)
                    is_clean = True
            await self._close_store()
            if self._claim is not None:
                claim, self._claim = self._claim, None
                await asyncio.to_thread(claim.release, is_clean=is_clean)
            wipe(self._identity.store_key)

    async def _reopen(self) -> None:
        """Close the store and open it through a new association, as a new incarnation.

        What the old association still has on its way could land later: its end is waited for.
        """
        await self._close_store()
        await self._stores.wait_for_fence()
        await self._open_store()

    async def _open_store(self) -> None:
        association = self._stores.association(self._party)
        try:
            native = await self._stores.store(association, self._identity, exist="open")
        except BaseException:
            await association.close()
            raise
        self._association = association
        self._native = native
        self._incarnation = secrets.randbits(63) + 1
        self._stores.target.serve_volume(self._volume_id, native, jobs=self.jobs)

    async def _close_store(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            await self._stores.target.close_volume(self._volume_id)
        association, self._association = self._association, None
        if association is not None:
            await association.close()


class ThirdPartyStores:
    """The third parties that the operator named, and the target that serves what lies on them."""

    def __init__(
        self,
        parties: Sequence[ThirdParty],
        *,
        host_nqn: str,
        directory: Path,
        keep_alive_ms: int = KEEP_ALIVE_MS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._parties = {party.name: party for party in parties}
        self._directory = directory
        self._keep_alive_ms = keep_alive_ms
        self._sleep = sleep
        self.host_nqn = host_nqn
        self.target = Target(traddr="127.0.0.1", trsvcid=0, store_kind="memory")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen on a loopback port, which admits queues with a ticket of this process only."""
        await self.target.start()
        tasks = TaskOwner()
        tasks.start(self._observe_jobs(), name="third-party-jobs")
        try:
            yield
        finally:
            await tasks.close()
            await self.target.stop()

    async def _observe_jobs(self) -> None:
        while True:
            await asyncio.sleep(JOBS_SECONDS)
            await self.target.observe_jobs()

    async def create(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        store_key: bytearray,
        freshness: bool = True,
    ) -> None:
        """Lay out an empty volume; again is harmless. UsageError if there is something else."""
        identity = StoreIdentity(
            volume_id=volume_id,
            sector_count=sector_count,
            store_key=store_key,
            freshness=freshness,
        )
        async with self._using(name) as association:
            try:
                native = await self.store(association, identity, exist="create")
            except UsageError as error:
                if error.reason != "third_party.occupied":
                    raise
                occupied = error
            else:
                await asyncio.to_thread(native.close)
                return
        async with self._using(name) as association:
            try:
                native = await self.store(association, identity, exist="open")
            except UnavailableError as error:
                raise occupied from error
            await asyncio.to_thread(native.close)

    async def delete(self, name: str, volume_id: uuid.UUID) -> None:
        """Take a volume off its namespace: its sectors stay, but nothing leads to them."""
        async with self._using(name) as association:
            device = await association.open()
            try:
                await asyncio.to_thread(device.erase, volume_id.bytes)
            except OSError as error:
                raise _store_error(name, error) from error

    async def attach(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        store_key: bytearray,
        freshness: bool = True,
    ) -> ThirdPartyVolume:
        """Open a volume for this gateway alone; keeps a copy of the key until it is closed."""
        identity = StoreIdentity(
            volume_id=volume_id,
            sector_count=sector_count,
            store_key=bytearray(store_key),
            freshness=freshness,
        )
        volume = ThirdPartyVolume(self, self._party(name), identity)
        await volume.open()
        return volume

    def claim(self, party: ThirdParty) -> _Claim:
        """Lock a third party against every other use by this node. Blocking."""
        return _Claim(self._directory / f"{party.name}.lock", party.name)

    def association(self, party: ThirdParty) -> _Association:
        """Make an association that isn't connected yet."""
        return _Association(party, host_nqn=self.host_nqn, keep_alive_ms=self._keep_alive_ms)

    async def wait_for_fence(self) -> None:
        """Wait until the third party must have given up an association that was lost."""
        await self._sleep(2 * self._keep_alive_ms / 1000)

    async def store(
        self,
        association: _Association,
        identity: StoreIdentity,
        *,
        exist: Literal["create", "open"],
    ) -> _native.Namespace:
        """Connect, and create or open the store of a volume."""
        device = await association.open()
        try:
            return await asyncio.to_thread(
                _native.Namespace.on_device,
                device,
                volume_id=identity.volume_id.bytes,
                block_count=identity.sector_count,
                # The engine wipes what it takes.
                store_key=bytearray(identity.store_key),
                exist=exist,
                freshness=identity.freshness,
            )
        except OSError as error:
            raise _store_error(association.name, error) from error

    @contextlib.asynccontextmanager
    async def _using(self, name: str) -> AsyncIterator[_Association]:
        """Use a third party for a moment."""
        party = self._party(name)
        claim = await asyncio.to_thread(self.claim, party)
        is_clean = False
        association = self.association(party)
        try:
            if claim.was_in_use:
                await self.wait_for_fence()
            yield association
            is_clean = True
        except UsageError:
            is_clean = True
            raise
        finally:
            await association.close()
            await asyncio.to_thread(claim.release, is_clean=is_clean)

    def _party(self, name: str) -> ThirdParty:
        try:
            return self._parties[name]
        except KeyError:
            known = ", ".join(sorted(self._parties)) or "none is configured"
            raise UsageError(
                "third_party.unknown", f"third party {name[:80]!r}; allowed: {known}"
            ) from None


def check_format(party: ThirdParty, namespace: NamespaceIdentity) -> None:
    """Raise UsageError `third_party.format` for metadata that a volume can't lie on."""
    found = (namespace.block_bytes, namespace.metadata_bytes)
    is_format = namespace.is_extended and namespace.protection_type == 0
    if namespace.metadata_bytes and not (found == (_DATA_BYTES, _METADATA_BYTES) and is_format):
        raise UsageError(
            "third_party.format",
            f"namespace {party.namespace_id} of {party.name!r} has {namespace.metadata_bytes} "
            f"bytes of metadata per block of {namespace.block_bytes}, extended "
            f"{namespace.is_extended}, protection type {namespace.protection_type}; allowed: "
            f"{_METADATA_BYTES} per {_DATA_BYTES}, extended, none; or no metadata",
        )


def _store_error(name: str, error: OSError) -> Error:
    if isinstance(error, FileExistsError):
        return UsageError("third_party.occupied", f"{name!r}: {error}")
    return UnavailableError("third_party.store", f"{name!r}: {error}")
