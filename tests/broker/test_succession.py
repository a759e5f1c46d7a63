"""The replacement of the authority at a broker: who must be ready for each step."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path

import pytest

from broker.succession_nodes import EXPIRED, GATEWAY, KEY, TARGET, Clock, Node, membership_of
from brokers import Count, MemoryAudit, rewrapping_of, start_broker, succession_of
from sealane.crypto.anchors import TrustAnchors, digest
from sealane.crypto.certificates import Subject
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import authorities
from sealane.daemon.broker.authority import opened_signer
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.stated import Stated
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.succession import AGAIN_SECONDS, AuthoritySuccession
from sealane.errors import Error, UnavailableError
from sealane.protocol.kinds import AuthorityLag, AuthorityStage

OLD, NEW = bytes(range(32)), bytes(range(1, 33))


class Site:
    def __init__(self, registry: Registry, other: Registry) -> None:
        self.registry = registry
        self.other = other
        self.clock = Clock()
        self.audit = MemoryAudit()
        self.first = registry.authority

    @property
    def steps(self) -> AuthoritySuccession:
        return succession_of(self.registry, audit=self.audit, now=self.clock)

    def node(self, subject: Subject = TARGET) -> Node:
        return Node(subject, TrustAnchors(self.first.certificate), self.clock)

    async def refusal(self, step: Awaitable[None]) -> str:
        with pytest.raises(Error) as refused:
            await step
        return refused.value.reason

    async def lags(self) -> dict[str, AuthorityLag]:
        _, lagging = await self.steps.progress()
        return {each.node: each.lag for each in lagging}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    store = SqliteStore(tmp_path / "store")
    _, _, registry = await start_broker(store, starts=Count(), heads=Count(), kek=OLD)
    other = await Registry.open(store, WrappingKey(OLD), node="b2")
    yield Site(registry, other)
    await registry.close()


async def test_a_whole_replacement(site: Site) -> None:
    node = site.node()
    await node.attest(site.registry)
    await site.steps.announce()
    assert await site.lags() == {"s": AuthorityLag.NOT_TRUSTING}
    assert site.registry.authority.certificate == site.first.certificate
    await node.attest(site.registry)
    assert len(node.anchors.certificates) == 2
    # It trusts the successor, but hasn't said so.
    assert await site.refusal(site.steps.switch()) == "authority.unready"
    await node.attest(site.registry)
    assert await site.lags() == {}
    await site.steps.switch()
    assert site.registry.authority.certificate != site.first.certificate
    assert site.registry.authorities.attesting.certificate == site.first.certificate
    assert await site.lags() == {"s": AuthorityLag.CERTIFIED}
    assert await site.refusal(site.steps.retire()) == "authority.needed"
    await node.attest(site.registry)
    assert await site.refusal(site.steps.retire()) == "authority.needed"
    await node.attest(site.registry)
    await site.steps.retire()
    assert site.registry.authorities.attesting is site.registry.authority
    assert await site.lags() == {"s": AuthorityLag.TRUSTING}
    await node.attest(site.registry)
    assert node.anchors.certificates == (site.registry.authority.certificate,)
    await node.attest(site.registry)
    assert await site.lags() == {}
    stages = [record["stage"] for record in site.audit.records if record["outcome"] == "done"]
    assert stages == ["announced", "switched", "retired"]
    stored = (await site.registry.authority_record()).record
    assert stored.succession is not None
    # The key is gone with the trust in it.
    assert stored.succession.wrapped_key == b""
    assert [*site.registry.authorities.ever] == [
        site.first.certificate,
        site.registry.authority.certificate,
    ]


async def test_brokers_of_earlier_versions_read_what_nodes_state_until_a_replacement(
    site: Site,
) -> None:
    node = site.node()
    for _ in range(2):
        await node.attest(site.registry)
    said = await site.registry.stated.get("target/s")
    assert said is not None
    assert node.in_use.digests
    assert {*said.record.model_dump()} == {"incarnation", "version", "clock_skew_ms"}
    await site.steps.announce()
    await node.attest(site.registry)
    said = await site.registry.stated.get("target/s")
    assert said is not None
    assert said.record.trusted == (digest(site.first.certificate),)


async def test_steps_are_idempotent_and_have_an_order(site: Site) -> None:
    assert await site.refusal(site.steps.switch()) == "authority.stage"
    assert await site.refusal(site.steps.retire()) == "authority.stage"
    await site.steps.announce()
    successor = site.registry.authorities.other
    await site.steps.announce()
    assert site.registry.authorities.other == successor
    assert await site.refusal(site.steps.retire()) == "authority.stage"
    await site.steps.switch()
    await site.steps.switch()
    assert digest(site.registry.authority.certificate) == successor
    assert await site.refusal(site.steps.announce()) == "authority.stage"
    await site.steps.retire()
    await site.steps.retire()
    assert await site.refusal(site.steps.switch()) == "authority.stage"
    assert len(site.audit.records) == 3
    # The next one begins after the end of this one.
    await site.steps.announce()
    assert site.registry.authorities.stage == AuthorityStage.ANNOUNCED
    assert len(site.registry.authorities.anchors.certificates) == 2


async def test_a_node_that_was_away_catches_up_or_keeps_the_old_authority(site: Site) -> None:
    here, away = site.node(GATEWAY), site.node(TARGET)
    await away.attest(site.registry)
    site.clock.now += EXPIRED
    await here.attest(site.registry)
    await site.steps.announce()
    for _ in range(2):
        await here.attest(site.registry)
    # It has no valid certificate: nobody can meet it.
    await site.steps.switch()
    for _ in range(2):
        await here.attest(site.registry)
    assert await site.lags() == {"s": AuthorityLag.NOT_TRUSTING}
    assert await site.refusal(site.steps.retire()) == "authority.needed"
    assert await site.refusal(site.steps.retire(gone=["g"])) == "authority.needed"
    # Back, and another process: it still knows only the first authority.
    back = Node(
        replace(TARGET, incarnation=b"N" * 16), TrustAnchors(site.first.certificate), site.clock
    )
    await back.attest(site.registry)
    assert back.accepts(here)
    assert here.accepts(back)
    await back.attest(site.registry)
    await site.steps.retire()


async def test_nodes_that_are_gone_or_revoked_are_not_waited_for(site: Site) -> None:
    gone, revoked = site.node(TARGET), site.node(GATEWAY)
    for node in (gone, revoked):
        await node.attest(site.registry)
    site.clock.now += EXPIRED
    await membership_of(site.registry, site.clock).revoke("g", "gateway", reason="stolen")
    await site.steps.announce()
    await site.steps.switch()
    assert await site.refusal(site.steps.retire()) == "authority.needed"
    await site.steps.retire(gone=["s"])
    # Its operator still has to give it the new trust anchor.
    assert await site.lags() == {"s": AuthorityLag.NOT_TRUSTING}


async def test_a_broker_that_cannot_open_the_successors_key_trusts_it_and_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("key.token.unavailable", "the token is away")

    async def at_once(_seconds: float) -> None:
        pass

    await site.steps.announce()
    await site.other.refresh_authorities()
    await site.steps.switch()
    await site.steps.retire()
    monkeypatch.setattr(authorities, "opened_signer", fail)
    with pytest.raises(UnavailableError):
        await succession_of(site.other).keep(lambda: None, sleep=at_once)
    assert site.other.authorities.anchors.digests == site.registry.authorities.anchors.digests


async def test_a_broker_that_cannot_read_the_store_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = []

    async def fail(_key: str) -> None:
        raise UnavailableError("broker.store.unavailable", "away")

    async def thrice(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) > 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(site.other.store, "get", fail)
    with pytest.raises(asyncio.CancelledError):
        await succession_of(site.other).keep(lambda: None, sleep=thrice)


async def test_an_announcement_repeated_after_the_end_begins_no_other(site: Site) -> None:
    present = digest(site.first.certificate)
    for _ in range(2):
        await site.steps.announce(present)
    await site.steps.switch()
    await site.steps.retire()
    assert await site.refusal(site.steps.announce(present)) == "authority.other"
    await site.steps.announce(digest(site.registry.authority.certificate))


async def test_a_broker_that_is_called_follows_a_switch_before_it_signs(site: Site) -> None:
    node, books = site.node(), membership_of(site.other, site.clock)
    await site.steps.announce()
    await site.other.refresh_authorities()
    for _ in range(2):
        await node.attest(site.registry)
    await site.steps.switch()
    assert site.other.authority.certificate == site.first.certificate
    assert node.leaf is not None
    await books.admit(TARGET, node.leaf, _Result())  # type: ignore[arg-type]
    assert site.other.authority.certificate == site.registry.authority.certificate


async def test_a_repeated_step_is_covered(site: Site) -> None:
    covered: list[int] = []

    async def cover(revision: int) -> None:
        covered.append(revision)

    steps = AuthoritySuccession(
        site.registry, node="b", cover=cover, audit=site.audit, now=site.clock
    )
    for _ in range(2):
        await steps.announce()
    revision = (await site.registry.authority_record()).revision
    assert covered == [revision, revision]


async def test_a_lost_answer_counts_as_none(site: Site) -> None:
    node = site.node()
    await node.attest(site.registry)
    await site.steps.announce()
    for _ in range(3):
        await node.attest(site.registry, answer_is_lost=True)
    assert await site.refusal(site.steps.switch()) == "authority.unready"
    for _ in range(2):
        await node.attest(site.registry)
    await site.steps.switch()
    for _ in range(3):
        await node.attest(site.registry, answer_is_lost=True)
    # It still shows a certificate of the first authority.
    assert await site.refusal(site.steps.retire()) == "authority.needed"


async def test_another_process_of_a_node_has_said_nothing_yet(site: Site) -> None:
    await site.steps.announce()
    node = site.node()
    for _ in range(2):
        await node.attest(site.registry)
    again = Node(
        replace(TARGET, incarnation=b"N" * 16), TrustAnchors(site.first.certificate), site.clock
    )
    await again.attest(site.registry)
    assert await site.refusal(site.steps.switch()) == "authority.unready"


async def test_no_certificate_of_the_predecessor_is_recorded_after_the_switch(site: Site) -> None:
    await site.steps.announce()
    await site.steps.switch()
    # The other broker hasn't looked since.
    assert site.other.authority.certificate == site.first.certificate
    books = membership_of(site.other, site.clock)
    leaf = site.other.authority.issue(TARGET, KEY, now=site.clock())
    with pytest.raises(UnavailableError) as refused:
        await books.attested(
            TARGET, leaf, policy_version=1, hardware_sha256=bytes(32), stated=Stated()
        )
    assert refused.value.reason == "attestation.authority.changed"
    assert await site.other.nodes.get("target/s") is None


async def test_nodes_that_lag_are_asked_to_attest_again_soon_and_not_at_once(site: Site) -> None:
    node, books = site.node(), membership_of(site.registry, site.clock)

    async def is_asked() -> bool:
        assert node.leaf is not None
        result = _Result()
        return await books.admit(TARGET, node.leaf, result)  # type: ignore[arg-type]

    await node.attest(site.registry)
    site.clock.now += dt.timedelta(seconds=AGAIN_SECONDS)
    assert not await is_asked()
    await site.steps.announce()
    assert await is_asked()
    await node.attest(site.registry)
    assert not await is_asked()
    site.clock.now += dt.timedelta(seconds=AGAIN_SECONDS)
    assert await is_asked()
    await node.attest(site.registry)
    site.clock.now += dt.timedelta(seconds=AGAIN_SECONDS)
    assert not await is_asked()


async def test_both_keys_are_wrapped_under_the_next_encryption_key(site: Site) -> None:
    await site.steps.announce()
    rotation = rewrapping_of(site.registry)
    await rotation.announce([WrappingKey(OLD), WrappingKey(NEW)])
    await rotation.begin()
    await rotation.proceed()
    record = (await site.registry.authority_record()).record
    assert record.succession is not None
    successor, key_id = opened_signer(
        record.succession.wrapped_key,
        record.succession.certificate,
        site.registry.keys,
        key_id=record.key_id,
    )
    assert key_id == record.key_id
    await site.steps.switch()
    assert site.registry.authority.certificate == successor.certificate


async def test_a_broker_opened_in_the_middle_signs_with_the_right_one(site: Site) -> None:
    for step, is_first in ((site.steps.announce, True), (site.steps.switch, False)):
        await step()
        reopened = await Registry.open(site.registry.store, WrappingKey(OLD), node="b")
        signs = reopened.authority.certificate == site.first.certificate
        assert (signs, reopened.authorities.attesting.certificate) == (
            is_first,
            site.first.certificate,
        )
        assert reopened.authorities.anchors.digests == site.registry.authorities.anchors.digests


class _Result:
    policy_version = 1
