"""What a target's host can put on its disks: the device's file, and the file of an anchor.

The anchor's comes behind a MAC that who keeps it in a `file` anchor can compute.
"""

import contextlib
from uuid import UUID

from sealane.crypto.encoding import canonical_json
from sealane.daemon.device.anchors.record_file import decode_content, encode_content
from sealane.daemon.device.directory import parse_device
from sealane.errors import VerificationError

DEVICE = UUID(int=13)


def device_file(data: bytes) -> None:
    """What is read as a device's file is the one encoding of what it says."""
    with contextlib.suppress(VerificationError):
        device_id, openings = parse_device(data, source="fuzz")
        again = canonical_json({"device_id": str(device_id), "openings": openings})
        assert again == data


def anchor_file(data: bytes) -> None:
    """What is read as an anchor's content has one encoding: the one it came in."""
    try:
        content = decode_content(data, device_id=DEVICE)
    except ValueError:
        return
    assert encode_content(content, device_id=DEVICE) == data
