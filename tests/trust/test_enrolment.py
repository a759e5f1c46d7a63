"""Enrolment while brokers fail: each challenge is answered at the broker that issued it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from brokers import MemoryAudit, authorities_of, unchanged_authorities
from control_plane import write_key
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.attestation.verifier import Verifier
from sealane.crypto.certificates import CertificateAuthority, Subject, spiffe_id
from sealane.crypto.evidence.software import SoftwareVerifier
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.servicer import AttestationServicer
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.verifier import Clocks, VerifierService
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node import enrolment as module
from sealane.daemon.node.enrolment import Enrolment, key_digest
from sealane.daemon.node.evidence.choose import open_driver
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.runtime.authorizers import TlsOnly
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import bind_tcp, new_server, running
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.v1 import attestation_pb2, attestation_pb2_grpc
from trust.verifiers import LISTED, NoBooks, software_policy


class Scripted(AttestationServicer):
    """A broker's servicer that records sessions, and runs a hook before an answer."""

    def __init__(self, name: str, service: VerifierService) -> None:
        super().__init__(service)
        self.name = name
        self.given: list[bytes] = []
        self.sessions: list[tuple[str, bytes]] = []
        self.before_attest: Callable[[], None] | None = None
        self.audience = ""

    async def GetChallenge(self, request: Any, context: Any) -> attestation_pb2.Challenge:  # noqa: N802
        challenge = await super().GetChallenge(request, context)
        self.given.append(challenge.session_id)
        challenge.audience = self.audience or challenge.audience
        return challenge

    async def Attest(self, request: Any, context: Any) -> attestation_pb2.AttestationResult:  # noqa: N802
        self.sessions.append((self.name, request.session_id))
        if self.before_attest is not None:
            self.before_attest()
        return await super().Attest(request, context)


@dataclass
class Site:
    """Two brokers of one authority, and a node that may enrol with either."""

    brokers: dict[str, Scripted]
    enrolment: Enrolment

    @property
    def answered(self) -> list[tuple[str, bytes]]:
        """Sessions and the brokers that received them, in no order of brokers."""
        return [each for broker in self.brokers.values() for each in broker.sessions]

    def is_straight(self) -> bool:
        """Return whether every session was answered at the broker that issued it."""
        return all(session in self.brokers[name].given for name, session in self.answered)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteStore(tmp_path / "broker.sqlite")
        registry = await Registry.open(store, WrappingKey(bytes(32)), node="b1")
        stack.push_async_callback(registry.close)
        authority = registry.authority
        brokers, addresses = {}, {}
        for name in ("b1", "b2"):
            service = VerifierService(
                Verifier(
                    policy=software_policy(),
                    evidence_verifiers=[SoftwareVerifier()],
                    audience=spiffe_id(name, "broker"),
                    verifier_key_sha256=key_digest(authority.certificate),
                ),
                books=NoBooks(),
                authorities=authorities_of(authority),
                refresh=unchanged_authorities,
                broker=name,
                audit=MemoryAudit(),
                clocks=Clocks(registry),
                metrics=Metrics(),
            )
            stack.callback(service.close)
            brokers[name] = Scripted(name, service)

            async def issue(keys: Keys, node: str = name) -> Issued:
                subject = Subject(
                    node=node,
                    role="broker",
                    tenant="",
                    incarnation=keys.incarnation,
                    kem_public_key=keys.kem_public,
                )
                leaf = authority.issue(subject, keys.tls.public_key(), now=utc_now())
                return Issued(leaf=leaf)

            identity = Identity(
                node=name,
                role="broker",
                anchors=TrustAnchors(authority.certificate),
                obtain=issue,
                metrics=Metrics(),
            )
            await identity.renew()
            server = new_server(Metrics(), TlsOnly())
            attestation_pb2_grpc.add_AttestationServicer_to_server(brokers[name], server)
            addresses[name] = bind_tcp(
                server, "127.0.0.1:0", identity.server_credentials(mutual=False), key="test"
            )
            await stack.enter_async_context(running(server))
        (tmp_path / "anchor.pem").write_bytes(
            authority.certificate.public_bytes(serialization.Encoding.PEM)
        )
        write_key(tmp_path / "g1.pem", LISTED.pem())
        config = EnrolmentConfig.model_validate(
            {
                "broker_node": "b1",
                "broker_address": "unused:1",
                "attestation_address": addresses["b1"],
                "trust_anchor": str(tmp_path / "anchor.pem"),
                "evidence": "software",
                "key_file": str(tmp_path / "g1.pem"),
                "timeout_seconds": 10,
                "other_brokers": [
                    {
                        "node": "b2",
                        "address": "unused:2",
                        "attestation_address": addresses["b2"],
                    }
                ],
            }
        )
        driver = open_driver(config, tcti="")
        stack.callback(driver.close)
        yield Site(
            brokers,
            Enrolment(
                config,
                node="g1",
                role="gateway",
                driver=driver,
                kept=KeptAnchors.open(config, tmp_path),
            ),
        )


