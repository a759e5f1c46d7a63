"""The file of an anchor that is kept on this machine: all its records, and the count of changes."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from sealane.crypto.encoding import fields, parse_fields
from sealane.daemon.anchors.anchor import FAILED, RECORDS_MAX, U64_MAX, Anchored
from sealane.daemon.files import FILE_BYTES_MAX, read_bounded, write_durably
from sealane.errors import UnavailableError, VerificationError

_LABEL: Final = "sealane anchor v2"
_MAC_BYTES: Final = 32
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All records of a device, and the count that makes them current."""

    count: int
    records: Mapping[str, Anchored]


class RecordFile:
    """Authenticated for one device, replaced as a whole and durably. Its calls block.

    `F("sealane anchor v2", device id (16), count (8), records…)` ‖ HMAC-SHA256; a record is the
    length of its name (1), the name, its number (8) and its blob.
    """

    def __init__(self, path: Path, *, device_id: UUID, key: bytes | bytearray) -> None:
        self.path = path
        self._device_id = device_id
        self._key = key

    def write(self, content: Content) -> None:
        """Replace the file; UnavailableError `anchor.failed`."""
        encoded = encode_content(content, device_id=self._device_id)
        try:
            write_durably(self.path, encoded + self._mac(encoded))
        except OSError as error:
            raise self._failed(error) from error

    def read(self) -> Content | None:
        """Return what it holds, None if there is no file; VerificationError `anchor.record`."""
        try:
            encoded = read_bounded(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from error
        signed, mac = encoded[:-_MAC_BYTES], encoded[-_MAC_BYTES:]
        if len(encoded) > FILE_BYTES_MAX or not hmac.compare_digest(mac, self._mac(signed)):
            raise self._refused()
        try:
            return decode_content(signed, device_id=self._device_id)
        except ValueError as error:
            raise self._refused() from error

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(bytes(self._key), content, "sha256")

    def _refused(self) -> VerificationError:
        return VerificationError(
            "anchor.record",
            f"{self.path}: not a record of device {self._device_id} by this machine: it was "
            "changed, or its TPM was cleared or is another",
        )

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError(FAILED, f"{self.path}: {error.strerror}")


def encode_content(content: Content, *, device_id: UUID) -> bytes:
    """Return what stands before the MAC: the one encoding of `content`."""
    parts = [_encode(name, content.records[name]) for name in sorted(content.records)]
    return fields(_LABEL, device_id.bytes, _u64(content.count), *parts)


def decode_content(encoded: bytes, *, device_id: UUID) -> Content:
    """Undo `encode_content`; ValueError if `encoded` is none of its."""
    parts = parse_fields(_LABEL, encoded, count_max=2 + RECORDS_MAX)
    if parts is None or len(parts) < 2:
        raise ValueError("not the fields of an anchor")
    records = dict(map(_decode, parts[2:]))
    content = Content(count=int.from_bytes(parts[1], "big"), records=records)
    if content.count > U64_MAX or encode_content(content, device_id=device_id) != encoded:
        raise ValueError("another device's, or not the one encoding of its content")
    return content


def _encode(name: str, record: Anchored) -> bytes:
    encoded = name.encode("ascii")
    return bytes([len(encoded)]) + encoded + _u64(record.number) + record.blob


def _decode(part: bytes) -> tuple[str, Anchored]:
    """Undo `_encode`; ValueError, which UsageError is, too, if `part` is none of its."""
    if not part:
        raise ValueError("an empty record")
    name_end = 1 + part[0]
    blob_start = name_end + _NUMBER_BYTES
    number = int.from_bytes(part[name_end:blob_start], "big")
    return part[1:name_end].decode("ascii"), Anchored(number=number, blob=part[blob_start:])


def _u64(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
