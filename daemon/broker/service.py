"""What the broker does: registers volumes, releases keys, grants leases (DESIGN §6)."""

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sealane.crypto.certificates import NAME_PATTERN, Subject
from sealane.crypto.exchange import wipe
from sealane.crypto.hpke import Context, SignedSecret, seal_signed
from sealane.crypto.keys import derive_volume_key
from sealane.crypto.lease import Arena, Lease
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.key_epochs import KeyEpochs
from sealane.daemon.broker.records import GrantRecord, ShareRecord, Stored, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.calls import page_limit, parse_uuid
from sealane.daemon.clock import utc_now
from sealane.daemon.logs import get_logger
from sealane.daemon.metrics import Metrics
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2
from sealane.transport.tasks import TaskOwner

SECTOR_BYTES: Final = 4096
SECTOR_COUNT_MAX: Final = 1 << 40
DISPLAY_NAME_CHARACTERS_MAX: Final = 128
MODES: Final = {"", "local", "off"}

# Answers kept for retries; one that fell out costs a retry a fresh lease, which is burned.
_ANSWERS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedLease:
    """A sealed lease and the arena its context names."""

    secret: SignedSecret
    lease_id: int
    broker_instance: int
    start_epoch: int


@dataclass(frozen=True, slots=True)
class _Grant:
    """What was asked, as a digest, and the lease it gets."""

    asked: bytes
    lease: "asyncio.Future[SignedLease]"

    def is_of(self, lease_id: int) -> bool:
        """Whether it got that lease."""
        return self.lease.done() and self.lease.result().lease_id == lease_id


