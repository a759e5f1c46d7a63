"""Sends that end well without waking the job, until it wants to know."""

import asyncio
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.client import Session
from sealane.errors import SessionError
from session_pairs import connected

TURNS = 20
"""Of the event loop, after which it has seen a doorbell that was rung before."""


async def ended(session: Session, sends: int) -> None:
    """Wait until the fabric says that this many sends have ended, and has rung if it would."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while session.statistics()["sends_completed"] < sends:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_an_ended_send_wakes_the_job_only_while_it_wants_to_hear(
    fabrics: tuple[Any, Any],
) -> None:
    async with connected(*fabrics) as (left, right):
        left.posts.quiet_sends()
        for number in (1, 2):
            receiving = await right.post_receive(offset=0, length=8)
            sending = await left.post_send(offset=0, length=8)
            await receiving
            await ended(left, number)
            assert not sending.done()
            with left.posts.hearing_sends():
                assert sending.done(), "it is not announced again"
        with left.posts.hearing_sends(), left.posts.hearing_sends():
            sending = await left.post_send(offset=0, length=8)
            await right.receive(offset=0, length=8)
            await sending.wait(timeout_seconds=PATIENCE_SECONDS)


async def test_a_send_that_fails_wakes_the_job(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, _):
        left.posts.quiet_sends()
        sending = await left.post_send(offset=0, length=8, deadline_seconds=0.01)
        with pytest.raises(SessionError) as expired:
            await sending.wait(timeout_seconds=PATIENCE_SECONDS)
        assert expired.value.reason == "session.message.expired"


async def test_a_full_ring_and_a_drain_hear_of_quiet_sends(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        left.posts.quiet_sends()
        count = left.ring.entries + 10

        async def receive() -> None:
            for _ in range(count):
                await right.receive(offset=0, length=8)

        async def send() -> None:
            for _ in range(count):
                await left.post_send(offset=0, length=8)
            await left.drain()

        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(receive(), send())
