"""A verifier's requirements of a node. Anything that a policy doesn't name is refused.

A policy lists hardware (and the nodes that it may be) and reference values (required measurements,
by type of evidence, product and role). `sealane.daemon.broker.policy` reads it from a document.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sealane.crypto.attestation.ar4si import Tier
from sealane.crypto.evidence.software import SOFTWARE


class Position(Enum):
    """A policy's rule for a measurement that does not list its values."""

    ANY = "any"
    # Any value that its event log explains, if each event is a listed one.
    EVENTS = "events"


Accepted = frozenset[bytes] | Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine, by the hardware id of its primary evidence, and the nodes and roles it may be.

    `devices` are the hardware ids of secondary evidence that may accompany it.
    """

    hardware_id: str
    nodes: frozenset[str]
    roles: frozenset[str]
    tenant: str
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues:
    """Required claims of evidence of one type and product, for nodes in one of `roles`.

    Every measurement, TCB component and property in the evidence must be named here, and every one
    named here must be in the evidence. `flags` are exceptions from the safe values of the type.
    `secondary` are types of evidence that must accompany it. Status and advisories are the vendor's
    terms. `accepted_tier` is the worst result that is accepted.
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
        """Name of the policy in results."""
        return f"sealane:{self.version}:sha256:{self.digest.hex()}"

    @property
    def software_allowed(self) -> bool:
        """Whether it accepts evidence that says nothing about a machine."""
        return any(r.evidence_type == SOFTWARE for r in self.references)

    def takes(self, evidence_type: str, role: str) -> bool:
        """Return whether it has reference values of a type for a role."""
        return bool(self.references_for(evidence_type, role))

    def references_for(self, evidence_type: str, role: str) -> tuple[ReferenceValues, ...]:
        """Return the reference values of a type for a role, in the policy's order."""
        return tuple(
            r for r in self.references if r.evidence_type == evidence_type and role in r.roles
        )


NO_POLICY: Final = Policy()


def software_reference(roles: frozenset[str]) -> ReferenceValues:
    """Return a development policy's reference values for `software` evidence: only a listed key."""
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
