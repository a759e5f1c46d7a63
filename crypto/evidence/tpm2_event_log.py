"""The firmware's event log (TCG PC Client Platform Firmware Profile, section 10), replayed.

A log alone proves nothing: anyone can write one. Its replay must give the quoted PCRs. Then its
digests are what was extended into them, one by one, and a policy can name components instead of
whole machines. Little-endian. Only the SHA-256 digests are read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sealane.crypto.evidence.tpm2_structures import ALG_SHA256, PCR_BYTES, PCR_COUNT, malformed
from sealane.errors import VerificationError

LOG_BYTES_MAX: Final = 128 << 10
EVENTS_MAX: Final = 4096
_ALGORITHMS_MAX: Final = 8
_DIGEST_BYTES_MAX: Final = 64

_EV_NO_ACTION: Final = 3
_SPEC_ID: Final = b"Spec ID Event03\0"
_STARTUP_LOCALITY: Final = b"StartupLocality\0"

# The firmware's PCRs. An operating system may extend later ones without the firmware's log.
_FIRMWARE_PCR_MAX: Final = 7


@dataclass(slots=True)
class _Register:
    value: bytes = bytes(PCR_BYTES)
    digests: list[bytes] = field(default_factory=list)

    def extend(self, digest: bytes) -> None:
        self.value = hashlib.sha256(self.value + digest).digest()
        self.digests.append(digest)


def explain(log: bytes, quoted: Mapping[int, bytes]) -> dict[int, tuple[bytes, ...]]:
    """Return the digests that were extended into each quoted PCR that `log` explains.

    `quoted` are the values of the quote by index. VerificationError `attestation.tpm2.malformed`,
    or `attestation.tpm2.event_log` if the log gives a different value for one of PCRs 0…7.
    """
    registers = _replay(log)
    explained: dict[int, tuple[bytes, ...]] = {}
    for index, register in registers.items():
        if index not in quoted:
            continue
        if register.value == quoted[index]:
            explained[index] = tuple(register.digests)
        elif index <= _FIRMWARE_PCR_MAX:
            raise VerificationError(
                "attestation.tpm2.event_log",
                f"the event log does not account for the quoted value of PCR {index}",
            )
    return explained


def _replay(log: bytes) -> dict[int, _Register]:
    if len(log) > LOG_BYTES_MAX:
        raise malformed(f"an event log of {len(log)} bytes; allowed: {LOG_BYTES_MAX}")
    reader = _Reader(log)
    sizes = _read_header(reader)
    registers: dict[int, _Register] = {}
    for _ in range(EVENTS_MAX):
        if reader.is_at_end:
            return registers
        index, kind = reader.integer(4), reader.integer(4)
        digest = _read_digests(reader, sizes)
        event = reader.take(reader.integer(4))
        if index >= PCR_COUNT:
            raise malformed(f"an event for PCR {index}")
        if kind != _EV_NO_ACTION:
            registers.setdefault(index, _Register()).extend(digest)
        elif index == 0 and event.startswith(_STARTUP_LOCALITY):
            _start_at_locality(registers, event)
    raise malformed(f"an event log of more than {EVENTS_MAX} events")


def _read_header(reader: "_Reader") -> dict[int, int]:
    """Read the first event, in the old format; return digest sizes by algorithm."""
    index, kind = reader.integer(4), reader.integer(4)
    reader.take(hashlib.sha1().digest_size)  # noqa: S324 - skips a field of that size
    header = _Reader(reader.take(reader.integer(4)))
    if (index, kind) != (0, _EV_NO_ACTION) or header.take(len(_SPEC_ID)) != _SPEC_ID:
        raise malformed("the event log does not begin with Spec ID Event03")
    header.take(8)  # platform class, version of the specification, size of UINTN
    count = header.integer(4)
    if not 0 < count <= _ALGORITHMS_MAX:
        raise malformed(f"an event log with {count} algorithms; allowed: at most {_ALGORITHMS_MAX}")
    sizes = {header.integer(2): header.integer(2) for _ in range(count)}
    header.take(header.integer(1))
    if not header.is_at_end or max(sizes.values()) > _DIGEST_BYTES_MAX:
        raise malformed("the event log has a malformed header")
    if sizes.get(ALG_SHA256) != PCR_BYTES:
        raise malformed("the event log has no SHA-256 digests")
    return sizes


def _read_digests(reader: "_Reader", sizes: Mapping[int, int]) -> bytes:
    """Read the digests of one event and return the SHA-256 digest."""
    digests: dict[int, bytes] = {}
    for _ in range(reader.integer(4)):
        algorithm = reader.integer(2)
        if algorithm not in sizes or algorithm in digests:
            raise malformed(
                f"an event has an undeclared or repeated digest algorithm {algorithm:#06x}"
            )
        digests[algorithm] = reader.take(sizes[algorithm])
    if ALG_SHA256 not in digests:
        raise malformed("an event has no SHA-256 digest")
    return digests[ALG_SHA256]


def _start_at_locality(registers: dict[int, _Register], event: bytes) -> None:
    """Start PCR 0 with the locality of TPM2_Startup in its last byte (section 10.4.5.3)."""
    if len(event) != len(_STARTUP_LOCALITY) + 1 or 0 in registers:
        raise malformed("a startup locality event at the wrong place")
    registers[0] = _Register(value=event[-1:].rjust(PCR_BYTES, b"\0"))


class _Reader:
    """Reads little-endian integers and bytes from the front."""

    def __init__(self, encoded: bytes) -> None:
        self._rest = memoryview(encoded)

    @property
    def is_at_end(self) -> bool:
        return not self._rest

    def take(self, count: int) -> bytes:
        if count > len(self._rest):
            raise malformed("the event log is truncated")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return bytes(taken)

    def integer(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")
