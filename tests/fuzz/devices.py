"""Files that a target's host can forge: the device's file, and an anchor's.

An anchor's content has a MAC, which the host can compute for a `file` anchor.
"""

import contextlib
from uuid import UUID

from sealane.crypto.encoding import canonical_json
from sealane.daemon.device.anchors.record_file import decode_content, encode_content
from sealane.daemon.device.directory import parse_device
from sealane.errors import UsageError, VerificationError

DEVICE = UUID(int=13)


def device_file(data: bytes) -> None:
    """A decoded device's file has a single encoding: the input."""
    with contextlib.suppress(UsageError, VerificationError):
        device_id, openings = parse_device(data, source="fuzz")
        again = canonical_json({"device_id": str(device_id), "openings": openings})
        assert again == data


def anchor_file(data: bytes) -> None:
    """Decoded anchor content has a single encoding: the input."""
    try:
        content = decode_content(data, device_id=DEVICE)
    except ValueError:
        return
    assert encode_content(content, device_id=DEVICE) == data
