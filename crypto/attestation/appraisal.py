"""Appraisal: claims against policy → trust vector, verdict, and the rule that decided.

All rules are applied to all items, whatever the result of others, so the time taken doesn't reveal
which one failed. Whether evidence is genuine is decided before this.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.crypto.attestation import ar4si
from sealane.crypto.attestation.ar4si import Tier
from sealane.crypto.attestation.policy import Hardware, Policy, Position, ReferenceValues
from sealane.crypto.evidence.claims import Claims, Memory
from sealane.crypto.evidence.cmw import PRIMARY
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

UP_TO_DATE: Final = "UpToDate"
SafeFlags = Mapping[str, Mapping[str, bool]]

_RUNTIME: Final = {Memory.ENCRYPTED: ar4si.ENCRYPTED, Memory.ISOLATED: ar4si.ISOLATED}


class PolicyViolationError(VerificationError):
    """Genuine evidence of something that the policy does not allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one rule. `reason` is the stable id of its refusal; the texts are for operators.

    On failure the trust vector's `claim` gets `value`.
    """

    item: str
    rule: str
    holds: bool
    reason: ReasonId
    wanted: str
    found: str
    claim: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAppraisal:
    """Result for one item of evidence."""

    claims: Claims
    reference: str
    findings: tuple[Finding, ...]
    vector: Mapping[str, int]

    @property
    def status(self) -> Tier:
        """Tier of the worst claim."""
        return ar4si.worst(self.vector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """Result for a node: `items` by label, the primary first, and the machine's policy entry."""

    items: Mapping[str, ItemAppraisal]
    hardware: Hardware | None
    policy: Policy

    @property
    def findings(self) -> Iterator[Finding]:
        """Results of all applied rules."""
        for item in self.items.values():
            yield from item.findings

    @property
    def decided(self) -> Finding:
        """The deciding result: the first failure, or the last one if none failed."""
        findings = [*self.findings]
        return next((f for f in findings if not f.holds), findings[-1])

    @property
    def is_accepted(self) -> bool:
        """Whether all rules hold."""
        return all(f.holds for f in self.findings)

    @property
    def status(self) -> Tier:
        """Tier of the worst item."""
        return max(item.status for item in self.items.values())

    def require(self) -> Hardware:
        """Return the machine's entry; PolicyViolationError with the reason of the first failure."""
        decided = self.decided
        if self.hardware is None or not decided.holds:
            raise PolicyViolationError(
                decided.reason,
                f"{decided.item}: {decided.rule}: found {decided.found}, wanted {decided.wanted}",
            )
        return self.hardware


