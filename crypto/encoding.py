"""Unambiguous byte strings for transcripts, signatures and key derivation.

`fields` prefixes each field with its length, so different lists never give the same bytes;
`canonical_json` is the subset of RFC 8785 without number formatting: objects, arrays, strings,
integers and booleans, keys sorted, ASCII only.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sealane.errors import VerificationError
from sealane.reasons import ReasonId

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | bool"


def fields(label: str, *parts: bytes) -> bytes:
    """Return `label` and `parts`, each with its length as four bytes, big-endian."""
    return b"".join(len(p).to_bytes(4, "big") + p for p in (label.encode("ascii"), *parts))


def parse_fields(label: str, encoded: bytes, *, count_max: int) -> list[bytes] | None:
    """Return the parts that `fields` joined under `label`; None for any other `encoded`."""
    head = fields(label)
    if not encoded.startswith(head):
        return None
    parts: list[bytes] = []
    position = len(head)
    while position < len(encoded):
        start = position + 4
        length = int.from_bytes(encoded[position:start], "big")
        if len(parts) == count_max or len(encoded) < start or len(encoded) - start < length:
            return None
        position = start + length
        parts.append(encoded[start:position])
    return parts


def canonical_json(value: Mapping[str, JSON]) -> bytes:
    """Encode `value`; TypeError for a float, null or text outside ASCII."""
    _refuse_unencodable(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def parse_canonical_json(
    encoded: bytes, *, bytes_max: int, what: str, reason: ReasonId
) -> dict[str, object]:
    """Decode; `encoded` must be the canonical encoding of its value.

    Raises VerificationError `reason`: `what` is too long, not JSON, not an object, or not
    canonical.
    """
    if len(encoded) > bytes_max:
        raise VerificationError(reason, f"{what} has {len(encoded)} bytes; allowed: {bytes_max}")
    try:
        value = json.loads(encoded.decode("ascii"))
        again = canonical_json(value) if isinstance(value, dict) else None
    except (ValueError, TypeError, RecursionError) as error:
        raise VerificationError(reason, f"{what} is not canonical JSON") from error
    if again != encoded:
        raise VerificationError(reason, f"{what} is not a canonical JSON object")
    return dict(value)


def _refuse_unencodable(value: object) -> None:
    """Raise TypeError if `value` contains something outside this subset."""
    if isinstance(value, str):
        if not value.isascii() or not value.isprintable():
            raise TypeError("Sealane's canonical JSON holds printable ASCII only")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_unencodable(key)
            _refuse_unencodable(item)
    elif isinstance(value, Sequence):
        for item in value:
            _refuse_unencodable(item)
    elif not isinstance(value, int):
        raise TypeError(f"Sealane's canonical JSON can't hold {type(value).__name__}")
