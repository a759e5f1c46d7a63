"""Whose a gRPC call is: told by the relay's name, which nobody else can connect under."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import door
from sealane.daemon.runtime.origins import Origins
from sealane.daemon.runtime.servers import local_door, running
from sealane.errors import VerificationError


class Answers(health_pb2_grpc.HealthServicer):
    """Keeps who called, and under which address."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self.peers: list[str] = []
        self.users: list[int] = []

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        self.peers.append(context.peer())
        self.users.append(self._origins.of(context).user)
        return health_pb2.HealthCheckResponse()


def is_known(origins: Origins, peer: str) -> bool:
    try:
        origins.of(SimpleNamespace(peer=lambda: peer))
    except VerificationError:
        return False
    return True


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Answers, Origins]]:
    origins = Origins()
    answers = Answers(origins)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(answers, server)
    async with local_door(server, path, relayed=origins.relay), running(server):
        yield answers, origins


async def test_each_connection_has_a_name_of_its_own_that_leads_to_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([70_001, 70_002])
    unpack = door._PEER_CREDENTIALS.unpack
    monkeypatch.setattr(
        door,
        "_PEER_CREDENTIALS",
        SimpleNamespace(unpack=lambda packed: (unpack(packed)[0], next(users), 0)),
    )
    path = tmp_path / "door"
    options = [("grpc.use_local_subchannel_pool", 1)]
    origins = Origins()
    answers = Answers(origins)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(answers, server)
    async with (
        local_door(server, path, relayed=origins.relay, admit=lambda _: None),
        running(server),
        grpc.aio.insecure_channel(f"unix:{path}", options) as first,
        grpc.aio.insecure_channel(f"unix:{path}", options) as second,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        for channel in (first, second, first):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answers.users == [70_001, 70_002, 70_001]
    assert answers.peers[0] == answers.peers[2] != answers.peers[1]


async def test_a_name_that_anybody_may_take_leads_to_nobody(tmp_path: Path) -> None:
    path = tmp_path / "door"
    async with served(path) as (answers, origins), asyncio.timeout(PATIENCE_SECONDS):
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answers.users == [os.geteuid()]
        (used,) = answers.peers
        # The relay ends with its caller's connection, and so does what its name stands for.
        while is_known(origins, used):  # noqa: ASYNC110 - relays ring no bell
            await asyncio.sleep(0.01)
    for peer in (used, "unix:", "", "ipv4:127.0.0.1:1"):
        with pytest.raises(VerificationError) as unknown:
            origins.of(SimpleNamespace(peer=lambda peer=peer: peer))
        assert unknown.value.reason == "call.origin.unknown"


def test_a_relay_whose_name_is_taken_relays_nothing(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other, theirs:
        listener.bind(str(tmp_path / "inner"))
        listener.listen()
        other.bind(b"\0sealane-test-taken")
        caller = door.Caller(ours)
        with pytest.raises(OSError, match="in use"):
            door.relay(caller, str(tmp_path / "inner"), own_name=b"\0sealane-test-taken")
        caller.close()
