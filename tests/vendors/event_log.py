"""Event logs in the firmware's format (TCG PC Client), and the resulting registers."""

import hashlib


def event(index: int, kind: int, content: bytes, digest: bytes | None = None) -> bytes:
    digest = hashlib.sha256(content).digest() if digest is None else digest
    return (
        index.to_bytes(4, "little")
        + kind.to_bytes(4, "little")
        + (1).to_bytes(4, "little")
        + b"\x0b\x00"
        + digest
        + len(content).to_bytes(4, "little")
        + content
    )


def header(
    algorithms: bytes = b"\x0b\x00\x20\x00", count: int = 1, *, kind: int = 3, rest: bytes = b""
) -> bytes:
    content = b"Spec ID Event03\0" + bytes(4) + b"\0\2\0\2" + count.to_bytes(4, "little")
    content += algorithms + b"\0" + rest
    return (
        bytes(4)
        + kind.to_bytes(4, "little")
        + bytes(20)
        + len(content).to_bytes(4, "little")
        + content
    )


def extended(*digests: bytes, start: bytes = bytes(32)) -> bytes:
    for digest in digests:
        start = hashlib.sha256(start + digest).digest()
    return start


FIRMWARE, LOADER = (hashlib.sha256(c).digest() for c in (b"firmware", b"loader"))
LOG = (
    header()
    + event(0, 3, b"StartupLocality\0\3", bytes(32))
    + event(0, 8, b"firmware")
    + event(0, 3, b"not extended", bytes(32))
    + event(4, 0x80000003, b"firmware")
    + event(4, 0x80000003, b"loader")
    + event(12, 0xD, b"kernel")
)
LOGGED = {0: extended(FIRMWARE, start=bytes(31) + b"\3"), 4: extended(FIRMWARE, LOADER)}
