"""What a verifier has established about a node, in one form for every kind of evidence."""

import datetime as dt
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sealane.crypto.encoding import fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What evidence must commit to so that it speaks for this node, these keys, this challenge.

    `runtime_data` is the canonical runtime data, `nonce` the challenge's, `tls_public_key` a
    SubjectPublicKeyInfo in DER. Devices are asked first, and the primary evidence names their
    answers in the runtime data: so a device's nonce can't depend on the runtime data.
    """

    runtime_data: bytes
    nonce: bytes
    tls_public_key: bytes
    kem_public_key: bytes

    @property
    def report_data(self) -> bytes:
        """SHA-512 of the runtime data: 64 bytes, REPORT_DATA of SEV-SNP, REPORTDATA of TDX."""
        return hashlib.sha512(self.runtime_data).digest()

    @property
    def qualifying_data(self) -> bytes:
        """SHA-256 of the runtime data: 32 bytes, extraData of a TPM 2.0 attestation."""
        return hashlib.sha256(self.runtime_data).digest()

    @property
    def device_nonce(self) -> bytes:
        """The nonce that devices of this node answer to."""
        return device_nonce(
            nonce=self.nonce,
            tls_public_key=self.tls_public_key,
            kem_public_key=self.kem_public_key,
        )


def device_nonce(*, nonce: bytes, tls_public_key: bytes, kem_public_key: bytes) -> bytes:
    """Return the nonce of an SPDM measurement request: SHA-256 over a challenge's and the keys."""
    parts = fields("sealane spdm v1", nonce, tls_public_key, kem_public_key)
    return hashlib.sha256(parts).digest()


# Evidence of one machine may be verified in another order than it was made in, by as long as a
# challenge lives.
_CLOCK_TOLERANCE_MILLIS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareClock:
    """A clock that hardware keeps over its resets (TPMS_CLOCK_INFO): time itself, signed.

    `millis` counts operation, not the calendar; a restart is a resume from hibernation.
    """

    reset_count: int
    restart_count: int
    millis: int

    def has_gone_back(self, last: "HardwareClock") -> bool:
        """Whether this is older than `last` of the same hardware: its state was put back."""
        boot = (self.reset_count, self.restart_count)
        last_boot = (last.reset_count, last.restart_count)
        is_earlier = self.millis + _CLOCK_TOLERANCE_MILLIS < last.millis
        return boot < last_boot or (boot == last_boot and is_earlier)


class Memory(Enum):
    """Protection of a machine's memory from its operator."""

    ENCRYPTED = "encrypted"
    ISOLATED = "isolated"
    """By software that the operator can replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What genuine evidence says. Nothing here has been compared with a policy yet.

    `hardware_id` is `<scheme>:<hex>` (`chip-id`, `csp-id`, `ppid`, `ek-sha256`, `key-sha256`, …),
    the name of the hardware allow-list. `measurements` are digests by the specification's name
    (`measurement`, `mrtd`, `rtmr0`, `pcr7`); `tcb` are security version numbers by component,
    compared one by one with the policy's minimum. `flags` are the bits a policy must take a
    position on (`debug`, `migrate_ma`, `sept_ve_disable`), `properties` the numbers of which it
    must list those it takes (`report_version`, `vmpl`). `events` are the digests that an event log
    shows to have been extended into a measurement, by its name. `certified_keys` names the keys of
    the runtime data (`kem`, `tls`) that the hardware certifies to have made itself. `clock` is for
    comparing with what the same `hardware_id` said last. `memory` is None for devices, which run
    nothing of ours. `valid_until` is the earliest end of what
    was relied on.
    """

    evidence_type: str
    hardware_id: str
    product: str
    measurements: Mapping[str, bytes]
    tcb: Mapping[str, int]
    flags: Mapping[str, bool]
    valid_until: dt.datetime
    tcb_status: str = ""
    advisories: tuple[str, ...] = ()
    properties: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    certified_keys: frozenset[str] = field(default_factory=frozenset)
    clock: HardwareClock | None = None
    memory: Memory | None = None
