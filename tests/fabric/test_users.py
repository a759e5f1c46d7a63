"""Users of one fabric: their names, limits and listeners, apart from the sockets they come by."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fabrics import RATE_MAX, Fabric
from other_users import ALICE, BOB
from patience import PATIENCE_SECONDS
from sealane.daemon.fabric import jobs
from sealane.daemon.fabric.jobs import Job
from sealane.daemon.fabric.settings import JobLimits
from sealane.errors import Error, UnavailableError, UsageError
from sealane.transport.tasks import TaskOwner
from session_pairs import RATE, REGION

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
FIRST, SECOND = b"first secret, 16+", b"second secret, 16+"


def job_of(fabric: Fabric, uid: int) -> Job:
    """Return this process as a job of that user."""
    pid = os.getpid()
    return fabric.service.jobs.take_in(pid, os.pidfd_open(pid), uid)


@contextlib.asynccontextmanager
async def listening(fabric: Fabric, job: Job, name: str, **how: Any) -> AsyncIterator[Any]:
    owner = TaskOwner()
    before = len(fabric.service.sessions())
    how = {"region_bytes": REGION} | how
    task = owner.start(
        fabric.service.listen(job_token=job.token, uid=job.user.uid, display_name=name, **how),
        name=f"listen {name}",
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(fabric.service.sessions()) == before and not task.done():  # noqa: ASYNC110 - they ring no bell
            await asyncio.sleep(0)
    try:
        yield task
    finally:
        await owner.close()


async def opened(left: Fabric, right: Fabric, secret: bytes = b"") -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await left.service.open(
            job_token=left.job_token,
            display_name="data",
            region_bytes=REGION,
            peer_node=right.name,
            peer_address=right.address,
            rate_bits_per_second=RATE,
            secret=secret,
        )


async def test_a_process_that_changes_its_user_is_another_job(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, _ = fabrics
    alice, bob = job_of(left, ALICE), job_of(left, BOB)
    assert alice.token != bob.token
    assert job_of(left, ALICE) is alice
    assert left.service.jobs.of(alice.token, uid=ALICE) is alice
    with pytest.raises(UsageError) as foreign:
        left.service.jobs.of(alice.token, uid=BOB)
    assert foreign.value.reason == "session.job.unknown"


async def test_places_for_jobs_are_bounded_by_user(
    fabrics: tuple[Fabric, Fabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = fabrics
    monkeypatch.setattr(jobs, "JOBS_OF_USER_MAX", 0)
    with pytest.raises(UnavailableError) as full:
        job_of(left, ALICE)
    assert full.value.reason == "fabric.jobs.limit"
    assert left.service.jobs.list() == []


async def test_an_offer_reaches_the_listener_that_knows_its_secret_whoever_took_the_name(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    alice, bob = job_of(right, ALICE), job_of(right, BOB)
    async with (
        listening(right, alice, "data", secret=FIRST) as first,
        listening(right, bob, "data", secret=SECOND) as second,
    ):
        grant = await opened(left, right, SECOND)
        async with asyncio.timeout(PATIENCE_SECONDS):
            answered = await second
        assert answered.session.job is bob
        assert not first.done()
        with pytest.raises(Error) as mismatch:
            await opened(left, right, b"a third secret, 16+")
        assert mismatch.value.reason == "session.secret.mismatch"
        assert not first.done()
    assert grant.session.job.user.uid == os.geteuid()


@pytest.mark.parametrize("secret", [b"", FIRST])
async def test_an_offer_disturbs_no_listener_of_the_other_kind(
    fabrics: tuple[Fabric, Fabric], secret: bytes
) -> None:
    left, right = fabrics
    alice, bob = job_of(right, ALICE), job_of(right, BOB)
    async with (
        listening(right, alice, "data", secret=b"" if secret else FIRST) as other,
        listening(right, bob, "data", secret=secret) as meant,
    ):
        await opened(left, right, secret)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await meant).session.job is bob
        assert not other.done()


async def test_memory_and_rate_of_a_user_are_bounded(make_fabric: MakeFabric) -> None:
    limits = JobLimits(region_bytes=REGION + 4096, rate_share=0.25)
    async with make_fabric("b", user_limits=limits) as right:
        alice, bob = job_of(right, ALICE), job_of(right, BOB)
        async with (
            listening(right, alice, "data"),
            listening(right, alice, "more", region_bytes=4097) as refused,
            listening(right, bob, "data") as waiting,
        ):
            with pytest.raises(UnavailableError) as too_much:
                await refused
            assert too_much.value.reason == "session.limit.region_bytes"
            assert "fabric.jobs.limits.region_bytes" in str(too_much.value)
            assert not waiting.done()
        with pytest.raises(UsageError) as too_fast:
            await right.service.open(
                job_token=alice.token,
                display_name="data",
                region_bytes=REGION,
                peer_node="c",
                peer_address="127.0.0.1:1",
                rate_bits_per_second=RATE_MAX // 4 + 1,
            )
        assert too_fast.value.reason == "session.limit.rate_share"


async def test_rings_go_to_the_user_of_the_session(fabrics: tuple[Fabric, Fabric]) -> None:
    left, right = fabrics
    async with listening(right, job_of(right, ALICE), "data") as waiting:
        await opened(left, right)
        async with asyncio.timeout(PATIENCE_SECONDS):
            grant = await waiting
        assert right.service.grants.claim(grant.ring_token, BOB) is None
        descriptors = right.service.grants.claim(grant.ring_token, ALICE)
        assert descriptors is not None
        for descriptor in descriptors:
            os.close(descriptor)
        assert right.service.grants.claim(grant.ring_token, ALICE) is None
