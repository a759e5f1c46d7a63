"""All orders of two actors in a replacement of the authority, with crashes at each step.

As in test_rewrapping_model.py: one actor stops at one step of the store, before or after its
effect; meanwhile another one acts to its end; then the first goes on or has crashed. After each
step of that, all nodes with a valid certificate must accept each other. In the end the replacement
can be completed, nodes trust only the successor, and the predecessor's key is nowhere.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.succession_nodes import EXPIRED, GATEWAY, TARGET, Clock, Node, check_understanding
from broker.test_rewrapping_model import Stopping
from brokers import Count, rewrapping_of, start_broker, succession_of
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import AuthorityStage

pytestmark = pytest.mark.slow

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
_EXPECTED = {"authority.stage", "authority.unready", "authority.needed"}


@dataclass
class Actors:
    clock: Clock
    nodes: list[Node]

    def of(self, name: str) -> Node:
        return next(node for node in self.nodes if node.subject.node == name)


Act = Callable[[Registry, Actors], Awaitable[None]]


async def _try(step: Awaitable[None]) -> None:
    try:
        await step
    except UsageError as error:
        if error.reason not in _EXPECTED:
            raise


async def announce(registry: Registry, actors: Actors) -> None:
    await _try(succession_of(registry, now=actors.clock).announce())


async def switch(registry: Registry, actors: Actors) -> None:
    await _try(succession_of(registry, now=actors.clock).switch())


async def retire(registry: Registry, actors: Actors) -> None:
    await _try(succession_of(registry, now=actors.clock).retire())


async def _attest(registry: Registry, node: Node) -> None:
    try:
        await node.attest(registry)
    except UnavailableError as error:
        if error.reason != "attestation.authority.changed":
            raise


async def gateway(registry: Registry, actors: Actors) -> None:
    await _attest(registry, actors.of("g"))


async def away(registry: Registry, actors: Actors) -> None:
    """A node whose certificate has expired attests again."""
    await _attest(registry, actors.of("a"))


async def new_process(registry: Registry, actors: Actors) -> None:
    """A node starts again, with what it kept."""
    node = actors.of("s")
    again = Node(
        replace(node.subject, incarnation=b"N" * 16),
        TrustAnchors(*node.anchors.certificates),
        actors.clock,
    )
    actors.nodes[actors.nodes.index(node)] = again
    await _attest(registry, again)


async def rewrap(registry: Registry, actors: Actors) -> None:
    """Rotate the key encryption key."""
    rotation = rewrapping_of(registry)
    try:
        await rotation.begin()
    except UsageError as error:
        if error.reason != "broker.key.retired":
            raise
    await rotation.proceed()


async def all_attest(registry: Registry, actors: Actors) -> None:
    for node in actors.nodes:
        await node.attest(registry)
        check_understanding(actors.nodes)


async def _prepared(registry: Registry, stage: AuthorityStage | None) -> Actors:
    """Return nodes that are ready for what follows `stage`: two here and one away."""
    clock = Clock()
    first = registry.authority.certificate
    away_node = replace(TARGET, node="a", incarnation=b"A" * 16)
    actors = Actors(
        clock, [Node(each, TrustAnchors(first), clock) for each in (TARGET, GATEWAY, away_node)]
    )
    await all_attest(registry, actors)
    clock.now += EXPIRED
    here = Actors(clock, actors.nodes[:2])
    await all_attest(registry, here)
    for reached, step in ((AuthorityStage.ANNOUNCED, announce), (AuthorityStage.SWITCHED, switch)):
        if stage is None:
            break
        await step(registry, actors)
        assert registry.authorities.stage == reached
        for _ in range(2):
            await all_attest(registry, here)
        if stage == reached:
            break
    return actors


async def run(
    path: Path,
    stage: AuthorityStage | None,
    first: Act,
    second: Act,
    *,
    stop_at: int,
    is_after: bool,
    crashes: bool,
) -> bool:
    """Return whether the first actor took that many steps; check what holds in the end."""
    store = SqliteStore(path)
    _, _, made = await start_broker(Stopping(store), starts=Count(), heads=Count(), kek=OLD)
    await rewrapping_of(made).announce([WrappingKey(OLD), WrappingKey(NEW)])
    actors = await _prepared(made, stage)
    before = made.authorities.anchors.certificates[0]
    await made.close()
    views = [Stopping(store), Stopping(store)]
    one, two = [
        await Registry.open(view, WrappingKey(OLD), WrappingKey(NEW), node="b") for view in views
    ]
    view = views[0]
    view.steps, view.stop_at, view.is_after = 0, stop_at, is_after

    async def meanwhile() -> None:
        view.meanwhile = None
        check_understanding(actors.nodes)
        await second(two, actors)
        check_understanding(actors.nodes)
        view.is_dead = crashes

    view.meanwhile = meanwhile
    try:
        await first(one, actors)
    except UnavailableError:
        assert view.is_dead
    was_stopped = view.meanwhile is None
    check_understanding(actors.nodes)
    # Whoever comes next completes it.
    last = await Registry.open(Stopping(store), WrappingKey(OLD), WrappingKey(NEW), node="b")
    steps = succession_of(last, now=actors.clock)
    while last.authorities.stage != AuthorityStage.RETIRED:
        for _ in range(3):
            await all_attest(last, actors)
        follows = {
            None: steps.announce,
            AuthorityStage.ANNOUNCED: steps.switch,
            AuthorityStage.SWITCHED: steps.retire,
        }[last.authorities.stage]
        await follows()
        check_understanding(actors.nodes)
    await all_attest(last, actors)
    assert last.authority.certificate != before
    for node in actors.nodes:
        assert node.anchors.certificates == (last.authority.certificate,)
    record = (await last.authority_record()).record
    assert record.succession is not None
    assert record.succession.wrapped_key == b""
    assert len(record.retired_certificates) == 1
    for registry in (one, two, last):
        await registry.close()
    await store.close()
    return was_stopped


@pytest.mark.parametrize("crashes", [False, True], ids=["goes-on", "crashes"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "case",
    [
        (None, announce, announce),
        (None, announce, gateway),
        (None, gateway, announce),
        (None, announce, rewrap),
        (AuthorityStage.ANNOUNCED, switch, switch),
        (AuthorityStage.ANNOUNCED, switch, gateway),
        (AuthorityStage.ANNOUNCED, switch, away),
        (AuthorityStage.ANNOUNCED, switch, new_process),
        (AuthorityStage.ANNOUNCED, switch, rewrap),
        (AuthorityStage.ANNOUNCED, rewrap, switch),
        (AuthorityStage.ANNOUNCED, gateway, switch),
        (AuthorityStage.ANNOUNCED, away, switch),
        (AuthorityStage.ANNOUNCED, new_process, switch),
        (AuthorityStage.SWITCHED, retire, retire),
        (AuthorityStage.SWITCHED, retire, gateway),
        (AuthorityStage.SWITCHED, retire, new_process),
        (AuthorityStage.SWITCHED, retire, rewrap),
        (AuthorityStage.SWITCHED, away, retire),
        (AuthorityStage.SWITCHED, new_process, retire),
    ],
    ids=lambda case: "-".join([str(case[0]), case[1].__name__, case[2].__name__]),
)
async def test_every_order_keeps_all_nodes_in_touch(
    tmp_path: Path, case: tuple[AuthorityStage | None, Act, Act], is_after: bool, crashes: bool
) -> None:
    steps = 0
    while True:
        async with asyncio.timeout(60):
            was_stopped = await run(
                tmp_path / f"{steps}.sqlite",
                *case,
                stop_at=steps + 1,
                is_after=is_after,
                crashes=crashes,
            )
        if not was_stopped:
            break
        steps += 1
    assert steps > 1
