"""Fabrics of neighbouring releases agree on a session's version, whoever stands between them.

The attacker has both ends' TLS keys, and so reads, changes and answers calls, but not their KEM
keys. Every sequence of its actions is tried, with the product's exchange at both ends.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.fabric import establishment
from sealane.daemon.fabric.establishment import (
    Answer,
    Initiation,
    Offer,
    Result,
    offer_newest,
    respond,
)
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.transport.establish import VERSION, VERSIONS, SessionKeys, Shown

BEFORE = VERSIONS[1]
OFFERS = ("pass", "refuse", "lower", "raise", "lose")
"""What the attacker does with an offer."""
ANSWERS = ("pass", "unmark", "mark", "repeat", "lose")
"""What it does with an answer."""
SHOWN = {node: Shown(certificate=node.encode() * 32, token=b"t" * 32) for node in "ab"}


@dataclass(frozen=True, slots=True)
class Release:
    """A fabric of this release, or of the one before: it knows version 5 only."""

    node: str
    is_before: bool
    kem: X25519KemKey

    @property
    def subject(self) -> Subject:
        return Subject(
            node=self.node,
            role="fabric",
            tenant="t",
            incarnation=b"n" * 16,
            kem_public_key=self.kem.public_key,
        )

    @property
    def versions(self) -> tuple[int, ...]:
        return (BEFORE,) if self.is_before else VERSIONS


def refusal(version: int) -> UsageError:
    return UsageError("session.establish.version", f"session version {version}")


class World:
    """One initiator, one responder, and what the attacker does with each message in turn."""

    def __init__(self, *, initiator: Release, responder: Release, acts: Iterator[str]) -> None:
        self.initiator, self.responder = initiator, responder
        self.acts = acts
        self.used: tuple[str, ...] = ()
        self.sent: list[Answer] = []
        self.theirs: list[tuple[int, SessionKeys]] = []

    def act(self) -> str:
        act = next(self.acts, "pass")
        self.used += (act,)
        return act

    def initiate(self, *, version: int) -> Initiation:
        return Initiation(
            display_name="s",
            own=self.initiator.subject,
            responder=self.responder.subject,
            shown=SHOWN["a"],
            check_result=lambda _: SHOWN["b"],
            kem=self.initiator.kem,
            units=(1408,),
            rate_bits_per_second=1_000_000,
            data_addresses=("127.0.0.1:1",),
            secret=None,
            version=version,
        )

    def answer(self, offer: Offer) -> Answer:
        if offer.version not in self.responder.versions:
            raise refusal(offer.version)
        own = self.responder
        with patch.object(
            establishment,
            "responder_nonce",
            (lambda _: b"r" * 32) if own.is_before else establishment.responder_nonce,
        ):
            answer, keys = respond(
                offer,
                initiator=self.initiator.subject,
                initiator_shown=SHOWN["a"],
                own=own.subject,
                own_certificate=SHOWN["b"].certificate,
                own_result=Result(token="", verifier=b""),
                kem=own.kem,
                units=(1408,),
                data_addresses=("127.0.0.1:2",),
                secret=None,
            )
        self.theirs.append((offer.version, keys))
        return answer

    async def establish(self, offer: Offer) -> Answer:
        act = self.act()
        if act == "refuse":
            raise refusal(offer.version)
        if act == "lose":
            raise UnavailableError("peer.unreachable", "lost")
        if act == "lower":
            offer = replace(offer, version=BEFORE)
        elif act == "raise":
            offer = replace(offer, version=VERSION)
        answer = self.answer(offer)
        self.sent.append(answer)
        act = self.act()
        if act == "lose":
            raise UnavailableError("peer.unreachable", "lost")
        if act == "repeat":
            return self.sent[0]
        if act == "unmark":
            return replace(answer, nonce=answer.nonce[:24] + b"12345678")
        if act == "mark":
            return replace(answer, nonce=answer.nonce[:24] + b"sealane6")
        return answer

    async def run(self) -> tuple[int, SessionKeys]:
        """The initiator's side: the version and its keys."""
        if not self.initiator.is_before:
            initiation, answer = await offer_newest(self.initiate, self.establish)
            return initiation.offer.version, initiation.keys(answer)
        initiation = self.initiate(version=BEFORE)
        answer = await self.establish(initiation.offer)
        with patch.object(establishment, "check_not_lowered", lambda *_: None):
            return BEFORE, initiation.keys(answer)


@pytest.fixture(params=list(itertools.product((False, True), repeat=2)), ids=str)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Release, ...]:
    # The result is checked elsewhere, and its thumbprint is what both ends have shown.
    monkeypatch.setattr(Result, "thumbprint", property(lambda _: b"t" * 32))
    is_before = request.param
    return tuple(
        Release(node, before, X25519KemKey.create())
        for node, before in zip("ab", is_before, strict=True)
    )


async def test_neighbouring_releases_use_the_newest_version_of_both(
    ends: tuple[Release, ...],
) -> None:
    initiator, responder = ends
    world = World(initiator=initiator, responder=responder, acts=iter(()))
    version, keys = await world.run()
    expected = BEFORE if initiator.is_before or responder.is_before else VERSION
    (theirs, theirs_keys) = world.theirs[-1]
    assert (version, theirs) == (expected, expected)
    assert (keys.send, keys.receive) == (theirs_keys.receive, theirs_keys.send)


async def test_nobody_between_the_ends_lowers_the_version(ends: tuple[Release, ...]) -> None:
    initiator, responder = ends
    newest = BEFORE if initiator.is_before or responder.is_before else VERSION
    made = 0
    refused: set[str] = set()
    tried: set[tuple[str, ...]] = set()
    acts_of_any = sorted({*OFFERS, *ANSWERS})
    for acts in itertools.product(acts_of_any, repeat=4):
        if any(acts[:count] in tried for count in range(1, 5)):
            continue
        world = World(initiator=initiator, responder=responder, acts=iter(acts))
        try:
            version, keys = await world.run()
        except Error as error:
            refused.add(error.reason)
            continue
        finally:
            tried.add(world.used)
        made += 1
        assert version == newest, acts
        agreed = [one for one in world.theirs if one[1].receive == keys.send]
        assert [one[0] for one in agreed] == [version], acts
        assert agreed[0][1].send == keys.receive
    assert made > 0
    if newest == VERSION:
        assert "session.establish.lowered" in refused
    assert refused <= {
        "session.establish.version",
        "session.establish.lowered",
        "session.establish.confirmation",
        "secret.sealed",
        "peer.unreachable",
    }


@pytest.mark.parametrize("ends", [(False, False)], indirect=True, ids=["both of this release"])
async def test_a_lowered_version_is_named(ends: tuple[Release, ...]) -> None:
    initiator, responder = ends
    world = World(initiator=initiator, responder=responder, acts=iter(("refuse",)))
    with pytest.raises(VerificationError, match="somebody refused it") as caught:
        await world.run()
    assert caught.value.reason == "session.establish.lowered"
    assert len(world.theirs) == 1, "the responder had answered"


async def test_an_offer_that_is_refused_for_something_else_is_made_once(
    ends: tuple[Release, ...],
) -> None:
    world = World(initiator=ends[0], responder=ends[1], acts=iter(()))
    made: list[Initiation] = []

    def initiate(*, version: int) -> Initiation:
        made.append(world.initiate(version=version))
        return made[-1]

    async def refuse(_: Offer) -> Answer:
        raise UsageError("session.rate.range", "too fast")

    with pytest.raises(UsageError, match="too fast"):
        await offer_newest(initiate, refuse)
    [initiation] = made
    assert not any(initiation._share), "wiped"
