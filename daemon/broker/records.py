"""The records that brokers keep, and their form in the store.

A record is JSON after a MAC: 32 bytes HMAC-SHA256(record key; label, key, JSON). The MAC covers the
record's key in the store. So someone with write access to the store can't create or change a
record, or move one to another key. An older version under the same key does have a valid MAC, at
least until the record key is replaced: the store's state record detects that
(sealane.daemon.broker.store.checked).
"""

import datetime as dt
import uuid
from collections.abc import AsyncIterator, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sealane.crypto.anchors import RETIRED_MAX
from sealane.crypto.keys import KEY_EPOCH_MAX, KEY_EPOCHS_MAX, KEY_ID_BYTES
from sealane.crypto.lease import (
    COUNTER_END,
    EPOCH_COUNTERS_MAX,
    INSTANCE_MAX,
    LEASE_COUNTERS,
    START_EPOCH_MAX,
)
from sealane.crypto.roles import Role
from sealane.daemon.broker.keyring import UNNAMED
from sealane.daemon.broker.store.contract import PAGE_ENTRIES_MAX, Compare, Entry, Store
from sealane.daemon.broker.store.record_keys import RecordKeys
from sealane.daemon.device.anchors.anchor import BLOB_BYTES_MAX, MAC_BYTES, U64_MAX
from sealane.errors import LeaseError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind, AuthorityStage, TenantKeyStage, VolumeMode

RESTORES_MAX: Final = 256
FENCING_EPOCH_MAX: Final = (1 << 32) - 1

SHARES_MAX: Final = 64
"""Tenants that a volume can be shared with at the same time."""

RETIRED_KEYS_MAX: Final = 4096


def _is_empty(value: Sized) -> bool:
    return len(value) == 0


KeyId = Annotated[bytes, Field(max_length=KEY_ID_BYTES, exclude_if=_is_empty)]
"""Id of a key encryption key. UNNAMED isn't written: earlier versions don't know the field."""
KeyEpoch = Annotated[int, Field(ge=1, le=KEY_EPOCH_MAX)]
BrokerInstance = Annotated[int, Field(ge=1, le=INSTANCE_MAX)]
FencingEpoch = Annotated[int, Field(ge=1, le=FENCING_EPOCH_MAX)]
StartEpoch = Annotated[int, Field(ge=0, le=START_EPOCH_MAX)]