async def test_a_broker_that_goes_between_challenge_and_attest_costs_a_fresh_challenge(
    site: Site,
) -> None:
    def go() -> None:
        raise UnavailableError("peer.unreachable", "the broker is going down")

    site.brokers["b1"].before_attest = go
    keys = Keys.create()
    issued = await site.enrolment.obtain(keys)
    assert issued.leaf.public_key() == keys.tls.public_key()
    assert [name for name, _ in site.answered] == ["b1", "b2"]
    assert site.is_straight()


async def test_a_broker_that_forgot_its_challenge_costs_a_fresh_one(site: Site) -> None:
    def forget() -> None:
        # As after a restart at the same address, or behind an address shared by several brokers.
        site.brokers["b1"].before_attest = None
        raise VerificationError("attestation.nonce.stale", "no such challenge is open")

    site.brokers["b1"].before_attest = forget
    await site.enrolment.obtain(Keys.create())
    assert [name for name, _ in site.answered] == ["b1", "b2"]
    assert site.is_straight()


async def test_no_certificate_by_the_predecessor_is_accepted_after_one_by_the_successor(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.enrolment.obtain(Keys.create())
    anchors = site.enrolment._kept.anchors
    [present] = anchors.certificates
    assert anchors.issuer == present
    successor = CertificateAuthority.create(broker="b1", now=utc_now())
    anchors.certificates = (present, successor.certificate)
    expected = key_digest(present)
    monkeypatch.setattr(module, "key_digest", lambda _: expected)
    await site.enrolment.obtain(Keys.create())
    anchors.issuer = successor.certificate
    with pytest.raises(VerificationError) as refused:
        await site.enrolment.obtain(Keys.create())
    assert refused.value.reason == "certificate.issuer"


async def test_a_refusal_is_not_taken_to_the_next_broker(site: Site) -> None:
    def refuse() -> None:
        raise VerificationError("attestation.refused", "the verifier refused this node")

    site.brokers["b1"].before_attest = refuse
    with pytest.raises(VerificationError) as caught:
        await site.enrolment.obtain(Keys.create())
    assert caught.value.reason == "attestation.refused"
    assert [name for name, _ in site.answered] == ["b1"]


async def test_brokers_that_forget_every_challenge_are_not_asked_for_ever(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        raise VerificationError("attestation.nonce.stale", "no such challenge is open")

    for broker in site.brokers.values():
        broker.before_attest = forget
    moments = iter(range(0, 100 * 10**9, 4 * 10**9))
    monkeypatch.setattr(module, "monotonic_ns", lambda: next(moments))
    with pytest.raises(VerificationError) as caught:
        await site.enrolment.obtain(Keys.create())
    assert caught.value.reason == "attestation.nonce.stale"
    assert len(site.answered) == 3
    assert site.is_straight()


async def test_challenge_of_another_verifier_is_not_answered(site: Site) -> None:
    """Otherwise a relay could make our hardware answer a verifier that we didn't call."""
    site.brokers["b1"].audience = spiffe_id("b2", "broker")
    with pytest.raises(VerificationError) as caught:
        await site.enrolment.obtain(Keys.create())
    assert caught.value.reason == "attestation.audience.mismatch"
    assert site.answered == []
