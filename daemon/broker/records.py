"""The records that brokers keep, and how they stand in the store.

A record is JSON behind a MAC: 32 bytes HMAC-SHA256(record key; label, key, JSON). The key it
stands under is covered, so nobody who can write to the store can make a record, change one, or put
one in another's place. An older version under the same key has a good MAC: that is what the store's
state record is for (sealane.daemon.broker.store.checked).
"""

import datetime as dt
import hmac
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sealane.crypto.encoding import fields
from sealane.crypto.keys import KEY_EPOCH_MAX, KEY_EPOCHS_MAX
from sealane.crypto.lease import (
    COUNTER_END,
    EPOCH_COUNTERS_MAX,
    INSTANCE_MAX,
    LEASE_COUNTERS,
    START_EPOCH_MAX,
)
from sealane.crypto.roles import Role
from sealane.daemon.broker.store.contract import Compare, Entry, Store
from sealane.daemon.device.anchors.anchor import BLOB_BYTES_MAX, MAC_BYTES, U64_MAX
from sealane.errors import LeaseError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind, VolumeMode

FENCING_EPOCH_MAX: Final = (1 << 32) - 1

_MAC_BYTES: Final = 32
SHARES_MAX: Final = 64
"""Tenants that one volume is shared with at a time."""

KeyEpoch = Annotated[int, Field(ge=1, le=KEY_EPOCH_MAX)]
BrokerInstance = Annotated[int, Field(ge=1, le=INSTANCE_MAX)]
FencingEpoch = Annotated[int, Field(ge=1, le=FENCING_EPOCH_MAX)]
StartEpoch = Annotated[int, Field(ge=0, le=START_EPOCH_MAX)]


class Record(BaseModel):
    """Base of all records: immutable, nothing unknown in it. Bytes are base64 in JSON."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


class AuthorityRecord(Record):
    """The brokers' common authority; its two secrets are wrapped under the key encryption key."""

    wrapped_key: bytes
    certificate: bytes
    wrapped_record_key: bytes


class TenantRecord(Record):
    """A tenant: k_s, wrapped, and how many volumes it has."""

    wrapped_key: bytes
    volume_count: Annotated[int, Field(ge=0)] = 0


class ShareRecord(Record):
    """A tenant whose gateways may use a volume of another."""

    tenant: str
    read_only: bool


