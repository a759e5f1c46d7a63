"""Jobs of a fabric: their limits, and cleanup when they die."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fabrics import RATE_MAX, Fabric
from patience import PATIENCE_SECONDS
from sealane.client.grants import introduce
from sealane.daemon.fabric import jobs
from sealane.daemon.fabric.settings import JobLimits
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.transport.tasks import TaskOwner
from session_pairs import RATE, REGION, connected, wait_listening

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
OURS = os.geteuid()
SLEEPER = "import sys; print(flush=True); sys.stdin.read()"


class FromOutside:
    """What the kernel says of a process in a PID namespace that isn't below this one."""

    size = 12

    def unpack(self, _: bytes) -> tuple[int, int, int]:
        return 0, OURS, 0


@pytest.fixture
def process() -> Any:
    """Run another process."""
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        yield sleeper
        sleeper.kill()


async def reason_of(action: Awaitable[Any]) -> str:
    with pytest.raises(Error) as refused:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await action
    return refused.value.reason


def listen(fabric: Fabric, name: str, token: bytes, region_bytes: int = REGION) -> Any:
    return fabric.service.listen(job_token=token, display_name=name, region_bytes=region_bytes)


@contextlib.asynccontextmanager
async def listening(
    fabric: Fabric, name: str, token: bytes, region_bytes: int = REGION
) -> AsyncIterator[asyncio.Task[Any]]:
    owner = TaskOwner()
    task = owner.start(listen(fabric, name, token, region_bytes), name=f"listen {name}")
    await wait_listening(fabric, name)
    try:
        yield task
    finally:
        await owner.close()


async def test_a_process_is_one_job_however_often_it_says_so(
    fabrics: tuple[Fabric, Fabric], process: Any
) -> None:
    left, _ = fabrics

    assert await introduce(left.sessions) == await introduce(left.sessions) == left.job_token
    other = left.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), OURS)
    assert other.token != left.job_token
    assert [job.pid for job in left.service.jobs.list()] == [os.getpid(), process.pid]


async def test_without_a_job_nothing_opens(fabrics: tuple[Fabric, Fabric]) -> None:
    _, right = fabrics
    for token in (b"", bytes(16), right.job_token[:-1]):
        assert await reason_of(listen(right, "data", token)) == "session.job.unknown"


async def test_dead_job_frees_all_it_had_though_its_descriptors_are_held(
    fabrics: tuple[Fabric, Fabric], process: Any
) -> None:
    left, right = fabrics
    job = left.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), OURS)
    async with listening(right, "data", right.job_token) as far, asyncio.timeout(PATIENCE_SECONDS):
        grant = await left.service.open(
            job_token=job.token,
            display_name="data",
            region_bytes=REGION,
            peer_node=right.name,
            peer_address=right.address,
            rate_bits_per_second=RATE,
        )
        # This process still holds the rings, so the stream doesn't end.
        held = grant.session.take_job_descriptors()
        async with listening(left, "more", job.token):
            process.send_signal(signal.SIGKILL)
            await grant.session.wait_closed()
            await (await far).session.wait_closed()
            reasons = {session.close_reason for session in left.service.sessions()}
        for descriptor in held:
            os.close(descriptor)

    assert reasons == {"session.job.gone"}
    assert (job.regions, left.service.jobs.list()) == ({}, [])
    with pytest.raises(UsageError):
        left.service.jobs.of(job.token)


async def test_number_of_a_dead_process_gives_nothing_to_the_next_that_has_it(
    fabrics: tuple[Fabric, Fabric], process: Any
) -> None:
    left, _ = fabrics
    first = left.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), OURS)
    async with listening(left, "data", first.token) as waiting:
        process.kill()
        process.wait()
        # The event loop hasn't noticed yet when another process reuses the process id.
        second = left.service.jobs.take_in(process.pid, os.pidfd_open(os.getpid()), OURS)
        assert second.token != first.token
        assert await reason_of(waiting) == "session.listener.closed"
        assert left.service.jobs.of(second.token) is second
        with pytest.raises(UsageError):
            left.service.jobs.of(first.token)


async def test_process_that_ended_before_it_was_looked_at_is_no_job(
    fabrics: tuple[Fabric, Fabric], process: Any
) -> None:
    pidfd = os.pidfd_open(process.pid)
    process.kill()
    process.wait()
    with pytest.raises(UnavailableError) as gone:
        fabrics[0].service.jobs.take_in(process.pid, pidfd, OURS)
    assert gone.value.reason == "fabric.jobs.gone"
    assert fabrics[0].service.jobs.list() == []


