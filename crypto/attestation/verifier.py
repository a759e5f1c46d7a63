"""The verifier: issues challenges and turns evidence into a result. Pure: the time is an argument.

`open` and `take` belong to one thread; `prepare` and `verify` change nothing and may run on others.
"""

import datetime as dt
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.attestation.appraisal import Appraisal, PolicyViolationError, appraise
from sealane.crypto.attestation.challenge import Challenge, Challenges
from sealane.crypto.attestation.policy import Policy
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.certificates import NAME_PATTERN, Subject
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.cmw import (
    COLLATERAL,
    PRIMARY,
    Item,
    decode_collection,
    secondary_digests,
)
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, EvidenceVerifier, Introduced
from sealane.crypto.roles import NODE_ROLES
from sealane.errors import UsageError, VerificationError

INTRODUCTION_BYTES_MAX: Final = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Genuine evidence of a node, appraised; `subject` returns what may be certified."""

    data: RuntimeData
    tls_public_key: ec.EllipticCurvePublicKey
    appraisal: Appraisal

    def subject(self) -> Subject:
        """Return the subject to certify, for exactly `tls_public_key`.

        PolicyViolationError with the reason of the rule that decided.
        """
        hardware = self.appraisal.require()
        return Subject(
            node=self.data.node,
            role=self.data.role,
            tenant=hardware.tenant,
            incarnation=self.data.incarnation,
            kem_public_key=self.data.kem_public_key,
            kem_algorithm=self.data.kem_algorithm,
        )


def _find_none(evidence_type: str) -> EvidenceVerifier | None:  # noqa: ARG001
    """Find no verifier of another distribution."""
    return None


class Verifier:
    """Challenges nodes and appraises their evidence. `policy` may be replaced at any time.

    `find` returns the verifier of a type that isn't among `evidence_verifiers`. Only types that the
    policy names are looked for, when it is put into force; one that isn't found is refused.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        evidence_verifiers: Sequence[EvidenceVerifier],
        audience: str,
        verifier_key_sha256: bytes,
        find: Callable[[str], EvidenceVerifier | None] = _find_none,
    ) -> None:
        self.audience = audience
        self.verifier_keys: Collection[bytes] = (verifier_key_sha256,)
        """SHA-256 of the keys of the authorities, of which evidence must name one."""
        self._challenges = Challenges()
        self._own = evidence_verifiers
        self._find = find
        self.policy = policy

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        known = [*self._own, *found_verifiers(policy, self._own, self._find)]
        self._policy = policy
        self._by_type = {v.evidence_type: v for v in known}
        self._by_media_type = {v.media_type: v for v in known}
        self._safe_flags = {v.evidence_type: v.safe_flags for v in known}

    def prepare(
        self,
        *,
        node: str,
        role: str,
        evidence_types: Sequence[str],
        introduction: bytes,
        now: dt.datetime,
    ) -> Introduced:
        """Check a request for a challenge; changes nothing.

        `evidence_types` are those that the node can produce, the primary one first; the
        introduction is for that type. Raises UsageError `attestation.node.malformed` or
        `attestation.role.unknown`, VerificationError `attestation.type.refused` or an error of the
        introduction.
        """
        # Anyone can ask, so what is kept until the challenge expires must be small.
        if NAME_PATTERN.fullmatch(node) is None:
            raise UsageError(
                "attestation.node.malformed", f"node {node[:80]!r}; allowed: a node's name"
            )
        if role not in NODE_ROLES:
            raise UsageError(
                "attestation.role.unknown",
                f"role {role[:80]!r} can't enrol; allowed: {', '.join(NODE_ROLES)}",
            )
        primary = evidence_types[0] if evidence_types else ""
        verifier = self._by_type.get(primary)
        if verifier is None or not self.policy.takes(primary, role):
            raise PolicyViolationError(
                "attestation.type.refused",
                f"the policy accepts no evidence of type {primary[:80]!r} for role {role}",
            )
        if len(introduction) > INTRODUCTION_BYTES_MAX:
            raise VerificationError(
                "attestation.introduction.malformed",
                f"an introduction of {len(introduction)} bytes; allowed: {INTRODUCTION_BYTES_MAX}",
            )
        return verifier.introduce(introduction, now=now)

    def open(
        self,
        *,
        node: str,
        role: str,
        evidence_type: str,
        peer: str,
        introduced: Introduced,
        now_ns: int,
    ) -> Challenge:
        """Open a challenge after `prepare`; `peer` is the address that asks.

        UnavailableError `attestation.challenge.limit`.
        """
        return self._challenges.open(
            node=node,
            role=role,
            evidence_type=evidence_type,
            peer=peer,
            now_ns=now_ns,
            introduced=introduced,
        )

    def take(self, session_id: bytes, *, now_ns: int) -> Challenge:
        """Use up a challenge; VerificationError `attestation.nonce.stale`."""
        return self._challenges.take(session_id, now_ns=now_ns)

    def required_types(self, challenge: Challenge) -> list[str]:
        """Return the types of evidence that the policy requires, the primary one first."""
        references = self.policy.references_for(challenge.evidence_type, challenge.role)
        secondary = {t for reference in references for t in reference.secondary}
        return [challenge.evidence_type, *sorted(secondary)]

    def optional_types(self, challenge: Challenge) -> list[str]:
        """Return the other types that the policy has reference values of, for this role."""
        known = {r.evidence_type for r in self.policy.references if challenge.role in r.roles}
        return sorted(known - {*self.required_types(challenge)})

    def verify(
        self, challenge: Challenge, *, runtime_data: bytes, evidence: bytes, now: dt.datetime
    ) -> Verified:
        """Verify evidence and appraise it; VerificationError unless it is genuine and bound."""
        items = decode_collection(evidence)
        data = RuntimeData.decode(runtime_data)
        self._check_binding(data, challenge)
        tls_public_key = _parse_tls_key(data.tls_public_key)
        claims = self._verify_items(data, challenge, items, now)
        return Verified(
            data=data,
            tls_public_key=tls_public_key,
            appraisal=appraise(
                claims,
                policy=self.policy,
                node=data.node,
                role=data.role,
                safe_flags=self._safe_flags,
            ),
        )

    def _verify_items(
        self,
        data: RuntimeData,
        challenge: Challenge,
        items: Mapping[str, Item],
        now: dt.datetime,
    ) -> dict[str, Claims]:
        """Return the claims of all items, by label."""
        if secondary_digests(items) != data.secondary_evidence_sha256:
            raise VerificationError(
                "attestation.evidence.unbound",
                "the runtime data names secondary evidence other than what was sent",
            )
        collateral = items.get(COLLATERAL)
        claims = {}
        for label, item in items.items():
            if label == COLLATERAL:
                continue
            verifier = self._by_media_type.get(item.media_type)
            is_primary = label == PRIMARY
            if verifier is None or (is_primary != (verifier.evidence_type == data.evidence_type)):
                raise _wrong_type(label, item)
            if is_primary:
                _check_collateral(collateral, verifier)
            claims[label] = verifier.verify(
                item.value,
                binding=data.binding(),
                introduced=challenge.introduced if is_primary else NOT_INTRODUCED,
                endorsements=b"" if collateral is None else collateral.value,
                now=now,
            )
        return claims

    def _check_binding(self, data: RuntimeData, challenge: Challenge) -> None:
        if not secrets.compare_digest(data.nonce, challenge.nonce):
            raise VerificationError(
                "attestation.nonce.mismatch", "the runtime data answers another challenge"
            )
        if (data.node, data.role, data.evidence_type) != (
            challenge.node,
            challenge.role,
            challenge.evidence_type,
        ):
            raise VerificationError(
                "attestation.subject.mismatch",
                f"the challenge was for {challenge.evidence_type} evidence of {challenge.role} "
                f"{challenge.node}, the runtime data says {data.evidence_type} of {data.role} "
                f"{data.node}",
            )
        if data.audience != self.audience:
            raise VerificationError(
                "attestation.audience.mismatch",
                f"the runtime data is for {data.audience!r}, this is {self.audience!r}",
            )
        if data.verifier_key_sha256 not in self.verifier_keys:
            raise VerificationError(
                "attestation.verifier.mismatch", "the node trusts a different verifier's key"
            )