class Record(BaseModel):
    """Base of all records: immutable, unknown fields refused. Bytes are base64 in JSON."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


class SuccessionRecord(Record):
    """The present or last replacement of the authority (sealane.daemon.broker.succession).

    `certificate` is the other authority's (DER): the successor's while it is announced, afterwards
    the predecessor's. Its key, wrapped, is kept until the predecessor is retired. The signatures
    are those of `sealane.crypto.anchors.Succession`.
    """

    stage: AuthorityStage
    began_at: dt.datetime
    certificate: bytes
    wrapped_key: bytes = b""
    signature: bytes
    retirement: bytes = b""


class AuthorityRecord(Record):
    """The brokers' common authority, and which key encryption key its secrets are wrapped under.

    New keys are wrapped under the same. While `previous_key_id` is set, other records may still be
    wrapped under that one (sealane.daemon.broker.rewrapping). `retired_key_ids` are of keys that
    were replaced, oldest first; `retired_certificates` (DER) are those of retired authorities,
    whose signatures are still in audit logs. `record_key_number` counts the replacements of the
    record key; while `wrapped_previous_record_key` is set, records may still be under that one
    (sealane.daemon.broker.record_key_rotation).
    """

    wrapped_key: bytes
    certificate: bytes
    wrapped_record_key: bytes
    key_id: KeyId = UNNAMED
    previous_key_id: KeyId = UNNAMED
    retired_key_ids: Annotated[
        tuple[KeyId, ...], Field(max_length=RETIRED_KEYS_MAX, exclude_if=_is_empty)
    ] = ()
    # None of these is written before it is needed: earlier versions don't know them.
    succession: Annotated[
        SuccessionRecord | None, Field(exclude_if=lambda value: value is None)
    ] = None
    retired_certificates: Annotated[
        tuple[bytes, ...], Field(max_length=RETIRED_MAX, exclude_if=_is_empty)
    ] = ()
    record_key_number: Annotated[int, Field(ge=0, exclude_if=lambda value: value == 0)] = 0
    wrapped_previous_record_key: Annotated[bytes, Field(exclude_if=_is_empty)] = b""


class HeldKeysRecord(Record):
    """The ids of the key encryption keys that each broker has had since its last start."""

    brokers: dict[str, tuple[KeyId, ...]] = Field(default_factory=dict)


TenantKeyNumber = Annotated[int, Field(ge=0, le=KEY_EPOCH_MAX)]


class TenantRecord(Record):
    """A tenant: its key k_s, wrapped, and its number of volumes.

    `key_number` counts the replacements of the key, and `key_stage` is how far the present one is;
    None: none is in progress (sealane.daemon.broker.tenant_key_rotation).
    """

    wrapped_key: bytes
    key_id: KeyId = UNNAMED
    volume_count: Annotated[int, Field(ge=0)] = 0
    # Neither is written before the first replacement: earlier versions don't know them.
    key_number: Annotated[TenantKeyNumber, Field(exclude_if=lambda value: value == 0)] = 0
    key_stage: Annotated[TenantKeyStage | None, Field(exclude_if=lambda value: value is None)] = (
        None
    )


class TenantKeyRecord(Record):
    """A key k_s that a tenant had before, wrapped: volumes still have key epochs of it."""

    tenant: str
    number: TenantKeyNumber
    wrapped_key: bytes
    key_id: KeyId = UNNAMED

    @property
    def name(self) -> str:
        """Name in the table; keys of one tenant are adjacent."""
        return tenant_key_name(self.tenant, self.number)

    @staticmethod
    def of(tenant: str) -> str:
        """Return the prefix of the names of all records of a tenant."""
        return f"{tenant}/"


class TenantKeyUse(Record):
    """From this key epoch on, a volume's keys derive from its tenant's key of this number."""

    first_key_epoch: KeyEpoch
    number: TenantKeyNumber


class ShareRecord(Record):
    """A tenant whose gateways may use another tenant's volume."""

    tenant: str
    read_only: bool