async def test_number_of_jobs_is_bounded(
    fabrics: tuple[Fabric, Fabric], process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = fabrics
    monkeypatch.setattr(jobs, "JOBS_MAX", 1)
    left.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), OURS)

    assert await reason_of(introduce(left.sessions)) == "session.job.refused"


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_kernel_names_the_process_behind_a_connection(
    has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(jobs, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid, pidfd, uid = jobs.peer_of(ours)
    shown = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    os.close(pidfd)

    assert (pid, uid) == (os.getpid(), os.geteuid())
    assert f"Pid:\t{pid}\n" in shown


def test_a_process_without_a_number_here_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_PEER_CREDENTIALS", FromOutside())
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(UnavailableError) as unseen:
        jobs.peer_of(ours)
    assert unseen.value.reason == "fabric.jobs.unseen"


async def test_sessions_of_a_job_are_bounded_and_those_of_another_are_not_touched(
    make_fabric: MakeFabric, process: Any
) -> None:
    limits = JobLimits(sessions=1, region_bytes=3 * REGION)
    async with make_fabric("b", limits=limits) as right:
        token = right.job_token
        other = right.service.jobs.take_in(process.pid, os.pidfd_open(process.pid), OURS)
        async with listening(right, "data", token):
            assert await reason_of(listen(right, "x", token)) == "session.limit.sessions"
            async with listening(right, "more", other.token):
                pass
        async with listening(right, "again", token):
            pass


async def test_memory_of_a_job_is_bounded(make_fabric: MakeFabric) -> None:
    async with make_fabric("b", limits=JobLimits(region_bytes=REGION + 4096)) as right:
        token = right.job_token
        async with listening(right, "data", token):
            too_much = listen(right, "more", token, 4097)
            assert await reason_of(too_much) == "session.limit.region_bytes"
            async with listening(right, "more", token, 4096):
                pass


async def test_rate_of_a_session_is_within_the_share_of_a_job(
    make_fabric: MakeFabric, fabrics: tuple[Fabric, Fabric]
) -> None:
    async with make_fabric("c", limits=JobLimits(rate_share=0.25)) as left:
        opening = left.service.open(
            job_token=left.job_token,
            display_name="data",
            region_bytes=REGION,
            peer_node=fabrics[1].name,
            peer_address=fabrics[1].address,
            rate_bits_per_second=RATE_MAX // 4 + 1,
        )
        assert await reason_of(opening) == "session.limit.rate_share"


async def test_operations_of_a_job_are_bounded_over_its_sessions(make_fabric: MakeFabric) -> None:
    limits = JobLimits(receives=3, sends=2)
    async with (
        make_fabric("a", limits=limits) as left,
        make_fabric("b") as right,
        connected(left, right) as (near, far),
        connected(left, right, name="more") as (other, _),
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        receives = [
            await end.post_receive(offset=8 * index, length=8)
            for index, end in enumerate((near, other, near))
        ]
        sends = [await end.post_send(offset=0, length=8) for end in (near, other)]

        async def wait_taken() -> None:
            # A ring is read in order, so this answer comes after everything posted before.
            await asyncio.gather(*(receive.packet_map(0) for receive in receives))

        await wait_taken()
        for refused in (
            await other.post_receive(offset=0, length=8),
            await other.post_send(offset=0, length=8),
            await near.post_stream(8),
        ):
            with pytest.raises(SessionError) as limit:
                await refused
            assert limit.value.reason == "session.message.limit"
        # A session that ends frees room for any other.
        await far.send(offset=0, length=8)
        await receives[0]
        await sends[1].cancel()
        receives.append(await other.post_receive(offset=0, length=8))
        sends.append(await near.post_send(offset=0, length=8))
        await wait_taken()
        assert not any(operation.done() for operation in [*receives[1:], sends[0], sends[2]])
        (job,) = left.service.jobs.list()
        assert job.account.usage()["refused_operations"] == 3
        assert job.account.usage()["receives"] == 3
        assert job.account.usage()["sends"] == 2
        near.close()
        await left.service.get(near.session.name).wait_closed()
        usage = job.account.usage()
        assert (usage["receives"], usage["sends"]) == (2, 0)
