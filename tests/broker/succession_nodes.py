"""Nodes and brokers for tests of a replacement of the authority: they attest as daemons do."""

import datetime as dt
from dataclasses import dataclass, field, replace

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from brokers import MemoryAudit
from sealane.crypto.anchors import TrustAnchors, digest
from sealane.crypto.certificates import LIFETIME, Subject, verify_leaf
from sealane.daemon.broker.membership import Membership
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics

KEY = ec.generate_private_key(ec.SECP256R1()).public_key()
TARGET = Subject(
    node="s", role="target", tenant="t", incarnation=b"T" * 16, kem_public_key=bytes(32)
)
GATEWAY = replace(TARGET, node="g", role="gateway", incarnation=b"G" * 16)


@dataclass
class Clock:
    now: dt.datetime = field(default_factory=utc_now)

    def __call__(self) -> dt.datetime:
        return self.now


def membership_of(registry: Registry, clock: Clock) -> Membership:
    """Return the nodes of a broker without policy and devices."""

    async def nothing(*_: object, **__: object) -> None:
        pass

    return Membership(
        registry,
        cover=nothing,
        check_policy=lambda _version, *, now_ns: bool(now_ns) and False,
        check_device=nothing,
        lost=nothing,
        audit=MemoryAudit(),
        metrics=Metrics(),
        now=clock,
    )


@dataclass
class Node:
    """A role of a node: what it trusts, what its server accepts, and what it shows."""

    subject: Subject
    anchors: TrustAnchors
    clock: Clock
    in_use: TrustAnchors = field(default_factory=TrustAnchors)
    leaf: x509.Certificate | None = None
    certified_by: bytes = b""

    async def attest(self, registry: Registry, *, answer_is_lost: bool = False) -> None:
        """Get a certificate as `VerifierService` and `Enrolment` do it."""
        await registry.refresh_authorities()
        authorities = registry.authorities
        signing, succession = authorities.signing, authorities.succession
        # It must be able to reach the listener at all.
        assert set(self.anchors.certificates) & {authorities.attesting.certificate}
        leaf = signing.issue(self.subject, KEY, now=self.clock())
        await membership_of(registry, self.clock).attested(
            self.subject,
            leaf,
            policy_version=1,
            hardware_sha256=bytes(32),
            stated=Stated(trusted=self.in_use.digests, certified_by=self.certified_by),
        )
        if answer_is_lost:
            return
        if succession is not None:
            self.anchors.certificates = succession.follow(self.anchors.certificates)
        now = self.clock()
        self.anchors.checked(lambda anchor: verify_leaf(leaf, anchor=anchor, now=now))
        self.leaf, self.certified_by = leaf, digest(signing.certificate)
        self.in_use = TrustAnchors(*self.anchors.certificates)

    @property
    def is_active(self) -> bool:
        return self.leaf is not None and self.clock() < self.leaf.not_valid_after_utc

    def accepts(self, other: "Node") -> bool:
        """Check that this node's server accepts what another one shows."""
        assert other.leaf is not None
        leaf, now = other.leaf, self.clock()
        subject = self.in_use.checked(lambda anchor: verify_leaf(leaf, anchor=anchor, now=now))
        return subject == other.subject


def check_understanding(nodes: list[Node]) -> None:
    """All nodes with a valid certificate accept each other."""
    active = [node for node in nodes if node.is_active]
    for one in active:
        for other in active:
            assert one.accepts(other)


EXPIRED = LIFETIME + dt.timedelta(seconds=1)
