"""Evidence on the wire: one collection of labelled items (RFC 9999, CMW collection in CBOR).

A map from label to a record of media type and value, in the deterministic encoding of RFC 8949,
section 4.2.1: definite lengths, shortest heads, keys in bytewise order, no duplicates. Only this
form is accepted. It is parsed here because a general decoder would act on tags before the form
could be checked. The primary item speaks for the node; further ones are devices (`gpu0`) and data
for verification (`collateral`).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealane.errors import VerificationError

PRIMARY: Final = "primary"
COLLATERAL: Final = "collateral"

EVIDENCE_BYTES_MAX: Final = 256 << 10
ITEMS_MAX: Final = 16
MEDIA_TYPE_CHARACTERS_MAX: Final = 127  # RFC 6838, section 4.2: for each of the two names

LABEL: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]*/[a-z0-9][a-z0-9!#$&^_.+-]*")
_BYTES, _TEXT, _ARRAY, _MAP = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Item:
    """One item of evidence: its media type and its bytes."""

    media_type: str
    value: bytes


def encode_collection(items: Mapping[str, Item]) -> bytes:
    """Return the deterministic encoding; labels and types must be valid."""
    entries = sorted((_text(label), item) for label, item in items.items())
    return _head(_MAP, len(entries)) + b"".join(
        label
        + _head(_ARRAY, 2)
        + _text(item.media_type)
        + _head(_BYTES, len(item.value))
        + item.value
        for label, item in entries
    )


def decode_collection(encoded: bytes) -> dict[str, Item]:
    """Parse a collection, keeping the order of labels.

    VerificationError `attestation.evidence.size` or `attestation.evidence.malformed`; also for
    trailing bytes, a non-deterministic encoding, no primary item, or an empty value.
    """
    if len(encoded) > EVIDENCE_BYTES_MAX:
        raise VerificationError(
            "attestation.evidence.size",
            f"evidence has {len(encoded)} bytes; allowed: {EVIDENCE_BYTES_MAX}",
        )
    reader = _Reader(encoded)
    count = reader.head(_MAP)
    if count > ITEMS_MAX:
        raise _malformed(f"evidence has {count} items; allowed: {ITEMS_MAX}")
    items: dict[str, Item] = {}
    previous = b""
    for _ in range(count):
        start = reader.position
        label = reader.text_string(32)
        key = encoded[start : reader.position]
        if LABEL.fullmatch(label) is None or key <= previous:
            raise _malformed("the labels of the evidence are not valid names in ascending order")
        previous = key
        if reader.head(_ARRAY) != 2:
            raise _malformed(f"item {label} is not a pair of media type and value")
        media_type = reader.text_string(2 * MEDIA_TYPE_CHARACTERS_MAX + 1)
        if _MEDIA_TYPE.fullmatch(media_type) is None:
            raise _malformed(f"item {label} has no media type")
        items[label] = Item(media_type, reader.byte_string())
    reader.finish()
    if PRIMARY not in items or not all(item.value for item in items.values()):
        raise _malformed("the evidence has no primary item, or an empty one")
    return items


def secondary_digests(items: Mapping[str, Item]) -> tuple[bytes, ...]:
    """Return SHA-256 of every item but the primary, in the order of their labels.

    A digest covers the whole encoded entry, including label and media type.
    """
    labels = sorted((_text(label), label) for label in items if label != PRIMARY)
    return tuple(
        hashlib.sha256(encode_collection({label: items[label]})).digest() for _, label in labels
    )


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    size = next(s for s in (1, 2, 4, 8) if argument < 1 << 8 * s)
    return bytes([major << 5 | 23 + size.bit_length()]) + argument.to_bytes(size, "big")


def _text(text: str) -> bytes:
    return _head(_TEXT, len(text)) + text.encode("ascii")


class _Reader:
    """Reads heads and strings; never past the end, and never more than requested."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self.position = 0

    def head(self, major: int) -> int:
        """Read a head of `major` type in its shortest form and return its argument."""
        start = self.position
        (initial,) = self._take(1)
        if initial >> 5 != major or initial & 31 > 27:
            raise _malformed(f"evidence has an item of unexpected type at byte {start}")
        if initial & 31 < 24:
            return initial & 31
        argument = int.from_bytes(self._take(1 << (initial & 31) - 24), "big")
        if not self._encoded.startswith(_head(major, argument), start):
            raise _malformed("evidence is not in deterministic encoding")
        return argument

    def text_string(self, characters_max: int) -> str:
        length = self.head(_TEXT)
        if length > characters_max:
            raise _malformed(f"evidence has a text of {length} bytes; allowed: {characters_max}")
        try:
            return self._take(length).decode("ascii")
        except UnicodeDecodeError as error:
            raise _malformed("evidence has a text that is not ASCII") from error

    def byte_string(self) -> bytes:
        return self._take(self.head(_BYTES))

    def finish(self) -> None:
        if self.position != len(self._encoded):
            raise _malformed("evidence has trailing bytes")

    def _take(self, count: int) -> bytes:
        if count > len(self._encoded) - self.position:
            raise _malformed("evidence is truncated")
        self.position += count
        return self._encoded[self.position - count : self.position]


def _malformed(message: str) -> VerificationError:
    return VerificationError("attestation.evidence.malformed", message)
