"""NVMe qualified names (NVMe Base 2.0 §4.7)."""

import re
import uuid

from sealane.errors import UsageError

NQN_BYTES_MAX = 223
_DATED = re.compile(r"nqn\.\d{4}-(0[1-9]|1[0-2])\.[a-z0-9.-]+(:.+)?")
_VOLUME = "nqn.2026-11.dev.sealane:volume:"
_EXPORT = "nqn.2026-11.dev.sealane:export:"
_GATEWAY = "nqn.2026-11.dev.sealane:gateway:"


def check_nqn(text: str) -> str:
    """Return `text` if it is an NQN; UsageError otherwise."""
    printable = text.isprintable() and " " not in text
    if len(text.encode()) > NQN_BYTES_MAX or not printable or not _DATED.fullmatch(text):
        raise UsageError(
            "nqn.malformed",
            f"{text!r} is not an NVMe qualified name; allowed: nqn.yyyy-mm.reverse.domain:name, "
            f"at most {NQN_BYTES_MAX} bytes",
        )
    return text


def volume_nqn(volume_id: uuid.UUID) -> str:
    """Return the name of a volume's secure subsystem at its target."""
    return f"{_VOLUME}{volume_id}"


def export_nqn(volume_id: uuid.UUID) -> str:
    """Return the name of an attached volume's plain subsystem at its gateway."""
    return f"{_EXPORT}{volume_id}"


def gateway_nqn(node: str) -> str:
    """Return a gateway's host name for its target."""
    return f"{_GATEWAY}{node}"