class VolumeRecord(Record):
    """A registered volume: the content of its descriptor (protocol/v1/broker.proto).

    The record of a deleted volume is kept, so that its id, and thus its key, is never used again.
    """

    volume_id: uuid.UUID
    tenant: str
    display_name: str
    sector_count: Annotated[int, Field(ge=1)]
    target_node: str
    generation: Annotated[int, Field(ge=1)]
    key_epoch: KeyEpoch
    mode: str = ""
    third_party: str = ""
    fully_sealed: bool = False
    filling_gateway: str = ""
    oldest_key_epoch: KeyEpoch = 1
    # Leased under `key_epoch`, minus returned counters.
    counters_leased: Annotated[int, Field(ge=0)] = 0
    request_id: uuid.UUID | None = None
    is_deleted: bool = False
    device_id: uuid.UUID | None = None
    shares: Annotated[tuple[ShareRecord, ...], Field(max_length=SHARES_MAX)] = ()
    # Sector count after the resize in progress; 0: none.
    growing_to: Annotated[int, Field(ge=0)] = 0
    # In order of both; epochs before the first are of key 0. Not written before a tenant's first
    # replacement: earlier versions don't know it.
    tenant_key_uses: Annotated[tuple[TenantKeyUse, ...], Field(exclude_if=_is_empty)] = ()

    def allows(self, tenant: str, *, writing: bool = False) -> bool:
        """Return whether `tenant` owns it, or has a share that allows the use."""
        share = self.share_of(tenant)
        return tenant == self.tenant or (share is not None and not (writing and share.read_only))

    def share_of(self, tenant: str) -> ShareRecord | None:
        """Return the share of another tenant; None: it has none."""
        return next((share for share in self.shares if share.tenant == tenant), None)

    def without_share(self, tenant: str) -> "VolumeRecord":
        """Return a copy without this tenant's share."""
        left = tuple(share for share in self.shares if share.tenant != tenant)
        return self.model_copy(update={"shares": left})

    def with_share(self, share: ShareRecord) -> "VolumeRecord":
        """Return a copy with this share, sorted by tenant; UsageError `volume.share.limit`."""
        shares = [*self.without_share(share.tenant).shares, share]
        if len(shares) > SHARES_MAX:
            raise UsageError(
                "volume.share.limit",
                f"volume {self.volume_id} is shared with {SHARES_MAX} tenants already; allowed: "
                f"{SHARES_MAX}",
            )
        ordered = tuple(sorted(shares, key=lambda each: each.tenant))
        return self.model_copy(update={"shares": ordered})

    def growing(self, sector_count: int) -> "VolumeRecord":
        """Return a copy that begins to grow to this size; UsageError `volume.resize.…`."""
        if self.mode == VolumeMode.OFF:
            raise UsageError(
                "volume.resize.mode",
                f"volume {self.volume_id} can't grow: it has mode off and was filled with sealed "
                "sectors when it was created; create a larger one and copy",
            )
        if sector_count < self.sector_count:
            raise UsageError(
                "volume.resize.smaller",
                f"volume {self.volume_id} has {self.sector_count} sectors and can't shrink to "
                f"{sector_count}; create a smaller one and copy",
            )
        return self.model_copy(update={"growing_to": sector_count})

    def grown(self, sector_count: int) -> "VolumeRecord":
        """Return a copy with the size that it was growing to; UsageError `volume.resize.state`."""
        if sector_count not in {self.growing_to, self.sector_count}:
            raise UsageError(
                "volume.resize.state",
                f"volume {self.volume_id} doesn't grow to {sector_count} sectors: another resize "
                "was begun in the meantime",
            )
        is_over = sector_count == self.growing_to
        growing_to = 0 if is_over else self.growing_to
        return self.model_copy(update={"sector_count": sector_count, "growing_to": growing_to})

    @property
    def key_epochs(self) -> range:
        """Key epochs that its sectors may be sealed under."""
        return range(self.oldest_key_epoch, self.key_epoch + 1)

    def tenant_key_number(self, key_epoch: int) -> int:
        """Return the number of the tenant's key that the key of an epoch derives from."""
        numbers = [use.number for use in self.tenant_key_uses if use.first_key_epoch <= key_epoch]
        return numbers[-1] if numbers else 0

    @property
    def present_tenant_key(self) -> int:
        """Number of the tenant's key that the present key epoch derives from."""
        return self.tenant_key_number(self.key_epoch)

    @property
    def next_tenant_key(self) -> int:
        """Number of the tenant's key that the next key epoch derives from."""
        return self.tenant_key_number(self.key_epoch + 1)

    @property
    def needed_tenant_keys(self) -> frozenset[int]:
        """Numbers of the tenant's keys that live or later key epochs derive from."""
        oldest = self.oldest_key_epoch
        later = [use.number for use in self.tenant_key_uses if use.first_key_epoch > oldest]
        return frozenset([self.tenant_key_number(oldest), *later])

    def ready_for(self, number: int) -> "VolumeRecord":
        """Return a copy whose next key epoch derives from the tenant's key of this number.

        The present one and those before, under which sectors are sealed, stay with their key.
        """
        uses = [use for use in self.tenant_key_uses if use.first_key_epoch <= self.key_epoch]
        uses.append(TenantKeyUse(first_key_epoch=self.key_epoch + 1, number=number))
        return self.model_copy(update={"tenant_key_uses": tuple(uses)})

    @property
    def has_key_epochs_left(self) -> bool:
        """Whether it can begin another key epoch."""
        return len(self.key_epochs) < KEY_EPOCHS_MAX

    def in_next_epoch(self) -> "VolumeRecord":
        """Return a copy in the next key epoch; UsageError `volume.key_epoch.limit`."""
        if not self.has_key_epochs_left:
            raise UsageError(
                "volume.key_epoch.limit",
                f"volume {self.volume_id} has {len(self.key_epochs)} key epochs; allowed: "
                f"{KEY_EPOCHS_MAX}. Copy it to a new volume",
            )
        return self.model_copy(update={"key_epoch": self.key_epoch + 1, "counters_leased": 0})

    def with_lease(self, counters: int) -> "VolumeRecord":
        """Return a copy with `counters` more leased, in the next epoch if no whole lease is left.

        LeaseError `lease.key_exhausted`: they don't fit, and no key epochs are left.
        """
        leased = self.counters_leased + counters
        if leased > EPOCH_COUNTERS_MAX:
            raise LeaseError(
                "lease.key_exhausted",
                f"volume {self.volume_id} has used up key epoch {self.key_epoch}: 4 PB are leased "
                "under it",
            )
        if leased + LEASE_COUNTERS > EPOCH_COUNTERS_MAX and self.has_key_epochs_left:
            return self.in_next_epoch()
        return self.model_copy(update={"counters_leased": leased})


