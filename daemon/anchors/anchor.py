"""Anchors: where a device's last durable state is named, out of reach of who owns its disks.

DESIGN §5.5: an anchor holds epoch, checkpoint root, head of the log and commit number. Whoever
opens a device reads it, recovers to exactly that state, and advances it before the first I/O.
docs/anchors.md has what each kind guarantees.
"""

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID

from sealane.crypto.encoding import fields, parse_fields
from sealane.daemon.files import write_durably
from sealane.errors import UnavailableError, UsageError, VerificationError

U64_MAX: Final = (1 << 64) - 1
DIGEST_BYTES_MAX: Final = 64

_LABEL: Final = "sealane anchor v1"
_MAC_BYTES: Final = 32
_RECORD_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """A device's state: `root` of its tree at the last checkpoint, `head` of its log since.

    Epoch and commit number never go back. Digests have 1 to 64 bytes; all are opaque here.
    """

    epoch: int
    commit_number: int
    root: bytes
    head: bytes

    def __post_init__(self) -> None:
        if not all(0 <= value <= U64_MAX for value in (self.epoch, self.commit_number)):
            raise UsageError("anchor.range", "epoch and commit number have 64 bits")
        if not all(1 <= len(value) <= DIGEST_BYTES_MAX for value in (self.root, self.head)):
            raise UsageError("anchor.range", f"digests have 1…{DIGEST_BYTES_MAX} bytes")

    def check_successor(self, following: "Anchored") -> None:
        """Raise UsageError `anchor.order` if `following` is older than this."""
        if (following.epoch, following.commit_number) < (self.epoch, self.commit_number):
            raise UsageError(
                "anchor.order",
                f"epoch {following.epoch}, commit {following.commit_number} is older than what is "
                f"anchored: {self.epoch}, {self.commit_number}",
            )


class Anchor(Protocol):
    """The anchor of one device, held by one owner at a time. Its calls block."""

    @property
    def state(self) -> Anchored:
        """What is anchored."""

    def advance(self, state: Anchored) -> None:
        """Anchor a newer state; when this returns, no older one is ever accepted again.

        UsageError `anchor.order`. UnavailableError if it can't be told whether it was anchored:
        then every further call is refused (`anchor.failed`) until the anchor is opened again.
        """

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a file holds of an anchor: the state, and the count that makes it current."""

    count: int
    state: Anchored


class RecordFile:
    """One record in a file, authenticated for one device, replaced durably."""

    def __init__(self, path: Path, *, device_id: UUID, key: bytes | bytearray) -> None:
        self.path = path
        self._device_id = device_id
        self._key = key

    def write(self, record: Record) -> None:
        """Replace the record; UnavailableError `anchor.failed`."""
        state = record.state
        content = fields(
            _LABEL,
            self._device_id.bytes,
            _u64(record.count),
            _u64(state.epoch),
            _u64(state.commit_number),
            state.root,
            state.head,
        )
        try:
            write_durably(self.path, content + self._mac(content))
        except OSError as error:
            raise self._failed(error) from error

    def read(self) -> Record | None:
        """Return the record, None if there is no file; VerificationError `anchor.record`."""
        try:
            with self.path.open("rb") as file:
                encoded = file.read(_RECORD_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from error
        content, mac = encoded[:-_MAC_BYTES], encoded[-_MAC_BYTES:]
        refused = VerificationError(
            "anchor.record",
            f"{self.path}: not a record of device {self._device_id} by this machine: it was "
            "changed, or its TPM was cleared or is another",
        )
        if not hmac.compare_digest(mac, self._mac(content)):
            raise refused
        parts = parse_fields(_LABEL, content, count_max=6)
        if parts is None or len(parts) != 6 or parts[0] != self._device_id.bytes:
            raise refused
        count, epoch, commit_number = (int.from_bytes(part, "big") for part in parts[1:4])
        state = Anchored(epoch=epoch, commit_number=commit_number, root=parts[4], head=parts[5])
        return Record(count=count, state=state)

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(bytes(self._key), content, "sha256")

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError("anchor.failed", f"{self.path}: {error.strerror}")


@contextmanager
def closed_on_failure(anchor: Anchor) -> Iterator[None]:
    """Close an anchor that doesn't come to be."""
    try:
        yield
    except BaseException:
        anchor.close()
        raise


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
        "anchor.failed", f"the anchor of device {device_id} failed: open the device again"
    )


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "big")