class BrokerService:
    """One start of the broker: what it knows, and the arena of this start."""

    def __init__(
        self, registry: Registry, instance: Instance, *, audit: Audit, metrics: Metrics
    ) -> None:
        self.registry = registry
        self.audit = audit
        self._instance = instance
        self._metrics = metrics
        self.authority = registry.authority
        self.arena = instance.arena
        self.key_epochs = KeyEpochs(registry)
        # Grants by who asked, also those on their way: a retry joins the first.
        self._grants: OrderedDict[tuple[bytes, bytes], _Grant] = OrderedDict()
        self._tasks = TaskOwner()

    async def close(self) -> None:
        """Give up the grants on their way: what they took of the arena is burned."""
        await self._tasks.close()

    async def register_volume(
        self,
        caller: Subject,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        mode: str = "",
        third_party: str = "",
        fully_sealed: bool = False,
    ) -> broker_pb2.RegisterVolumeResponse:
        """Register a volume of the caller's tenant; the same request id gives the same volume.

        A volume on a third party belongs to one gateway: the caller, which alone ever gets its key
        and leases. The caller also fills a volume that is fully sealed, as all of mode "off" are.
        """
        sector_count, rest = divmod(size_bytes, SECTOR_BYTES)
        if rest or not 1 <= sector_count <= SECTOR_COUNT_MAX:
            raise UsageError(
                "volume.size",
                f"volume size {size_bytes} bytes; allowed: a multiple of {SECTOR_BYTES} from "
                f"{SECTOR_BYTES} to {SECTOR_COUNT_MAX * SECTOR_BYTES}",
            )
        if len(display_name) > DISPLAY_NAME_CHARACTERS_MAX or not display_name.isprintable():
            raise UsageError(
                "volume.display_name",
                f"display name of {len(display_name)} characters; allowed: at most "
                f"{DISPLAY_NAME_CHARACTERS_MAX} printable ones",
            )
        if NAME_PATTERN.fullmatch(target_node) is None:
            raise UsageError(
                "volume.target", f"target {target_node[:80]!r}; allowed: the name of a node"
            )
        if mode not in MODES or bool(third_party) not in {mode != "", mode == "local"}:
            raise UsageError(
                "volume.mode",
                f"volume mode {mode[:80]!r} on third party {third_party[:80]!r}; allowed: "
                "no mode on a target, local on a third party, off on either",
            )
        if third_party and (
            NAME_PATTERN.fullmatch(third_party) is None or target_node != caller.node
        ):
            raise UsageError(
                "volume.third_party",
                f"third party {third_party[:80]!r} of node {target_node!r}; allowed: a name that "
                "the caller's own configuration gives one",
            )
        is_sealed = fully_sealed or mode == "off"
        record = VolumeRecord(
            volume_id=uuid.uuid4(),
            tenant=caller.tenant,
            display_name=display_name,
            sector_count=sector_count,
            target_node=target_node,
            generation=1,
            key_epoch=1,
            mode=mode,
            third_party=third_party,
            fully_sealed=is_sealed,
            filling_gateway=caller.node if is_sealed else "",
            request_id=parse_uuid(request_id, what="request id"),
        )
        stored, is_new = await self.registry.register(record)
        return broker_pb2.RegisterVolumeResponse(volume=self._signed(stored, caller), is_new=is_new)

    async def descriptor(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Return a volume's signed descriptor to its target or a gateway that may use it."""
        return self._signed(await self._volume(caller, volume_id), caller)

    async def descriptors(
        self, caller: Subject, *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.SignedVolumeDescriptor], str]:
        """Return a page of descriptors and the token of the next one (empty: no more)."""
        after = str(parse_uuid(page_token, what="page token")) if page_token else ""
        limit = page_limit(page_size)
        is_target = caller.role == "target"
        records = await self.registry.list_volumes(
            tenant=None if is_target else caller.tenant,
            target_node=caller.node if is_target else None,
            after=after,
            limit=limit + 1,
        )
        more = len(records) > limit
        page = records[:limit]
        return [self._signed(r, caller) for r in page], str(page[-1].volume_id) if more else ""

    async def finish_filling(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Let gateways attach a volume that the caller, and nobody else, has filled."""
        record = await self._own_volume(caller, volume_id)
        if record.filling_gateway not in {"", caller.node}:
            raise VerificationError(
                "volume.filling.refused",
                f"volume {record.volume_id} is filled by gateway {record.filling_gateway!r}",
            )
        return self._signed(await self.registry.finish_filling(record.volume_id), caller)

    async def unregister_volume(self, caller: Subject, volume_id: str) -> None:
        """Forget a volume: no key of it is released again."""
        record = await self._own_volume(caller, volume_id)
        revision = await self.registry.unregister(record.volume_id)
        # A key that nobody may have any more must not come back with an older store.
        await self._instance.cover(revision)
        await self.audit.record(
            "volume.unregister", subject=caller.spiffe_id, outcome="done", volume_id=volume_id
        )

    async def share_volume(
        self, caller: Subject, volume_id: str, *, tenant: str, read_only: bool
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Let gateways of another tenant use a volume of the caller's.

        UsageError `volume.share.tenant`, `.third_party`, `.limit`. It doesn't tell whether there is
        such a tenant: that is the policy's.
        """
        record = await self._own_volume(caller, volume_id)
        if NAME_PATTERN.fullmatch(tenant) is None or tenant == record.tenant:
            raise UsageError(
                "volume.share.tenant", f"tenant {tenant[:80]!r}; allowed: another one's name"
            )
        if record.third_party:
            raise UsageError(
                "volume.share.third_party",
                f"volume {record.volume_id} belongs to gateway {record.target_node!r} alone; "
                "volumes on a target of ours can be shared",
            )
        share = ShareRecord(tenant=tenant, read_only=read_only)
        shared = await self.registry.share(record.volume_id, share)
        await self.audit.record(
            "volume.share",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            shared_with=tenant,
            read_only=read_only,
        )
        get_logger().info(
            "volume_shared", volume_id=volume_id, shared_with=tenant, read_only=read_only
        )
        return self._signed(shared, caller)

    async def unshare_volume(
        self, caller: Subject, volume_id: str, *, tenant: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """End a tenant's share; nothing sealed from its new key epoch on is open to that tenant.

        UsageError `volume.share.not_found`.
        """
        record = await self._own_volume(caller, volume_id)
        after, is_rotated = await self.key_epochs.withdraw(record.volume_id, tenant)
        # An older store must not bring the share back.
        await self._instance.cover(await self.registry.store.revision())
        await self.audit.record(
            "volume.unshare",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            shared_with=tenant,
            key_epoch=after.key_epoch,
            rotated=is_rotated,
        )
        get_logger().info("volume_unshared", volume_id=volume_id, shared_with=tenant)
        if is_rotated:
            await self._cover_rotation([after])
        else:
            get_logger().error(
                "key_not_rotated", volume_id=volume_id, reason="volume.key_epoch.limit"
            )
        return self._signed(after, caller)

    async def rotate_key(self, volume_id: uuid.UUID) -> VolumeRecord:
        """Begin a volume's next key epoch; UsageError `volume.not_found`, `volume.key_epoch.…`."""
        volume = await self.key_epochs.rotate(volume_id)
        await self._cover_rotation([volume])
        return volume

    async def rotate_keys_of(self, spiffe_id: str) -> None:
        """Begin new key epochs wherever a node that lost its trust holds the newest key."""
        await self._cover_rotation(await self.key_epochs.rotate_held_by(spiffe_id))

    async def _cover_rotation(self, volumes: Sequence[VolumeRecord]) -> None:
        for volume in volumes:
            await self.audit.record(
                "key.rotate",
                subject="broker",
                outcome="done",
                volume_id=str(volume.volume_id),
                key_epoch=volume.key_epoch,
            )
            get_logger().info(
                "key_rotated", volume_id=str(volume.volume_id), key_epoch=volume.key_epoch
            )
        if volumes:
            # An older store must not bring a key back into use.
            await self._instance.cover(await self.registry.store.revision())

    async def release_key(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedSecret:
        """Seal one key epoch of a volume to the caller's attested KEM key."""
        record = await self._volume(caller, volume_id)
        _check_owner(record, caller)
        if key_epoch not in record.key_epochs:
            raise _wrong_epoch(record, key_epoch)
        await self.key_epochs.note_holder(caller.spiffe_id, record.volume_id, key_epoch)
        tenant_key = await self.registry.tenant_key(record.tenant)
        volume_key = derive_volume_key(tenant_key, volume_id=record.volume_id, key_epoch=key_epoch)
        try:
            secret = seal_signed(
                volume_key,
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=_context("volume key", caller, record, key_epoch, request_id=request_id),
                signing_key=self.authority.signing_key,
            )
        finally:
            wipe(tenant_key)
            wipe(volume_key)
        await self.audit.record(
            "key.release",
            subject=caller.spiffe_id,
            outcome="granted",
            volume_id=volume_id,
            key_epoch=key_epoch,
            incarnation=caller.incarnation,
            request_id=request_id,
        )
        self._metrics.keys_released.inc()
        get_logger().info(
            "key_released",
            volume_id=volume_id,
            key_epoch=key_epoch,
            recipient=caller.spiffe_id,
            incarnation=caller.incarnation.hex(),
        )
        return secret

    async def grant_lease(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedLease:
        """Grant the next counters of this start's arena, sealed to the caller.

        A retry with the same request id from the same incarnation gets the same counters.
        """
        volume = await self._grantable(caller, volume_id, key_epoch)
        context = _context(
            "lease", caller, volume.record, key_epoch, request_id=request_id, arena=self.arena
        )
        asked = hashlib.sha256(context.info()).digest()
        grant = self._grants.get((caller.incarnation, request_id))
        if grant is None:
            grant = _Grant(asked, asyncio.get_running_loop().create_future())
            self._grants[caller.incarnation, request_id] = grant
            if len(self._grants) > _ANSWERS_MAX:
                self._grants.popitem(last=False)
            self._tasks.start(self._settle_grant(grant, caller, context), name="grant")
        elif grant.asked != asked:
            raise UsageError("lease.request.exists", "this request id was used for another lease")
        # A caller that goes away must not stop what another may be waiting for.
        return await asyncio.shield(grant.lease)

    async def _settle_grant(self, grant: "_Grant", caller: Subject, context: Context) -> None:
        try:
            lease = await self._grant(caller, context)
        except BaseException as error:
            self._grants.pop((caller.incarnation, context.request_id), None)
            if isinstance(error, asyncio.CancelledError):
                grant.lease.cancel()
                raise
            grant.lease.set_exception(error)
            grant.lease.exception()  # who asked may be gone
        else:
            grant.lease.set_result(lease)

    async def _grant(self, caller: Subject, context: Context) -> SignedLease:
        """Take counters out of the arena, enter them in the books, seal them."""
        granted = self.arena.grant(incarnation=caller.incarnation)

        async def attempt() -> VolumeRecord | None:
            # A volume deleted, or given a new key epoch, in between gets no lease of the old one.
            volume = await self._grantable(caller, context.volume_id, context.key_epoch)
            record = GrantRecord(
                broker_instance=self.arena.broker_instance,
                start_epoch=self.arena.start_epoch,
                lease_id=granted.lease_id,
                ranges=tuple((r.counter_start, r.counter_end) for r in granted.ranges),
                volume_id=volume.record.volume_id,
                key_epoch=context.key_epoch,
                recipient=caller.spiffe_id,
                incarnation=caller.incarnation,
                granted_at=utc_now(),
            )
            recorded = await self.registry.record_grant(record, volume=volume)
            return volume.record if recorded else None

        volume = await self.registry.settle(attempt)
        lease = SignedLease(
            secret=seal_signed(
                _lease_message(volume, context.key_epoch, granted),
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=context,
                signing_key=self.authority.signing_key,
            ),
            lease_id=granted.lease_id,
            broker_instance=self.arena.broker_instance,
            start_epoch=self.arena.start_epoch,
        )
        await self.audit.record(
            "lease.grant",
            subject=caller.spiffe_id,
            outcome="granted",
            volume_id=context.volume_id,
            key_epoch=context.key_epoch,
            start_epoch=self.arena.start_epoch,
            lease_id=granted.lease_id,
            ranges=[f"{r.counter_start}-{r.counter_end}" for r in granted.ranges],
            incarnation=caller.incarnation,
        )
        self._metrics.leases_granted.inc()
        get_logger().info(
            "lease_granted",
            volume_id=context.volume_id,
            start_epoch=self.arena.start_epoch,
            lease_id=granted.lease_id,
            counters=granted.count,
            recipient=caller.spiffe_id,
        )
        return lease

    async def return_lease(
        self,
        caller: Subject,
        *,
        volume_id: str,
        arena: tuple[int, int],
        lease_id: int,
        touched: Sequence[int],
    ) -> int:
        """Take back what the caller never touched of a lease; returns how many counters.

        LeaseError `lease.return.…`; a lease of another start of a broker stays burned.
        """
        if arena != (self.arena.broker_instance, self.arena.start_epoch):
            raise LeaseError(
                "lease.return.arena", f"lease {lease_id} is of another start of a broker"
            )
        self.arena.report(lease_id, touched, incarnation=caller.incarnation)
        # A late retry must not be told counters that may soon be somebody else's.
        for asked in [a for a, grant in self._grants.items() if grant.is_of(lease_id)]:
            del self._grants[asked]
        # The books first: what they call returned may be lost, what is granted again must be there.
        if not await self.registry.record_return(arena, lease_id, touched):
            raise LeaseError("lease.return.unknown", f"no lease {lease_id} is out")
        counters = self.arena.give_back(lease_id, touched, incarnation=caller.incarnation)
        await self.audit.record(
            "lease.return",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            start_epoch=self.arena.start_epoch,
            lease_id=lease_id,
            counters=counters,
        )
        self._metrics.leases_returned.inc()
        get_logger().info(
            "lease_returned",
            volume_id=volume_id,
            lease_id=lease_id,
            counters=counters,
            recipient=caller.spiffe_id,
        )
        return counters

    async def _grantable(
        self, caller: Subject, volume_id: str, key_epoch: int
    ) -> Stored[VolumeRecord]:
        """Return the volume if the caller may seal for it under `key_epoch`."""
        volume = await self._stored_volume(caller, volume_id)
        if key_epoch != volume.record.key_epoch:
            raise _wrong_epoch(volume.record, key_epoch)
        _check_owner(volume.record, caller)
        if not volume.record.allows(caller.tenant, writing=True):
            raise VerificationError(
                "volume.read_only",
                f"volume {volume.record.volume_id} is shared with tenant {caller.tenant!r} to be "
                "read: it gets no counters",
            )
        return volume

    async def _volume(self, caller: Subject, volume_id: str) -> VolumeRecord:
        return (await self._stored_volume(caller, volume_id)).record

    async def _stored_volume(self, caller: Subject, volume_id: str) -> Stored[VolumeRecord]:
        stored = await self.registry.volume(parse_uuid(volume_id, what="volume id"))
        record = stored.record
        is_user = caller.role == "gateway" and record.allows(caller.tenant)
        is_target = caller.role == "target" and caller.node == record.target_node
        if not is_user and not is_target:
            # The same answer as for a volume that isn't there: ids of other tenants stay unknown.
            raise UsageError("volume.not_found", f"there is no volume {record.volume_id}")
        return stored

    async def _own_volume(self, caller: Subject, volume_id: str) -> VolumeRecord:
        """Return a volume of the caller's tenant; refuse one that is only shared with it."""
        record = await self._volume(caller, volume_id)
        if caller.tenant != record.tenant:
            raise VerificationError(
                "volume.tenant.refused",
                f"volume {record.volume_id} is shared with tenant {caller.tenant!r}, and another's",
            )
        return record

    def _signed(self, record: VolumeRecord, caller: Subject) -> broker_pb2.SignedVolumeDescriptor:
        # A tenant is told of its own share only, the target of none.
        told = [
            share
            for share in record.shares
            if caller.role == "gateway" and caller.tenant in {record.tenant, share.tenant}
        ]
        descriptor = broker_pb2.VolumeDescriptor(
            volume_id=str(record.volume_id),
            generation=record.generation,
            sector_count=record.sector_count,
            tenant=record.tenant,
            target_node=record.target_node,
            key_epoch=record.key_epoch,
            display_name=record.display_name,
            mode=record.mode,
            third_party=record.third_party,
            fully_sealed=record.fully_sealed,
            filling_gateway=record.filling_gateway,
            oldest_key_epoch=record.oldest_key_epoch,
            device_id="" if record.device_id is None else str(record.device_id),
            shares=[
                broker_pb2.VolumeShare(tenant=share.tenant, read_only=share.read_only)
                for share in told
            ],
        ).SerializeToString(deterministic=True)
        return broker_pb2.SignedVolumeDescriptor(
            descriptor=descriptor, signature=self.authority.sign_descriptor(descriptor)
        )


def _check_owner(record: VolumeRecord, caller: Subject) -> None:
    """Only one gateway can ever seal for a volume whose store that gateway alone keeps."""
    if record.third_party and caller.node != record.target_node:
        raise VerificationError(
            "volume.owner.refused",
            f"volume {record.volume_id} of mode {record.mode} belongs to gateway "
            f"{record.target_node!r}",
        )
    if record.filling_gateway not in {"", caller.node}:
        raise UnavailableError(
            "volume.filling",
            f"volume {record.volume_id} is being filled by gateway {record.filling_gateway!r}",
        )


def _wrong_epoch(record: VolumeRecord, key_epoch: int) -> UsageError:
    return UsageError(
        "volume.key_epoch",
        f"key epoch {key_epoch} of volume {record.volume_id}; the newest is {record.key_epoch}, "
        f"the oldest {record.oldest_key_epoch}",
    )


def _context(
    purpose: str,
    caller: Subject,
    record: VolumeRecord,
    key_epoch: int,
    *,
    request_id: bytes,
    arena: Arena | None = None,
) -> Context:
    return Context(
        purpose=purpose,
        recipient=caller.spiffe_id,
        incarnation=caller.incarnation,
        request_id=request_id,
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        arena=None if arena is None else (arena.broker_instance, arena.start_epoch),
    )


def _lease_message(record: VolumeRecord, key_epoch: int, granted: Lease) -> bytes:
    broker_instance, start_epoch = granted.arena
    return broker_pb2.Lease(
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        broker_instance=broker_instance,
        start_epoch=start_epoch,
        ranges=[
            broker_pb2.CounterRange(counter_start=r.counter_start, counter_end=r.counter_end)
            for r in granted.ranges
        ],
        lease_id=granted.lease_id,
    ).SerializeToString()