class HolderRecord(Record):
    """The newest key epoch of a volume that a role of a node ever received."""

    volume_id: uuid.UUID
    key_epoch: KeyEpoch

    @staticmethod
    def holder(spiffe_id: str) -> str:
        """Return the prefix of the names of all records of a holder."""
        return f"{spiffe_id.removeprefix('spiffe://sealane/')}/"


class RequestRecord(Record):
    """The volume that a tenant's request created."""

    volume_id: uuid.UUID
    # Requested size: the volume may have grown since. 0: recorded before volumes could grow.
    sector_count: Annotated[int, Field(ge=0)] = 0


class InstanceRecord(Record):
    """The node that a broker instance number belongs to, and the last start epoch it claimed.

    `is_anchored` is false until the first start after taking over a store that had no anchor.
    """

    node: str
    start_epoch: StartEpoch
    is_anchored: bool = True


class Revocation(Record):
    """An operator's revocation of a node, with the reason given."""

    reason: str
    revoked_at: dt.datetime


class NodeRecord(Record):
    """One role of a node: the last leaf issued to it (DER), and its revocation if any.

    `previous_leaf` is of the same incarnation; `superseded` are earlier incarnations, newest first.
    Certificates issued until `restored_at` are refused. `hardware_sha256` is of the hardware id
    that it last attested with; `refused_version` is that of a newer policy which has refused that
    hardware since.
    """

    node: str
    role: str
    tenant: str = ""
    incarnation: bytes = b""
    leaf: bytes = b""
    previous_leaf: bytes = b""
    policy_version: int = 0
    hardware_sha256: bytes = b""
    refused_version: int = 0
    superseded: tuple[bytes, ...] = ()
    attested_at: dt.datetime | None = None
    revocation: Revocation | None = None
    restored_at: dt.datetime | None = None


class StatedRecord(Record):
    """What an incarnation of a node's role stated when it last attested (`stated.Stated`).

    Apart from its NodeRecord, which brokers of earlier versions read.
    """

    incarnation: bytes
    version: str = ""
    clock_skew_ms: int | None = None
    # Digests of the authorities that it trusts, and the one that certified it. Written from the
    # first announcement of a successor on: earlier versions don't know them.
    trusted: Annotated[tuple[bytes, ...], Field(exclude_if=_is_empty)] = ()
    certified_by: Annotated[bytes, Field(exclude_if=_is_empty)] = b""


class WhereaboutsRecord(Record):
    """From where an incarnation of a node's role last attested, and where it says it listens."""

    incarnation: bytes
    call_address: str = ""
    addresses: dict[str, str] = Field(default_factory=dict)


