"""Sessions of one job that share a region, and one message to many peers from it."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fabrics import Fabric
from patience import PATIENCE_SECONDS
from sealane._native import JobRing, SessionEndpoint, SharedRegion
from sealane.client import ErasureCoded, SelectiveRepeat, Sent, Session, send_to_all
from sealane.client.grants import listen_session, listen_sessions, open_session
from sealane.daemon.fabric.limits import Limits
from sealane.daemon.fabric.settings import JobLimits
from sealane.daemon.fabric.statistics import job_usage
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2
from sealane.transport.tasks import TaskOwner
from session_pairs import RATE, REGION, connected, taken, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


@contextlib.asynccontextmanager
async def fan(
    left: Fabric, right: Fabric, count: int, *, listens: bool = False
) -> AsyncIterator[tuple[list[Session], list[Session]]]:
    """Open sessions of one region at the left, each to one of its own at the right.

    `listens`: the left listens for all but the first, instead of opening them.
    """
    async with contextlib.AsyncExitStack() as stack:
        near, far = await stack.enter_async_context(connected(left, right, name="0"))
        ends, others = [near], [far]
        for name in map(str, range(1, count)):
            by, to = (right, left) if listens else (left, right)
            at_opener: dict[str, Any] = {"region_bytes": REGION} if listens else {"region_of": near}
            at_listener: dict[str, Any] = (
                {"region_of": near} if listens else {"region_bytes": REGION}
            )
            async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(
                    stack.enter_async_context(listen_session(to.sessions, name, **at_listener))
                )
                await wait_listening(to, name)
                opened = await stack.enter_async_context(
                    open_session(
                        by.sessions,
                        name,
                        peer_node=to.name,
                        peer_address=to.address,
                        rate_bits_per_second=RATE,
                        **at_opener,
                    )
                )
            pair = (opened, listening.result())
            ends.append(pair[listens])
            others.append(pair[not listens])
        yield ends, others


def array_of(session: Session, length: int, seed: int = 1) -> Any:
    array = np.asarray(session.empty(length, "uint8"))
    array[:] = np.random.default_rng(seed).integers(0, 256, length)
    return array


@pytest.mark.parametrize("reliability", [SelectiveRepeat(), ErasureCoded(k=4, m=2)])
@pytest.mark.parametrize("listens", [False, True])
async def test_one_array_reaches_all_peers(
    fabrics: tuple[Fabric, Fabric], listens: bool, reliability: Any
) -> None:
    async with fan(*fabrics, 3, listens=listens) as (near, far):
        assert len({id(end.ring.region) for end in near}) == 1
        array = array_of(near[1], 100_000)
        rooms = [end.empty(100_000, "uint8") for end in far]
        receives = [await end.post_receive(room) for end, room in zip(far, rooms, strict=True)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            results = await send_to_all(near, array, reliability=reliability, immediate=7)
            received = [await receive for receive in receives]

        assert [result.length for result in results] == [100_000] * 3
        assert [one.immediate for one in received] == [7] * 3
        for room in rooms:
            np.testing.assert_array_equal(np.asarray(room), array)
        # Each session has keys of its own: a packet of one means nothing to another.
        assert sum(end.statistics()["forged"] for end in far) == 0


async def test_peer_that_is_gone_or_slow_stops_no_other(fabrics: tuple[Fabric, Fabric]) -> None:
    async with fan(*fabrics, 3) as (near, far):
        array = array_of(near[0], 50_000)
        room = far[0].empty(50_000, "uint8")
        receive = await far[0].post_receive(room)
        # One has left, one never posts a receive.
        far[1].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            good, gone, slow = await send_to_all(near, array, deadline_seconds=0.5)
            await receive

        assert good.length == 50_000
        assert isinstance(gone, SessionError)
        assert isinstance(slow, SessionError)
        assert slow.reason == "session.message.expired"
        np.testing.assert_array_equal(np.asarray(room), array)
        # Neither an operation nor a result holds the array any more: the whole region is free.
        del array
        gc.collect()
        near[0].empty(REGION, "uint8")


async def test_each_sessions_error_is_its_result(fabrics: tuple[Fabric, Fabric]) -> None:
    async with fan(*fabrics, 2) as (near, far):
        array = array_of(near[0], 1000)
        await near[0].drain()
        receive = await far[1].post_receive(offset=0, length=1000)
        async with asyncio.timeout(PATIENCE_SECONDS):
            draining, good = await send_to_all(near, array)
            await receive
        assert isinstance(draining, UsageError)
        assert draining.reason == "session.draining"
        assert isinstance(good, Sent)
        # No result holds the array.
        del array
        gc.collect()
        near[0].empty(REGION, "uint8")


async def test_deadline_bounds_the_wait_for_room_on_a_full_ring(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    async with fan(*fabrics, 2) as (near, far):
        # No receive at the peer: the ring stays full.
        filling = asyncio.ensure_future(fill(near[0]))
        receive = await far[1].post_receive(offset=0, length=8)
        array = near[0].empty(8, "uint8")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(filling), 1.0)
        assert not filling.done()
        filling.cancel()
        full = asyncio.ensure_future(fill(near[0]))
        async with asyncio.timeout(PATIENCE_SECONDS):
            late, good = await send_to_all(near, array, deadline_seconds=0.3)
            await receive
        full.cancel()
        assert isinstance(late, SessionError)
        assert late.reason == "session.message.expired"
        assert "no room" in str(late)
        assert isinstance(good, Sent)
        del array
        gc.collect()
        assert near[0].empty(REGION, "uint8").nbytes == REGION


async def fill(session: Session) -> None:
    """Post sends without end; waits where the ring is full."""
    while True:
        await session.post_send(offset=0, length=8)


async def test_a_closed_session_keeps_its_arrays_until_the_fabric_has_ended_it() -> None:
    with contextlib.closing(SessionEndpoint(["127.0.0.1:0"], SharedRegion(REGION))) as endpoint:
        session = Session(JobRing(*endpoint.take_job_fds()), sessions_pb2.Session(name="s"))
        receive = await session.post_receive(session.empty(REGION, "uint8"))
        session.close()
        assert receive.done()
        del receive
        gc.collect()
        # Nothing serves the session, so its fabric has not noticed.
        with pytest.raises(UnavailableError, match="are free"):
            session.empty(1, "uint8")
        endpoint.close()
        session.empty(REGION, "uint8")


async def test_what_cant_be_sent_to_all_is_sent_to_none(fabrics: tuple[Fabric, Fabric]) -> None:
    async with fan(*fabrics, 2) as (near, far):
        for sessions, immediate, reason in (
            ([near[0], far[0]], 7, "session.post.elsewhere"),
            (near, 1 << 32, "session.post.immediate"),
            (far[:1], 7, "session.post.elsewhere"),
        ):
            with pytest.raises(UsageError) as refused:
                await send_to_all(sessions, near[0].empty(8, "uint8"), immediate=immediate)
            assert refused.value.reason == reason
        assert await send_to_all([], near[0].empty(8, "uint8")) == []
        # The next message is the first.
        sent, got = await asyncio.gather(
            near[0].send(offset=0, length=16), far[0].receive(offset=0, length=32)
        )
        assert (sent.length, got.length) == (16, 16)


async def test_region_outlives_the_session_that_had_it_first(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    async with fan(left, right, 2) as (near, far):
        (job,) = left.service.jobs.list()[:1]
        array = array_of(near[0], 10_000)
        near[0].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(job.regions) > 1:  # noqa: ASYNC110 - no event of its own
                await asyncio.sleep(0.01)
        room = far[1].empty(10_000, "uint8")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(near[1].send(array), far[1].receive(room))
        np.testing.assert_array_equal(np.asarray(room), array)
        kept = mapped_bytes()
    async with asyncio.timeout(PATIENCE_SECONDS):
        del near, far, array, room
        while mapped_bytes() >= kept:
            gc.collect()
            await asyncio.sleep(0.01)


def mapped_bytes() -> int:
    """Return the length of all regions that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:sealane-region" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


