"""Sends that succeed without waking the job, until it wants to know."""

import asyncio
from typing import Any

from patience import PATIENCE_SECONDS
from sealane.client import Session
from sealane.errors import Error
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
        failed, errors = asyncio.Event(), list[Error]()
        sending.when_failed(lambda error: (errors.append(error), failed.set()))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await failed.wait()
        sending.when_failed(errors.append)
        assert [error.reason for error in errors] == ["session.message.expired"] * 2


async def test_a_stream_that_ends_wakes_the_job(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        left.posts.quiet_sends()
        receiving = await right.post_receive(offset=0, length=8)
        stream = await left.post_stream(8)
        await stream.write(0, offset=0, length=8)
        await stream.end()
        await receiving
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not stream.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_whoever_waits_for_a_quiet_send_hears_of_it(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        left.posts.quiet_sends()
        sending = await left.post_send(offset=0, length=8)
        waiting = asyncio.ensure_future(sending.wait(timeout_seconds=PATIENCE_SECONDS))
        await asyncio.sleep(0)
        await right.receive(offset=0, length=8)
        assert (await waiting).length == 8
        with left.posts.hearing_sends():
            left.posts.quiet_sends()
            sending = await left.post_send(offset=0, length=8)
            await right.receive(offset=0, length=8)
            await ended(left, 2)
            assert sending.done(), "somebody listens"
        left.close()
        left.posts.quiet_sends()


async def test_a_full_ring_and_a_drain_hear_of_quiet_sends(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        left.posts.quiet_sends()
        count = left.ring.entries + 10

        async def receive() -> None:
            for _ in range(count):
                await right.receive(offset=0, length=8)

        async def send() -> None:
            sent = [await left.post_send(offset=0, length=8) for _ in range(count)]
            await left.drain()
            assert all(one.done() for one in sent)

        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(receive(), send())
