"""Many hosts, slow hosts and silent hosts: resources are bounded, and others are served."""

import asyncio
import contextlib
import gc
import resource
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.daemon.nvme import admin_session
from sealane.daemon.nvme import listener as listening
from sealane.protocol.nvme.constants import AdminOpcode
from target.places import Place, admin_queue, io_queue, plain

CONNECTS = 10_000


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with plain() as made:
        yield made


async def served(place: Place) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), place.host() as host:
        assert (await host.identify_namespace()).block_count > 0


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_descriptors() -> int:
    """Return the open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def silent(place: Place, count: int) -> contextlib.ExitStack:
    """Open connections that send nothing."""
    stack = contextlib.ExitStack()
    for _ in range(count):
        stack.enter_context(socket.create_connection(place.address))
    return stack


async def closed(connection: socket.socket) -> bytes:
    """Return what arrives until the other side closes."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    received = b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with contextlib.suppress(ConnectionResetError):
            while part := await loop.sock_recv(connection, 1 << 16):
                received += part
    return received


async def test_connections_that_say_nothing_are_cut_and_others_served_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.5)
    half = listening.HANDSHAKES_MAX // 2
    with silent(place, half) as stack:
        await served(place)
        with socket.create_connection(place.address) as last:
            last.sendall(_native.encode_ic_req())
            assert len(await closed(last)) == 128  # ICResp, then the timeout
        del stack
    await served(place)
    assert set(place.faults) == {"connection.timeout"}
    assert len(place.faults) == half + 1


async def test_more_half_open_connections_than_the_limit_are_refused_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.host() as host:
        with silent(place, listening.HANDSHAKES_MAX):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(place.faults) == 0:
                    with socket.create_connection(place.address) as more:
                        await closed(more)
            assert set(place.faults) == {"handshakes.limit"}
            # Connected hosts are served while no new ones are admitted.
            assert (await host.identify_namespace()).block_count > 0
    await served(place)


async def test_a_host_that_sends_byte_by_byte_has_as_long_as_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to the whole handshake, not to the silence between bytes."""
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(place.address) as slow:
        ended = asyncio.ensure_future(closed(slow))
        sent = 0
        with contextlib.suppress(OSError):
            for byte in _native.encode_ic_req():
                slow.send(bytes([byte]))
                sent += 1
                done, _ = await asyncio.wait([ended], timeout=0.01)
                if done:
                    break
        assert await ended == b""
        assert sent < 128
    assert place.faults == ["connection.timeout"]


@pytest.mark.slow
async def test_ten_thousand_connects_leave_nothing_behind(place: Place) -> None:
    loop = asyncio.get_running_loop()

    async def connect(start: bytes) -> None:
        connection = socket.socket()
        with connection:
            connection.setblocking(False)
            # Reset on close, so that no port stays in TIME_WAIT.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                await loop.sock_connect(connection, place.address)
                await loop.sock_sendall(connection, start)

    starts = [b"", _native.encode_ic_req()[:9], _native.encode_ic_req(), bytes([9]) * 16]
    for index in range(500):
        await connect(starts[index % len(starts)])
    gc.collect()
    before = resident_bytes()
    descriptors = open_descriptors()
    for index in range(CONNECTS):
        await connect(starts[index % len(starts)])
    await served(place)
    gc.collect()
    assert resident_bytes() - before < 16 << 20
    assert open_descriptors() <= descriptors + listening.HANDSHAKES_MAX


async def test_a_host_that_takes_no_answer_is_cut(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_session, "SEND_SECONDS", 0.2)
    identify = bytearray(64)
    identify[0:2], identify[40], identify[39] = bytes([AdminOpcode.IDENTIFY, 0x40]), 1, 0x5A
    identify[32:36] = (4096).to_bytes(4, "little")
    asked = _native.encode_capsule_cmd(bytes(identify), b"")
    before = resident_bytes()
    async with admin_queue(place) as opened:
        opened.writer.transport.pause_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not place.faults:
                    opened.writer.write(asked * 64)
                    # Unsent data stays on this side: only the daemon's memory counts.
                    await asyncio.wait([asyncio.ensure_future(opened.writer.drain())], timeout=0.05)
        assert place.faults == ["connection.stalled"]
        assert resident_bytes() - before < 64 << 20
        opened.writer.transport.abort()
    await served(place)


async def test_an_io_queue_whose_host_takes_no_data_is_bounded(place: Place) -> None:
    """Reads wait in the socket, not in memory: 128 commands of 64 blocks at most."""
    read = bytearray(64)
    read[0:2], read[4], read[39] = bytes([0x02, 0x40]), 1, 0x5A
    read[32:36] = (64 * 4096).to_bytes(4, "little")
    read[48] = 63
    async with io_queue(place) as opened:
        opened.writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = resident_bytes()
        for cid in range(120):
            read[2] = cid
            opened.writer.write(_native.encode_capsule_cmd(bytes(read), b""))
        await served(place)
        await served(place)
        assert resident_bytes() - before < 48 << 20
    await served(place)
    assert place.faults == []


async def test_associations_and_queues_are_bounded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_PER_SOURCE_MAX", 8)
    async with contextlib.AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(place.host()) for _ in range(8)]
        with socket.create_connection(place.address) as more:
            assert await closed(more) == b""
        assert place.faults == ["connections.source.limit"]
        for host in hosts:
            assert (await host.identify_namespace()).block_count > 0
    await served(place)
