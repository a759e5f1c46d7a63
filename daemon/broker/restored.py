"""What a store must be before it is served after a restore from a snapshot.

A restore is a rollback on purpose. Everything that the snapshot can't know about the time after it
is replaced by something that is safe whatever happened then:

* **Keys.** Every volume begins a key epoch beyond those that it may have had since: sectors sealed
  since stay readable, a holder of a newer key than the snapshot knows doesn't have this one, and no
  IV repeats under it. A volume that has too few key epochs left gets no leases.
* **Counters.** Every broker instance of the snapshot is retired, and later ones add a random base
  to their start epochs (`Instance.claim`), as a second line of defence.
* **Nodes** are revoked unless the operator accepts them by name; certificates issued before the
  restore are refused in any case.
* **Devices** whose anchor brokers keep have lost it: what is found is refused
  (`device.anchor.mismatch`) unless the operator accepts the device by name. Numbers of anchor
  records and fencing epochs continue beyond any that were used since.
* **Permissions** that may have been used since, to show an unknown device, are withdrawn.

Key epochs, fencing epochs and anchor numbers skip as many steps as restores were made since the
snapshot, this one included. So each is beyond every other restore's, of whatever snapshot: it is
the number of restores before it times the step, plus what brokers counted themselves, which the
step is larger than. Nothing in a snapshot can tell how many restores there were: the operator does.
"""

import datetime as dt
import secrets
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.crypto.lease import EPOCH_COUNTERS_MAX, START_EPOCH_MAX
from sealane.daemon.broker.authority import AUTHORITY_KEY
from sealane.daemon.broker.devices import FENCE
from sealane.daemon.broker.records import (
    LAST_RESTORE,
    RESTORES_MAX,
    DeviceRecord,
    NodeRecord,
    RestoreRecord,
    Revocation,
    Stored,
    Tables,
    VolumeRecord,
)
from sealane.daemon.broker.store.contract import STATE_KEY, Entry
from sealane.errors import UsageError
from sealane.protocol.kinds import AnchorKind

EPOCH_BASE_MIN: Final = 1 << 20
"""Smallest base of start epochs. A broker that was never restored doesn't start so often."""
EPOCH_BASE_MAX: Final = START_EPOCH_MAX >> 1
"""The rest is left to counters, which a TPM starts above all that it ever counted."""
KEY_EPOCHS_AHEAD: Final = 16
"""Key epochs skipped: more than a volume begins that a snapshot doesn't know of."""
FENCING_EPOCHS_AHEAD: Final = 1 << 16
ANCHOR_NUMBERS_AHEAD: Final = 1 << 40

