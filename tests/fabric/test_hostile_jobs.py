"""A job that turns what it was given against its fabric: descriptors, memory, sockets, calls."""

import asyncio
import contextlib
import ctypes
import errno
import gc
import mmap
import os
import resource
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fabrics import Fabric
from lingering import LINGER_SECONDS, lingering
from patience import PATIENCE_SECONDS
from raw_jobs import raw_job
from sealane.client.grants import introduce
from sealane.daemon.fabric import ring_socket
from sealane.daemon.runtime import door
from sealane.errors import UnavailableError
from sealane.protocol.v1 import sessions_pb2
from session_pairs import REGION, connected, wait_listening

LIBC = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MADV_REMOVE = 9
DESCRIPTORS_OF_A_MESSAGE = 253
"""Most that the kernel takes at once (SCM_MAX_FD)."""


def punch_hole(descriptor: int, length: int) -> int:
    """Give a memory's pages up; 0, or the error number."""
    how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    off_t = ctypes.c_int64
    failed = LIBC.fallocate(descriptor, how, off_t(0), off_t(length))
    return ctypes.get_errno() if failed else 0


def descriptors_of(file: int) -> int:
    """Return how many descriptors of this process stand for the file that `file` stands for."""
    wanted = os.fstat(file)
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        # Another thread may close its own meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += os.path.samestat(wanted, one.stat())
    return count


