"""The ring socket alone, and what keeps jobs out of the process behind it."""

import contextlib
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealane.client.grants import fetch_ring
from sealane.daemon.fabric import ring_socket
from sealane.daemon.runtime import door
from sealane.errors import UnavailableError
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
