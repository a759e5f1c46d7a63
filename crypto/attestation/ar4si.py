"""Trustworthiness claims and tiers of attestation results (draft-ietf-rats-ar4si, section 2.3).

A claim's value is an int8 that determines its tier. Zero, like absence, affirms nothing.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

INSTANCE_IDENTITY: Final = "instance-identity"
CONFIGURATION: Final = "configuration"
EXECUTABLES: Final = "executables"
HARDWARE: Final = "hardware"
RUNTIME_OPAQUE: Final = "runtime-opaque"
CLAIMS: Final = (
    INSTANCE_IDENTITY,
    CONFIGURATION,
    EXECUTABLES,
    "file-system",
    HARDWARE,
    RUNTIME_OPAQUE,
    "storage-opaque",
    "sourced-data",
)

# Values used here, with the claims that they belong to.
RECOGNIZED: Final = 2  # instance-identity
UNRECOGNIZED: Final = 97  # instance-identity, hardware
APPROVED: Final = 2  # configuration
APPROVED_BOOT: Final = 3  # executables
UNRECOGNIZED_EXECUTABLES: Final = 33
GENUINE: Final = 2  # hardware
VULNERABLE: Final = 32  # hardware: genuine, with known vulnerabilities
ENCRYPTED: Final = 2  # runtime-opaque
ISOLATED: Final = 32  # runtime-opaque: not encrypted from the operator
UNSUPPORTABLE: Final = 96  # every claim


class Tier(IntEnum):
    """Quality of a claim or a whole result; larger is worse."""

    NONE = 0
    AFFIRMING = 2
    WARNING = 32
    CONTRAINDICATED = 96

    @property
    def label(self) -> str:
        """Name in a result."""
        return self.name.lower()


def tier_of(value: int) -> Tier:
    """Return the tier of a claim's value, -128 to 127; ValueError outside."""
    if not -128 <= value <= 127:
        raise ValueError(f"a trustworthiness claim is an int8, not {value}")
    distance = value if value >= 0 else -value - 1
    if distance < 2 and value != -2:
        return Tier.NONE
    if distance < 32:
        return Tier.AFFIRMING
    return Tier.WARNING if distance < 96 else Tier.CONTRAINDICATED


def worst(vector: Mapping[str, int]) -> Tier:
    """Return the tier of the worst claim: a result's status must not be better."""
    return max((tier_of(value) for value in vector.values()), default=Tier.NONE)
