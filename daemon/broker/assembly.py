"""Assembles the verifier: policy in force, evidence verifiers, node records, service."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from sealane.crypto.attestation.policy import NO_POLICY, Policy
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.certificates import spiffe_id
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.evidence.verifier import EvidenceVerifier
from sealane.crypto.roles import Role
from sealane.daemon.broker.collateral import CollateralKeeper
from sealane.daemon.broker.devices import Devices
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.membership import Membership
from sealane.daemon.broker.owners import (
    POLICY_LABEL,
    Owner,
    Owners,
    owner_name,
    parse_owner_key,
    parse_signatures,
)
from sealane.daemon.broker.owners_keeper import OwnersKeeper
from sealane.daemon.broker.policy import parse_policy, read_document, read_signature
from sealane.daemon.broker.policy_keeper import PolicyKeeper
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.verifier import Clocks, VerifierService
from sealane.daemon.config import BrokerConfig
from sealane.daemon.node.enrolment import key_digest
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.files import read_file
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.third_party_evidence import installed_verifier
from sealane.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierParts:
    """The verifier and its parts that the broker role uses."""

    keeper: PolicyKeeper
    collateral: CollateralKeeper
    service: VerifierService
    membership: Membership
    devices: Devices


def find_verifier(evidence_type: str) -> EvidenceVerifier | None:
    """Return the verifier of a type that the policy names and another distribution has.

    One that can't be used is logged and left out, so its evidence is refused.
    """
    try:
        return installed_verifier(evidence_type)
    except UsageError as error:
        get_logger().error("evidence_kind_refused", evidence=evidence_type, message=str(error))
        return None


def check_policy_file(config: BrokerConfig, *, owners: Owners | None) -> Policy:
    """Read the policy file and verify that `owners`, if any, signed it.

    UsageError or VerificationError as for a policy that is applied.
    """
    path = Path(config.policy_file)
    document = read_document(path)
    if owners is not None:
        signatures = parse_signatures(read_signature(path), source=f"{path}.sig")
        owners.verify(POLICY_LABEL, document, signatures, what=str(path))
    return parse_policy(document, source=str(path))


def configured_owners(config: BrokerConfig) -> Owners | None:
    """Return the policy's owners by the configuration; None: anyone may write a policy.

    UsageError `policy.owner…` or that of a file.
    """
    several, key = config.policy_owners, "broker.policy_owners.keys"
    if several is not None:
        paths, threshold = several.keys, several.threshold
    elif config.policy_owner_key is not None:
        paths, threshold, key = [config.policy_owner_key], 1, "broker.policy_owner_key"
    else:
        return None
    owners = [
        Owner(
            name=owner_name(Path(path)),
            key=parse_owner_key(read_file(path, key=key), source=f"{key} {path}"),
        )
        for path in paths
    ]
    return Owners.of(owners, threshold=threshold, version=0, source=key.removesuffix(".keys"))


async def offer_policy(keeper: PolicyKeeper, config: BrokerConfig) -> None:
    """Put the operator's policy file into force if it is newer than the policy in force."""
    path = Path(config.policy_file)
    await keeper.offer(read_document(path), read_signature(path), source=str(path))


async def open_verifier(
    config: BrokerConfig,
    broker: BrokerService,
    instance: Instance,
    stack: contextlib.AsyncExitStack,
    *,
    node: str,
    metrics: Metrics,
) -> VerifierParts:
    """Open all parts of the verifier in order of dependency; `stack` closes them in reverse."""
    authorities = broker.registry.authorities
    collateral = CollateralKeeper(
        None if config.collateral_dir is None else Path(config.collateral_dir),
        registry=broker.registry,
        metrics=metrics,
    )
    await collateral.load()
    verifier = Verifier(
        policy=NO_POLICY,
        evidence_verifiers=verifiers(
            Trusted(
                collateral=collateral.current,
                tpm_roots=read_certificates(config.tpm_roots, "broker.tpm_roots"),
                card_roots=read_certificates(config.card_roots, "broker.card_roots"),
            )
        ),
        find=find_verifier,
        audience=spiffe_id(node, Role.BROKER),
        verifier_key_sha256=key_digest(authorities.signing.certificate),
    )

    def follow() -> None:
        verifier.verifier_keys = [*map(key_digest, authorities.anchors.certificates)]

    follow()
    authorities.on_change.append(follow)

    def enact(policy: Policy) -> None:
        verifier.policy = policy
        metrics.broker.policy_version.set(policy.version)
        if policy.software_allowed:
            get_logger().warning(
                "development_policy",
                message="software evidence is allowed: nodes prove possession of a key file and "
                "nothing about their machines; for development only",
            )

    configured = configured_owners(config)
    if configured is None:
        get_logger().warning(
            "unsigned_policy",
            message="policies need no owner's signature: anyone who can write the policy file "
            "decides which nodes are trusted; for development only",
        )
    owners = OwnersKeeper(
        broker.registry, configured=configured, cover=instance.cover, audit=broker.audit
    )
    keeper = PolicyKeeper(broker.registry, owners=owners, audit=broker.audit, changed=enact)
    await offer_policy(keeper, config)
    devices = Devices(
        broker.registry,
        init=config.device_init,
        cover=instance.cover,
        audit=broker.audit,
        metrics=metrics,
    )
    membership = Membership(
        broker.registry,
        cover=instance.cover,
        check_policy=keeper.check_version,
        check_device=devices.check,
        lost=broker.rotate_keys_of,
        audit=broker.audit,
        metrics=metrics,
    )
    service = VerifierService(
        verifier,
        books=membership,
        authorities=authorities,
        refresh=broker.registry.refresh_authorities,
        broker=node,
        audit=broker.audit,
        clocks=Clocks(broker.registry),
        metrics=metrics,
    )
    stack.callback(service.close)
    return VerifierParts(
        keeper=keeper,
        collateral=collateral,
        service=service,
        membership=membership,
        devices=devices,
    )
