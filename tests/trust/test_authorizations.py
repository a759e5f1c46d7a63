"""Authorizations of peers: lifetime, ends, and attempts to extend them.

The tests run in virtual time, so nothing is late.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from broker.virtual import in_virtual_time
from patience import PATIENCE_SECONDS
from sealane.daemon.node.authorizations import (
    NO_VOLUME,
    REFUSED_VOLUMES_MAX,
    STALE,
    Authorizations,
)
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.errors import UnavailableError, VerificationError
from trust.world import running_authorizations

FRESH = 0.6


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)


def _peer(name: str = "g") -> PeerIncarnation:
    return PeerIncarnation(spiffe_id=f"spiffe://sealane/gateway/{name}", incarnation=bytes(16))


@dataclass
class World:
    """A broker with scripted answers, and a target that uses the authorizations."""

    refusals: dict[PeerIncarnation, str] = field(default_factory=dict)
    is_away: bool = False
    failure: str = ""
    held: asyncio.Event | None = None
    asked: list[bytes] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    used: set[PeerIncarnation] = field(default_factory=set)
    lost: asyncio.Queue[tuple[PeerIncarnation, str, float]] = field(default_factory=asyncio.Queue)

    async def ask(self, nonce: bytes, peers: Sequence[PeerIncarnation]) -> Sequence[str]:
        self.asked.append(nonce)
        self.heard.set()
        answers = [self.refusals.get(peer, "") for peer in peers]
        if self.held is not None:
            await self.held.wait()
        if self.failure:
            raise VerificationError(self.failure, "refused")
        if self.is_away:
            raise UnavailableError("peer.unreachable", "the broker can't be reached")
        return answers

    async def end(self, peer: PeerIncarnation, reason: str) -> None:
        self.used.discard(peer)
        self.lost.put_nowait((peer, reason, asyncio.get_running_loop().time()))

    def authorizations(self, *, keep: float | None = None) -> Authorizations:
        return Authorizations(
            ask=self.ask,
            uses=lambda: self.used,
            lost=self.end,
            fresh_seconds=FRESH,
            keep_seconds=keep,
            now_ns=_now_ns,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Authorizations]:
        made = self.authorizations()
        async with running_authorizations(made):
            yield made


@pytest.fixture
def world() -> World:
    return World()


@in_virtual_time
async def test_used_peer_stays_while_the_broker_says_so(world: World) -> None:
    async with world.running() as running:
        await running.require(_peer())
        world.used.add(_peer())
        for _ in range(8):
            world.heard.clear()
            await asyncio.wait_for(world.heard.wait(), PATIENCE_SECONDS)
            assert running.is_fresh(_peer())
        assert world.lost.empty()
        assert len({*world.asked}) == len(world.asked), "a nonce was used twice"


@in_virtual_time
async def test_silence_ends_it_when_the_time_since_the_question_is_over(world: World) -> None:
    async with world.running() as running:
        began = asyncio.get_running_loop().time()
        await running.require(_peer())
        world.used.add(_peer())
        world.is_away = True
        peer, reason, ended = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
        assert (peer, reason) == (_peer(), STALE)
        assert ended - began == pytest.approx(FRESH)
        assert running.is_broker_away
        with pytest.raises(UnavailableError):
            await running.require(_peer())


@in_virtual_time
async def test_refusal_ends_it_at_the_next_question(world: World) -> None:
    async with world.running() as running:
        await running.require(_peer())
        await running.require(_peer("h"))
        world.used |= {_peer(), _peer("h")}
        world.refusals[_peer()] = "node.revoked"
        peer, reason, _ = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
        assert (peer, reason) == (_peer(), "node.revoked")
        assert not running.is_fresh(_peer())
        assert running.is_fresh(_peer("h"))


@in_virtual_time
async def test_refused_peer_begins_nothing_and_may_come_back(world: World) -> None:
    made = world.authorizations()
    world.refusals[_peer()] = "node.revoked"
    for _ in range(10):
        with pytest.raises(VerificationError) as caught:
            await made.require(_peer())
        assert caught.value.reason == "node.revoked"
    assert len(world.asked) == 1, "a refused peer that insists must not load the broker"
    world.refusals.clear()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not made.is_fresh(_peer()):
            try:
                await made.require(_peer())
            except VerificationError:
                await asyncio.sleep(0.05)


@in_virtual_time
async def test_delayed_answer_gains_no_time(world: World) -> None:
    made = world.authorizations()
    world.held = asyncio.Event()
    asking = asyncio.ensure_future(made.require(_peer()))
    await asyncio.sleep(FRESH + 0.05)
    world.held.set()
    with pytest.raises(VerificationError) as caught:
        await asking
    assert caught.value.reason == STALE
    assert not made.is_fresh(_peer())


@in_virtual_time
async def test_old_yes_does_not_undo_a_later_no(world: World) -> None:
    made = world.authorizations()
    slow = world.held = asyncio.Event()
    earlier = asyncio.ensure_future(made.require(_peer()))
    await asyncio.sleep(0.01)
    world.held = None
    made.lose_all("nothing is used yet")
    world.used.add(_peer())
    made.lose_all("node.revoked")
    slow.set()
    with pytest.raises(VerificationError) as caught:
        await earlier
    assert caught.value.reason == "node.revoked"


@in_virtual_time
async def test_revoked_asker_ends_everything(world: World) -> None:
    async with world.running() as running:
        await running.require(_peer())
        world.used.add(_peer())
        world.failure = "node.revoked"
        peer, reason, _ = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
        assert (peer, reason) == (_peer(), "node.revoked")


@in_virtual_time
async def test_forged_answers_count_as_silence(world: World) -> None:
    async with world.running() as running:
        await running.require(_peer())
        world.used.add(_peer())
        world.failure = "authorization.signature"
        _, reason, _ = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
        assert reason == STALE


@in_virtual_time
async def test_used_peer_that_was_never_authorized_is_ended(world: World) -> None:
    async with world.running() as running:
        world.is_away = True
        world.used.add(_peer())
        _, reason, _ = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
        assert reason == STALE
        assert not running.is_fresh(_peer())


@in_virtual_time
async def test_kept_peer_lives_longer_but_begins_nothing(world: World) -> None:
    made = world.authorizations(keep=3 * FRESH)
    began = asyncio.get_running_loop().time()
    async with running_authorizations(made):
        await made.require(_peer())
        world.used.add(_peer())
        world.is_away = True
        await asyncio.sleep(FRESH + 0.1)
        assert world.lost.empty()
        with pytest.raises(UnavailableError):
            await made.require(_peer())
        _, reason, ended = await asyncio.wait_for(world.lost.get(), PATIENCE_SECONDS)
    assert reason == STALE
    assert ended - began == pytest.approx(3 * FRESH)


@in_virtual_time
async def test_many_who_wait_ask_once(world: World) -> None:
    made = world.authorizations()
    world.held = asyncio.Event()
    tasks = [asyncio.ensure_future(made.require(_peer())) for _ in range(50)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    world.held.set()
    await asyncio.wait(tasks)
    assert len(world.asked) == 1
    assert all(task.exception() is None for task in tasks[1:])


@in_virtual_time
async def test_a_peer_that_guesses_volumes_is_not_asked_for_any_more(world: World) -> None:
    made = world.authorizations()

    def use(number: int, name: str = "g") -> PeerIncarnation:
        return replace(_peer(name), volume_id=f"volume {number}")

    for number in range(REFUSED_VOLUMES_MAX + 1):
        world.refusals[use(number)] = NO_VOLUME
    for number in range(REFUSED_VOLUMES_MAX):
        with pytest.raises(VerificationError) as refused:
            await made.require(use(number))
        assert refused.value.reason == NO_VOLUME
    asked = len(world.asked)
    with pytest.raises(UnavailableError) as caught:
        await made.require(use(REFUSED_VOLUMES_MAX))
    assert caught.value.reason == "authorization.limit"
    assert len(world.asked) == asked
    # Other peers, and the peer's authorization without a volume, aren't affected.
    await made.require(use(1, "h"))
    await made.require(_peer())


def _boot_world(world: World, *, keep: float | None = None) -> Authorizations:
    """Return authorizations on the clock of permits."""
    return Authorizations(
        ask=world.ask, uses=lambda: world.used, lost=world.end, fresh_seconds=60, keep_seconds=keep
    )


async def test_a_permit_begins_with_the_answer_and_counts_from_the_question(world: World) -> None:
    running = _boot_world(world, keep=0.3)
    permit = running.permit(_peer())
    assert not permit.holds
    world.held = asyncio.Event()
    asking = asyncio.ensure_future(running.require(_peer()))
    await world.heard.wait()
    sent = monotonic_ns()
    await asyncio.sleep(0.4)
    assert monotonic_ns() > sent + 0.3e9
    assert not permit.holds
    # An authorization delayed beyond its lifetime is worthless.
    world.held.set()
    await asking
    assert not permit.holds
    assert running.permit(_peer()) is permit


async def test_a_permit_is_taken_back_by_a_no_and_by_our_own_end(world: World) -> None:
    running = _boot_world(world)
    refused, kept = _peer("refused"), _peer("kept")
    for peer in (refused, kept):
        await running.require(peer)
    permits = [running.permit(peer) for peer in (refused, kept)]
    assert [permit.holds for permit in permits] == [True, True]
    world.refusals[refused] = "node.revoked"
    await running._ask_again([refused, kept])
    assert [permit.holds for permit in permits] == [False, True]
    running.lose_all("node.revoked")
    assert not permits[1].holds
    # Once restored and authorized again, the same permit is valid again.
    world.refusals.clear()
    await running._ask_again([refused])
    assert permits[0].holds


async def test_a_permit_of_another_use_is_another_permit(world: World) -> None:
    running = _boot_world(world)
    whole, shared = _peer(), replace(_peer(), volume_id="v")
    await running.require(whole)
    await running.require(shared)
    permits = [running.permit(peer) for peer in (whole, shared)]
    world.refusals[shared] = NO_VOLUME
    await running._ask_again([whole, shared])
    assert [permit.holds for permit in permits] == [True, False]
