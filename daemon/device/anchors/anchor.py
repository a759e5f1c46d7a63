"""Anchors: where a device's last durable state is named, out of reach of who owns its disks.

An anchor (anchors.md) holds small records by name, which their owners fill: a volume's epoch,
checkpoint root, head of the log and commit number, the list of a target's volumes. Whoever opens a
device recovers to exactly what they say, and advances them before the first I/O. anchors.md
has what each kind guarantees.
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
"""Records of one device: one for each volume that a target takes, and its catalogue."""
NUMBER_STEP_MAX: Final = 1 << 20
"""How much further one change leads: whoever makes up changes doesn't use the numbers up."""
MAC_BYTES: Final = 32
CHANGES_MAX: Final = 32
"""Records that one call changes: brokers' stores take 64 changes and compares in a commit."""

FAILED: Final = "anchor.failed"
_NAME: Final = re.compile(
    r"catalogue|volume/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
)


def volume_record(volume_id: UUID) -> str:
    """Return the name of a volume's record."""
    return f"volume/{volume_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """A record: its number grows with each change, its 1 to 128 bytes are opaque here.

    `mac` is the owner's, over all the rest (`sealane.daemon.device.anchors.authentic`).
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
    """From the record whose number is `expected` (0: there is none) to `record` (None: it goes).

    The number of a record that goes stays taken: the anchor's floor is the highest such number, and
    no new record, of whatever name, begins at it or below.
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
        """Whether the change has to be made yet: not if it was made, and this is its repetition.

        UsageError `anchor.order` if `found` is neither what it starts from nor what it leads to, or
        if a new record doesn't begin above `floor`; `anchor.range` if the number grows by too much.
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
    """The anchor of one device, held by one owner at a time."""

    @property
    def records(self) -> Mapping[str, Anchored]:
        """What is anchored, by name; UnavailableError `anchor.failed` if that can't be told."""

    @property
    def floor(self) -> int:
        """The highest number of a record that is gone; 0: none is. Errors as `records`."""

    async def advance(self, changes: Sequence[Change]) -> None:
        """Make up to 32 changes, all or none; once this returns, nothing older is accepted again.

        UsageError `anchor.order`: not what is anchored. UnavailableError `anchor.failed`: nothing
        works until the anchor is opened again. Any other UnavailableError: whether it was anchored
        is not known, and exactly these changes are to be asked for again. VerificationError: the
        device isn't the caller's any more.
        """

    async def close(self) -> None:
        """Let go of it."""


def check_changes(changes: Sequence[Change]) -> None:
    """Raise UsageError `anchor.range` unless there are 1 to 32, each of another record."""
    if not 1 <= len(changes) <= CHANGES_MAX or len({c.name for c in changes}) != len(changes):
        raise UsageError(
            "anchor.range",
            f"{len(changes)} changes; allowed: 1…{CHANGES_MAX}, each to a different record",
        )


def changed(
    records: Mapping[str, Anchored], changes: Sequence[Change], *, floor: int
) -> tuple[dict[str, Anchored], int]:
    """Return records and floor after `changes`; UsageError `anchor.order`, `anchor.range`.

    New records are measured by the floor before them: none of theirs is one that goes here.
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
    """Return the error for an anchor of which it isn't known how far it got."""
    return UnavailableError(
        FAILED, f"the anchor of device {device_id} failed: open the device again"
    )
