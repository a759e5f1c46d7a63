"""A stopping fabric: no new messages, current ones complete, then a clean end on both sides."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from fabrics import Fabric
from patience import PATIENCE_SECONDS
from sealane.client.grants import listen_session
from sealane.daemon.fabric.session import State
from sealane.errors import Error
from sealane.protocol.v1 import sessions_pb2
from session_pairs import REGION, connected, taken, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
LENGTH = 1 << 20


async def reason_of(action: Any) -> str:
    with pytest.raises(Error) as refused:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await action
    return refused.value.reason


async def drain(fabric: Fabric, seconds: float = 0.0) -> Any:
    request = sessions_pb2.DrainFabricRequest(timeout_seconds=seconds)
    return await fabric.sessions.DrainFabric(request)


async def test_what_is_under_way_arrives_and_nothing_new_begins(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    async with connected(left, right) as (near, far), asyncio.timeout(PATIENCE_SECONDS):
        sessions = [
            fabric.service.get(end.session.name) for fabric, end in ((left, near), (right, far))
        ]
        waiting = [
            await near.post_receive(offset=0, length=LENGTH),
            await far.post_receive(offset=0, length=LENGTH),
        ]
        near.region[LENGTH:] = far.region[LENGTH:] = b"m" * (REGION - LENGTH)
        sends = [
            await near.post_send(offset=LENGTH, length=LENGTH),
            await far.post_send(offset=LENGTH, length=LENGTH),
            # This message ends first, however long the answer to the drain takes.
            await near.post_send(offset=LENGTH, length=8),
        ]
        # Posted messages are accepted before the daemon requests the end.
        await asyncio.gather(*(receive.packet_map(0) for receive in waiting))

        answer = await drain(left)
        late = await near.post_send(offset=0, length=8)

        assert (answer.drain.sessions_left, answer.drain.seconds_left > 5) == (1, True)
        assert await reason_of(late.wait()) == "session.message.draining"
        waiting.append(await far.post_receive(offset=LENGTH, length=8))
        await asyncio.gather(*sends, *waiting)
        assert near.region[:LENGTH] == far.region[:LENGTH] == b"m" * LENGTH
        await asyncio.gather(*(session.wait_closed() for session in sessions))
        assert {session.close_reason for session in sessions} <= {
            "session.closed.draining",
            "session.peer_closed.draining",
        }
        assert left.service.drain.progress.sessions_left == 0


async def test_draining_fabric_takes_no_sessions_from_either_side(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    await drain(right)

    def opening(opener: Fabric, peer: Fabric) -> Any:
        return opener.service.open(
            job_token=opener.job_token,
            display_name="data",
            region_bytes=REGION,
            peer_node=peer.name,
            peer_address=peer.address,
            rate_bits_per_second=1_000_000,
        )

    listening = right.service.listen(
        job_token=right.job_token, display_name="data", region_bytes=REGION
    )
    assert await reason_of(listening) == "fabric.draining"
    assert await reason_of(opening(right, left)) == "fabric.draining"
    assert await reason_of(opening(left, right)) == "fabric.draining"


async def test_listener_hears_of_the_drain(fabrics: tuple[Fabric, Fabric]) -> None:
    _, right = fabrics

    async def listen() -> str:
        with pytest.raises(Error) as refused:
            async with listen_session(right.sessions, "data", region_bytes=REGION):
                pass
        return refused.value.reason

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        await wait_listening(right)
        await drain(right)
    assert listening.result() == "fabric.draining"


async def test_what_has_no_more_time_ends_with_the_reason(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("a", drain_timeout_seconds=0.2) as left,
        make_fabric("b") as right,
        connected(left, right) as (near, far),
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        ours, theirs = (
            fabric.service.get(end.session.name) for fabric, end in ((left, near), (right, far))
        )
        # The peer posts no receive.
        send = await near.post_send(offset=0, length=8)
        await taken(near)
        await drain(left, seconds=100)
        assert await reason_of(send.wait()) in {
            "session.message.aborted",
            "session.message.outcome_unknown",
        }
        await theirs.wait_closed()
        await ours.wait_closed()
        assert ours.close_reason == "session.closed.draining"
        assert theirs.close_reason == "session.peer_closed.draining"


async def test_peer_of_a_draining_fabric_is_told_and_sends_nothing_new(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    async with connected(left, right) as (near, far), asyncio.timeout(PATIENCE_SECONDS):
        held = await near.post_send(offset=0, length=8)
        await taken(near)
        await drain(left)
        session = right.service.get(far.session.name)
        while session.state is State.ESTABLISHED:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
        refused = await far.post_send(offset=0, length=8)
        assert await reason_of(refused.wait()) == "session.message.draining"
        assert session.state is State.DRAINING
        # The awaited message still arrives.
        assert (await far.receive(offset=0, length=8)).length == 8
        await held


async def test_time_for_a_drain_is_checked(fabrics: tuple[Fabric, Fabric]) -> None:
    with pytest.raises(Exception, match="negative drain time"):
        await drain(fabrics[0], seconds=-1)
    assert fabrics[0].service.drain.progress is None


async def test_an_ended_drain_takes_sessions_again_and_ends_the_ones_it_told(
    make_fabric: MakeFabric,
) -> None:
    async with (
        make_fabric("a") as left,
        make_fabric("b") as right,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        async with connected(left, right) as (near, _):
            ours = left.service.get(near.session.name)
            await drain(left)
            left.service.drain.end()
            assert left.service.drain.progress is None
            await ours.wait_closed()
            assert ours.close_reason in {"session.closed.draining", "session.peer_closed.draining"}
        async with connected(left, right) as (near, far):
            receive = await far.post_receive(offset=0, length=8)
            await (await near.post_send(offset=0, length=8)).wait()
            await receive.wait()


async def test_the_time_of_an_ended_drain_ends_no_later_session(make_fabric: MakeFabric) -> None:
    async with (
        make_fabric("a", drain_timeout_seconds=0.5) as left,
        make_fabric("b") as right,
        asyncio.timeout(PATIENCE_SECONDS),
        connected(left, right) as (near, _),
    ):
        stuck = left.service.get(near.session.name)
        # The peer posts no receive.
        await near.post_send(offset=0, length=8)
        await taken(near)
        await drain(left)
        left.service.drain.end()
        async with connected(left, right, name="later") as (later, _):
            await stuck.wait_closed()
            assert stuck.close_reason == "session.closed.draining"
            await asyncio.sleep(0.2)
            assert left.service.get(later.session.name).state is State.ESTABLISHED