_HELD: Final = "not accepted when the broker's store was restored from a snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What the operator names as trusted: nodes, and devices as they are found."""

    nodes: Collection[str] = ()
    devices: Collection[uuid.UUID] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The records to restore, without their state record, and what was done to them."""

    entries: Mapping[str, bytes]
    ordinal: int
    epoch_base: int
    retired: tuple[int, ...]
    policy_version: int
    held_nodes: tuple[str, ...]
    held_devices: tuple[uuid.UUID, ...]
    unwritable_volumes: tuple[uuid.UUID, ...]


def new_epoch_base() -> int:
    """Return a random base of start epochs."""
    return EPOCH_BASE_MIN + secrets.randbelow(EPOCH_BASE_MAX - EPOCH_BASE_MIN)


def revised(
    entries: Mapping[str, bytes],
    tables: Tables,
    *,
    accepted: Accepted,
    restored_before: int,
    now: dt.datetime,
    snapshot_at: dt.datetime,
    snapshot_state: int,
) -> Revision:
    """Return the records of a snapshot as they may be served.

    `restored_before` is the number of restores of these brokers' snapshots before, whichever.

    UsageError `broker.restore.count`, `broker.restore.device`; `node.not_found`, `device.not_found`
    for an accepted one that isn't in the snapshot. VerificationError `broker.store.record.forged`,
    `.malformed`.
    """
    jumps = _jumps(entries, tables, restored_before)
    after: dict[str, bytes] = {}
    seen_nodes: set[str] = set()
    retired: list[int] = []
    held_nodes: set[str] = set()
    unwritable: list[uuid.UUID] = []
    policy_version = 0
    anchor_numbers: dict[str, int] = {}
    devices: list[Stored[DeviceRecord]] = []
    for key, before in entries.items():
        value = before
        if key in {STATE_KEY, AUTHORITY_KEY}:
            continue
        table, stored = tables.opened(Entry(key, before, 0))
        record = stored.record
        if table in {tables.restores, tables.device_requests, tables.held_keys}:
            continue  # replaced; withdrawn; those of retired brokers
        if table is tables.nodes:
            seen_nodes.add(record.node)
            is_accepted = record.node in accepted.nodes
            if not is_accepted or record.revocation is not None:
                held_nodes.add(record.node)
            value = table.sealed(stored.name, _node(record, now, is_accepted=is_accepted))[key]
        elif table is tables.volumes and not record.is_deleted:
            volume = _volume(record, jumps)
            if volume.counters_leased:
                unwritable.append(record.volume_id)
            value = table.sealed(stored.name, volume)[key]
        elif table is tables.devices:
            devices.append(stored)
        elif table is tables.anchors:
            owner = stored.name.partition("/")[0]
            anchor_numbers[owner] = max(anchor_numbers.get(owner, 0), record.number)
            continue
        elif table is tables.instances:
            retired.append(int(stored.name))
        elif table is tables.policies:
            policy_version = record.version
        after[key] = value
    for device in devices:
        number = anchor_numbers.get(device.name, 0)
        after |= tables.devices.sealed(
            device.name,
            _device(device.record, now, accepted=accepted, last_number=number, jumps=jumps),
        )
    _check_known(accepted, seen_nodes, {each.record.device_id: each.record for each in devices})
    restore = RestoreRecord(
        restored_at=now,
        snapshot_at=snapshot_at,
        snapshot_state=snapshot_state,
        epoch_base=new_epoch_base(),
        ordinal=restored_before + 1,
        retired=tuple(sorted(retired)),
    )
    return Revision(
        entries={
            AUTHORITY_KEY: entries[AUTHORITY_KEY],
            **after,
            **tables.restores.sealed(LAST_RESTORE, restore),
        },
        ordinal=restore.ordinal,
        epoch_base=restore.epoch_base,
        retired=restore.retired,
        policy_version=policy_version,
        held_nodes=tuple(sorted(held_nodes)),
        held_devices=tuple(
            each.record.device_id for each in devices if _is_held(each.record, accepted)
        ),
        unwritable_volumes=tuple(unwritable),
    )


def _jumps(entries: Mapping[str, bytes], tables: Tables, restored_before: int) -> int:
    """Return how many steps to skip: the number of restores since the snapshot, and this one."""
    key = tables.restores.key(LAST_RESTORE)
    known = tables.opened(Entry(key, entries[key], 0))[1].record.ordinal if key in entries else 0
    if not known <= restored_before < RESTORES_MAX:
        raise UsageError(
            "broker.restore.count",
            f"restored {restored_before} times before; allowed: {known}, which the snapshot "
            f"itself knows of, to {RESTORES_MAX - 1}",
        )
    return restored_before + 1 - known


def _node(record: NodeRecord, now: dt.datetime, *, is_accepted: bool) -> NodeRecord:
    if record.revocation is not None:
        return record
    if is_accepted:
        return record.model_copy(update={"restored_at": now})
    revocation = Revocation(reason=_HELD, revoked_at=now)
    return record.model_copy(update={"revocation": revocation, "restored_at": None})


def _volume(record: VolumeRecord, jumps: int) -> VolumeRecord:
    newest = record.key_epoch + jumps * KEY_EPOCHS_AHEAD
    last = record.oldest_key_epoch + KEY_EPOCHS_MAX - 1
    if newest > last:
        # It may have been in use since, and how much was leased is unknown: nothing more is.
        return record.model_copy(update={"key_epoch": last, "counters_leased": EPOCH_COUNTERS_MAX})
    return record.model_copy(update={"key_epoch": newest, "counters_leased": 0})


def _is_held(record: DeviceRecord, accepted: Accepted) -> bool:
    return _is_kept_here(record) and record.device_id not in accepted.devices


def _is_kept_here(record: DeviceRecord) -> bool:
    """Return whether brokers kept its anchor, which a restore can't bring back."""
    return record.anchor == AnchorKind.BROKER and not record.is_forgotten


def _device(
    record: DeviceRecord, now: dt.datetime, *, accepted: Accepted, last_number: int, jumps: int
) -> DeviceRecord:
    if record.is_forgotten:
        return record
    opening = record.opening
    update: dict[str, object] = {
        "fencing_epoch": record.fencing_epoch + jumps * FENCING_EPOCHS_AHEAD,
        "anchor_floor": max(record.anchor_floor, last_number) + jumps * ANCHOR_NUMBERS_AHEAD,
        # Whoever serves it now gets no authorizations from here, and has stopped by then.
        "opening": None if opening is None else opening.model_copy(update={"until": now + FENCE}),
    }
    if _is_kept_here(record):
        # Confirmed since, maybe; only the operator has what is found accepted.
        update["is_initialised"] = record.device_id not in accepted.devices
    return record.model_copy(update=update)


def _check_known(
    accepted: Accepted, nodes: Collection[str], devices: Mapping[uuid.UUID, DeviceRecord]
) -> None:
    for node in accepted.nodes:
        if node not in nodes:
            raise UsageError("node.not_found", f"no node {node[:80]!r} is in the snapshot")
    for device in accepted.devices:
        if device not in devices:
            raise UsageError("device.not_found", f"no device {device} is in the snapshot")
        if not _is_kept_here(devices[device]):
            raise UsageError(
                "broker.restore.device",
                f"device {device} has anchor {devices[device].anchor or 'none yet'} or is "
                f"forgotten; allowed to be accepted: those with anchor {AnchorKind.BROKER}",
            )
