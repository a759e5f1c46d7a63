"""Volumes on targets that are not Sealane's (docs/operate/third-party.md).

The gateway serves such a volume to itself, through a target in its own process whose store lies on
the third party's plain namespace. Everything between front end and store is the same as for
`remote` volumes. When the third party is lost, the store is opened again; to the gateway this looks
like a target that restarted.
"""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sealane import _native
from sealane.crypto.exchange import wipe
from sealane.crypto.queue import TICKET_BYTES
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.daemon.device.store_anchor import StoreAnchor
from sealane.daemon.device.third_party import OpenDevice, VolumeDevice
from sealane.daemon.gateway.grants import QueueGrant
from sealane.daemon.gateway.third_party_link import Association, Claim, ThirdParty
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.volume_subsystem import extended
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.daemon.volume.kept_jobs import JOBS_SECONDS, VolumeJobs
from sealane.daemon.volume.store_calls import on_store_thread
from sealane.errors import Error, UnavailableError, UsageError, VerificationError, foreign_reason
from sealane.protocol.kinds import StoreKind
from sealane.transport.tasks import TaskOwner

KEEP_ALIVE_MS: Final = 5000
OwnAuthorization: TypeAlias = Callable[
    [uuid.UUID], Awaitable[tuple[PeerIncarnation, _native.Permit]]
]
"""Returns this gateway's own authorization for a volume, with its end; raises if it has none.

No Sealane target stands between the gateway and a third party, so its own authorization is the
limit."""
_SECRET_BYTES: Final = 32
_STORE: Final = "third_party.store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """Identity of a volume's store on a namespace, and the key that authenticates it.

    With `open_device` the store is anchored: an older state of the whole store is refused, too.
    """

    volume_id: uuid.UUID
    sector_count: int
    store_key: bytearray = field(repr=False)
    freshness: bool = True
    open_device: OpenDevice | None = None


class ThirdPartyVolume:
    """Back end of an attached volume; the gateway opens queues with `open_queue`."""

    def __init__(
        self, stores: "ThirdPartyStores", party: ThirdParty, identity: "StoreIdentity"
    ) -> None:
        self._stores = stores
        self._party = party
        self._identity = identity
        self._volume_id = identity.volume_id
        self._claim: Claim | None = None
        self._association: Association | None = None
        self._device: VolumeDevice | None = None
        self._native: _native.Namespace | None = None
        self.jobs = VolumeJobs()
        """Jobs continue when the store is opened again, and end with this object."""
        self._tasks = TaskOwner()
        self._turn = asyncio.Lock()
        self._epoch = 0
        self._incarnation = 0
        self._is_fresh = False
        self._is_refused = False
        self._is_closed = False

    async def open(self) -> None:
        """Claim the namespace and the volume's anchor, and open the store on it.

        VerificationError `store.rolled_back` if its anchor knows of a later state.
        """
        self._claim = await asyncio.to_thread(self._stores.claim, self._party)
        try:
            if self._claim.was_in_use:
                await self._stores.wait_for_fence()
            if self._identity.open_device is not None:
                self._device = await self._identity.open_device()
                self._device.on_loss = self._lose
            await self._open_store()
            if self._device is not None:
                await self._device.confirm()
            self._is_fresh = True
        except VerificationError:
            # The third party has answered all requests: nothing is in flight.
            self._is_refused = True
            await self.close()
            raise
        except BaseException:
            await self.close()
            raise

    async def open_queue(
        self, queue_id: int, association_epoch: int, milestone: bytes = b""
    ) -> QueueGrant:
        """Admit a queue. The first queue of a newer epoch fences all older ones.

        VerificationError `volume.rolled_back` if the store doesn't contain `milestone`.
        """
        async with self._turn:
            if self._is_closed:
                raise UnavailableError("third_party.closed", "the volume is being detached")
            if self._device is not None and self._device.loss is not None:
                raise self._device.loss
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
            gateway, permit = await self._stores.authorized(self._volume_id)
            target.require_milestone(self._volume_id, milestone)
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
                gateway=gateway,
                permit=permit,
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
                confirmed=milestone,
                milestone=target.milestone(self._volume_id),
            )

    @property
    def layout(self) -> str:
        """Layout of the store's sectors; empty: it keeps no freshness, or isn't open."""
        return "" if self._native is None else self._native.layout

    def statistics(self) -> Mapping[str, int]:
        """Return the store's counters; empty while it is being opened again. For any thread."""
        native = self._native
        return {} if native is None else native.statistics()

    def take_events(self) -> Sequence[StorageEvent]:
        """Take the target's events since the last call."""
        if self._native is None:
            return ()
        return self._stores.target.take_events(self._volume_id)

    async def close(self) -> None:
        """Make everything durable, close the store and disconnect from the third party."""
        async with self._turn:
            self._is_closed = True
            is_clean = self._is_refused
            if self._native is not None:
                with contextlib.suppress(OSError):
                    await on_store_thread(self._native.sync)
                    is_clean = True
            await self._close_store()
            if self._device is not None:
                await self._device.close()
            if self._claim is not None:
                claim, self._claim = self._claim, None
                await asyncio.to_thread(claim.release, is_clean=is_clean)
            wipe(self._identity.store_key)
        await self._tasks.close()

    def _lose(self) -> None:
        """Release the store: another opening of the volume has taken over its anchor."""
        self._tasks.start(self._abandon(), name="third-party-lost")

    async def _abandon(self) -> None:
        async with self._turn:
            await self._close_store()

    async def _reopen(self) -> None:
        """Close the store and open it again through a new association, as a new incarnation.

        Commands in flight on the old association could take effect later, so this waits until they
        can't.
        """
        await self._close_store()
        await self._stores.wait_for_fence()
        await self._open_store()

    async def _open_store(self) -> None:
        association = self._stores.association(self._party)
        try:
            native, anchor = await self._stores.store(
                association, self._identity, self._device, exist="open"
            )
        except BaseException:
            await association.close()
            raise
        self._association = association
        self._native = native
        self._incarnation = secrets.randbits(63) + 1
        self._stores.target.serve_volume(self._volume_id, native, jobs=self.jobs, anchor=anchor)

    async def _close_store(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            await self._stores.target.close_volume(self._volume_id)
        association, self._association = self._association, None
        if association is not None:
            await association.close()


class ThirdPartyStores:
    """Configured third parties, and the target that serves the volumes on them."""

    def __init__(
        self,
        parties: Sequence[ThirdParty],
        *,
        host_nqn: str,
        directory: Path,
        authorized: OwnAuthorization,
        keep_alive_ms: int = KEEP_ALIVE_MS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Serve volumes on `parties` while `authorized` confirms that the gateway may use them."""
        self._parties = {party.name: party for party in parties}
        self._directory = directory
        self.authorized = authorized
        """Called before each queue."""
        self._keep_alive_ms = keep_alive_ms
        self._sleep = sleep
        self.host_nqn = host_nqn
        self.target = Target(traddr="127.0.0.1", trsvcid=0, store_kind=StoreKind.MEMORY)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen on a loopback port that admits only queues with a ticket of this process."""
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
        open_device: OpenDevice | None = None,
    ) -> None:
        """Lay out an empty volume. Idempotent. UsageError if the namespace holds something else.

        With `open_device` its first state is anchored before this returns.
        """
        identity = StoreIdentity(
            volume_id=volume_id,
            sector_count=sector_count,
            store_key=store_key,
            freshness=freshness,
        )
        device = None if open_device is None else await open_device()
        try:
            # A confirmed device was laid out already, and may hold data.
            if device is None or device.is_believed:
                occupied = await self._lay_out(name, identity, device)
            else:
                occupied = UsageError(
                    "third_party.occupied", f"{name!r}: already laid out as a store"
                )
            if occupied is not None:
                await self._look(name, identity, device, occupied)
            if device is not None:
                await device.confirm()
        finally:
            if device is not None:
                await device.close()

    async def _lay_out(
        self, name: str, identity: StoreIdentity, device: VolumeDevice | None
    ) -> UsageError | None:
        """Lay out a store; return the error if the namespace is occupied."""
        if device is not None:
            # Left over from an interrupted attempt.
            await device.anchors.forget(volume_record(identity.volume_id))
        async with self._using(name) as association:
            try:
                opened = await self.store(association, identity, device, exist="create")
            except UsageError as error:
                if error.reason != "third_party.occupied":
                    raise
                return error
            await _close(*opened)
        return None

    async def _look(
        self,
        name: str,
        identity: StoreIdentity,
        device: VolumeDevice | None,
        occupied: UsageError,
    ) -> None:
        """Raise `occupied` unless the namespace holds the volume's store."""
        async with self._using(name) as association:
            try:
                opened = await self.store(association, identity, device, exist="open")
            except UnavailableError as error:
                if error.reason != _STORE:
                    raise
                raise occupied from error
            await _close(*opened)

    async def resize(
        self,
        name: str,
        volume_id: uuid.UUID,
        *,
        sector_count: int,
        larger_sector_count: int,
        store_key: bytearray,
        open_device: OpenDevice | None = None,
    ) -> None:
        """Make a detached volume of `sector_count` sectors larger. Idempotent.

        UnavailableError `store.extend` if its namespace has no room for it.
        """
        identity = StoreIdentity(
            volume_id=volume_id, sector_count=sector_count, store_key=store_key
        )
        device = None if open_device is None else await open_device()
        try:
            async with self._using(name) as association:
                native, anchor = await self.store(association, identity, device, exist="open")
                try:
                    await extended(native, larger_sector_count)
                finally:
                    await _close(native, anchor)
            if device is not None:
                await device.confirm()
        finally:
            if device is not None:
                await device.close()

    async def delete(self, name: str, volume_id: uuid.UUID) -> None:
        """Remove a volume from its namespace; its sectors stay but become unreachable."""
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
        open_device: OpenDevice | None = None,
    ) -> ThirdPartyVolume:
        """Open a volume for this gateway alone; keeps a copy of the key until it is closed.

        `open_device` opens the volume's device, if it is anchored.
        """
        identity = StoreIdentity(
            volume_id=volume_id,
            sector_count=sector_count,
            store_key=bytearray(store_key),
            freshness=freshness,
            open_device=open_device,
        )
        volume = ThirdPartyVolume(self, self._party(name), identity)
        await volume.open()
        return volume

    def claim(self, party: ThirdParty) -> Claim:
        """Lock a third party against all other uses by this node. Blocking."""
        return Claim(self._directory / f"{party.name}.lock", party.name)

    def association(self, party: ThirdParty) -> Association:
        """Create an association without connecting it."""
        return Association(party, host_nqn=self.host_nqn, keep_alive_ms=self._keep_alive_ms)

    async def wait_for_fence(self) -> None:
        """Wait until the third party must have dropped an association that was lost."""
        await self._sleep(2 * self._keep_alive_ms / 1000)

    async def store(
        self,
        association: Association,
        identity: StoreIdentity,
        device: VolumeDevice | None,
        *,
        exist: Literal["create", "open"],
    ) -> tuple[_native.Namespace, StoreAnchor | None]:
        """Connect, and create or open a volume's store; the caller closes the anchor after it."""
        remote = await association.open()
        anchor = None if device is None else await _anchor(device, identity.volume_id)
        try:
            native = await on_store_thread(
                _native.Namespace.on_device,
                remote,
                volume_id=identity.volume_id.bytes,
                block_count=identity.sector_count,
                # The engine wipes the key that it is given.
                store_key=bytearray(identity.store_key),
                exist=exist,
                freshness=identity.freshness,
                anchor=None if anchor is None else anchor.native,
            )
        except BaseException as error:
            if anchor is not None:
                await anchor.close()
            if isinstance(error, OSError):
                raise _store_error(association.name, error) from error
            raise
        return native, anchor

    @contextlib.asynccontextmanager
    async def _using(self, name: str) -> AsyncIterator[Association]:
        """Use a third party for the duration of a block."""
        party = self._party(name)
        claim = await asyncio.to_thread(self.claim, party)
        is_clean = False
        association = self.association(party)
        try:
            if claim.was_in_use:
                await self.wait_for_fence()
            yield association
            is_clean = True
        except (UsageError, VerificationError):
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


async def _anchor(device: VolumeDevice, volume_id: uuid.UUID) -> StoreAnchor:
    """Return the anchored state, once no change of an earlier opening of the store is in flight."""
    await device.anchors.settle()
    return StoreAnchor(device.anchors, volume_id, rarely=False, believed=device.is_believed)


async def _close(native: _native.Namespace, anchor: StoreAnchor | None) -> None:
    # Closing the store anchors its last state: the anchor must answer until then.
    await on_store_thread(native.close)
    if anchor is not None:
        await anchor.close()


def _store_error(name: str, error: OSError) -> Error:
    if isinstance(error, FileExistsError):
        return UsageError("third_party.occupied", f"{name!r}: {error}")
    if isinstance(error, _native.StoreRefusedError):
        reason, text = foreign_reason(error.args[0]), error.args[1]
        if reason != "anchor.unreachable":
            return VerificationError(reason, f"{name!r}: {text}")
        return UnavailableError(reason, f"{name!r}: {text}")
    return UnavailableError(_STORE, f"{name!r}: {error}")
