"""Unix sockets of a daemon, and callers that turn them against it."""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lingering import LINGER_SECONDS, lingering
from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import door, servers
from sealane.daemon.runtime.door import Caller
from sealane.daemon.runtime.health import Health
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.servers import local_door, new_server, running
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.refusal import REFUSED


def greet(caller: Caller) -> None:
    """Answer one byte."""
    caller.receive_exactly(1, timeout_seconds=PATIENCE_SECONDS)
    caller.socket.send(b"ok")


async def greeted(path: Path) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        caller.connect(str(path))
        caller.send(b"x")
        with contextlib.suppress(ConnectionResetError):
            return await loop.sock_recv(caller, 2)
    return b""


def sent_lingering(path: Path, stack: contextlib.ExitStack, content: bytes = b"x") -> socket.socket:
    """Connect, and send bytes each of which blocks its receiver.

    Nothing is received before the loop turns.
    """
    caller = stack.enter_context(socket.socket(socket.AF_UNIX))
    caller.connect(str(path))
    for index in range(len(content)):
        lingers = stack.enter_context(lingering())
        socket.send_fds(caller, [content[index : index + 1]], [lingers])
        os.close(lingers)
    caller.setblocking(False)
    return caller


async def test_who_is_blocked_by_what_it_received_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "door"
    loop = asyncio.get_running_loop()
    async with door.door(path, greet):
        with contextlib.ExitStack() as stack:
            hostile = sent_lingering(path, stack)
            began = loop.time()
            assert await greeted(path) == b"ok", "in another thread"
            assert await loop.sock_recv(hostile, 2) == b"ok"
            assert loop.time() - began < LINGER_SECONDS / 4
    assert not path.exists()


async def test_what_is_left_unread_blocks_only_the_thread_of_its_connection(
    tmp_path: Path,
) -> None:
    path = tmp_path / "door"
    loop = asyncio.get_running_loop()
    async with door.door(path, lambda _: None):
        with contextlib.ExitStack() as stack:
            hostile = sent_lingering(path, stack)
            began = loop.time()
            # Answered by the end of the stream, without being read.
            assert await greeted(path) == b""
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(hostile, 2) == b""
            assert loop.time() - began < LINGER_SECONDS / 4


async def test_room_is_made_though_every_thread_is_blocked(tmp_path: Path) -> None:
    path = tmp_path / "door"
    async with door.door(path, greet, connections_max=2):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                sent_lingering(path, stack)
            async with asyncio.timeout(LINGER_SECONDS / 4):
                assert await greeted(path) == b"ok"


@pytest.mark.parametrize("turns", range(6))
async def test_who_comes_as_the_door_closes_blocks_nobody(tmp_path: Path, turns: int) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        async with door.door(tmp_path / "door", greet):
            await asyncio.sleep(0.01)
            sent_lingering(tmp_path / "door", stack)
            for _ in range(turns):
                await asyncio.sleep(0)
            began = loop.time()
        gc.collect()
        assert loop.time() - began < LINGER_SECONDS / 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is root")
@pytest.mark.parametrize("admit", [door.own_user_and_root, door.own_user])
async def test_root_reaches_a_daemon_of_another_user_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admit: door.Admit
) -> None:
    monkeypatch.setattr(door, "geteuid", lambda: 12345)
    async with door.door(tmp_path / "door", greet, admit=admit):
        is_admitted = admit is door.own_user_and_root
        assert await greeted(tmp_path / "door") == (b"ok" if is_admitted else REFUSED[:2])


async def test_threads_end_with_the_door(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def callers() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "caller"} - before

    async with door.door(tmp_path / "door", greet):
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(tmp_path / "door"))
            assert await greeted(tmp_path / "door") == b"ok"
            assert callers()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while callers():  # noqa: ASYNC110 - threads ring no bell
            await asyncio.sleep(0.01)


async def test_paths_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as missing:
        async with door.door(tmp_path / "no" / "door", greet):
            pass
    assert missing.value.reason == "listen.refused"
    with pytest.raises(UsageError) as long:
        async with door.door(tmp_path / ("x" * 108), greet):
            pass
    assert long.value.reason == "listen.path"
    async with door.door(tmp_path / "door", greet):
        with pytest.raises(UnavailableError) as taken:
            async with door.door(tmp_path / "door", greet):
                pass
    assert taken.value.reason == "listen.in_use"


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A gRPC server behind a door, and a client."""
    server = new_server(Metrics(), None)
    health = Health()
    await health.serve(server, [])
    async with (
        local_door(server, path),
        running(server),
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        yield health_pb2_grpc.HealthStub(channel)


async def test_calls_pass_and_what_blocks_their_receiver_stops_none(tmp_path: Path) -> None:
    path = tmp_path / "door"
    request = health_pb2.HealthCheckRequest()
    async with served(path) as stub:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                sent_lingering(path, stack)
            async with asyncio.timeout(LINGER_SECONDS / 4):
                for _ in range(3):
                    await stub.Check(request)
        assert os.listdir(tmp_path) == ["door"], "gRPC's own has no name"  # noqa: PTH208


async def test_nothing_is_received_from_a_connection_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOCAL_CONNECTIONS_MAX", 2)
    path = tmp_path / "door"
    request = health_pb2.HealthCheckRequest()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with served(path), contextlib.AsyncExitStack() as channels:
        with contextlib.ExitStack() as stack:
            # What gRPC hears out: the preface and two empty frames of settings.
            content = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + 2 * (bytes(3) + b"\x04" + bytes(5))
            for _ in range(2):
                # Nothing more comes from gRPC behind its own settings, which would end a relay.
                hostile = sent_lingering(path, stack, content)
                assert await asyncio.get_running_loop().sock_recv(hostile, 1 << 10)
            async with asyncio.timeout(LINGER_SECONDS / 4):
                for _ in range(2):
                    channel = grpc.aio.insecure_channel(f"unix:{path}", options)
                    await channels.enter_async_context(channel)
                    await health_pb2_grpc.HealthStub(channel).Check(request)


async def test_a_caller_that_takes_nothing_does_not_hold_up_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "DRAIN_SECONDS", 0.1)
    path = tmp_path / "door"
    loop = asyncio.get_running_loop()
    settings = bytes(3) + b"\x04" + bytes(5)
    with socket.socket(socket.AF_UNIX) as flood:
        flood.setblocking(False)
        async with asyncio.timeout(PATIENCE_SECONDS), served(path):
            flood.connect(str(path))
            await loop.sock_sendall(flood, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            # Each frame is answered, and none of the answers is received, until nothing moves.
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(1):
                        await loop.sock_sendall(flood, 1000 * settings)


async def test_a_large_message_passes_whole_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "door"
    content = secrets.token_bytes(3 << 20)
    backend = tmp_path / "backend"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(echo, backend)
    async with server, door.door(path, lambda caller: door.relay(caller, str(backend))):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(content)
        writer.write_eof()
        assert await reader.read() == content
        writer.close()
        await writer.wait_closed()
