"""A job with direct access to the descriptors of its session."""

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from session_pairs import RATE, REGION, wait_listening


@dataclass(frozen=True)
class RawJob:
    """The left end of a session: the fabric's state, and the job's descriptors."""

    session: Any
    region: int
    submission: int
    completion: int
    memory: mmap.mmap
    """The submission memory."""
    bell: socket.socket
    """The doorbell, which only the fabric rings."""
    call: int
    """The eventfd that wakes the fabric."""
    far: Any
    """The right end, as its fabric knows it."""


@contextlib.asynccontextmanager
async def raw_job(left: Any, right: Any) -> AsyncIterator[RawJob]:
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(
            right.service.listen(
                job_token=right.job_token, display_name="hostile", region_bytes=REGION
            )
        )
        await wait_listening(right, "hostile")
        grant = await left.service.open(
            job_token=left.job_token,
            display_name="hostile",
            region_bytes=REGION,
            peer_node=right.name,
            peer_address=right.address,
            rate_bits_per_second=RATE,
        )
    descriptors = left.service.grants.claim(grant.ring_token, os.geteuid())
    assert descriptors is not None
    region, submission, completion, doorbell, call = descriptors
    memory = mmap.mmap(submission, 0)
    with socket.socket(fileno=doorbell) as bell, contextlib.closing(memory):
        bell.setblocking(False)
        try:
            yield RawJob(
                session=grant.session,
                region=region,
                submission=submission,
                completion=completion,
                memory=memory,
                bell=bell,
                call=call,
                far=listening.result(),
            )
        finally:
            for descriptor in (region, submission, completion, call):
                os.close(descriptor)
    listening.result().session.close("session.closed.requested")
