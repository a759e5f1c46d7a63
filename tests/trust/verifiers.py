"""A verifier service without a daemon, and nodes that enrol with it."""

import contextlib
import datetime as dt
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from brokers import MemoryAudit, unchanged_authorities
from sealane.crypto.attestation.challenge import Challenge
from sealane.crypto.attestation.policy import Hardware, Policy, software_reference
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.certificates import Subject
from sealane.crypto.evidence.cmw import PRIMARY, Item, encode_collection
from sealane.crypto.evidence.software import MEDIA_TYPE, SoftwareKey, SoftwareVerifier
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.verifier import Clocks, Issued, VerifierService
from sealane.daemon.runtime.metrics import Metrics

AUDIENCE = "spiffe://sealane/broker/b"
VERIFIER_KEY = bytes(32)
NOW = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
LISTED, FORBIDDEN, UNKNOWN = (SoftwareKey.create() for _ in range(3))


def software_policy(version: int = 1) -> Policy:
    """Return a policy: LISTED is gateway g1, FORBIDDEN is another node, UNKNOWN isn't listed."""
    machines = [
        Hardware(
            hardware_id=key.fingerprint.replace("sha256", "key-sha256"),
            nodes=frozenset({node}),
            roles=frozenset({"gateway"}),
            tenant="t",
        )
        for key, node in ((LISTED, "g1"), (FORBIDDEN, "other"))
    ]
    return Policy(
        version=version,
        hardware={m.hardware_id: m for m in machines},
        references=(software_reference(frozenset({"gateway"})),),
    )


@dataclass
class Node:
    """A node that enrols with a software key."""

    key: SoftwareKey = LISTED
    name: str = "g1"
    address: str = "192.0.2.1"
    tls: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    async def challenge(self, service: VerifierService) -> Challenge:
        """Request a challenge."""
        return await service.challenge(
            node=self.name,
            role="gateway",
            evidence_types=["software"],
            introduction=b"",
            address=self.address,
        )

    def answer(self, challenge: Challenge) -> tuple[bytes, bytes]:
        """Return runtime data and evidence."""
        data = RuntimeData(
            nonce=challenge.nonce,
            audience=AUDIENCE,
            node=self.name,
            role="gateway",
            incarnation=secrets.token_bytes(16),
            tls_public_key=self.tls.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            ),
            kem_public_key=secrets.token_bytes(32),
            verifier_key_sha256=VERIFIER_KEY,
            evidence_type="software",
        )
        item = Item(MEDIA_TYPE, self.key.evidence(data.binding()))
        return data.encode(), encode_collection({PRIMARY: item})

    async def enrol(self, service: VerifierService) -> Issued:
        """Request a challenge and answer it."""
        challenge = await self.challenge(service)
        return await self.present(service, challenge, *self.answer(challenge))

    async def present(
        self, service: VerifierService, challenge: Challenge, data: bytes, evidence: bytes
    ) -> Issued:
        """Answer a challenge."""
        return await service.attest(
            session_id=challenge.session_id,
            runtime_data=data,
            evidence=evidence,
            address=self.address,
        )


@dataclass
class NoBooks:
    """Node records that only note refusals."""

    refusals: list[dict[str, object]] = field(default_factory=list)

    async def attested(self, subject: Subject, leaf: x509.Certificate, **_: object) -> None:
        assert leaf.not_valid_after_utc
        assert subject.node

    async def refused(self, node: str, role: str, **values: object) -> None:
        self.refusals.append({"node": node, "role": role, **values})


@contextlib.asynccontextmanager
async def running_verifier(
    directory: Path,
) -> AsyncIterator[tuple[VerifierService, MemoryAudit, Registry]]:
    """Run a service on its own store."""
    store = SqliteStore(directory / "broker.sqlite")
    registry = await Registry.open(store, WrappingKey(bytes(32)), node="b")
    audit = MemoryAudit()
    service = VerifierService(
        Verifier(
            policy=software_policy(),
            evidence_verifiers=[SoftwareVerifier()],
            audience=AUDIENCE,
            verifier_key_sha256=VERIFIER_KEY,
        ),
        books=NoBooks(),
        authorities=registry.authorities,
        refresh=unchanged_authorities,
        broker="b",
        audit=audit,
        clocks=Clocks(registry),
        metrics=Metrics(),
    )
    try:
        yield service, audit, registry
    finally:
        service.close()
        await registry.close()