class RestoreRecord(Record):
    """The last restore of the store from a snapshot (sealane.daemon.broker.restored).

    `retired` are all broker instances that had used the store; later ones add `epoch_base` to
    their counter. It is the `ordinal`-th of these brokers' restores, whichever snapshots they were
    of. `is_announced`: the audit log has it.
    """

    restored_at: dt.datetime
    snapshot_at: dt.datetime
    snapshot_state: Annotated[int, Field(ge=1)]
    epoch_base: StartEpoch
    ordinal: Annotated[int, Field(ge=1, le=RESTORES_MAX)]
    retired: tuple[BrokerInstance, ...]
    is_announced: bool = False


class HeadRecord(Record):
    """The last head of a broker; its number is the value of that broker's anchor counter."""

    number: Annotated[int, Field(ge=1)]
    start_epoch: StartEpoch


Counter = Annotated[int, Field(ge=1, le=COUNTER_END)]


class GrantRecord(Record):
    """A lease: a half-open range of counters of one arena, for one incarnation of a gateway.

    `touched` is the first returned counter; None: nothing was returned yet. A lease of an arena
    that is no longer served, or of an incarnation that has ended, is burned.
    """

    broker_instance: BrokerInstance
    start_epoch: StartEpoch
    lease_id: Annotated[int, Field(ge=1)]
    counter_start: Counter
    counter_end: Counter
    volume_id: uuid.UUID
    key_epoch: KeyEpoch
    recipient: str
    incarnation: bytes
    granted_at: dt.datetime
    touched: Counter | None = None

    @property
    def name(self) -> str:
        """Name in the table; leases of one arena are adjacent."""
        return grant_name((self.broker_instance, self.start_epoch), self.lease_id)

    @property
    def counters(self) -> int:
        """Number of counters granted."""
        return self.counter_end - self.counter_start

    @property
    def returned(self) -> int:
        """Number of counters returned."""
        return 0 if self.touched is None else self.counter_end - self.touched


class Opening(Record):
    """A process that may serve a device; `until`: only until then, because the device was moved."""

    node: str
    incarnation: bytes
    fencing_epoch: FencingEpoch
    until: dt.datetime | None = None


class DeviceRecord(Record):
    """A store directory of a target (devices.md): its owner, and what keeps its anchor.

    Also a volume on a third party (`is_volume`), under the volume's id; its owner is a gateway. The
    fencing epoch increases with each opening and each move. Until `is_initialised`, the state that
    its owner finds is accepted. The record of a forgotten device is kept, so that the device is
    never taken for a new one.
    """

    device_id: uuid.UUID
    owner: str
    fencing_epoch: FencingEpoch = 1
    wrapped_secret: bytes
    key_id: KeyId = UNNAMED
    anchor: AnchorKind | None = None
    is_initialised: bool = False
    opening: Opening | None = None
    opened_at: dt.datetime | None = None
    is_forgotten: bool = False
    is_volume: bool = False
    anchor_floor: Annotated[int, Field(ge=0, le=U64_MAX)] = 0
    """The highest number of any removed record of its anchor: these numbers stay taken."""

    @property
    def role(self) -> str:
        """Role of the nodes that open it."""
        return Role.GATEWAY if self.is_volume else Role.TARGET


class DeviceRequestRecord(Record):
    """An unknown device that a node shows, or the permission to show one next."""

    device_id: uuid.UUID | None = None
    anchor: AnchorKind | None = None
    is_next_authorized: bool = False


class ServedRecord(Record):
    """The device that a target's process has open: new volumes go there."""

    device_id: uuid.UUID
    incarnation: bytes


class AnchorRecord(Record):
    """A record of a device's anchor (sealane.daemon.device.anchors)."""

    number: Annotated[int, Field(ge=1, le=U64_MAX)]
    blob: Annotated[bytes, Field(min_length=1, max_length=BLOB_BYTES_MAX)]
    mac: Annotated[bytes, Field(max_length=MAC_BYTES)] = b""
    """Made and checked by the device's owner."""