async def test_memory_that_sessions_share_counts_once(make_fabric: MakeFabric) -> None:
    limits = JobLimits(sessions=3, region_bytes=REGION + 4096)
    async with (
        make_fabric("a", limits=limits) as left,
        make_fabric("b") as right,
        fan(left, right, 3) as (near, _),
    ):
        (job,) = left.service.jobs.list()[:1]
        assert job_usage(job)["region_bytes"] == REGION
        assert (len(job.regions), len(set(job.regions.values()))) == (3, 1)
        assert await refused_opening(left, right, region_of=near[0]) == "session.limit.sessions"
        near[0].close()
        near[1].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(job.regions) > 1:  # noqa: ASYNC110 - no event of its own
                await asyncio.sleep(0.01)
        # It still counts for the one that is left.
        reason = await refused_opening(left, right, region_bytes=8192)
        assert reason == "session.limit.region_bytes"


async def test_a_region_can_be_shared_while_it_is_in_use_by_the_name_it_began_with(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    async with fan(left, right, 2) as (near, _):
        (job,) = left.service.jobs.list()[:1]
        terms: dict[str, Any] = {
            "peer_node": left.name,
            "peer_address": left.address,
            "rate_bits_per_second": RATE,
            "region_bytes": REGION,
            "wait_seconds": PATIENCE_SECONDS,
        }
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            listen_sessions(left.sessions, "many", region_of=near[0], backlog=1) as listener,
        ):
            near[0].close()
            while near[0].session.name in job.regions:  # noqa: ASYNC110 - no event of its own
                await asyncio.sleep(0.01)
            # The second listener begins to wait once the first has a peer.
            for _ in range(3):
                async with open_session(right.sessions, "many", **terms):
                    with contextlib.closing(await listener.accept()) as session:
                        assert session.ring.region is near[1].ring.region
                        assert session.region_name == near[0].session.name