class VolumeRecord(Record):
    """One registered volume: what its descriptor says (protocol/v1/broker.proto).

    A deleted volume stays: its id, and so its key, is never given out again.
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
    # Leased under `key_epoch`, without what came back.
    counters_leased: Annotated[int, Field(ge=0)] = 0
    request_id: uuid.UUID | None = None
    is_deleted: bool = False
    device_id: uuid.UUID | None = None
    shares: Annotated[tuple[ShareRecord, ...], Field(max_length=SHARES_MAX)] = ()
    # What it will be once it is stored so; 0: it isn't growing.
    growing_to: Annotated[int, Field(ge=0)] = 0

    def allows(self, tenant: str, *, writing: bool = False) -> bool:
        """Whether gateways of `tenant` may use it: its own, and those it is shared with."""
        share = self.share_of(tenant)
        return tenant == self.tenant or (share is not None and not (writing and share.read_only))

    def share_of(self, tenant: str) -> ShareRecord | None:
        """Return what another tenant may do; None: nothing."""
        return next((share for share in self.shares if share.tenant == tenant), None)

    def without_share(self, tenant: str) -> "VolumeRecord":
        """Return it as it is for its other tenants."""
        left = tuple(share for share in self.shares if share.tenant != tenant)
        return self.model_copy(update={"shares": left})

    def with_share(self, share: ShareRecord) -> "VolumeRecord":
        """Return it shared so, by the names of the tenants; UsageError `volume.share.limit`."""
        shares = [*self.without_share(share.tenant).shares, share]
        if len(shares) > SHARES_MAX:
            raise UsageError(
                "volume.share.limit",
                f"volume {self.volume_id} is shared with {SHARES_MAX} tenants, which is the limit",
            )
        ordered = tuple(sorted(shares, key=lambda each: each.tenant))
        return self.model_copy(update={"shares": ordered})

    def growing(self, sector_count: int) -> "VolumeRecord":
        """Return it about to have so many sectors; UsageError `volume.resize.…`."""
        if self.mode == VolumeMode.OFF:
            raise UsageError(
                "volume.resize.mode",
                f"volume {self.volume_id} has mode off, and was filled with sealed sectors when it "
                "was made: create a larger one and copy",
            )
        if sector_count < self.sector_count:
            raise UsageError(
                "volume.resize.smaller",
                f"volume {self.volume_id} has {self.sector_count} sectors: with {sector_count} it "
                "would lose what is in the others; create a smaller one and copy",
            )
        return self.model_copy(update={"growing_to": sector_count})

    def grown(self, sector_count: int) -> "VolumeRecord":
        """Return it with the sectors that it was growing to; UsageError `volume.resize.state`."""
        if sector_count not in {self.growing_to, self.sector_count}:
            raise UsageError(
                "volume.resize.state",
                f"volume {self.volume_id} doesn't grow to {sector_count} sectors: another change "
                "of its size was begun meanwhile",
            )
        is_over = sector_count == self.growing_to
        growing_to = 0 if is_over else self.growing_to
        return self.model_copy(update={"sector_count": sector_count, "growing_to": growing_to})

    @property
    def key_epochs(self) -> range:
        """The key epochs that sectors of it may be sealed under."""
        return range(self.oldest_key_epoch, self.key_epoch + 1)

    def in_next_epoch(self) -> "VolumeRecord":
        """Return it in its next key epoch; UsageError `volume.key_epoch.limit`."""
        if len(self.key_epochs) >= KEY_EPOCHS_MAX:
            raise UsageError(
                "volume.key_epoch.limit",
                f"volume {self.volume_id} has {len(self.key_epochs)} key epochs; allowed: "
                f"{KEY_EPOCHS_MAX}. Copy it to a new volume",
            )
        return self.model_copy(update={"key_epoch": self.key_epoch + 1, "counters_leased": 0})

    def with_lease(self, counters: int) -> "VolumeRecord":
        """Return it once `counters` more are leased: in its next epoch if no whole lease is left.

        LeaseError `lease.key_exhausted`: they don't fit, and there can't be another epoch.
        """
        leased = self.counters_leased + counters
        if leased > EPOCH_COUNTERS_MAX:
            raise LeaseError(
                "lease.key_exhausted",
                f"4 PB are leased under key epoch {self.key_epoch} of volume {self.volume_id}",
            )
        if leased + LEASE_COUNTERS > EPOCH_COUNTERS_MAX and len(self.key_epochs) < KEY_EPOCHS_MAX:
            return self.in_next_epoch()
        return self.model_copy(update={"counters_leased": leased})


class HolderRecord(Record):
    """The newest key epoch of a volume that one role of one node was ever given."""

    volume_id: uuid.UUID
    key_epoch: KeyEpoch

    @staticmethod
    def holder(spiffe_id: str) -> str:
        """Return what the names of all records of a holder begin with."""
        return f"{spiffe_id.removeprefix('spiffe://sealane/')}/"


class RequestRecord(Record):
    """Which volume a tenant's request made."""

    volume_id: uuid.UUID
    # What it asked for: the volume may have grown since. 0: noted before volumes could.
    sector_count: Annotated[int, Field(ge=0)] = 0


class InstanceRecord(Record):
    """Whom a broker instance number belongs to, and the start epoch it last went for.

    `is_anchored` is false until the first start after a store was taken over that had no anchor.
    """

    node: str
    start_epoch: StartEpoch
    is_anchored: bool = True


class Revocation(Record):
    """That an operator revoked a node, and the operator's words."""

    reason: str
    revoked_at: dt.datetime


class NodeRecord(Record):
    """One role of a node: the leaf it was issued last (DER) and whether it is revoked.

    `previous_leaf` is of the same incarnation, `superseded` are those before it, newest first.
    Nothing issued until `restored_at` counts. `hardware_sha256` is of the hardware id that it last
    attested with, `refused_version` that of a newer policy which refused that hardware since.
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


class HeadRecord(Record):
    """The last head of one broker: its number is what that broker's anchor counts."""

    number: Annotated[int, Field(ge=1)]
    start_epoch: StartEpoch


