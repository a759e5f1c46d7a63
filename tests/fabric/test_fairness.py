"""Jobs on a fabric get equal shares of its rate in bytes, whatever their number of sessions."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fabrics import Fabric
from patience import PATIENCE_SECONDS
from sealane.client.grants import fetch_ring, listen_session
from sealane.client.session import Session
from sealane.daemon.runtime.statistics import CATALOGUE
from sealane.protocol.v1 import sessions_pb2
from sealane.transport.tasks import TaskOwner
from session_pairs import REGION, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
RATE = 40_000_000
MESSAGE = 100_000
WARM_BYTES = 400_000
BYTES = 2_000_000
ROUNDS = 10
"""A machine with other work may hold one back for a while, but not again and again."""


@pytest.fixture
def second_process() -> Iterator[int]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@contextlib.asynccontextmanager
async def sending(left: Fabric, right: Fabric, name: str, token: bytes) -> AsyncIterator[Session]:
    """Yield a session of a job that always has messages to send."""

    async def receive(session: Session, place: int) -> None:
        while True:
            await session.receive(offset=place * MESSAGE, length=MESSAGE)

    async def listen() -> None:
        async with (
            listen_session(right.sessions, name, region_bytes=REGION) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for place in range(REGION // MESSAGE):
                tasks.create_task(receive(session, place))

    async def send(session: Session) -> None:
        while True:
            await session.send(offset=0, length=MESSAGE)

    owner = TaskOwner()
    owner.start(listen(), name=f"receive {name}")
    await wait_listening(right, name)
    grant = await left.service.open(
        job_token=token,
        display_name=name,
        region_bytes=REGION,
        peer_node=right.name,
        peer_address=right.address,
        rate_bits_per_second=RATE,
    )
    wire = sessions_pb2.SessionGrant(ring_socket=grant.ring_socket, ring_token=grant.ring_token)
    session = Session(await fetch_ring(wire), sessions_pb2.Session(name=name))
    # Enough messages to outlast a delay of this process's event loop.
    for _ in range(8):
        owner.start(send(session), name=f"send {name}")
    try:
        yield session
    finally:
        await owner.close()
        session.close()


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


async def sent_by(count: Callable[[], list[int]], total: int) -> list[int]:
    """Wait until `total` bytes have been sent; return the bytes of each session."""
    while sum(sent := count()) < total:  # noqa: ASYNC110 - another thread counts
        await asyncio.sleep(0.005)
    return sent


async def test_jobs_with_unequal_numbers_of_sessions_send_as_much(
    make_fabric: MakeFabric, second_process: int
) -> None:
    async with (
        make_fabric("a", rate_max_bits_per_second=RATE) as left,
        make_fabric("b") as right,
        contextlib.AsyncExitStack() as stack,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        many = left.service.jobs.of(left.job_token)
        one = left.service.jobs.take_in(second_process, os.pidfd_open(second_process), os.geteuid())
        sessions = [
            await stack.enter_async_context(sending(left, right, f"s{index}", job.token))
            for index, job in enumerate([many, many, many, one])
        ]

        def by_job() -> list[int]:
            return [job.account.usage()["wire_bytes_sent"] for job in (many, one)]

        def by_session() -> list[int]:
            return [session.statistics()["wire_bytes_sent"] for session in sessions]

        await sent_by(by_job, sum(by_job()) + WARM_BYTES)
        for _ in range(ROUNDS):
            job_before, session_before = by_job(), by_session()
            job_after = await sent_by(by_job, sum(job_before) + BYTES)
            jobs = [now - then for now, then in zip(job_after, job_before, strict=True)]
            each = [now - then for now, then in zip(by_session(), session_before, strict=True)]
            if jain(jobs) >= 0.95 and jain(each[:3]) >= 0.95:
                break
        else:
            pytest.fail(f"{jobs} {each}")
        for session in sessions:
            assert session.statistics()["limited_shared_rate_nanos"] > 0
            assert {*session.statistics()} == {*CATALOGUE["session"]}
        assert all(job.account.usage()["waits"] for job in (many, one))


async def test_job_alone_has_all_of_the_rate(make_fabric: MakeFabric, second_process: int) -> None:
    async with (
        make_fabric("a", rate_max_bits_per_second=RATE) as left,
        make_fabric("b") as right,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        idle = left.service.jobs.take_in(
            second_process, os.pidfd_open(second_process), os.geteuid()
        )
        async with sending(left, right, "alone", left.job_token) as session:
            job = left.service.jobs.of(left.job_token)
            await sent_by(lambda: [job.account.usage()["wire_bytes_sent"]], BYTES)

            assert idle.account.usage()["wire_bytes_sent"] == 0
            limited = session.statistics()
            assert limited["limited_shared_rate_nanos"] < limited["limited_pacing_nanos"]
