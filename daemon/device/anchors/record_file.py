"""The file of an anchor kept on this machine: all its records, and the count of changes."""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from sealane.crypto.encoding import fields, parse_fields
from sealane.daemon.device.anchors.anchor import FAILED, NO_SPACE, RECORDS_MAX, U64_MAX, Anchored
from sealane.daemon.runtime.files import FILE_BYTES_MAX, read_bounded, write_durably
from sealane.daemon.runtime.reserve_file import FULL
from sealane.errors import UnavailableError, UsageError, VerificationError

FORMAT: Final = 3
_LABEL: Final = f"sealane anchor v{FORMAT}"
# In each format the label comes first, after its length (four bytes).
_LABELLED: Final = re.compile(rb"\0\0\0[\x11-\x13]sealane anchor v([1-9][0-9]{0,2})(?![0-9])")
_MAC_BYTES: Final = 32
_HEAD_FIELDS: Final = 3
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All records of a device, the count that makes them current, and the anchor's floor."""

    count: int
    records: Mapping[str, Anchored]
    floor: int = 0


class RecordFile:
    """A file authenticated for one device, replaced as a whole and durably. Its calls block.

    `F("sealane anchor v3", device id (16), count (8), floor (8), records…)` ‖ HMAC-SHA256; a record
    is the length of its name (1), the name, its number (8), the length of its MAC (1), the MAC and
    its blob.
    """

    def __init__(self, path: Path, *, device_id: UUID, key: bytes | bytearray) -> None:
        self.path = path
        self._device_id = device_id
        self._key = key

    def write(self, content: Content) -> None:
        """Replace the file; UnavailableError `anchor.failed`; `anchor.space`: nothing changed."""
        encoded = encode_content(content, device_id=self._device_id)
        try:
            write_durably(self.path, encoded + self._mac(encoded))
        except OSError as error:
            if error.errno in FULL:
                raise UnavailableError(NO_SPACE, f"{self.path}: {error.strerror}") from error
            raise self._failed(error) from error

    def read(self) -> Content | None:
        """Return the content, or None if there is no file.

        VerificationError `anchor.record`; UsageError `anchor.format`: of another release.
        """
        try:
            encoded = read_bounded(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from error
        signed, mac = encoded[:-_MAC_BYTES], encoded[-_MAC_BYTES:]
        if len(encoded) > FILE_BYTES_MAX or not hmac.compare_digest(mac, self._mac(signed)):
            raise self._refused()
        self._check_format(signed)
        try:
            return decode_content(signed, device_id=self._device_id)
        except ValueError as error:
            raise self._refused() from error

    def _check_format(self, signed: bytes) -> None:
        """Raise UsageError `anchor.format` for what another release of this machine wrote."""
        found = _LABELLED.match(signed)
        if found is not None and int(found[1]) != FORMAT:
            raise UsageError(
                "anchor.format",
                f"{self.path}: an anchor of format {int(found[1])}, and this release reads "
                f"{FORMAT}: start the release that wrote it",
            )

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(bytes(self._key), content, "sha256")

    def _refused(self) -> VerificationError:
        return VerificationError(
            "anchor.record",
            f"{self.path}: not a record that this machine wrote for device {self._device_id}: the "
            "file was changed, or the TPM was cleared or replaced",
        )

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError(FAILED, f"{self.path}: {error.strerror}")


def encode_content(content: Content, *, device_id: UUID) -> bytes:
    """Return the canonical encoding of `content`, which precedes the MAC."""
    parts = [_encode(name, content.records[name]) for name in sorted(content.records)]
    return fields(_LABEL, device_id.bytes, _u64(content.count), _u64(content.floor), *parts)


def decode_content(encoded: bytes, *, device_id: UUID) -> Content:
    """Decode the canonical encoding of a content; ValueError for anything else."""
    parts = parse_fields(_LABEL, encoded, count_max=_HEAD_FIELDS + RECORDS_MAX)
    if parts is None or len(parts) < _HEAD_FIELDS:
        raise ValueError("not the fields of an anchor")
    count, floor = (int.from_bytes(part, "big") for part in parts[1:_HEAD_FIELDS])
    records = dict(map(_decode, parts[_HEAD_FIELDS:]))
    content = Content(count=count, records=records, floor=floor)
    is_long = max(count, floor) > U64_MAX
    if is_long or encode_content(content, device_id=device_id) != encoded:
        raise ValueError("for another device, or not in canonical encoding")
    return content


def _encode(name: str, record: Anchored) -> bytes:
    encoded = name.encode("ascii")
    mac = bytes([len(record.mac)]) + record.mac
    return bytes([len(encoded)]) + encoded + _u64(record.number) + mac + record.blob


def _decode(part: bytes) -> tuple[str, Anchored]:
    """Decode a record; ValueError (UsageError is one, too) if it is not a canonical encoding."""
    if not part:
        raise ValueError("an empty record")
    name_end = 1 + part[0]
    mac_start = name_end + _NUMBER_BYTES + 1
    if len(part) < mac_start:
        raise ValueError("a record without a number")
    blob_start = mac_start + part[mac_start - 1]
    record = Anchored(
        number=int.from_bytes(part[name_end : mac_start - 1], "big"),
        blob=part[blob_start:],
        mac=part[mac_start:blob_start],
    )
    return part[1:name_end].decode("ascii"), record


def _u64(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")


class RecordKeeper:
    """An anchor that replaces a record file, and knows its content."""

    _file: RecordFile
    _content: Content | None
    """None while it isn't known."""

    def _replace(self, content: Content) -> None:
        """Replace the file; errors of `RecordFile.write`. The caller knows when the content counts.

        Afterwards it isn't known, unless there was no space: then nothing has changed.
        """
        before, self._content = self._content, None
        try:
            self._file.write(content)
        except UnavailableError as error:
            if error.reason == NO_SPACE:
                self._content = before
            raise