Counter = Annotated[int, Field(ge=1, le=COUNTER_END)]


class GrantRecord(Record):
    """A lease: a half-open range of counters of one arena, to one incarnation of a gateway.

    `touched` is the first counter that came back; None: nothing came back yet. A lease of an arena
    that isn't served any more, or of an incarnation that is gone, is burned.
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
        """Its name in the table: the leases of one arena follow each other."""
        return grant_name((self.broker_instance, self.start_epoch), self.lease_id)

    @property
    def counters(self) -> int:
        """How many counters were granted."""
        return self.counter_end - self.counter_start

    @property
    def returned(self) -> int:
        """How many of them came back."""
        return 0 if self.touched is None else self.counter_end - self.touched


class Opening(Record):
    """A process that may serve a device; `until`: only so long, the device went to another node."""

    node: str
    incarnation: bytes
    fencing_epoch: FencingEpoch
    until: dt.datetime | None = None


class DeviceRecord(Record):
    """A store directory of a target (devices.md): whose it is, and who keeps its anchor.

    Also a volume on a third party, `is_volume`, under the volume's id: its owner is a gateway.
    The fencing epoch grows with each opening and each move. Until `is_initialised`, what its owner
    finds in it is believed. A forgotten device stays, so that it never counts as a new one.
    """

    device_id: uuid.UUID
    owner: str
    fencing_epoch: FencingEpoch = 1
    wrapped_secret: bytes
    anchor: AnchorKind | None = None
    is_initialised: bool = False
    opening: Opening | None = None
    opened_at: dt.datetime | None = None
    is_forgotten: bool = False
    is_volume: bool = False
    anchor_floor: Annotated[int, Field(ge=0, le=U64_MAX)] = 0
    """The highest number of a record of its anchor that is gone: those stay taken."""

    @property
    def role(self) -> str:
        """Whose nodes open it."""
        return Role.GATEWAY if self.is_volume else Role.TARGET


class DeviceRequestRecord(Record):
    """What one node shows or may show: the unknown device it came with, or that the next may be."""

    device_id: uuid.UUID | None = None
    anchor: AnchorKind | None = None
    is_next_authorized: bool = False


class ServedRecord(Record):
    """The device that one process of a target has open: its volumes go there."""

    device_id: uuid.UUID
    incarnation: bytes


class AnchorRecord(Record):
    """One record of a device's anchor (sealane.daemon.device.anchors)."""

    number: Annotated[int, Field(ge=1, le=U64_MAX)]
    blob: Annotated[bytes, Field(min_length=1, max_length=BLOB_BYTES_MAX)]
    mac: Annotated[bytes, Field(max_length=MAC_BYTES)] = b""
    """Of the device's owner, who checks it."""


class PolicyRecord(Record):
    """The policy in force, as its owner gave it; versions only grow."""

    version: Annotated[int, Field(ge=1)]
    document: bytes
    signature: bytes


class AuditHeadRecord(Record):
    """Where one broker's audit log ended when a record of it was last acknowledged."""

    sequence: Annotated[int, Field(ge=1)]
    digest: bytes


class CollateralRecord(Record):
    """The high-water marks of hardware vendors' collateral: values only grow."""

    marks: dict[str, int]


