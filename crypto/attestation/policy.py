"""What a verifier wants of a node; what a policy does not allow is refused."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedKey:
    """What a policy lets the holder of one software key be."""

    fingerprint: str
    nodes: Sequence[str]
    roles: Sequence[str]
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The verifier's policy; what it doesn't allow is refused."""

    software_allowed: bool = False
    keys: Sequence[AllowedKey] = ()
