"""Reasons for a session's end: fabric, job and peer get the same reason, each in its own terms."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from session_pairs import connected

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
End = Callable[[Any, Any], Awaitable[None] | None]


@pytest.mark.parametrize(
    ("cause", "reason", "told"),
    [
        ("node.revoked", "session.peer.revoked", "session.peer_closed.revoked"),
        ("authorization.stale", "session.trust.ended", "session.peer_closed.requested"),
        ("node.refused", "session.peer.refused", "session.peer_closed.requested"),
    ],
)
async def test_a_peer_that_may_not_act_loses_its_sessions_and_no_other_does(
    make_fabric: MakeFabric, cause: str, reason: str, told: str
) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        make_fabric("fabric-c") as other,
        connected(left, right, name="first") as (ours, theirs),
        connected(left, other, name="second") as (unharmed, _),
    ):
        first, second = left.service.sessions()
        at_peer = right.service.get(theirs.session.name)
        assert first.identity.peer is not None
        await left.service.end_peer(first.identity.peer, cause)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await at_peer.wait_closed()

        assert (first.close_reason, second.close_reason) == (reason, "")
        assert [session.state.value for session in (first, second)] == ["closed", "established"]
        assert [end.ring.close_reason() for end in (ours, unharmed)] == [reason, ""]
        assert (at_peer.close_reason, theirs.ring.close_reason()) == (told, told)


@pytest.mark.parametrize(
    ("end", "reason", "told"),
    [
        pytest.param(
            lambda service, name: service.close(name),
            "session.closed.requested",
            "session.peer_closed.requested",
            id="operator",
        ),
        pytest.param(
            lambda service, _: service.bar("node.revoked"),
            "session.closed.barred",
            "session.peer_closed.barred",
            id="barred",
        ),
        pytest.param(
            lambda service, _: service.drain.run(0),
            "session.closed.draining",
            "session.peer_closed.draining",
            id="drain",
        ),
    ],
)
async def test_a_job_is_told_why_its_daemon_ended_the_session(
    make_fabric: MakeFabric, end: End, reason: str, told: str
) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        connected(left, right) as (ours, theirs),
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        session = left.service.get(ours.session.name)
        at_peer = right.service.get(theirs.session.name)
        # No receive is posted for it, so a drain has to wait.
        await ours.post_send(offset=0, length=8)

        ending = end(left.service, ours.session.name)
        if ending is not None:
            await ending
        await at_peer.wait_closed()

        assert (session.close_reason, ours.ring.close_reason()) == (reason, reason)
        assert (at_peer.close_reason, theirs.ring.close_reason()) == (told, told)


async def test_the_reason_of_a_stop_is_the_job_s(make_fabric: MakeFabric) -> None:
    async with contextlib.AsyncExitStack() as stack:
        right = await stack.enter_async_context(make_fabric("fabric-b"))
        async with contextlib.AsyncExitStack() as jobs:
            async with make_fabric("fabric-a") as left:
                ours, _ = await jobs.enter_async_context(connected(left, right))
            assert ours.ring.close_reason() == "session.closed.shutdown"


async def test_a_reason_that_came_first_stays(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("fabric-a") as left,
        make_fabric("fabric-b") as right,
        connected(left, right) as (ours, theirs),
    ):
        right.service.close(theirs.session.name)
        session = left.service.get(ours.session.name)
        # The worker learns of it before the event loop runs.
        while not ours.ring.close_reason():
            pass
        left.service.close(ours.session.name)

        assert session.close_reason == "session.peer_closed.requested"