class ClockRecord(Record):
    """What a machine's clock said when it last attested (TPMS_CLOCK_INFO)."""

    reset_count: Annotated[int, Field(ge=0)]
    restart_count: Annotated[int, Field(ge=0)]
    millis: Annotated[int, Field(ge=0)]


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record and the revision of its last change, for the compare of the next one."""

    record: R
    revision: int
    name: str


class Table(Generic[R]):
    """The records of one kind, each under its name; names are visible ASCII."""

    __slots__ = ("_key", "_model", "_prefix", "_store")

    def __init__(self, store: Store, prefix: str, model: type[R], *, record_key: bytes) -> None:
        self._store = store
        self._prefix = f"{prefix}/"
        self._model = model
        self._key = record_key

    async def get(self, name: str) -> Stored[R] | None:
        """Return the record `name`; VerificationError if it isn't one of ours."""
        entry = await self._store.get(self.key(name))
        return None if entry is None else self._opened(entry)

    async def page(
        self, *, within: str = "", after: str = "", limit: int
    ) -> tuple[list[Stored[R]], bool]:
        """Return up to `limit` records by name: names begin with `within`, lie behind `after`.

        True: there are more.
        """
        page = await self._store.range(
            self._prefix + within, after=self.key(after) if after else "", limit=limit
        )
        return [self._opened(entry) for entry in page.entries], page.has_more

    def key(self, name: str) -> str:
        """Return the key of the record `name`."""
        return self._prefix + name

    def sealed(self, name: str, record: R) -> dict[str, bytes]:
        """Return what a commit puts so that `record` stands under `name`."""
        key = self.key(name)
        content = record.model_dump_json().encode()
        return {key: self._mac(key, content) + content}

    def unchanged(self, name: str, stored: Stored[R] | None) -> Compare:
        """Return what a commit compares so that `name` still is as it was read."""
        return Compare(self.key(name), 0 if stored is None else stored.revision)

    async def watch(self, *, from_revision: int) -> AsyncIterator[Stored[R]]:
        """Yield records that are put from that revision on; errors as `Store.watch` and `get`."""
        async for commit in self._store.watch(self._prefix, from_revision=from_revision):
            for change in commit:
                if change.value is not None:
                    yield self._opened(Entry(change.key, change.value, change.revision))

    def _opened(self, entry: Entry) -> Stored[R]:
        mac, content = entry.value[:_MAC_BYTES], entry.value[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(entry.key, content)):
            raise VerificationError(
                "broker.store.record.forged", f"{entry.key}: no broker of this authority wrote it"
            )
        try:
            record = self._model.model_validate_json(content)
        except ValidationError as error:
            raise VerificationError(
                "broker.store.malformed",
                f"{entry.key}: not a {self._model.__name__} of this version",
            ) from error
        return Stored(record, entry.revision, entry.key.removeprefix(self._prefix))

    def _mac(self, key: str, content: bytes) -> bytes:
        message = fields("sealane record v1", key.encode(), content)
        return hmac.digest(self._key, message, "sha256")


class Tables:
    """Every table there is; who adds a kind of record adds it here."""

    def __init__(self, store: Store, *, record_key: bytes) -> None:
        self.tenants = Table(store, "tenants", TenantRecord, record_key=record_key)
        self.volumes = Table(store, "volumes", VolumeRecord, record_key=record_key)
        self.requests = Table(store, "requests", RequestRecord, record_key=record_key)
        self.holders = Table(store, "holders", HolderRecord, record_key=record_key)
        self.grants = Table(store, "grants", GrantRecord, record_key=record_key)
        self.instances = Table(store, "instances", InstanceRecord, record_key=record_key)
        self.heads = Table(store, "heads", HeadRecord, record_key=record_key)
        self.policies = Table(store, "policies", PolicyRecord, record_key=record_key)
        self.audit_heads = Table(store, "audit", AuditHeadRecord, record_key=record_key)
        self.collateral = Table(store, "collateral", CollateralRecord, record_key=record_key)
        self.clocks = Table(store, "clocks", ClockRecord, record_key=record_key)
        self.nodes = Table(store, "nodes", NodeRecord, record_key=record_key)
        self.devices = Table(store, "devices", DeviceRecord, record_key=record_key)
        self.device_requests = Table(
            store, "device-requests", DeviceRequestRecord, record_key=record_key
        )
        self.served = Table(store, "served", ServedRecord, record_key=record_key)
        self.anchors = Table(store, "anchors", AnchorRecord, record_key=record_key)


def instance_name(instance: int) -> str:
    """Return the name that a broker instance's records stand under."""
    return f"{instance:05}"


def arena_name(arena: tuple[int, int]) -> str:
    """Return what the names of all grants of one arena (instance, start epoch) begin with."""
    return f"{instance_name(arena[0])}/{arena[1]:08}/"


def grant_name(arena: tuple[int, int], lease_id: int) -> str:
    """Return the name that a lease's record stands under."""
    return f"{arena_name(arena)}{lease_id:018}"
