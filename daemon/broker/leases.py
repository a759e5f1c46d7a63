"""Grants counter leases from the arena of this start, and ends leases that are returned.

Leases are recorded in the registry; `sealane.crypto.lease` defines them.
"""

import asyncio
import hashlib
import secrets
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, SignedSecret, seal_signed
from sealane.crypto.lease import RETURN_TOKEN_BYTES, Arena, Lease
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.records import GrantRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.volume_access import secret_context, writable_volume
from sealane.daemon.runtime.calls import parse_uuid
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import LeaseError, UsageError
from sealane.protocol.v1 import broker_pb2
from sealane.transport.tasks import TaskOwner

# Answers kept for retries. A retry whose answer was dropped gets a new lease; the old one is
# burned.
_ANSWERS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedLease:
    """A sealed lease and the arena in its HPKE context."""

    secret: SignedSecret
    lease_id: int
    broker_instance: int
    start_epoch: int


@dataclass(frozen=True, slots=True)
class _Grant:
    """Digest of a request, and the lease that it gets."""

    asked: bytes
    lease: "asyncio.Future[SignedLease]"

    def is_of(self, lease_id: int) -> bool:
        """Return whether this grant is that lease."""
        return self.lease.done() and self.lease.result().lease_id == lease_id


class Leases:
    """The leases of one start of a broker."""

    def __init__(self, registry: Registry, arena: Arena, *, audit: Audit, metrics: Metrics) -> None:
        self.arena = arena
        self._registry = registry
        self._audit = audit
        self._metrics = metrics
        # Grants by requester, including those in progress: a retry joins the first.
        self._grants: OrderedDict[tuple[bytes, bytes], _Grant] = OrderedDict()
        self._tasks = TaskOwner()

    async def close(self) -> None:
        """Abandon the grants in progress: counters they took from the arena are burned."""
        await self._tasks.close()

    async def grant(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedLease:
        """Grant the next counters of this start's arena, sealed to the caller.

        A retry with the same request id from the same incarnation gets the same counters.
        """
        volume = await writable_volume(self._registry, caller, volume_id, key_epoch)
        context = secret_context(
            "lease", caller, volume.record, key_epoch, request_id=request_id, arena=self.arena
        )
        asked = hashlib.sha256(context.info()).digest()
        grant = self._grants.get((caller.incarnation, request_id))
        if grant is None:
            grant = _Grant(asked, asyncio.get_running_loop().create_future())
            self._grants[caller.incarnation, request_id] = grant
            if len(self._grants) > _ANSWERS_MAX:
                self._grants.popitem(last=False)
            self._tasks.start(self._settle(grant, caller, context), name="grant")
        elif grant.asked != asked:
            raise UsageError("lease.request.exists", "this request id was used for another lease")
        # A caller that disconnects must not stop a grant that another call may be waiting for.
        return await asyncio.shield(grant.lease)

    async def _settle(self, grant: "_Grant", caller: Subject, context: Context) -> None:
        try:
            lease = await self._granted(caller, context)
        except BaseException as error:
            self._grants.pop((caller.incarnation, context.request_id), None)
            if isinstance(error, asyncio.CancelledError):
                grant.lease.cancel()
                raise
            grant.lease.set_exception(error)
            grant.lease.exception()  # the caller may have disconnected
        else:
            grant.lease.set_result(lease)

    async def _granted(self, caller: Subject, context: Context) -> SignedLease:
        """Take counters from the arena, record the grant, seal it."""
        granted = self.arena.grant(
            volume_id=uuid.UUID(context.volume_id),
            incarnation=caller.incarnation,
            return_token=secrets.token_bytes(RETURN_TOKEN_BYTES),
        )

        async def attempt() -> VolumeRecord | None:
            # A volume that was deleted or got a new key epoch in between gets no lease of the old
            # epoch.
            volume = await writable_volume(
                self._registry, caller, context.volume_id, context.key_epoch
            )
            record = GrantRecord(
                broker_instance=self.arena.broker_instance,
                start_epoch=self.arena.start_epoch,
                lease_id=granted.lease_id,
                counter_start=granted.counters.counter_start,
                counter_end=granted.counters.counter_end,
                volume_id=volume.record.volume_id,
                key_epoch=context.key_epoch,
                recipient=caller.spiffe_id,
                incarnation=caller.incarnation,
                granted_at=utc_now(),
            )
            recorded = await self._registry.record_grant(record, volume=volume)
            return volume.record if recorded else None

        volume = await self._registry.settle(attempt)
        lease = SignedLease(
            secret=seal_signed(
                _lease_message(volume, context.key_epoch, granted),
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=context,
                signing_key=self._registry.authority.signing_key,
            ),
            lease_id=granted.lease_id,
            broker_instance=self.arena.broker_instance,
            start_epoch=self.arena.start_epoch,
        )
        await self._audit.record(
            "lease.grant",
            subject=caller.spiffe_id,
            outcome="granted",
            volume_id=context.volume_id,
            key_epoch=context.key_epoch,
            broker_instance=self.arena.broker_instance,
            start_epoch=self.arena.start_epoch,
            lease_id=granted.lease_id,
            counter_start=granted.counters.counter_start,
            counter_end=granted.counters.counter_end,
            incarnation=caller.incarnation,
        )
        self._metrics.broker.leases_granted.inc()
        get_logger().info(
            "lease_granted",
            volume_id=context.volume_id,
            start_epoch=self.arena.start_epoch,
            lease_id=granted.lease_id,
            counters=granted.count,
            recipient=caller.spiffe_id,
        )
        return lease

    async def take_back(
        self,
        caller: Subject,
        *,
        volume_id: str,
        arena: tuple[int, int],
        lease_id: int,
        touched: int,
        return_token: bytes,
    ) -> int:
        """End a lease of the caller from counter `touched` on; return how many counters that is.

        They no longer count against the limit of the key epoch, and are never granted again.
        LeaseError or VerificationError `lease.return.…`; a lease of another start of a broker stays
        burned.
        """
        if arena != (self.arena.broker_instance, self.arena.start_epoch):
            raise LeaseError(
                "lease.return.arena", f"lease {lease_id} was granted by another start of a broker"
            )
        # First: a return that doesn't match changes nothing, neither here nor in the registry.
        counters = self.arena.give_back(
            lease_id,
            touched,
            volume_id=parse_uuid(volume_id, what="volume id"),
            incarnation=caller.incarnation,
            return_token=return_token,
        )
        # A late retry of the grant gets another lease: the returned counters are not counted any
        # longer.
        for asked in [a for a, grant in self._grants.items() if grant.is_of(lease_id)]:
            del self._grants[asked]
        if not await self._registry.record_return(arena, lease_id, touched):
            raise LeaseError("lease.return.unknown", f"no lease {lease_id} is outstanding")
        await self._audit.record(
            "lease.return",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            start_epoch=self.arena.start_epoch,
            lease_id=lease_id,
            counters=counters,
        )
        self._metrics.broker.leases_returned.inc()
        get_logger().info(
            "lease_returned",
            volume_id=volume_id,
            lease_id=lease_id,
            counters=counters,
            recipient=caller.spiffe_id,
        )
        return counters


def _lease_message(record: VolumeRecord, key_epoch: int, granted: Lease) -> bytes:
    broker_instance, start_epoch = granted.arena
    return broker_pb2.Lease(
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        broker_instance=broker_instance,
        start_epoch=start_epoch,
        counter_start=granted.counters.counter_start,
        counter_end=granted.counters.counter_end,
        lease_id=granted.lease_id,
        return_token=granted.return_token,
    ).SerializeToString()
