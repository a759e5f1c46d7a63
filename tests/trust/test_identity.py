"""A role accepts only a certificate for its own keys, node and role."""

import dataclasses
import datetime as dt
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.daemon.node.identity import Identity, Issued, Keys
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError, VerificationError

AUTHORITY = CertificateAuthority.create(broker="b", now=utc_now())
OTHER_AUTHORITY = CertificateAuthority.create(broker="b", now=utc_now())


class World:
    """A role whose broker issues the certificate that the test specifies."""

    def __init__(self) -> None:
        self.authority = AUTHORITY
        self.now = utc_now()
        self.tls: ec.EllipticCurvePublicKey | None = None
        self.changes: dict[str, Any] = {}
        self.identity = Identity(
            node="g",
            role="gateway",
            anchors=TrustAnchors(AUTHORITY.certificate),
            obtain=self.issue,
            metrics=Metrics(),
        )

    async def issue(self, keys: Keys) -> Issued:
        subject = Subject(
            node="g",
            role="gateway",
            tenant="t",
            incarnation=keys.incarnation,
            kem_public_key=keys.kem_public,
        )
        subject = dataclasses.replace(subject, **self.changes)
        key = self.tls or keys.tls.public_key()
        return Issued(leaf=self.authority.issue(subject, key, now=self.now))

    async def refusal(self) -> str:
        with pytest.raises(VerificationError) as caught:
            await self.identity.renew()
        return caught.value.reason


async def test_certificate_for_this_role_is_shown_from_then_on() -> None:
    world = World()
    assert not world.identity.has_certificate
    await world.identity.renew()
    assert world.identity.subject.spiffe_id == "spiffe://sealane/gateway/g"
    world.changes = {"tenant": "u"}
    await world.identity.renew()
    assert world.identity.subject.tenant == "u"


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "h"},
        {"role": "target"},
        {"incarnation": bytes(16)},
        {"kem_public_key": bytes(32)},
        {"kem_algorithm": "p256"},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_certificate_for_somebody_else_is_refused(changes: dict[str, Any]) -> None:
    """Above all for another KEM key, whose owner could open secrets sealed to us."""
    world = World()
    world.changes = changes
    assert await world.refusal() == "certificate.subject.mismatch"
    with pytest.raises(UnavailableError, match=r"certificate\.missing"):
        _ = world.identity.own


async def test_role_without_a_certificate_serves_nobody() -> None:
    world = World()
    with pytest.raises(UnavailableError, match=r"certificate\.missing"):
        world.identity._current_configuration()
    await world.identity.renew()
    assert world.identity._current_configuration() is not None


async def test_certificate_for_another_key_is_refused() -> None:
    world = World()
    world.tls = ec.generate_private_key(ec.SECP256R1()).public_key()
    assert await world.refusal() == "certificate.key.mismatch"
    assert not world.identity.has_certificate


async def test_certificate_that_the_authority_did_not_issue_now_is_refused() -> None:
    world = World()
    world.authority = OTHER_AUTHORITY
    assert await world.refusal() == "certificate.issuer"
    world.authority, world.now = AUTHORITY, utc_now() - dt.timedelta(days=1)
    assert await world.refusal() == "certificate.expired"


async def test_refused_certificate_does_not_take_the_place_of_a_good_one() -> None:
    world = World()
    await world.identity.renew()
    good = world.identity.certificate
    world.changes = {"node": "h"}
    await world.refusal()
    assert world.identity.certificate == good