async def test_region_that_only_a_listener_remembers_counts_again() -> None:
    """A region without a session counts as what a new session asks for."""
    region, other = SharedRegion(REGION), SharedRegion(4096)
    job: Any = SimpleNamespace(name="job", regions={"other": other})
    limits = JobLimits(sessions=3, region_bytes=REGION)
    settings: Any = SimpleNamespace(limits=limits, user_limits=None)
    with pytest.raises(UnavailableError) as refused:
        Limits(settings=settings).check_job(job, region=region)
    assert refused.value.reason == "session.limit.region_bytes"
    job.regions = {"one": region}
    Limits(settings=settings).check_job(job, region=region)
    job.regions = {"one": other}
    user = SimpleNamespace(uid=1, regions=[other])
    settings = SimpleNamespace(limits=JobLimits(region_bytes=2 * REGION), user_limits=limits)
    job = SimpleNamespace(name="job", regions={"other": other}, user=user)
    with pytest.raises(UnavailableError) as refused:
        Limits(settings=settings).check_job(job, region=region)
    assert refused.value.reason == "session.limit.region_bytes"


async def test_a_refused_receive_gives_its_bytes_back(make_fabric: MakeFabric) -> None:
    limits = JobLimits(receives=1)
    async with (
        make_fabric("a", limits=limits) as left,
        make_fabric("b") as right,
        fan(left, right, 2) as (near, far),
    ):
        first = await near[0].post_receive(offset=0, length=8)
        await taken(near[0])
        with pytest.raises(SessionError) as refused:
            await near[1].receive(offset=8, length=8)
        assert refused.value.reason == "session.message.limit"
        assert await first.complete()
        again = await near[1].post_receive(offset=8, length=8)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(far[1].send(offset=0, length=8), again)


async def refused_opening(left: Fabric, right: Fabric, **region: Any) -> str:
    terms: dict[str, Any] = {
        "peer_node": right.name,
        "peer_address": right.address,
        "rate_bits_per_second": RATE,
    }
    opening = open_session(left.sessions, "more", **terms, **region)
    with pytest.raises(Error) as refused:
        async with asyncio.timeout(PATIENCE_SECONDS), opening:
            pass
    return refused.value.reason


@contextlib.asynccontextmanager
async def theirs(fabric: Fabric) -> AsyncIterator[str]:
    """Yield the name of a listener that belongs to another process."""
    owner = TaskOwner()
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        job = fabric.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), os.geteuid())
        listening = fabric.service.listen(
            job_token=job.token, display_name="theirs", region_bytes=REGION
        )
        owner.start(listening, name="theirs")
        await wait_listening(fabric, "theirs")
        (name,) = job.regions
        yield name
    finally:
        await owner.close()
        process.kill()
        await process.wait()


async def test_only_regions_of_the_jobs_own_open_sessions_are_shared(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    async with connected(left, right) as (near, _), theirs(left) as name_of_theirs:
        # A session of another job of this user is as unknown as none.
        for name in (name_of_theirs, "sessions/none"):
            for region_bytes in (0, REGION):
                with pytest.raises(UsageError) as refused:
                    await left.service.listen(
                        job_token=left.job_token,
                        display_name="x",
                        region_bytes=region_bytes,
                        region_of=name,
                    )
                assert refused.value.reason == "session.region.absent"
        with pytest.raises(UsageError) as refused:
            await left.service.listen(
                job_token=left.job_token,
                display_name="x",
                region_bytes=REGION - 4096,
                region_of=near.session.name,
            )
        assert refused.value.reason == "session.region.range"


async def test_receives_of_sessions_that_share_a_region_never_share_a_byte(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    async with fan(*fabrics, 2) as (near, far):
        first = await near[0].post_receive(offset=8, length=8)
        await taken(near[0])
        overlapping = await near[1].post_receive(offset=12, length=8)
        apart = await near[1].post_receive(offset=16, length=8)
        with pytest.raises(SessionError) as refused:
            await overlapping.wait(timeout_seconds=PATIENCE_SECONDS)
        assert refused.value.reason == "session.message.overlap"
        await asyncio.gather(far[0].send(offset=0, length=8), first)
        # Free again, also for the other session; and what an ended session had is free, too.
        again = await near[1].post_receive(offset=8, length=8)
        await taken(near[1])
        assert not again.done()
        near[1].close()
        with pytest.raises(SessionError):
            await apart
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                retried = await near[0].post_receive(offset=16, length=8)
                await taken(near[0])
                if not retried.done():
                    break
                with pytest.raises(SessionError, match="another receive"):
                    retried.result()
