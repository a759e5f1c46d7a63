"""Features of a controller: a table of which can be set, and to what (NVMe Base §5.27).

No feature can be saved; the saved value is the default.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.protocol.nvme.constants import (
    BROADCAST_NSID,
    KEEP_ALIVE_GRANULARITY_MS,
    QUEUE_COUNT_MAX,
    Feature,
    Status,
)
from sealane.protocol.nvme.subsystem import Subsystem

HOST_BEHAVIOR_BYTES = 512
_TEMPERATURE_MAX = 0xFFFF
_THRESHOLD_TYPE = 0x003F_0000
_THRESHOLD_UNDER = 0x0010_0000
_SAVE = 1 << 31
_QUEUES_FORBIDDEN = 0xFFFF
_NOTIFICATION_BITS = 0x0E

_CHANGEABLE = 1 << 2
_NAMESPACE_SPECIFIC = 1 << 1
_CURRENT, _DEFAULT, _SAVED, _SUPPORTED = range(4)


class FeatureRefusedError(Exception):
    """A feature can't be set or read; `status` is the reason."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def _anything(_: int) -> bool:
    return True


def _is_zero(value: int) -> bool:
    return value == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One feature. `accepts` checks CDW11; `selector` is the part of CDW11 that names a variant."""

    default: int = 0
    accepts: Callable[[int], bool] = _anything
    is_changeable: bool = True
    is_per_namespace: bool = False
    selector: int = 0
    data_bytes: int = 0
    needs_reservations: bool = False


_COMMON: Final[Mapping[int, _Entry]] = {
    Feature.ASYNC_EVENT_CONFIGURATION: _Entry(),
    Feature.KEEP_ALIVE_TIMER: _Entry(),
}
_IO: Final[Mapping[int, _Entry]] = {
    **_COMMON,
    Feature.ARBITRATION: _Entry(),
    Feature.POWER_MANAGEMENT: _Entry(accepts=lambda value: not value & 0x1F),  # power state 0
    Feature.TEMPERATURE_THRESHOLD: _Entry(default=_TEMPERATURE_MAX, selector=_THRESHOLD_TYPE),
    # Errors for reading deallocated blocks (bit 16) are not supported.
    Feature.ERROR_RECOVERY: _Entry(accepts=lambda value: value <= 0xFFFF),
    # Stores acknowledge before a flush; hosts can't disable that, but can use FUA.
    Feature.VOLATILE_WRITE_CACHE: _Entry(default=1, is_changeable=False),
    Feature.NUMBER_OF_QUEUES: _Entry(),
    Feature.WRITE_ATOMICITY: _Entry(accepts=lambda value: value <= 1),
    Feature.HOST_BEHAVIOR: _Entry(data_bytes=HOST_BEHAVIOR_BYTES),
    Feature.COMMAND_SET_PROFILE: _Entry(accepts=_is_zero),
    Feature.HOST_IDENTIFIER: _Entry(is_changeable=False, data_bytes=16),
    Feature.RESERVATION_NOTIFICATION_MASK: _Entry(
        accepts=lambda value: not value & ~_NOTIFICATION_BITS,
        is_per_namespace=True,
        needs_reservations=True,
    ),
    # Registrations don't survive a power cycle.
    Feature.RESERVATION_PERSISTENCE: _Entry(
        is_changeable=False, is_per_namespace=True, needs_reservations=True
    ),
}


class Features:
    """Values of one controller's features. The keep-alive timeout is in milliseconds."""

    def __init__(self, subsystem: Subsystem, *, keep_alive_ms: int, host_id: bytes) -> None:
        table = _COMMON if subsystem.is_discovery else _IO
        self._table = {
            feature: entry
            for feature, entry in table.items()
            if subsystem.has_reservations or not entry.needs_reservations
        }
        self._host_id = host_id
        self._connected_keep_alive_ms = keep_alive_ms
        self._values: dict[tuple[int, int, int], int] = {}
        self._host_behavior = bytes(HOST_BEHAVIOR_BYTES)
        self.reset()

    def reset(self) -> None:
        """Restore the values after Connect."""
        self._values.clear()
        self._host_behavior = bytes(HOST_BEHAVIOR_BYTES)
        self.keep_alive_ms = self._connected_keep_alive_ms
        self.queue_count = QUEUE_COUNT_MAX

    @property
    def keep_alive_ms(self) -> int:
        """Keep-alive timeout in milliseconds; 0: none."""
        return self._keep_alive_ms

    @keep_alive_ms.setter
    def keep_alive_ms(self, milliseconds: int) -> None:
        granules = -(-milliseconds // KEEP_ALIVE_GRANULARITY_MS)
        self._keep_alive_ms = granules * KEEP_ALIVE_GRANULARITY_MS

    @property
    def known(self) -> tuple[int, ...]:
        """Identifiers of the features offered."""
        return tuple(self._table)

    def set(
        self, selector: int, value: int, *, nsid: int, data: bytes, subsystem: Subsystem
    ) -> int:
        """Set Features: `selector` is CDW10, `value` CDW11. Return the completion's result.

        FeatureRefusedError if it can't be set. The owner keeps the value of feature 0Bh.
        """
        feature = selector & 0xFF
        entry = self._entry(feature)
        if selector & _SAVE:
            raise FeatureRefusedError(Status.FEATURE_NOT_SAVEABLE)
        # Hosts also set values that already apply.
        if not entry.is_changeable and (entry.data_bytes or value != entry.default):
            raise FeatureRefusedError(Status.FEATURE_NOT_CHANGEABLE)
        if not entry.accepts(value) or len(data) != entry.data_bytes:
            raise FeatureRefusedError(Status.INVALID_FIELD)
        if entry.data_bytes:
            self._host_behavior = data
            return 0
        if feature == Feature.NUMBER_OF_QUEUES:
            return self._set_queue_count(value)
        if feature == Feature.KEEP_ALIVE_TIMER:
            self.keep_alive_ms = value
            return 0
        for each in self._namespaces(entry, nsid, subsystem, is_setting=True):
            self._values[feature, each, value & entry.selector] = value & ~entry.selector
        return 0

    def get(
        self, selector: int, variant: int, *, nsid: int, subsystem: Subsystem
    ) -> tuple[int, bytes]:
        """Get Features: `selector` is CDW10, `variant` CDW11. Return result and data."""
        feature, which = selector & 0xFF, selector >> 8 & 0x07
        entry = self._entry(feature)
        if which == _SUPPORTED:
            changeable = _CHANGEABLE if entry.is_changeable else 0
            return changeable | (_NAMESPACE_SPECIFIC if entry.is_per_namespace else 0), b""
        if which > _SUPPORTED:
            raise FeatureRefusedError(Status.INVALID_FIELD)
        is_current = which == _CURRENT
        if feature == Feature.HOST_IDENTIFIER:
            if not variant & 1:  # the 8-byte form doesn't exist over fabrics
                raise FeatureRefusedError(Status.INVALID_FIELD)
            return 0, self._host_id
        if feature == Feature.HOST_BEHAVIOR:
            return 0, self._host_behavior if is_current else bytes(HOST_BEHAVIOR_BYTES)
        if feature == Feature.NUMBER_OF_QUEUES:
            granted = (self.queue_count if is_current else QUEUE_COUNT_MAX) - 1
            return granted | granted << 16, b""
        if feature == Feature.KEEP_ALIVE_TIMER:
            return self.keep_alive_ms if is_current else 0, b""
        named = variant & entry.selector
        default = 0 if named & _THRESHOLD_UNDER else entry.default
        (each,) = self._namespaces(entry, nsid, subsystem, is_setting=False)
        return self._values.get((feature, each, named), default) if is_current else default, b""

    def notification_mask(self, nsid: int) -> int:
        """Return the mask of reservation notifications disabled for a namespace (feature 82h)."""
        return self._values.get((Feature.RESERVATION_NOTIFICATION_MASK, nsid, 0), 0)

    def _entry(self, feature: int) -> _Entry:
        entry = self._table.get(feature)
        if entry is None:
            raise FeatureRefusedError(Status.INVALID_FIELD)
        return entry

    def _set_queue_count(self, value: int) -> int:
        submission, completion = value & 0xFFFF, value >> 16
        if _QUEUES_FORBIDDEN in {submission, completion}:
            raise FeatureRefusedError(Status.INVALID_FIELD)
        self.queue_count = min(submission + 1, completion + 1, QUEUE_COUNT_MAX)
        granted = self.queue_count - 1
        return granted | granted << 16

    @staticmethod
    def _namespaces(
        entry: _Entry, nsid: int, subsystem: Subsystem, *, is_setting: bool
    ) -> tuple[int, ...]:
        """Return the ids that a value is kept under: 0 for one that belongs to the controller."""
        if not entry.is_per_namespace:
            if is_setting and nsid not in {0, BROADCAST_NSID}:
                raise FeatureRefusedError(Status.FEATURE_NOT_NAMESPACE_SPECIFIC)
            return (0,)
        if is_setting and nsid == BROADCAST_NSID:
            return tuple(namespace.nsid for namespace in subsystem.namespaces)
        if subsystem.namespace(nsid) is None:
            raise FeatureRefusedError(Status.INVALID_NAMESPACE)
        return (nsid,)


def encode_feature_effects(known: tuple[int, ...]) -> bytes:
    """Feature Identifiers Supported and Effects, log page 12h."""
    page = bytearray(1024)
    for feature in known:
        struct.pack_into("<I", page, feature * 4, 1)
    return bytes(page)
