"""Permitted peers of a session: tenants, nodes, and jobs that know a secret."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from fabrics import subject
from patience import PATIENCE_SECONDS
from sealane.client.collectives import Member, join
from sealane.client.grants import listen_session, open_session
from sealane.client.session import Session
from sealane.daemon.fabric.admission import NAMES_MAX, STRANGERS_LOGGED_MAX, admission
from sealane.errors import Error, UsageError
from session_pairs import RATE, REGION, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
SECRET = b"of this job only"
OTHER_SECRET = b"of another job.."


@contextlib.asynccontextmanager
async def listening(fabric: Any, **terms: Any) -> AsyncIterator[asyncio.Task[Session]]:
    """Run a listener for "data" in the background; yield a future of its session."""
    async with contextlib.AsyncExitStack() as stack:
        listener = listen_session(fabric.sessions, "data", region_bytes=REGION, **terms)
        task = asyncio.ensure_future(stack.enter_async_context(listener))
        await wait_listening(fabric)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def opening(
    fabric: Any, peer: Any, *, display_name: str = "data", **terms: Any
) -> contextlib.AbstractAsyncContextManager[Session]:
    return open_session(
        fabric.sessions,
        display_name,
        region_bytes=REGION,
        peer_node=peer.name,
        peer_address=peer.address,
        rate_bits_per_second=RATE,
        **terms,
    )


async def refused(fabric: Any, peer: Any, **terms: Any) -> str:
    with pytest.raises(Error) as caught:
        async with opening(fabric, peer, **terms):
            pass
    return caught.value.reason


async def accepted(fabric: Any, peer: Any, listener: asyncio.Task[Session], **terms: Any) -> str:
    """Return the peer node of the listener's session."""
    async with opening(fabric, peer, **terms), asyncio.timeout(PATIENCE_SECONDS):
        return (await listener).session.peer_node


async def test_another_tenants_fabric_does_not_get_a_listeners_session(
    make_fabric: MakeFabric,
) -> None:
    async with (
        make_fabric("thief-of-u") as thief,
        make_fabric("friend-of-t") as friend,
        make_fabric("data-of-t") as right,
        listening(right) as listener,
    ):
        with structlog.testing.capture_logs() as logs:
            reasons = [await refused(thief, right, peer_tenant="t") for _ in range(3)]
        assert reasons == 3 * ["session.listener.absent"]
        told = [entry for entry in logs if entry["event"] == "session_offer_refused"]
        assert [(each["tenant"], each["reason"]) for each in told] == [
            ("u", "session.peer.refused")
        ]
        # The refused peers didn't affect it: it still waits for its own.
        assert await accepted(friend, right, listener) == "friend-of-t"


async def test_a_session_is_opened_to_another_tenant_only_if_it_is_named(
    make_fabric: MakeFabric,
) -> None:
    async with (
        make_fabric("left-of-t") as left,
        make_fabric("right-of-u") as right,
        listening(right, peer_tenants=["t"]) as listener,
    ):
        assert await refused(left, right) == "session.peer.tenant"
        assert await refused(left, right, peer_tenant="v") == "session.peer.tenant"
        assert await accepted(left, right, listener, peer_tenant="u") == "left-of-t"


@pytest.mark.parametrize(
    ("terms", "welcome", "stranger"),
    [
        pytest.param({"peer_tenants": ["u"]}, "a-of-u", "a-of-t", id="another tenant"),
        pytest.param({"peer_nodes": ["a-of-t"]}, "a-of-t", "b-of-t", id="a node of ours"),
        pytest.param(
            {"peer_nodes": ["a-of-u"], "peer_tenants": ["u"]}, "a-of-u", "b-of-u", id="its node"
        ),
        pytest.param({"peer_nodes": ["a-of-t", "a-of-u"]}, "a-of-t", "a-of-u", id="both count"),
    ],
)
async def test_a_listener_names_tenants_and_nodes(
    make_fabric: MakeFabric, terms: dict[str, Sequence[str]], welcome: str, stranger: str
) -> None:
    async with (
        make_fabric(welcome) as left,
        make_fabric(stranger) as other,
        make_fabric("data-of-t") as right,
        listening(right, **terms) as listener,
    ):
        assert await refused(other, right, peer_tenant="t") == "session.listener.absent"
        assert await accepted(left, right, listener, peer_tenant="t") == welcome


@pytest.mark.parametrize("secret", [b"", OTHER_SECRET])
async def test_a_job_without_the_secret_is_refused_at_once_and_the_listener_goes_on(
    make_fabric: MakeFabric, secret: bytes
) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        listening(right, secret=SECRET) as listener,
    ):
        assert await refused(left, right, secret=secret) == "session.secret.mismatch"
        assert await accepted(left, right, listener, secret=SECRET) == "fabric-a"


async def test_a_listener_that_does_not_know_the_secret_is_noticed(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        listening(right),
    ):
        assert await refused(left, right, secret=SECRET) == "session.establish.confirmation"


async def test_a_rank_takes_sessions_only_from_the_node_of_the_member(
    make_fabric: MakeFabric,
) -> None:
    """A fabric of the same tenant whose job knows the group's secret claims to be rank 0."""
    async with (
        make_fabric("rank-0") as first,
        make_fabric("rank-1") as second,
        make_fabric("liar") as liar,
    ):
        members = [Member(node=each.name, address=each.address) for each in (first, second)]

        async def take_part(rank: int) -> int:
            fabric = (first, second)[rank]
            job: Any = SimpleNamespace(sessions=fabric.sessions)
            async with join(
                job, "g", rank=rank, members=members, rate_bits_per_second=RATE, secret=SECRET
            ) as group:
                # No member leaves before both are connected: leaving ends its sessions.
                await joined.wait()
                return group.rank

        joined = asyncio.Barrier(len(members))
        async with asyncio.TaskGroup() as tasks:
            ranks = [tasks.create_task(take_part(1))]
            await wait_listening(second, "g/0-1")
            lie = await refused(liar, second, display_name="g/0-1", secret=SECRET)
            assert lie == "session.listener.absent"
            ranks.append(tasks.create_task(take_part(0)))
        assert [each.result() for each in ranks] == [1, 0]


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"peer_nodes": ["no name"]}, "session.peers.malformed"),
        ({"peer_tenants": [""]}, "session.peers.malformed"),
        ({"peer_nodes": (NAMES_MAX + 1) * ["a"]}, "session.peers.malformed"),
        ({"secret": b"short"}, "session.secret.length"),
        ({"secret": 65 * b"l"}, "session.secret.length"),
    ],
)
async def test_a_listener_with_bad_terms_is_refused(
    make_fabric: MakeFabric, terms: dict[str, Any], reason: str
) -> None:
    async with make_fabric("fabric-a") as fabric:
        with pytest.raises(UsageError) as caught:
            async with listen_session(fabric.sessions, "data", region_bytes=REGION, **terms):
                pass
    assert caught.value.reason == reason


def test_the_secret_is_wiped_and_strangers_fill_no_log() -> None:
    with admission(own_tenant="t", tenants=(), nodes=(), secret=SECRET) as admitted:
        kept = admitted.secret
        assert kept is not None
        assert any(kept)
        with structlog.testing.capture_logs() as logs:
            for number in range(STRANGERS_LOGGED_MAX + 1):
                assert not admitted.takes(subject(f"n{number}-of-u"), display_name="data")
        assert len(logs) == STRANGERS_LOGGED_MAX
    assert not any(kept)