def found_verifiers(
    policy: Policy,
    known: Sequence[EvidenceVerifier],
    find: Callable[[str], EvidenceVerifier | None],
) -> Iterator[EvidenceVerifier]:
    """Yield the verifiers of the types that the policy names and that aren't `known`.

    An item is read by its media type, so a verifier that brings one of another's is left out.
    """
    named = {reference.evidence_type for reference in policy.references}
    taken = {v.media_type for v in known}
    for evidence_type in sorted(named - {v.evidence_type for v in known}):
        verifier = find(evidence_type)
        if verifier is not None and verifier.media_type not in taken:
            taken.add(verifier.media_type)
            yield verifier


def _parse_tls_key(encoded: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(encoded)
    except (ValueError, TypeError) as error:
        raise VerificationError(
            "attestation.tls_key.malformed", "the TLS key is not a SubjectPublicKeyInfo"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise VerificationError("attestation.tls_key.malformed", "the TLS key is not on P-256")
    return key


def _wrong_type(label: str, item: Item) -> VerificationError:
    return VerificationError(
        "attestation.evidence.type", f"item {label} can't have media type {item.media_type}"
    )


def _check_collateral(collateral: Item | None, verifier: EvidenceVerifier) -> None:
    """Refuse endorsements that don't belong to the primary evidence's type."""
    if collateral is not None and collateral.media_type != verifier.endorsements_media_type:
        raise _wrong_type(COLLATERAL, collateral)