POLICY_NAME: Final = "in-force"
"""Name of the one record of a policy."""


class PolicyRecord(Record):
    """The policy in force, as its owners supplied it; versions only increase.

    `owners_version` is that of the owners who had to sign when it was applied.
    """

    version: Annotated[int, Field(ge=1)]
    document: bytes
    signature: bytes
    # Not written before owners were changed: earlier versions don't know it.
    owners_version: Annotated[int, Field(ge=0, exclude_if=lambda value: value == 0)] = 0


class PolicyOwnersRecord(Record):
    """A version of the policy's owners (sealane.daemon.broker.owners_keeper).

    Without signatures it is what a broker's configuration named: the first ones, or at a reset.
    `policy_version` is that of the policy in force when they came, 0 before there was one: former
    owners count for no later one.
    """

    version: Annotated[int, Field(ge=0)]
    document: bytes
    signatures: bytes = b""
    policy_version: Annotated[int, Field(ge=0)] = 0


class AuditHeadRecord(Record):
    """The end of a broker's audit log when one of its records was last acknowledged."""

    sequence: Annotated[int, Field(ge=1)]
    digest: bytes


class CollateralRecord(Record):
    """The high-water marks of hardware vendors' collateral; values only increase."""

    marks: dict[str, int]


class ClockRecord(Record):
    """A machine's clock at its last attestation (TPMS_CLOCK_INFO)."""

    reset_count: Annotated[int, Field(ge=0)]
    restart_count: Annotated[int, Field(ge=0)]
    millis: Annotated[int, Field(ge=0)]


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record and the revision of its last change, to be compared at the next change."""

    record: R
    revision: int
    name: str


class Table(Generic[R]):
    """The records of one kind, by name; names are visible ASCII."""

    __slots__ = ("_keys", "_model", "_prefix", "_store")

    def __init__(
        self, store: Store | None, prefix: str, model: type[R], *, keys: RecordKeys
    ) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self._model = model
        self._keys = keys

    async def get(self, name: str) -> Stored[R] | None:
        """Return the record `name`; VerificationError if no broker wrote it."""
        entry = await self._reached().get(self.key(name))
        return None if entry is None else self.opened(entry)

    async def page(
        self, *, within: str = "", after: str = "", limit: int
    ) -> tuple[list[Stored[R]], bool]:
        """Return up to `limit` records whose names begin with `within` and sort after `after`.

        True: there are more.
        """
        page = await self._reached().range(
            self._prefix + within, after=self.key(after) if after else "", limit=limit
        )
        return [self.opened(entry) for entry in page.entries], page.has_more

    async def records(self, *, within: str = "", after: str = "") -> AsyncIterator[Stored[R]]:
        """Yield all records whose names begin with `within` and sort after `after`, by pages."""
        has_more = True
        while has_more:
            page, has_more = await self.page(within=within, after=after, limit=PAGE_ENTRIES_MAX)
            for stored in page:
                yield stored
            after = page[-1].name if page else after

    def key(self, name: str) -> str:
        """Return the key of the record `name`."""
        return self._prefix + name

    def sealed(self, name: str, record: R) -> dict[str, bytes]:
        """Return the put for a commit that stores `record` as `name`."""
        key = self.key(name)
        content = record.model_dump_json().encode()
        return {key: self._keys.sealed(key, content)}

    def unchanged(self, name: str, stored: Stored[R] | None) -> Compare:
        """Return the compare for a commit: `name` is unchanged since it was read."""
        return Compare(self.key(name), 0 if stored is None else stored.revision)

    async def watch(self, *, from_revision: int) -> AsyncIterator[Stored[R]]:
        """Yield each record put from that revision on, as it is by then.

        Raises the errors of `Store.watch` and `get`. What was put may have been replaced since, and
        be under a record key that is gone.
        """
        async for commit in self._reached().watch(self._prefix, from_revision=from_revision):
            for change in commit:
                stored = await self.get(change.key.removeprefix(self._prefix))
                if stored is not None:
                    yield stored

    def opened(self, entry: Entry) -> Stored[R]:
        """Return the record in an entry; VerificationError if no broker wrote it."""
        content = self._keys.opened(entry.key, entry.value)
        try:
            record = self._model.model_validate_json(content)
        except ValidationError as error:
            raise VerificationError(
                "broker.store.malformed",
                f"{entry.key}: not a {self._model.__name__} of this release, though a broker wrote "
                "it: start the release that wrote it",
            ) from error
        return Stored(record, entry.revision, entry.key.removeprefix(self._prefix))

    def _reached(self) -> Store:
        assert self._store is not None  # noqa: S101 - only a restore has tables without a store
        return self._store


class Tables:
    """All tables; a new kind of record is added here. Without a store they seal and open only."""

    def __init__(self, store: Store | None, *, keys: RecordKeys) -> None:
        self.tenants = Table(store, "tenants", TenantRecord, keys=keys)
        self.tenant_keys = Table(store, "tenant-keys", TenantKeyRecord, keys=keys)
        self.volumes = Table(store, "volumes", VolumeRecord, keys=keys)
        self.requests = Table(store, "requests", RequestRecord, keys=keys)
        self.holders = Table(store, "holders", HolderRecord, keys=keys)
        self.grants = Table(store, "grants", GrantRecord, keys=keys)
        self.instances = Table(store, "instances", InstanceRecord, keys=keys)
        self.restores = Table(store, "restores", RestoreRecord, keys=keys)
        self.heads = Table(store, "heads", HeadRecord, keys=keys)
        self.policies = Table(store, "policies", PolicyRecord, keys=keys)
        self.policy_owners = Table(store, "policy-owners", PolicyOwnersRecord, keys=keys)
        self.audit_heads = Table(store, "audit", AuditHeadRecord, keys=keys)
        self.collateral = Table(store, "collateral", CollateralRecord, keys=keys)
        self.clocks = Table(store, "clocks", ClockRecord, keys=keys)
        self.nodes = Table(store, "nodes", NodeRecord, keys=keys)
        self.stated = Table(store, "stated", StatedRecord, keys=keys)
        self.whereabouts = Table(store, "whereabouts", WhereaboutsRecord, keys=keys)
        self.devices = Table(store, "devices", DeviceRecord, keys=keys)
        self.device_requests = Table(store, "device-requests", DeviceRequestRecord, keys=keys)
        self.served = Table(store, "served", ServedRecord, keys=keys)
        self.anchors = Table(store, "anchors", AnchorRecord, keys=keys)
        self.held_keys = Table(store, "held-keys", HeldKeysRecord, keys=keys)

    def opened(self, entry: Entry) -> tuple[Table[Any], Stored[Any]]:
        """Return an entry's record and its table; errors of `Table.get` for one of no table."""
        for table in vars(self).values():
            if entry.key.startswith(table.key("")):
                return table, table.opened(entry)
        raise VerificationError(
            "broker.store.malformed", f"{entry.key}: not a record of this version"
        )


LAST_RESTORE: Final = "last"
"""Name of the only RestoreRecord."""


def tenant_key_name(tenant: str, number: int) -> str:
    """Return the name of the record of a key that a tenant had before."""
    return f"{TenantKeyRecord.of(tenant)}{number:010}"


def instance_name(instance: int) -> str:
    """Return the name of a broker instance's records."""
    return f"{instance:05}"


def arena_name(arena: tuple[int, int]) -> str:
    """Return the prefix of the names of all grants of one arena (instance, start epoch)."""
    return f"{instance_name(arena[0])}/{arena[1]:08}/"


def grant_name(arena: tuple[int, int], lease_id: int) -> str:
    """Return the name of a lease's record."""
    return f"{arena_name(arena)}{lease_id:018}"
