"""Anchors: a device's last durable state, recorded where the owner of its disks can't change it.

An anchor (anchors.md) holds small records by name. Their owners define the content: a volume's
epoch, checkpoint root, head of the log and commit number; the list of a target's volumes. A process
that opens a device recovers exactly the anchored state, and advances the records before the first
I/O. anchors.md states the guarantees of each kind.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from sealane.errors import UnavailableError, UsageError, VerificationError

U64_MAX: Final = (1 << 64) - 1
BLOB_BYTES_MAX: Final = 128
CATALOGUE: Final = "catalogue"
RECORDS_MAX: Final = 4097
"""Records of one device: one for each volume that a target may have, and one for its catalogue."""
NUMBER_STEP_MAX: Final = 1 << 20
"""Limit on the increase of a number by one change, so that forged changes can't use up the
numbers."""
MAC_BYTES: Final = 32
CHANGES_MAX: Final = 32
"""Records that one call changes; a commit in a broker's store takes 64 changes and compares."""

FAILED: Final = "anchor.failed"
NO_SPACE: Final = "anchor.space"
"""Nothing was changed for want of space: the same call may succeed later."""
_NAME: Final = re.compile(
    r"catalogue|volume/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
)


def volume_record(volume_id: UUID) -> str:
    """Return the name of a volume's record."""
    return f"volume/{volume_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """A record: its number increases with each change; its 1 to 128 bytes are opaque here.

    `mac` is the owner's, over everything else (`sealane.daemon.device.anchors.authentic`).
    """

    number: int
    blob: bytes
    mac: bytes = b""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= U64_MAX:
            raise UsageError("anchor.range", f"number {self.number}; allowed: 1…{U64_MAX}")
        if not 1 <= len(self.blob) <= BLOB_BYTES_MAX:
            raise UsageError("anchor.range", f"{len(self.blob)} bytes; allowed: 1…{BLOB_BYTES_MAX}")
        if len(self.mac) not in {0, MAC_BYTES}:
            raise UsageError(
                "anchor.range", f"a MAC of {len(self.mac)} bytes; allowed: none, {MAC_BYTES}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change from the record numbered `expected` (0: none) to `record` (None: remove it).

    The number of a removed record stays taken: the anchor's floor is the highest such number, and
    new records of any name begin above it.
    """

    name: str
    expected: int
    record: Anchored | None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise UsageError(
                "anchor.range", f"record {self.name[:80]!r}; allowed: {CATALOGUE}, volume/<UUID>"
            )
        newest = U64_MAX if self.record is None else self.record.number - 1
        if not 0 <= self.expected <= newest:
            raise UsageError("anchor.order", f"{self.name}: the record's number must grow")

    def is_due(self, found: Anchored | None, *, floor: int) -> bool:
        """Return whether the change is still to be made: not if this is a repeated request.

        UsageError `anchor.order` if `found` is neither the state before nor after the change, or if
        a new record doesn't begin above `floor`; `anchor.range` if the number grows by too much.
        """
        if found == self.record:
            return False
        number = 0 if found is None else found.number
        if number != self.expected:
            raise UsageError(
                "anchor.order",
                f"{self.name} has number {number}; the change expects number {self.expected}",
            )
        if self.record is not None:
            last = self.expected or floor
            if self.record.number <= last:
                raise UsageError(
                    "anchor.order",
                    f"{self.name}: number {self.record.number}; allowed: above {last}, the "
                    "highest number used so far",
                )
            if self.record.number - last > NUMBER_STEP_MAX:
                raise UsageError(
                    "anchor.range",
                    f"{self.name}: number {self.record.number} after {last}; allowed: at most "
                    f"{last + NUMBER_STEP_MAX}",
                )
        return True


class Anchor(Protocol):
    """The anchor of one device, with one owner at a time."""

    @property
    def records(self) -> Mapping[str, Anchored]:
        """Anchored records, by name; UnavailableError `anchor.failed` if they are unknown."""

    @property
    def floor(self) -> int:
        """The highest number of a removed record; 0: none. Errors as for `records`."""

    async def advance(self, changes: Sequence[Change]) -> None:
        """Make up to 32 changes, all or none; once this returns, no older state is accepted.

        UsageError `anchor.order`: the anchored state is another. UnavailableError `anchor.failed`:
        nothing works until the anchor is opened again. Any other UnavailableError: the outcome is
        unknown, and exactly these changes must be requested again. VerificationError: the device no
        longer belongs to the caller.
        """

    async def close(self) -> None:
        """Release the anchor."""


def check_changes(changes: Sequence[Change]) -> None:
    """Raise UsageError `anchor.range` unless there are 1 to 32, each to a different record."""
    if not 1 <= len(changes) <= CHANGES_MAX or len({c.name for c in changes}) != len(changes):
        raise UsageError(
            "anchor.range",
            f"{len(changes)} changes; allowed: 1…{CHANGES_MAX}, each to a different record",
        )


def changed(
    records: Mapping[str, Anchored], changes: Sequence[Change], *, floor: int
) -> tuple[dict[str, Anchored], int]:
    """Return records and floor after `changes`; UsageError `anchor.order`, `anchor.range`.

    New records are checked against the floor before the changes: no change removes a record that it
    also creates.
    """
    check_changes(changes)
    after, after_floor = dict(records), floor
    for change in changes:
        if not change.is_due(after.get(change.name), floor=floor):
            continue
        if change.record is None:
            after_floor = max(after_floor, after.pop(change.name).number)
        else:
            after[change.name] = change.record
    if len(after) > RECORDS_MAX:
        raise UsageError("anchor.range", f"{len(after)} records; allowed: at most {RECORDS_MAX}")
    return after, after_floor


def missing(device_id: UUID) -> VerificationError:
    """Return the error for a device that has no anchor here."""
    return VerificationError(
        "anchor.missing",
        f"device {device_id} has no anchor here: it was never initialised, belongs to another "
        "machine, or its record was removed",
    )


def failed(device_id: UUID) -> UnavailableError:
    """Return the error for an anchor whose last advance has an unknown outcome."""
    return UnavailableError(
        FAILED, f"the anchor of device {device_id} failed: open the device again"
    )