def appraise(
    claims: Mapping[str, Claims],
    *,
    policy: Policy,
    node: str,
    role: str,
    safe_flags: SafeFlags,
) -> Appraisal:
    """Appraise the claims of a node's items, by label; `safe_flags` are by type of evidence."""
    wanted = _Wanted(policy, role, safe_flags)
    primary = claims[PRIMARY]
    devices = {label: c for label, c in claims.items() if label != PRIMARY}
    hardware = policy.hardware.get(primary.hardware_id)
    machine = [*_machine_rules(primary, hardware, node=node, role=role)]
    types = frozenset(c.evidence_type for c in devices.values())
    items = {PRIMARY: wanted.appraise(PRIMARY, primary, machine, secondary_types=types)}
    allowed = frozenset() if hardware is None else hardware.devices
    for label, device in devices.items():
        paired = Finding(
            item=label,
            rule="device.paired",
            holds=device.hardware_id in allowed,
            reason="attestation.device.not_paired",
            wanted="a device listed with this machine",
            found=device.hardware_id,
            claim=ar4si.INSTANCE_IDENTITY,
            value=ar4si.UNRECOGNIZED,
        )
        items[label] = wanted.appraise(label, device, [paired])
    return Appraisal(items=items, hardware=hardware, policy=policy)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Requirements that items are appraised against."""

    policy: Policy
    role: str
    safe_flags: SafeFlags

    def appraise(
        self,
        label: str,
        claims: Claims,
        before: list[Finding],
        *,
        secondary_types: frozenset[str] | None = None,
    ) -> ItemAppraisal:
        """Apply the best-fitting reference values: those that fail the fewest rules.

        `secondary_types` are the types of the other items, for the primary item.
        """
        candidates = self.policy.references_for(claims.evidence_type, self.role)
        named = [r for r in candidates if r.product == claims.product]
        known = [*before, *_known_rules(label, claims, candidates, role=self.role)]
        results = [self._against(r, label, claims, known, secondary_types) for r in named]
        if not results:
            vector = _vector(claims, known)
            return ItemAppraisal(claims=claims, reference="", findings=(*known,), vector=vector)
        return min(results, key=lambda result: sum(not f.holds for f in result.findings))

    def _against(
        self,
        reference: ReferenceValues,
        label: str,
        claims: Claims,
        known: list[Finding],
        secondary_types: frozenset[str] | None,
    ) -> ItemAppraisal:
        safe = self.safe_flags.get(claims.evidence_type, {})
        findings = [*known, *_reference_rules(label, claims, reference, safe)]
        if secondary_types is not None:
            findings += _secondary_rules(label, reference, secondary_types)
        vector = _vector(claims, findings)
        findings.append(_tier_rule(label, reference, ar4si.worst(vector)))
        return ItemAppraisal(
            claims=claims, reference=reference.name, findings=(*findings,), vector=vector
        )


def _known_rules(
    label: str, claims: Claims, candidates: Iterable[ReferenceValues], *, role: str
) -> Iterator[Finding]:
    products = {r.product for r in candidates}
    yield Finding(
        item=label,
        rule="reference.type",
        holds=bool(products),
        reason="attestation.type.refused",
        wanted=f"a type that has reference values for role {role}",
        found=claims.evidence_type,
        claim=ar4si.HARDWARE,
        value=ar4si.UNSUPPORTABLE,
    )
    yield Finding(
        item=label,
        rule="reference.product",
        holds=claims.product in products,
        reason="attestation.product.refused",
        wanted=_listed(products),
        found=claims.product,
        claim=ar4si.HARDWARE,
        value=ar4si.UNRECOGNIZED,
    )


def _machine_rules(
    claims: Claims, hardware: Hardware | None, *, node: str, role: str
) -> Iterator[Finding]:
    yield Finding(
        item=PRIMARY,
        rule="hardware.listed",
        holds=hardware is not None,
        reason="attestation.hardware.not_listed",
        wanted="hardware on the policy's list",
        found=claims.hardware_id,
        claim=ar4si.INSTANCE_IDENTITY,
        value=ar4si.UNRECOGNIZED,
    )
    nodes = frozenset() if hardware is None else hardware.nodes
    yield Finding(
        item=PRIMARY,
        rule="hardware.node",
        holds=node in nodes,
        reason="attestation.node.refused",
        wanted=_listed(nodes),
        found=node,
        claim=ar4si.INSTANCE_IDENTITY,
        value=ar4si.UNSUPPORTABLE,
    )
    roles = frozenset() if hardware is None else hardware.roles
    yield Finding(
        item=PRIMARY,
        rule="hardware.role",
        holds=role in roles,
        reason="attestation.role.refused",
        wanted=_listed(roles),
        found=role,
        claim=ar4si.INSTANCE_IDENTITY,
        value=ar4si.UNSUPPORTABLE,
    )


def _reference_rules(
    label: str, claims: Claims, reference: ReferenceValues, safe: Mapping[str, bool]
) -> Iterator[Finding]:
    yield from _property_rules(label, claims, reference)
    yield from _flag_rules(label, claims, reference, safe)
    yield from _tcb_rules(label, claims, reference)
    yield from _measurement_rules(label, claims, reference)
    for key in sorted(reference.certified_keys):
        yield Finding(
            item=label,
            rule=f"certified_key.{key}",
            holds=key in claims.certified_keys,
            reason="attestation.key.uncertified",
            wanted="a key that the hardware certifies to have made",
            found=_listed(claims.certified_keys),
            claim=ar4si.CONFIGURATION,
            value=ar4si.UNSUPPORTABLE,
        )


def _property_rules(label: str, claims: Claims, reference: ReferenceValues) -> Iterator[Finding]:
    for name in sorted({*claims.properties, *reference.properties}):
        accepted = reference.properties.get(name)
        found = claims.properties.get(name)
        yield Finding(
            item=label,
            rule=f"property.{name}",
            holds=accepted is not None and found in accepted,
            reason=_reason(accepted, "attestation.property.refused"),
            wanted=_listed(map(str, sorted(accepted or ()))),
            found="nothing" if found is None else str(found),
            claim=ar4si.CONFIGURATION,
            value=ar4si.UNSUPPORTABLE,
        )


def _flag_rules(
    label: str, claims: Claims, reference: ReferenceValues, safe: Mapping[str, bool]
) -> Iterator[Finding]:
    for name in sorted({*claims.flags, *safe, *reference.flags}):
        found = claims.flags.get(name)
        wanted = reference.flags.get(name, safe.get(name))
        is_debug = name == "debug"
        yield Finding(
            item=label,
            rule=f"flag.{name}",
            holds=wanted is None or found == wanted,
            reason="attestation.debug.refused" if is_debug else "attestation.flag.refused",
            wanted="either" if wanted is None else str(wanted).lower(),
            found="nothing" if found is None else str(found).lower(),
            claim=ar4si.RUNTIME_OPAQUE if is_debug else ar4si.CONFIGURATION,
            value=ar4si.UNSUPPORTABLE,
        )


def _tcb_rules(label: str, claims: Claims, reference: ReferenceValues) -> Iterator[Finding]:
    for name in sorted({*claims.tcb, *reference.tcb}):
        minimum = reference.tcb.get(name)
        found = claims.tcb.get(name)
        yield Finding(
            item=label,
            rule=f"tcb.{name}",
            holds=minimum is not None and found is not None and found >= minimum,
            reason=_reason(minimum, "attestation.tcb.below_minimum"),
            wanted="nothing" if minimum is None else f"at least {minimum}",
            found="nothing" if found is None else str(found),
            claim=ar4si.HARDWARE,
            value=ar4si.UNSUPPORTABLE,
        )
    if claims.tcb_status or reference.tcb_statuses:
        yield Finding(
            item=label,
            rule="tcb.status",
            holds=claims.tcb_status in reference.tcb_statuses,
            reason="attestation.tcb.status_refused",
            wanted=_listed(reference.tcb_statuses),
            found=claims.tcb_status or "nothing",
            claim=ar4si.HARDWARE,
            value=ar4si.UNSUPPORTABLE,
        )
    for advisory in sorted(set(claims.advisories)):
        yield Finding(
            item=label,
            rule=f"advisory.{advisory}",
            holds=advisory in reference.advisories,
            reason="attestation.advisory.refused",
            wanted=_listed(reference.advisories),
            found=advisory,
            claim=ar4si.HARDWARE,
            value=ar4si.UNSUPPORTABLE,
        )


def _measurement_rules(label: str, claims: Claims, reference: ReferenceValues) -> Iterator[Finding]:
    for name in sorted({*claims.measurements, *reference.measurements}):
        accepted = reference.measurements.get(name)
        found = claims.measurements.get(name)
        yield Finding(
            item=label,
            rule=f"measurement.{name}",
            holds=found is not None and _is_measured(name, found, accepted, claims, reference),
            reason=_reason(accepted, "attestation.measurement.unknown"),
            wanted=_wanted(accepted),
            found="nothing" if found is None else found.hex(),
            claim=ar4si.EXECUTABLES,
            value=ar4si.UNRECOGNIZED_EXECUTABLES,
        )


def _is_measured(
    name: str,
    found: bytes,
    accepted: frozenset[bytes] | Position | None,
    claims: Claims,
    reference: ReferenceValues,
) -> bool:
    if accepted is None or accepted is Position.ANY:
        return accepted is not None
    if accepted is Position.EVENTS:
        events = claims.events.get(name)
        return events is not None and set(events) <= reference.events.get(name, frozenset())
    return found in accepted


def _secondary_rules(
    label: str, reference: ReferenceValues, types: frozenset[str]
) -> Iterator[Finding]:
    for evidence_type in sorted(reference.secondary):
        yield Finding(
            item=label,
            rule=f"secondary.{evidence_type}",
            holds=evidence_type in types,
            reason="attestation.secondary.missing",
            wanted=f"an item of type {evidence_type}",
            found=_listed(types),
            claim=ar4si.CONFIGURATION,
            value=ar4si.UNSUPPORTABLE,
        )


def _tier_rule(label: str, reference: ReferenceValues, status: Tier) -> Finding:
    return Finding(
        item=label,
        rule="tier",
        holds=Tier.AFFIRMING <= status <= reference.accepted_tier,
        reason="attestation.tier.refused",
        wanted=f"{reference.accepted_tier.label} or better",
        found=status.label,
        claim="",
        value=0,
    )


def _vector(claims: Claims, findings: Iterable[Finding]) -> dict[str, int]:
    """Return the claims that hold if all rules do, worsened by those that failed."""
    vector = {ar4si.INSTANCE_IDENTITY: ar4si.RECOGNIZED}
    if claims.memory is not None:
        vector[ar4si.RUNTIME_OPAQUE] = _RUNTIME[claims.memory]
    if claims.measurements:
        vector[ar4si.EXECUTABLES] = ar4si.APPROVED_BOOT
        vector[ar4si.CONFIGURATION] = ar4si.APPROVED
        is_current = claims.tcb_status in {"", UP_TO_DATE} and not claims.advisories
        vector[ar4si.HARDWARE] = ar4si.GENUINE if is_current else ar4si.VULNERABLE
    for finding in findings:
        if not finding.holds and finding.claim:
            vector[finding.claim] = max(vector.get(finding.claim, 0), finding.value)
    return vector


def _reason(position: object, reason: ReasonId) -> ReasonId:
    """Return `reason`, or that the policy is silent if it takes no position."""
    return "attestation.policy.silent" if position is None else reason


def _wanted(accepted: frozenset[bytes] | Position | None) -> str:
    if accepted is None:
        return "nothing"
    if isinstance(accepted, Position):
        return accepted.value
    return _listed(value.hex() for value in accepted)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "nothing"
