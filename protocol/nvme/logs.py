"""Log pages of a controller, encoded (NVMe Base 2.0 §5.16.1)."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from sealane.protocol.nvme.constants import (
    BROADCAST_NSID,
    DATA_UNIT_SECTORS,
    ERROR_ENTRIES_MAX,
    IDENTIFY_BYTES,
    AdminOpcode,
    IoOpcode,
)
from sealane.protocol.nvme.subsystem import CommandFailure, Health, Namespace, Subsystem

_CHANGED_MAX = IDENTIFY_BYTES // 4
_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
_NO_PARAMETER = 0xFFFF

# Command effects (NVMe Base 2.0 figure 211).
_SUPPORTED = 1 << 0
_CHANGES_BLOCKS = 1 << 1
_ADMIN_EFFECTS: Final[Mapping[int, int]] = {
    opcode: _SUPPORTED for opcode in AdminOpcode if opcode != AdminOpcode.FABRICS
}
_CHANGING: Final = frozenset({IoOpcode.WRITE, IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT})

# Error entry: count, queue, command, status with phase, location, LBA, namespace
_ERROR = struct.Struct("<QHHHHQI36x")
_ANA_HEADER = struct.Struct("<QH6x")
_ANA_GROUP = struct.Struct("<IIQB15x")
_NOTIFICATION = struct.Struct("<QBB2xI48x")


class Notification(IntEnum):
    """Kinds of reservation notifications; feature 82h masks kind n with bit n."""

    REGISTRATION_PREEMPTED = 1
    RESERVATION_RELEASED = 2
    RESERVATION_PREEMPTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFailure:
    """An entry of the error log; `count` is unique within the controller."""

    count: int
    failure: CommandFailure


def encode_supported(pages: Iterable[int]) -> bytes:
    """Encode Supported Log Pages, 00h."""
    data = bytearray(1024)
    for page in pages:
        data[page * 4] = 1
    return bytes(data)


def encode_errors(entries: Sequence[LoggedFailure]) -> bytes:
    """Encode Error Information, 01h: newest first, the rest zero."""
    encoded = b"".join(
        _ERROR.pack(
            entry.count,
            entry.failure.queue_id,
            entry.failure.command_id,
            (entry.failure.status << 1) & 0xFFFF,
            _NO_PARAMETER,
            entry.failure.lba,
            entry.failure.nsid,
        )
        for entry in entries[:ERROR_ENTRIES_MAX]
    )
    return encoded.ljust(ERROR_ENTRIES_MAX * _ERROR.size, b"\0")


def encode_health(health: Health, *, error_count: int) -> bytes:
    """Encode SMART / Health Information, 02h.

    Available spare is 100 %; a software store has no temperature, wear or power cycles, so those
    stay zero.
    """
    page = bytearray(512)
    page[3] = 100
    figures = (
        -(-health.sectors_read // DATA_UNIT_SECTORS),
        -(-health.sectors_written // DATA_UNIT_SECTORS),
        health.host_reads,
        health.host_writes,
        health.busy_ms // _MINUTE_MS,
        0,  # power cycles
        health.power_on_ms // _HOUR_MS,
        0,  # unsafe shutdowns
        health.media_errors,
        error_count,
    )
    for place, figure in enumerate(figures):
        page[32 + 16 * place : 48 + 16 * place] = figure.to_bytes(16, "little")
    return bytes(page)


def encode_firmware_slot(subsystem: Subsystem) -> bytes:
    """Encode Firmware Slot Information, 03h: one slot."""
    page = bytearray(512)
    page[0] = 1
    page[8:16] = subsystem.firmware.encode("ascii")[:8].ljust(8)
    return bytes(page)


def encode_changed_namespaces(changed: Iterable[int]) -> bytes:
    """Encode the Changed Namespace List, 04h; if too many, one id that stands for all."""
    ids = sorted(changed)
    if len(ids) > _CHANGED_MAX:
        ids = [BROADCAST_NSID]
    return b"".join(nsid.to_bytes(4, "little") for nsid in ids).ljust(IDENTIFY_BYTES, b"\0")


def encode_command_effects(subsystem: Subsystem) -> bytes:
    """Encode Commands Supported and Effects, 05h."""
    page = bytearray(4096)
    for opcode, effects in _ADMIN_EFFECTS.items():
        struct.pack_into("<I", page, opcode * 4, effects)
    for command in subsystem.commands:
        effects = _SUPPORTED | (_CHANGES_BLOCKS if command in _CHANGING else 0)
        struct.pack_into("<I", page, 1024 + command * 4, effects)
    return bytes(page)


def encode_ana(namespaces: Sequence[Namespace], *, change_count: int, groups_only: bool) -> bytes:
    """Encode Asymmetric Namespace Access, 0Ch: one group per namespace."""
    parts = [_ANA_HEADER.pack(change_count, len(namespaces))]
    for namespace in namespaces:
        count = 0 if groups_only else 1
        parts.append(_ANA_GROUP.pack(namespace.nsid, count, change_count, namespace.ana_state))
        if not groups_only:
            parts.append(namespace.nsid.to_bytes(4, "little"))
    return b"".join(parts)


def ana_bytes_max(subsystem: Subsystem) -> int:
    """Return the page's size with all possible groups, as hosts compute it (NANAGRPID, MNAN)."""
    return _ANA_HEADER.size + subsystem.nsid_max * (_ANA_GROUP.size + 4)


def encode_notification(
    *, count: int, kind: Notification | None, remaining: int, nsid: int
) -> bytes:
    """Encode Reservation Notification, 80h; without `kind` it is the empty page."""
    return _NOTIFICATION.pack(count, kind or 0, min(remaining, 0xFF), nsid)
