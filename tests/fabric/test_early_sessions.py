"""Sessions that jobs get before a path has answered."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sealane.client.session import Session
from sealane.errors import SessionError
from sealane.protocol.v1 import sessions_pb2
from session_pairs import Narrow, connected, taken

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
SMALL_BYTES = 400
"""Longest datagram that the relay passes on: answers to padded challenges are lost."""


@contextlib.asynccontextmanager
async def unvalidated(left: Any, right: Any) -> AsyncIterator[tuple[Session, Session]]:
    """Open a session whose path carries small packets only, so that it is never validated."""
    relay = Narrow("127.0.0.1:1", SMALL_BYTES)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: relay, local_addr=("127.0.0.1", 0)
    )

    def through_relay(addresses: list[str]) -> list[str]:
        relay.lead_to(addresses[0])
        return [f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"]

    with contextlib.closing(transport):
        async with connected(left, right, via=through_relay, early=True) as ends:
            yield ends


async def states(fabric: Any) -> list[int]:
    page = await fabric.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
    return [session.state for session in page.sessions]


async def test_a_short_message_arrives_before_the_path_has_answered(fabrics: Any) -> None:
    left, right = fabrics
    async with unvalidated(left, right) as (sender, receiver):
        sender.region[:5] = b"early"
        await asyncio.gather(
            sender.send(offset=0, length=5), receiver.receive(offset=100, length=5)
        )
        assert bytes(receiver.region[100:105]) == b"early"
        assert await states(left) == [sessions_pb2.Session.ESTABLISHING]


async def test_a_path_that_does_not_answer_in_time_ends_the_session(
    make_fabric: MakeFabric,
) -> None:
    async with (
        make_fabric("fabric-a", establish_timeout_seconds=0.2) as left,
        make_fabric("fabric-b") as right,
        unvalidated(left, right) as (sender, receiver),
    ):
        for end in (sender, receiver):
            with pytest.raises(SessionError, match="ended"):
                await end.receive(offset=0, length=5)
        with pytest.raises(SessionError, match=re.escape("session.establish.timeout")):
            await sender.receive(offset=0, length=5)


@pytest.mark.parametrize(
    ("left_unit", "right_unit"),
    [
        pytest.param(None, None, id="found"),
        pytest.param(None, 1408, id="the listener's"),
        pytest.param(4032, None, id="the opener's"),
    ],
)
async def test_a_job_gets_no_session_early_whose_memories_may_change(
    make_fabric: MakeFabric, left_unit: int | None, right_unit: int | None
) -> None:
    async with (
        make_fabric("fabric-a", unit_bytes=left_unit) as left,
        make_fabric("fabric-b", unit_bytes=right_unit) as right,
        connected(left, right, early=True) as (sender, receiver),
    ):
        expected = sessions_pb2.Session.ESTABLISHED
        assert [*(await states(left)), *(await states(right))] == [expected, expected]
        sender.region[:20_000] = bytes(range(200)) * 100
        await asyncio.gather(
            sender.send(offset=0, length=20_000), receiver.receive(offset=0, length=20_000)
        )
        assert receiver.region[:20_000] == sender.region[:20_000]


async def test_a_job_gets_none_whose_memories_may_change_while_no_path_answers(
    make_fabric: MakeFabric,
) -> None:
    async with (
        make_fabric("fabric-a", unit_bytes=None, establish_timeout_seconds=0.3) as left,
        make_fabric("fabric-b", unit_bytes=None) as right,
    ):
        with pytest.raises(ExceptionGroup) as refused:
            async with unvalidated(left, right):
                pytest.fail("a session")
        assert [error.reason for error in refused.value.exceptions] == ["session.establish.timeout"]


async def test_a_drain_lets_messages_under_way_finish(fabrics: Any) -> None:
    left, right = fabrics
    async with unvalidated(left, right) as (sender, receiver):
        sender.region[:5] = b"early"
        sending = await sender.post_send(offset=0, length=5)
        await taken(sender)
        left.service.begin_drain()
        await asyncio.sleep(0)
        assert await states(left) == [sessions_pb2.Session.DRAINING]
        await receiver.receive(offset=100, length=5)
        await sending.wait()
