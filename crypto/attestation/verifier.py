"""The verifier: hands out challenges and turns evidence into a result. Pure: time comes in.

`challenge` and `take` belong to one thread; `appraise` may run on others, it changes nothing.
"""

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.attestation.challenge import Challenge, Challenges
from sealane.crypto.attestation.policy import AllowedKey, Policy
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.certificates import NAME_PATTERN, ROLES, Subject
from sealane.crypto.evidence.claims import Claims
from sealane.crypto.evidence.cmw import COLLATERAL, PRIMARY, decode_collection, secondary_digests
from sealane.crypto.evidence.software import SOFTWARE
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, EvidenceVerifier
from sealane.errors import UsageError, VerificationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraised:
    """A verifier's positive result: issue a certificate for exactly this key and subject."""

    subject: Subject
    tls_public_key: ec.EllipticCurvePublicKey
    nonce: bytes
    claims: Claims

    @property
    def evidence_type(self) -> str:
        """The type of the primary evidence."""
        return self.claims.evidence_type


class Verifier:
    """Challenges nodes and appraises their evidence."""

    def __init__(
        self,
        *,
        policy: Policy,
        evidence_verifiers: Sequence[EvidenceVerifier],
        audience: str,
        verifier_key_sha256: bytes,
    ) -> None:
        self._policy = policy
        self._keys = {k.fingerprint: k for k in policy.keys}
        self._by_type: Mapping[str, EvidenceVerifier] = {
            v.evidence_type: v for v in evidence_verifiers
        }
        self._challenges = Challenges()
        self.audience = audience
        self._verifier_key_sha256 = verifier_key_sha256

    def challenge(
        self,
        *,
        node: str,
        role: str,
        evidence_types: Sequence[str],
        introduction: bytes,
        peer: str,
        now_ns: int,
        now: dt.datetime,
    ) -> Challenge:
        """Open a challenge for `node` in `role`; `peer` is the address that asks.

        `evidence_types` are what the node can give, the primary one first; the introduction is for
        that. Raises VerificationError `attestation.policy.driver_refused` or what the introduction
        lacks, UsageError `attestation.role.unknown` or `attestation.node.malformed`,
        UnavailableError `attestation.challenge.limit`.
        """
        primary = evidence_types[0] if evidence_types else ""
        verifier = self._evidence_verifier(primary)
        # Anyone can ask: what is kept until the challenge expires must be small.
        if NAME_PATTERN.fullmatch(node) is None:
            raise UsageError("attestation.node.malformed", f"node {node[:80]!r} can't be named")
        if role not in ROLES[1:]:
            raise UsageError(
                "attestation.role.unknown", f"role {role[:80]!r} can't enrol; allowed: {ROLES[1:]}"
            )
        return self._challenges.open(
            node=node,
            role=role,
            evidence_type=primary,
            peer=peer,
            now_ns=now_ns,
            introduced=verifier.introduce(introduction, now=now),
        )

    def take(self, session_id: bytes, *, now_ns: int) -> Challenge:
        """Spend a challenge; VerificationError `attestation.nonce.stale`."""
        return self._challenges.take(session_id, now_ns=now_ns)

    def appraise(
        self, challenge: Challenge, *, runtime_data: bytes, evidence: bytes, now: dt.datetime
    ) -> Appraised:
        """Verify and appraise; VerificationError with the reason of the first check that fails."""
        data = RuntimeData.decode(runtime_data)
        self._check_binding(data, challenge)
        claims = self._verify_evidence(data, challenge, evidence, now)[PRIMARY]
        allowed = self._allowed(claims)
        if data.node not in allowed.nodes:
            raise VerificationError(
                "attestation.policy.node_refused",
                f"this key may not be node {data.node!r}; the policy allows {list(allowed.nodes)}",
            )
        if data.role not in allowed.roles:
            raise VerificationError(
                "attestation.policy.role_refused",
                f"this key may not be a {data.role}; the policy allows {list(allowed.roles)}",
            )
        return Appraised(
            subject=Subject(
                node=data.node,
                role=data.role,
                tenant=allowed.tenant,
                incarnation=data.incarnation,
                kem_public_key=data.kem_public_key,
            ),
            tls_public_key=_parse_tls_key(data.tls_public_key),
            nonce=data.nonce,
            claims=claims,
        )

    def _verify_evidence(
        self, data: RuntimeData, challenge: Challenge, evidence: bytes, now: dt.datetime
    ) -> dict[str, Claims]:
        """Return the claims of every item, by its label."""
        items = decode_collection(evidence)
        if secondary_digests(items) != data.secondary_evidence_sha256:
            raise VerificationError(
                "attestation.evidence.unbound",
                "the runtime data names other secondary evidence than there is",
            )
        collateral = items.pop(COLLATERAL, None)
        by_media_type = {v.media_type: v for v in self._by_type.values()}
        claims = {}
        for label, item in items.items():
            verifier = by_media_type.get(item.media_type)
            is_primary = label == PRIMARY
            if verifier is None or (is_primary != (verifier.evidence_type == data.evidence_type)):
                raise VerificationError(
                    "attestation.evidence.type", f"item {label} can't be {item.media_type}"
                )
            claims[label] = verifier.verify(
                item.value,
                binding=data.binding(),
                introduced=challenge.introduced if is_primary else NOT_INTRODUCED,
                endorsements=b"" if collateral is None else collateral.value,
                now=now,
            )
        return claims

    def _evidence_verifier(self, evidence_type: str) -> EvidenceVerifier:
        verifier = self._by_type.get(evidence_type)
        if verifier is None or (evidence_type == SOFTWARE and not self._policy.software_allowed):
            raise VerificationError(
                "attestation.policy.driver_refused",
                f"the policy does not allow evidence of type {evidence_type[:80]!r}",
            )
        return verifier

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
        if data.verifier_key_sha256 != self._verifier_key_sha256:
            raise VerificationError(
                "attestation.verifier.mismatch", "the node trusts another verifier's key"
            )

    def _allowed(self, claims: Claims) -> AllowedKey:
        fingerprint = f"sha256:{claims.hardware_id.partition(':')[2]}"
        allowed = self._keys.get(fingerprint)
        if allowed is None:
            raise VerificationError(
                "attestation.key.unknown", f"the policy does not list {fingerprint}"
            )
        return allowed


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
