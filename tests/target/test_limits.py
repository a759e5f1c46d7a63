"""The listener's limits at their real size: up to the limit all are served, the next is refused."""

import asyncio
import contextlib
import resource
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from sealane import _native
from sealane.daemon.nvme import listener as listening
from sealane.daemon.target import data_path as target_module
from sealane.daemon.target.volume_subsystem import GATEWAYS_MAX
from sealane.errors import UnavailableError
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import DYNAMIC_CONTROLLER, AdminOpcode, Status
from sealane.transport.nvme.errors import NvmeStatusError
from target.pair import GATEWAY, World
from target.places import BLOCK, Place, Wire, plain, wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0
QUEUES_PER_ASSOCIATION = 16
DESCRIPTORS = 8192


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Raise the descriptor limit: both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS, "ulimit -Hn is too low"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with plain() as made:
        yield made


async def connection_from(place: Place, source: str) -> socket.socket:
    """Connect from a given loopback address: all of 127.0.0.0/8 is local."""
    made = socket.socket()
    made.bind((source, 0))
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, place.address)
    return made


def admin_connect(place: Place) -> bytes:
    made = Connect(
        command_id=1,
        queue_id=0,
        queue_size=32,
        host_id=uuid.uuid4(),
        controller_id=DYNAMIC_CONTROLLER,
        subsystem_nqn=place.nqn,
        host_nqn=place.host_nqn,
    )
    return _native.encode_capsule_cmd(*made.encode())


async def admin_from(place: Place, stack: contextlib.AsyncExitStack, source: str) -> Wire:
    """Connect an admin queue from an address."""
    opened = await stack.enter_async_context(wire(await connection_from(place, source)))
    opened.writer.write(_native.encode_ic_req())
    assert await opened.next() is not None
    assert await opened.status(admin_connect(place)) == Status.SUCCESS
    return opened


async def refused(place: Place, source: str) -> None:
    """Check that a connection from an address is closed before it sends anything."""
    async with wire(await connection_from(place, source)) as opened:
        with contextlib.suppress(ConnectionResetError):
            assert await opened.reader.read() == b""


def keep_alive() -> bytes:
    entry = bytearray(64)
    entry[0:2], entry[2] = bytes([AdminOpcode.KEEP_ALIVE, 0x40]), 9
    return _native.encode_capsule_cmd(bytes(entry), b"")


async def all_served(hosts: Sequence[Wire]) -> None:
    for host in hosts:
        assert await host.status(keep_alive()) in {Status.SUCCESS, Status.SEQUENCE_ERROR}


async def test_every_connection_that_fits_is_served_and_the_next_is_refused(place: Place) -> None:
    each, total = listening.CONNECTIONS_PER_SOURCE_MAX, listening.CONNECTIONS_MAX
    async with contextlib.AsyncExitStack() as stack:
        hosts = [await admin_from(place, stack, "127.0.0.2") for _ in range(each)]
        await refused(place, "127.0.0.2")
        await place.faults.settled("connections.source.limit")
        others = [await admin_from(place, stack, "127.0.0.3") for _ in range(total - each)]
        await refused(place, "127.0.0.4")
        await place.faults.settled("connections.limit")
        await all_served([*hosts, *others])
    async with asyncio.timeout(SECONDS), contextlib.AsyncExitStack() as stack:
        while True:
            # The listener may not have noticed all of their ends yet.
            with contextlib.suppress(ConnectionError, AssertionError):
                await all_served([await admin_from(place, stack, "127.0.0.2")])
                break


async def test_slow_writers_have_one_handshake_time_and_nobody_else_waits(place: Place) -> None:
    """The maximum of half-open connections, each sending a byte at times, with the real timeout."""
    async with place.host() as host:
        async with contextlib.AsyncExitStack() as stack:
            slow = [
                await stack.enter_async_context(wire(await connection_from(place, "127.0.0.2")))
                for _ in range(listening.HANDSHAKES_MAX)
            ]
            ends = [asyncio.ensure_future(each.reader.read()) for each in slow]
            async with asyncio.timeout(SECONDS):
                for byte in _native.encode_ic_req():
                    for each in slow:
                        with contextlib.suppress(ConnectionError):
                            each.writer.write(bytes([byte]))
                    assert (await host.identify_namespace()).block_count > 0
                    done, _ = await asyncio.wait(ends, timeout=0.1)
                    if done:
                        break
                received = await asyncio.gather(*ends, return_exceptions=True)
            assert all(each == b"" or isinstance(each, ConnectionResetError) for each in received)
        assert set(place.faults) <= {"connection.timeout", "handshakes.limit"}
        assert place.faults.count("connection.timeout") == listening.HANDSHAKES_MAX
    async with place.host() as host:
        assert (await host.identify_namespace()).block_count > 0


async def test_every_queue_that_fits_reads_and_the_next_is_refused(place: Place) -> None:
    read = bytearray(64)
    read[0:2], read[4], read[39] = bytes([0x02, 0x40]), 1, 0x5A
    struct.pack_into("<I", read, 32, BLOCK)
    asked = _native.encode_capsule_cmd(bytes(read), b"")
    async with contextlib.AsyncExitStack() as stack:
        queues = []
        for _ in range(listening.IO_QUEUES_MAX // QUEUES_PER_ASSOCIATION):
            host = await stack.enter_async_context(place.host())
            await host.request_queues(QUEUES_PER_ASSOCIATION)
            for queue_id in range(1, QUEUES_PER_ASSOCIATION + 1):
                connected = await host.connect_queue(queue_id)
                queues.append(await stack.enter_async_context(wire(connected.socket)))
        assert len(queues) == listening.IO_QUEUES_MAX
        more = await stack.enter_async_context(place.host())
        with pytest.raises(NvmeStatusError) as caught:
            await more.connect_queue(1)
        assert caught.value.status == Status.CONNECT_BUSY
        await place.faults.settled("queues.limit")
        for queue in queues:
            queue.writer.write(asked)
        for queue in queues:
            answer = await queue.next()
            assert answer is not None
            assert bytes(answer.data) == bytes(BLOCK)
    async with asyncio.timeout(SECONDS), place.host() as host:
        while True:
            # Closed queues are released when their threads end.
            with contextlib.suppress(NvmeStatusError):
                (await host.connect_queue(1)).close()
                break


async def test_as_many_tickets_wait_as_the_target_says(world: World) -> None:
    for _ in range(target_module._TICKETS_MAX):
        world.grant(1)
    with pytest.raises(UnavailableError) as caught:
        world.grant(1)
    assert caught.value.reason == "queue.ticket"
    async with world.back_host() as host:
        (await host.connect_queue(1, ticket=world.grants[-1].ticket)).close()
    world.grant(1)


async def test_as_many_gateways_share_a_volume_as_the_target_says(world: World) -> None:
    names = [f"{GATEWAY}:{number}" for number in range(GATEWAYS_MAX + 1)]
    for name in names[:-1]:
        world.grant(1, host_nqn=name)
    with pytest.raises(UnavailableError) as caught:
        world.grant(1, host_nqn=names[-1])
    assert caught.value.reason == "queue.gateways"
    for name in names[:-1]:
        assert world.target.newest_epoch(world.volume_id, name) == 1
