"""Real evidence from public repositories, in SEALANE_ATTESTATION_VECTORS; never committed."""

import datetime as dt
import os
from pathlib import Path

import pytest

VARIABLE = "SEALANE_ATTESTATION_VECTORS"


def vector(name: str) -> bytes:
    """Return a file of the set, decoded if it is hexadecimal text; skip without a set."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip(f"{VARIABLE} is not set: it names a folder of real evidence")
    content = (Path(folder) / name).read_bytes()
    return bytes.fromhex(content.decode()) if name.endswith(".hex") else content


def utc(text: str) -> dt.datetime:
    """Read an ISO 8601 time as UTC."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


class Committed:
    """A binding of which only the hashes are known, as in recorded evidence."""

    def __init__(self, *, report_data: bytes = bytes(64), device_nonce: bytes = bytes(32)) -> None:
        self.report_data = report_data
        self.device_nonce = device_nonce
