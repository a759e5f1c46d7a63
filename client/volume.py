"""Volumes, their attachments and their events."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field

from sealane.client.disk_queues import FrontEnd
from sealane.client.volume_store import VolumeStore, store_of
from sealane.errors import UsageError
from sealane.protocol.v1 import storage_pb2, volumes_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Address and counters of an attached volume's plain namespace."""

    traddr: str
    trsvcid: int
    subsystem_nqn: str
    namespace_id: int
    host_nqn: str
    sectors_sealed: int
    sectors_opened: int
    counters_used: int
    counters_leased: int
    refusals: int
    fail_over: str = ""
    """"active" or "standby" in a fail-over group; otherwise empty."""
    fail_over_group: str = ""
    """Identifies that group: the target fences only gateways of the same one. Otherwise empty."""
    dhchap_secret: str = field(default="", repr=False)
    """The host's DH-HMAC-CHAP secret; set only in the result of `attach`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeShare:
    """Another tenant whose gateways may use a volume."""

    tenant: str
    is_read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume; `state` is "available", "attached", "reattaching" or "filling".

    "reattaching": the gateway has restarted, and the volume isn't attached again yet. "filling":
    `filled_bytes` are written.

    `mode` is "remote", "local" on a `third_party` of the gateway `target_node`, or "off" on either;
    `claims` are the claims of the threat model that hold in it. `tenant` owns the volume; if that
    is another tenant, `shares` has only the share of this gateway's tenant.
    """

    name: str
    display_name: str
    size_bytes: int
    target_node: str
    state: str
    mode: str
    freshness: str
    key_epoch: int
    attachment: Attachment | None
    third_party: str = ""
    claims: tuple[str, ...] = ()
    filled_bytes: int = 0
    tenant: str = ""
    shares: tuple[VolumeShare, ...] = ()
    is_read_only: bool = False
    anchor: str = ""
    """In mode "local": "broker" or "none"; otherwise empty: the target keeps the anchor."""
    store: VolumeStore | None = None
    """State of its store, if that was requested."""
    store_unknown: str = ""
    """Reason id of the failed request for that state."""


def front_end_of(volume: Volume) -> FrontEnd:
    """Return an attached volume's front end; UsageError if it isn't attached."""
    a = volume.attachment
    if a is None or not a.dhchap_secret:
        raise UsageError(
            "volume.secret", f"{volume.name}: use the result of `attach`, which has the secret"
        )
    return FrontEnd(
        traddr=a.traddr,
        trsvcid=a.trsvcid,
        subsystem_nqn=a.subsystem_nqn,
        namespace_id=a.namespace_id,
        host_nqn=a.host_nqn,
        secret=a.dhchap_secret,
    )


def standby_ends(volume: Volume, standbys: Sequence[Volume]) -> list[FrontEnd]:
    """Return the front ends of a volume at other gateways, between which a client may change.

    UsageError `disk.paths` unless all are of one fail-over group (of a volume, a host and the
    gateways' tenant): without its fence, a write that a lost path still holds could undo a newer
    one.
    """
    if not standbys:
        return []
    first, *others = [front_end_of(each) for each in (volume, *standbys)]
    for each, end in zip(standbys, others, strict=True):
        is_same = (end.subsystem_nqn, end.namespace_id, end.host_nqn) == (
            first.subsystem_nqn,
            first.namespace_id,
            first.host_nqn,
        )
        if not is_same:
            raise UsageError("disk.paths", f"{each.name} is another volume, or for another host")
    groups = [
        each.attachment.fail_over_group if each.attachment else "" for each in (volume, *standbys)
    ]
    for each, group in zip((volume, *standbys), groups, strict=True):
        if not group:
            raise UsageError("disk.paths", f"{each.name} isn't attached with fail-over at each end")
        if group != groups[0]:
            raise UsageError(
                "disk.paths", f"{each.name} is attached at gateways of different tenants"
            )
    return others


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeEvent:
    """Something that happened to a volume; `reason` is a stable id, `origin` a node."""

    time: dt.datetime
    volume_id: str
    kind: str
    reason: str
    lba: int
    detail: str
    origin: str


def event_of(message: storage_pb2.VolumeEvent) -> VolumeEvent:
    """Convert from the wire."""
    return VolumeEvent(
        time=message.time.ToDatetime(tzinfo=dt.UTC),
        volume_id=message.volume_id,
        kind=message.kind,
        reason=message.reason,
        lba=message.lba,
        detail=message.detail,
        origin=message.origin,
    )


def volume_of(message: volumes_pb2.Volume) -> Volume:
    """Convert from the wire."""
    attachment = None
    if message.HasField("attachment"):
        a = message.attachment
        attachment = Attachment(
            traddr=a.traddr,
            trsvcid=a.trsvcid,
            subsystem_nqn=a.subsystem_nqn,
            namespace_id=a.namespace_id,
            host_nqn=a.host_nqn,
            sectors_sealed=a.sectors_sealed,
            sectors_opened=a.sectors_opened,
            counters_used=a.counters_used,
            counters_leased=a.counters_leased,
            refusals=a.refusals,
            fail_over=a.fail_over,
            fail_over_group=a.fail_over_group,
            dhchap_secret=a.dhchap_secret,
        )
    return Volume(
        name=message.name,
        display_name=message.display_name,
        size_bytes=message.size_bytes,
        target_node=message.target_node,
        state=volumes_pb2.Volume.State.Name(message.state).lower(),
        mode=message.mode,
        freshness=message.freshness,
        key_epoch=message.key_epoch,
        attachment=attachment,
        third_party=message.third_party,
        anchor=message.anchor,
        claims=tuple(message.claims),
        filled_bytes=message.filled_bytes,
        tenant=message.tenant,
        shares=tuple(
            VolumeShare(tenant=share.tenant, is_read_only=share.read_only)
            for share in message.shares
        ),
        is_read_only=message.read_only,
        store=store_of(message.store) if message.HasField("store") else None,
        store_unknown=message.store_unknown,
    )
