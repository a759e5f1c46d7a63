"""Brokers without a daemon, for tests."""

import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.audit import GENESIS, Detail, Outcome
from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.leases import SignedLease
from sealane.daemon.broker.operator_servicer import OperatorServicer
from sealane.daemon.broker.record_key_rotation import RecordKeyRotation
from sealane.daemon.broker.records import AuthorityRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.rewrapping import Rewrapping
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.snapshot import Snapshots
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.legacy import take_over
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.succession import AuthoritySuccession
from sealane.daemon.broker.tenant_key_rotation import TenantKeyRotation
from sealane.daemon.device.anchors.counter import FileCounter, MonotonicCounter
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics


class Count:
    """A counter in memory; an adversary may set `value`."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def read(self) -> int:
        return self.value

    def increment(self) -> int:
        self.value += 1
        return self.value


async def not_covered(_revision: int) -> None:
    """Stand in for `Instance.cover` where no store is rolled back."""


class MemoryAudit:
    """An audit log in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []
        self.head = GENESIS

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        self.records.append(
            {"kind": kind, "subject": subject, "outcome": outcome, "reason": reason, **detail}
        )


async def start_broker(
    store: Store,
    *,
    starts: MonotonicCounter,
    heads: MonotonicCounter,
    node: str = "b",
    instance: int = 3,
    kek: bytes = bytes(32),
    metrics: Metrics | None = None,
) -> tuple[BrokerService, Instance, Registry]:
    """Start a broker on an open store; its registry closes the store."""
    registry = await Registry.open(store, WrappingKey(kek), node=node)
    try:
        claimed = await Instance.claim(
            registry, node=node, instance=instance, starts=starts, heads=heads
        )
    except BaseException:
        await registry.close()
        raise
    service = BrokerService(registry, claimed, audit=MemoryAudit(), metrics=metrics or Metrics())
    return service, claimed, registry


@contextlib.asynccontextmanager
async def running_broker(
    path: Path,
    *,
    node: str = "b",
    instance: int = 3,
    kek: bytes = bytes(32),
    metrics: Metrics | None = None,
) -> AsyncIterator[BrokerService]:
    """Start a broker on a SQLite store like the daemon, with its counters next to it."""
    store = SqliteStore(path)
    try:
        await take_over(store, WrappingKey(kek), node=node, instance=instance)
        service, _, registry = await start_broker(
            store,
            starts=FileCounter(path.with_suffix(".starts")),
            heads=FileCounter(path.with_suffix(".heads")),
            node=node,
            instance=instance,
            kek=kek,
            metrics=metrics,
        )
        try:
            yield service
            await service.close()
        finally:
            await registry.close()
    finally:
        await store.close()


def rewrapping_of(
    registry: Registry, *, instance: int = 3, audit: MemoryAudit | None = None
) -> Rewrapping:
    """Return the rotation of the key encryption key at a broker without counters."""

    async def cover(_revision: int) -> None:
        pass

    return Rewrapping(
        registry,
        instance=instance,
        cover=cover,
        audit=audit or MemoryAudit(),
        metrics=Metrics(),
    )


def record_key_rotation_of(
    registry: Registry, *, audit: MemoryAudit | None = None
) -> RecordKeyRotation:
    """Return the replacement of the record key at a broker without counters."""

    async def cover(_revision: int) -> None:
        pass

    return RecordKeyRotation(registry, cover=cover, audit=audit or MemoryAudit())


def tenant_key_rotation_of(
    registry: Registry, *, audit: MemoryAudit | None = None
) -> TenantKeyRotation:
    """Return the rotation of tenants' keys at a broker without counters."""
    return TenantKeyRotation(registry, cover=not_covered, audit=audit or MemoryAudit())


def succession_of(
    registry: Registry,
    *,
    audit: MemoryAudit | None = None,
    now: Callable[[], dt.datetime] = utc_now,
) -> AuthoritySuccession:
    """Return the replacement of the authority at a broker without counters."""

    async def cover(_revision: int) -> None:
        pass

    return AuthoritySuccession(
        registry, node="b", cover=cover, audit=audit or MemoryAudit(), now=now
    )


def authorities_of(authority: CertificateAuthority) -> Authorities:
    """Return an authority that is never replaced, as brokers hold it."""
    record = AuthorityRecord(
        wrapped_key=b"",
        certificate=authority.certificate.public_bytes(Encoding.DER),
        wrapped_record_key=b"",
    )
    return Authorities(record, Keyring([]), authority)


async def unchanged_authorities() -> None:
    """Read that the authorities haven't changed."""


def operator_of(broker: BrokerService) -> OperatorServicer:
    """Return the service of the broker's operator."""
    snapshots = Snapshots(broker.registry, node="b", audit=broker.audit, metrics=Metrics())
    return OperatorServicer(
        broker,
        rewrapping=rewrapping_of(broker.registry),
        record_keys=record_key_rotation_of(broker.registry),
        tenant_keys=tenant_key_rotation_of(broker.registry),
        succession=succession_of(broker.registry),
        snapshots=snapshots,
    )


def token_of(broker: BrokerService, lease: SignedLease) -> bytes:
    """Return the token sealed inside a newly granted lease."""
    return broker.leases.arena._held[lease.lease_id].lease.return_token
