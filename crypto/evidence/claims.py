"""A verifier's findings about a node, in one form for all kinds of evidence."""

import datetime as dt
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sealane.crypto.encoding import fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What evidence must commit to in order to speak for this node, these keys, this challenge.

    `runtime_data` is the canonical runtime data, `nonce` the challenge's, `tls_public_key` a
    SubjectPublicKeyInfo in DER. Devices are asked first, and the primary evidence covers their
    answers through the runtime data; so a device's nonce can't depend on the runtime data.
    """

    runtime_data: bytes
    nonce: bytes
    tls_public_key: bytes
    kem_public_key: bytes

    @property
    def report_data(self) -> bytes:
        """SHA-512 of the runtime data: 64 bytes; REPORT_DATA of SEV-SNP, REPORTDATA of TDX."""
        return hashlib.sha512(self.runtime_data).digest()

    @property
    def qualifying_data(self) -> bytes:
        """SHA-256 of the runtime data: 32 bytes; extraData of a TPM 2.0 attestation."""
        return hashlib.sha256(self.runtime_data).digest()

    @property
    def device_nonce(self) -> bytes:
        """Nonce that the devices of this node must answer."""
        return device_nonce(
            nonce=self.nonce,
            tls_public_key=self.tls_public_key,
            kem_public_key=self.kem_public_key,
        )


def device_nonce(*, nonce: bytes, tls_public_key: bytes, kem_public_key: bytes) -> bytes:
    """Return the nonce of an SPDM measurement request: SHA-256 of challenge nonce and keys."""
    parts = fields("sealane spdm v1", nonce, tls_public_key, kem_public_key)
    return hashlib.sha256(parts).digest()


# Evidence of one machine may be verified in a different order from that of its creation, by up to
# the lifetime of a challenge.
_CLOCK_TOLERANCE_MILLIS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareClock:
    """A signed clock that hardware keeps across its resets (TPMS_CLOCK_INFO).

    `millis` counts operating time, not calendar time; a restart is a resume from hibernation.
    """

    reset_count: int
    restart_count: int
    millis: int

    def has_gone_back(self, last: "HardwareClock") -> bool:
        """Return whether this clock of the same hardware is older than `last`: a rollback."""
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
    """Content of genuine evidence, not yet compared with a policy.

    `hardware_id` is `<scheme>:<hex>` (`chip-id`, `csp-id`, `ppid`, `ek-sha256`, `key-sha256`, …),
    the name in the hardware allow-list. `measurements` are digests by their name in the
    specification (`measurement`, `mrtd`, `rtmr0`, `pcr7`); `tcb` are security version numbers by
    component, each compared with the policy's minimum. `flags` are bits that a policy may allow to
    differ from their safe value (`debug`, `migrate_ma`, `sept_ve_disable`), `properties` numbers of
    which it must list the accepted ones (`report_version`, `vmpl`). `events` are the digests that,
    according to an event log, were extended into a measurement, by its name. `certified_keys` names
    the keys of the runtime data (`kem`, `tls`) that the hardware certifies to have created. `clock`
    is compared with the last one of the same `hardware_id`. `memory` is None for devices, which run
    none of Sealane's code. `valid_until` is the earliest end of everything that was relied on.
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
