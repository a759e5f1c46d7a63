"""The ring socket alone, and what keeps jobs out of the process behind it."""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealane._native import SessionEndpoint, SharedRegion
from sealane.client.grants import fetch_ring
from sealane.daemon.fabric import ring_socket
from sealane.daemon.runtime import door
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

MakeFabric = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


async def test_ring_socket_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ring.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with ring_socket.serve(path, lambda *_: None, lambda _: bytes(16)):
        with pytest.raises(UnavailableError) as in_use:
            async with ring_socket.serve(path, lambda *_: None, lambda _: bytes(16)):
                pass

    assert in_use.value.reason == "listen.in_use"
    assert not path.exists()


async def test_rings_of_another_version_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ring.sock"
    with contextlib.closing(SessionEndpoint(["127.0.0.1:0"], SharedRegion(1 << 20))) as endpoint:
        region, submission, completion, *bells = endpoint.take_job_fds()
        header = os.pread(completion, os.fstat(completion).st_size, 0)
        other = os.memfd_create("completion", os.MFD_ALLOW_SEALING)
        os.write(other, header[:8] + (5).to_bytes(8, "little") + header[16:])
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.fcntl(completion, fcntl.F_GET_SEALS))
        os.close(completion)
        made = (region, submission, other, bells[0], bells[1])
        async with ring_socket.serve(path, lambda *_: made, lambda _: bytes(16)):
            grant = sessions_pb2.SessionGrant(ring_socket=str(path), ring_token=b"t" * 16)
            with pytest.raises(
                UsageError, match="use the client of the fabric's release"
            ) as caught:
                await fetch_ring(grant)
    assert caught.value.reason == "session.ring.version"


async def test_a_job_that_is_refused_before_it_asks_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ring.sock"
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        async def connect_and_be_refused(connection: socket.socket, address: Any) -> None:
            await connect(connection, address)
            end, _ = listener.accept()
            with end:
                end.send(ring_socket.REFUSED)

        monkeypatch.setattr(loop, "sock_connect", connect_and_be_refused)
        grant = sessions_pb2.SessionGrant(ring_socket=str(path), ring_token=b"t" * 16)
        with pytest.raises(UnavailableError) as refused:
            await fetch_ring(grant)
    assert refused.value.reason == "session.ring.refused"


async def test_failed_accept_does_not_end_the_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    failures = [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone")]

    def fail_first(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    monkeypatch.setattr(door, "ACCEPT_PAUSE_SECONDS", 0)
    path = tmp_path / "ring.sock"
    async with ring_socket.serve(path, lambda *_: None, lambda _: bytes(16)):
        grant = sessions_pb2.SessionGrant(ring_socket=str(path), ring_token=b"t" * 16)
        with pytest.raises(UnavailableError) as refused:
            await fetch_ring(grant)

    assert (refused.value.reason, failures) == ("session.ring.refused", [])
