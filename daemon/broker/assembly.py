"""Puts the verifier together: audit log, policy in force, evidence verifiers, service."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.crypto.attestation.policy import NO_POLICY, Policy
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.certificates import CertificateAuthority, spiffe_id
from sealane.crypto.evidence.collateral import Collateral
from sealane.crypto.evidence.hardware import hardware_verifiers
from sealane.crypto.evidence.software import SoftwareVerifier
from sealane.crypto.evidence.tpm2 import Tpm2Verifier
from sealane.crypto.evidence.verifier import EvidenceVerifier
from sealane.daemon.broker.audit import AuditLog, FileHead
from sealane.daemon.broker.collateral import CollateralKeeper
from sealane.daemon.broker.policy import (
    OwnerKey,
    parse_owner_key,
    parse_policy,
    read_document,
    read_signature,
    verify_owner,
)
from sealane.daemon.broker.policy_keeper import FilePolicyStore, PolicyKeeper
from sealane.daemon.broker.verifier import VerifierService
from sealane.daemon.config import BrokerConfig
from sealane.daemon.enrolment import key_digest
from sealane.daemon.files import read_file
from sealane.daemon.logs import get_logger
from sealane.daemon.metrics import Metrics

AUDIT_NAME: Final = "audit.jsonl"
MARKS_NAME: Final = "collateral-marks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierParts:
    """What the broker role needs of its verifier."""

    audit: AuditLog
    keeper: PolicyKeeper
    collateral: CollateralKeeper
    service: VerifierService


def evidence_verifiers(collateral: Callable[[], Collateral]) -> list[EvidenceVerifier]:
    """Return a verifier for every type of evidence; which of them count is the policy's to say."""
    return [SoftwareVerifier(), Tpm2Verifier(), *hardware_verifiers(collateral)]


def check_policy_file(config: BrokerConfig) -> Policy:
    """Read the policy as a start would; UsageError or VerificationError if it would fail."""
    path = Path(config.policy_file)
    document = read_document(path)
    owner = owner_key(config)
    if owner is not None:
        verify_owner(document, read_signature(path), owner=owner)
    return parse_policy(document, source=str(path))


def owner_key(config: BrokerConfig) -> OwnerKey | None:
    """Return the key that policies must be signed with; None: the configuration wants none."""
    if config.policy_owner_key is None:
        return None
    pem = read_file(config.policy_owner_key, key="broker.policy_owner_key")
    return parse_owner_key(pem, source=f"broker.policy_owner_key {config.policy_owner_key}")


async def open_verifier(
    config: BrokerConfig,
    stack: contextlib.AsyncExitStack,
    *,
    state: Path,
    node: str,
    authority: CertificateAuthority,
    metrics: Metrics,
) -> VerifierParts:
    """Open everything in the order it is needed; `stack` closes it in reverse."""
    audit = await AuditLog.open(
        state / AUDIT_NAME,
        keeper=FileHead(state / "audit.head"),
        signing_key=authority.signing_key,
    )
    stack.push_async_callback(audit.close)
    collateral = CollateralKeeper(
        None if config.collateral_dir is None else Path(config.collateral_dir),
        marks=state / MARKS_NAME,
    )
    await collateral.reload()
    verifier = Verifier(
        policy=NO_POLICY,
        evidence_verifiers=evidence_verifiers(collateral.current),
        audience=spiffe_id(node, "broker"),
        verifier_key_sha256=key_digest(authority.certificate),
    )

    def enact(policy: Policy) -> None:
        verifier.policy = policy
        metrics.policy_version.set(policy.version)
        if policy.software_allowed:
            get_logger().warning(
                "development_policy",
                message="software evidence is allowed: nodes prove possession of a key file and "
                "nothing about their machines; for development only",
            )

    owner = owner_key(config)
    if owner is None:
        get_logger().warning(
            "unsigned_policy",
            message="policies need no signature of their owner: whoever can write the policy file "
            "decides who is trusted; for development only",
        )
    keeper = PolicyKeeper(
        FilePolicyStore(state / "policy"), owner=owner, audit=audit, changed=enact
    )
    path = Path(config.policy_file)
    await keeper.start(read_document(path), read_signature(path), source=str(path))
    service = VerifierService(
        verifier, authority=authority, broker=node, audit=audit, metrics=metrics
    )
    stack.callback(service.close)
    return VerifierParts(audit=audit, keeper=keeper, collateral=collateral, service=service)