async def test_memory_can_be_neither_cut_nor_taken_away(fabrics: tuple[Any, Any]) -> None:
    async with raw_job(*fabrics) as job:
        sizes = [os.fstat(one).st_size for one in (job.region, job.submission, job.completion)]
        for descriptor, size in zip(
            (job.region, job.submission, job.completion), sizes, strict=True
        ):
            for wanted in (0, size - 1, size + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, wanted)
        with pytest.raises(PermissionError):
            os.pwrite(job.completion, bytes(8), 0)
        with pytest.raises(PermissionError):
            mmap.mmap(job.completion, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert punch_hole(job.completion, sizes[2]) == errno.EPERM
        reopened = os.open(f"/proc/self/fd/{job.completion}", os.O_RDONLY)
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(reopened)


async def test_pages_that_are_given_up_under_a_transfer_harm_nobody(
    fabrics: tuple[Any, Any],
) -> None:
    left, right = fabrics
    async with connected(left, right) as (sender, receiver):
        content = secrets.token_bytes(REGION)
        sender.region[:] = content
        region = ctypes.addressof((ctypes.c_char * REGION).from_buffer(receiver.ring.region))
        receiving = await receiver.post_receive(offset=0, length=REGION)
        sending = await sender.post_send(offset=0, length=REGION)
        while not receiving.done():
            assert LIBC.madvise(ctypes.c_void_p(region), REGION, MADV_REMOVE) == 0
            await asyncio.sleep(0)
        await asyncio.gather(sending, receiving)
        again = await receiver.post_receive(offset=0, length=REGION)
        await sender.send(offset=0, length=REGION)
        await again
        assert bytes(receiver.region) == content


async def test_descriptors_that_a_job_sends_are_not_kept(fabrics: tuple[Any, Any]) -> None:
    left, _ = fabrics
    async with raw_job(*fabrics) as job:
        await introduce(left.sessions)
        before = descriptors_of(job.region)
        flood = [job.region] * DESCRIPTORS_OF_A_MESSAGE
        for _ in range(8):
            with pytest.raises(BrokenPipeError):
                socket.send_fds(job.bell, [b"x"], flood)
            with socket.socket(socket.AF_UNIX) as caller:
                caller.setblocking(False)
                caller.connect(str(left.service.settings.ring_socket))
                socket.send_fds(caller, [b"t" * ring_socket.TOKEN_BYTES], flood)
                assert await asyncio.get_running_loop().sock_recv(caller, 1) == ring_socket.REFUSED
        await introduce(left.sessions)
        assert not job.session.close_reason, "nothing came of it"
        assert descriptors_of(job.region) == before


async def test_a_job_that_hears_no_more_has_ended(fabrics: tuple[Any, Any]) -> None:
    async with raw_job(*fabrics) as job:
        # Nothing could be sent on it anyway.
        job.bell.shutdown(socket.SHUT_WR)
        # A packet map of nothing: its completion is there, though the doorbell rings unheard.
        job.memory[128:136] = (8).to_bytes(8, "little")
        job.memory[:8] = (1).to_bytes(8, "little")
        os.eventfd_write(job.call, 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            one = (1).to_bytes(8, "little")
            while os.pread(job.completion, 8, 128) != one:  # noqa: ASYNC110 - no bell
                await asyncio.sleep(0)
        assert not job.session.close_reason
        job.bell.shutdown(socket.SHUT_RD)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await job.session.wait_closed()
    assert job.session.close_reason == "session.job.gone"


async def test_a_job_that_makes_its_wake_up_block_blocks_itself(fabrics: tuple[Any, Any]) -> None:
    async with raw_job(*fabrics) as job:
        # The flag is of the file that the fabric watches, too.
        os.set_blocking(job.call, True)
        os.eventfd_write(job.call, 1)
        assert os.eventfd_read(job.call) >= 1
        job.memory[:8] = (2**64 - 1).to_bytes(8, "little")
        os.eventfd_write(job.call, 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await job.session.wait_closed()
    assert job.session.close_reason == "ring.index.jump"


async def test_what_lingers_in_a_message_of_a_job_blocks_nobody_else(
    fabrics: tuple[Any, Any],
) -> None:
    left, _ = fabrics
    loop = asyncio.get_running_loop()
    path = str(left.service.settings.ring_socket)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            hostile = stack.enter_context(socket.socket(socket.AF_UNIX))
            hostile.connect(path)
            lingers = stack.enter_context(lingering())
            socket.send_fds(hostile, [b"t" * ring_socket.TOKEN_BYTES], [lingers])
            os.close(lingers)
        began = loop.time()
        assert await introduce(left.sessions) == left.job_token
        assert loop.time() - began < LINGER_SECONDS / 4


async def test_silent_connections_keep_nobody_from_the_fabric(
    fabrics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_socket, "HELLO_TIMEOUT_SECONDS", 600)
    left, _ = fabrics
    loop = asyncio.get_running_loop()
    path = str(left.service.settings.ring_socket)
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(door.CONNECTIONS_MAX + 6):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            await loop.sock_connect(caller, path)
            silent.append(caller)
            await asyncio.sleep(0)
        assert await introduce(left.sessions) == left.job_token
        # Room was made at the cost of the oldest; the newest may still speak.
        assert await loop.sock_recv(silent[0], 1) == b""
        await loop.sock_sendall(silent[-1], bytes(ring_socket.TOKEN_BYTES))
        assert await loop.sock_recv(silent[-1], 1) == ring_socket.INTRODUCED


def test_room_is_made_by_the_process_that_has_most() -> None:
    assert door.next_to_close({"a": (7, 1), "b": (7, 2), "c": (7, 2), "d": (7, 3)}) == "b"
    assert door.next_to_close({"a": (7, 1), "b": (7, 2)}) == "a"


def test_room_is_made_by_the_user_that_has_most_by_however_many_processes() -> None:
    many = {"a": (1, 1), "b": (1, 1), "c": (2, 2), "d": (2, 3), "e": (2, 4)}
    assert door.next_to_close(many) == "c"


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    # What earlier tests left behind is not closed meanwhile.
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_a_session_is_refused_and_then_opens(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, right = fabrics
    token = left.job_token
    with no_more_descriptors():
        with pytest.raises(UnavailableError) as refused:
            await left.service.listen(job_token=token, display_name="x", region_bytes=REGION)
        assert left.service.jobs.of(token).regions == {}
    assert refused.value.reason == "session.endpoint.resources"
    async with connected(left, right) as (sender, receiver):
        await asyncio.gather(sender.send(offset=0, length=8), receiver.receive(offset=0, length=8))


async def test_unknown_fields_are_passed_over_and_a_cancelled_call_leaves_nothing(
    fabrics: tuple[Fabric, Fabric],
) -> None:
    left, _ = fabrics
    known = sessions_pb2.ListenSessionRequest(
        display_name="odd", region_bytes=REGION, job_token=left.job_token
    )
    odd = known.SerializeToString() + b"\xfa\x7f\x03abc"
    request = sessions_pb2.ListenSessionRequest.FromString(odd)
    assert request.SerializeToString() == odd
    listening = left.sessions.ListenSession(request)
    await wait_listening(left, "odd")
    listening.cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while left.service.jobs.of(left.job_token).regions:  # noqa: ASYNC110 - no event of its own
            await asyncio.sleep(0)
