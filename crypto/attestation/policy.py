"""What a verifier wants of a node. What a policy does not name is refused, never unchecked.

A policy lists hardware (who may be what) and reference values (what must have been measured, per
type of evidence, product and role). `sealane.daemon.broker.policy` reads it from a document.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sealane.crypto.attestation.ar4si import Tier
from sealane.crypto.evidence.software import SOFTWARE


class Position(Enum):
    """What a policy says of a measurement instead of naming its values."""

    ANY = "any"
    # Its value may be any that its event log explains, if each event is a listed one.
    EVENTS = "events"


Accepted = frozenset[bytes] | Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine, by the hardware id of its primary evidence, and what it may be.

    `devices` are the hardware ids of the secondary evidence that may come with it.
    """

    hardware_id: str
    nodes: frozenset[str]
    roles: frozenset[str]
    tenant: str
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues:
    """What evidence of one type and product must say for a node to be one of `roles`.

    Every measurement, TCB component and property that the evidence claims must be named, and every
    one that is named must be claimed. `flags` are exceptions from the safe values of a type.
    `secondary` are types of evidence that must come with it. Status and advisories are the vendor's
    words. `accepted_tier` is the worst result that still is accepted.
    """

    name: str
    evidence_type: str
    product: str
    roles: frozenset[str]
    measurements: Mapping[str, Accepted]
    events: Mapping[str, frozenset[bytes]]
    tcb: Mapping[str, int]
    tcb_statuses: frozenset[str]
    advisories: frozenset[str]
    properties: Mapping[str, frozenset[int]]
    flags: Mapping[str, bool]
    certified_keys: frozenset[str]
    secondary: frozenset[str]
    accepted_tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One version of a policy; `digest` is SHA-256 of its document."""

    version: int = 0
    digest: bytes = bytes(32)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    references: tuple[ReferenceValues, ...] = ()

    @property
    def policy_id(self) -> str:
        """How results name the policy."""
        return f"sealane:{self.version}:sha256:{self.digest.hex()}"

    @property
    def software_allowed(self) -> bool:
        """Whether it takes evidence that says nothing about a machine."""
        return any(r.evidence_type == SOFTWARE for r in self.references)

    def takes(self, evidence_type: str, role: str) -> bool:
        """Whether it has reference values of a type for a role."""
        return bool(self.references_for(evidence_type, role))

    def references_for(self, evidence_type: str, role: str) -> tuple[ReferenceValues, ...]:
        """Return the reference values of a type for a role, in the policy's order."""
        return tuple(
            r for r in self.references if r.evidence_type == evidence_type and role in r.roles
        )


NO_POLICY: Final = Policy()


def software_reference(roles: frozenset[str]) -> ReferenceValues:
    """Return what a development policy wants of `software` evidence: a listed key, no more."""
    return ReferenceValues(
        name=SOFTWARE,
        evidence_type=SOFTWARE,
        product=SOFTWARE,
        roles=roles,
        measurements={},
        events={},
        tcb={},
        tcb_statuses=frozenset(),
        advisories=frozenset(),
        properties={},
        flags={},
        certified_keys=frozenset(),
        secondary=frozenset(),
        accepted_tier=Tier.WARNING,
    )
