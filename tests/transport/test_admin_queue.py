"""The initiator against controllers that forge, stall, cut and repeat PDUs."""

import asyncio
import contextlib
import select
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from patience import PATIENCE_SECONDS
from sealane import _native
from sealane.errors import Error, ProtocolError, UnavailableError
from sealane.protocol.nvme.command import encode_completion
from sealane.protocol.nvme.connect import Connect
from sealane.protocol.nvme.constants import PduKind
from sealane.transport.nvme import NvmeStatusError
from sealane.transport.nvme.admin_queue import ADMIN_QUEUE_SIZE, AdminQueue
from sealane.transport.nvme.handshake import ADMIN_DATA_MAX, Digests, _open
from sealane.transport.nvme.stream import PduStream
from sealane.transport.nvme.volume_queue import ConnectedQueue

ENTRY = bytes([0x06, 0x40]).ljust(64, b"\0")


@dataclass(slots=True)
class Peer:
    """Our queue and the other end of its connection."""

    queue: AdminQueue
    stream: PduStream
    losses: list[Error] = field(default_factory=list)

    async def command(self) -> int:
        """Read a command; return its id."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            header, _ = await self.stream.receive()
        assert header.kind == PduKind.CAPSULE_CMD
        return int.from_bytes(header.entry[2:4], "little")

    async def complete(self, command_id: int, *, status: int = 0, result: int = 0) -> None:
        await self.stream.send(
            _native.encode_capsule_resp(encode_completion(command_id, status=status, result=result))
        )


@contextlib.asynccontextmanager
async def connected(*, timeout_seconds: float = PATIENCE_SECONDS) -> AsyncIterator[Peer]:
    ours, theirs = tcp_pair()
    losses: list[Error] = []
    made = AdminQueue(_stream(ours), timeout_seconds=timeout_seconds, lost=losses.append)
    try:
        yield Peer(made, _stream(theirs), losses)
    finally:
        await made.close()
        theirs.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


def _stream(connection: socket.socket) -> PduStream:
    return PduStream(connection, data_max=ADMIN_DATA_MAX)


def data_pdu(command_id: int, data: bytes, *, offset: int = 0, flags: int = 0x04) -> bytes:
    header = struct.pack("<BBBBI", PduKind.C2H_DATA, flags, 24, 24, 24 + len(data))
    return header + struct.pack("<HHII4x", command_id, 0, offset, len(data)) + data


async def test_answers_find_their_commands_in_any_order() -> None:
    async with connected() as peer:
        asked = [asyncio.ensure_future(peer.queue.submit(ENTRY, room=4)) for _ in range(3)]
        ids = [await peer.command() for _ in asked]
        for index in (2, 0, 1):
            await peer.stream.send(data_pdu(ids[index], bytes([index] * 4)))
            await peer.complete(ids[index], result=index)
        assert await asyncio.gather(*asked) == [(bytes([n] * 4), n) for n in range(3)]


async def test_data_may_come_in_pieces_and_end_the_command() -> None:
    """The success flag replaces the completion."""
    async with connected() as peer:
        asked = asyncio.ensure_future(peer.queue.submit(ENTRY, room=8))
        command_id = await peer.command()
        await peer.stream.send(data_pdu(command_id, b"1234", flags=0))
        await peer.stream.send(data_pdu(command_id, b"5678", offset=4, flags=0x0C))
        assert await asked == (b"12345678", 0)


async def test_a_status_is_an_error_and_no_loss() -> None:
    async with connected() as peer:
        asked = asyncio.ensure_future(peer.queue.submit(ENTRY))
        await peer.complete(await peer.command(), status=0x002)
        with pytest.raises(NvmeStatusError) as caught:
            await asked
        assert caught.value.status == 0x002
        assert not peer.losses


BREACHES: dict[str, Callable[[int], bytes]] = {
    "another command's data": lambda cid: data_pdu(cid + 1, b"1234"),
    "data at another place": lambda cid: data_pdu(cid, b"1234", offset=4),
    "too much data": lambda cid: data_pdu(cid, b"123456789"),
    "success before the end": lambda cid: data_pdu(cid, b"1234", flags=0x08),
    "another command's end": lambda cid: _native.encode_capsule_resp(encode_completion(cid + 1)),
    "a request": lambda _: _native.encode_capsule_cmd(ENTRY, b""),
    "a second ICResp": lambda _: _native.encode_ic_resp(8192),
    "a termination": lambda _: _native.encode_termination(False, 1, 0, b""),
    "an unknown type": lambda _: b"\x55\0\x08\0\x08\0\0\0",
    "a length beyond all bounds": lambda cid: data_pdu(cid, b"")[:4] + b"\xff" * 4 + bytes(16),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_breaches_end_the_queue(breach: str) -> None:
    async with connected() as peer:
        asked = asyncio.ensure_future(peer.queue.submit(ENTRY, room=8))
        await peer.stream.send(BREACHES[breach](await peer.command()))
        with pytest.raises(UnavailableError):
            await asked
        assert isinstance(peer.losses[0], ProtocolError)
        with pytest.raises(UnavailableError):
            await peer.queue.submit(ENTRY)


async def test_an_end_in_the_middle_fails_every_command() -> None:
    async with connected() as peer:
        asked = [asyncio.ensure_future(peer.queue.submit(ENTRY, room=8)) for _ in range(3)]
        command_id = await peer.command()
        await peer.stream.send(data_pdu(command_id, b"12345678")[:-1])
        peer.stream.socket.close()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in ended] == [UnavailableError] * 3
        assert len(peer.losses) == 1


async def test_a_silent_controller_is_lost() -> None:
    async with connected(timeout_seconds=0) as peer:
        with pytest.raises(UnavailableError) as caught:
            await peer.queue.submit(ENTRY)
        assert caught.value.reason == "connection.timeout"
        assert [error.reason for error in peer.losses] == ["connection.timeout"]


async def test_a_command_may_have_less_time_than_others() -> None:
    async with connected() as peer:
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            with pytest.raises(UnavailableError, match=r"connection\.timeout"):
                await peer.queue.submit(ENTRY, timeout_seconds=0.05)
        assert len(peer.losses) == 1


async def test_a_parked_command_has_no_time_limit() -> None:
    async with connected(timeout_seconds=0) as peer:
        parked = asyncio.ensure_future(peer.queue.submit(ENTRY, is_bounded=False))
        await peer.complete(await peer.command(), result=7)
        assert await parked == (b"", 7)


async def test_commands_in_flight_are_bounded_even_when_callers_give_up() -> None:
    async with connected() as peer:
        asked = [
            asyncio.ensure_future(peer.queue.submit(ENTRY)) for _ in range(ADMIN_QUEUE_SIZE + 5)
        ]
        ids = [await peer.command() for _ in range(ADMIN_QUEUE_SIZE - 1)]
        assert len(set(ids)) == ADMIN_QUEUE_SIZE - 1
        for task in asked[:3]:
            task.cancel()
        await asyncio.wait(asked[:3])
        following = asyncio.ensure_future(peer.command())
        await asyncio.sleep(0)
        assert not following.done()

        await peer.complete(ids[0])
        assert await following not in ids
        for command_id in ids[1:]:
            await peer.complete(command_id)
        for _ in range(5):
            ids.append(await peer.command())
            await peer.complete(ids[-1])
        await peer.complete(following.result())
        results = await asyncio.gather(*asked[3:])
        assert len(results) == ADMIN_QUEUE_SIZE + 2
        assert not peer.losses


async def test_closing_is_no_loss_but_ends_commands() -> None:
    async with connected() as peer:
        asked = asyncio.ensure_future(peer.queue.submit(ENTRY))
        await peer.command()
        await peer.queue.close()
        with pytest.raises(UnavailableError):
            await asked
        assert not peer.losses


# Before the queue is ready: ICResp and Connect.

CONNECT = Connect(
    command_id=0,
    queue_id=0,
    queue_size=32,
    host_id=uuid.UUID(int=1),
    controller_id=0xFFFF,
    subsystem_nqn="nqn.2026-11.dev.sealane:x",
    host_nqn="nqn.2026-11.dev.sealane:host",
)


async def greeted(answer: bytes, *, digests: Digests, result: int = 1) -> PduStream:
    """Connect to a peer that sends `answer` as ICResp and accepts Connect."""
    ours, theirs = tcp_pair()
    try:
        peer = _stream(theirs)
        stream = _stream(ours)
        await peer.send(answer)
        opening = asyncio.ensure_future(_open(stream, CONNECT, None, digests))
        await peer.receive()
        with contextlib.suppress(Error):
            await peer.send(_native.encode_capsule_resp(encode_completion(0, result=result)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await opening
        return stream
    finally:
        ours.close()
        theirs.close()


async def test_no_digests_are_used_unless_granted() -> None:
    stream = await greeted(_native.encode_ic_resp(8192), digests=Digests(header=True, data=True))
    assert stream.digests == (False, False)


@pytest.mark.parametrize("digest", ["header_digest", "data_digest"])
async def test_digests_that_were_not_offered_are_refused(digest: str) -> None:
    answer = _native.encode_ic_resp(8192, **{digest: True})
    with pytest.raises(ProtocolError):
        await greeted(answer, digests=Digests())


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 1), (13, 0), (0, 0)])
async def test_an_unusable_icresp_is_refused(offset: int, value: int) -> None:
    answer = bytearray(_native.encode_ic_resp(8192))
    answer[offset] = value
    with pytest.raises(ProtocolError):
        await greeted(bytes(answer), digests=Digests())


async def test_a_limit_below_the_specifications_is_refused() -> None:
    with pytest.raises(ProtocolError):
        await greeted(_native.encode_ic_resp(4092), digests=Digests())


async def test_a_secure_channel_is_not_offered() -> None:
    with pytest.raises(UnavailableError) as caught:
        await greeted(_native.encode_ic_resp(8192), digests=Digests(), result=1 | 1 << 18)
    assert caught.value.reason == "authentication.channel"


def test_a_bulk_queue_whose_command_is_not_answered_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connected = ConnectedQueue(
            socket=ours,
            queue_id=1,
            queue_depth=8,
            h2c_data_max=8192,
            transfer_max=8192,
            in_capsule_max=8192,
        )
        described = connected.describe(block_bytes=4096)
        queue = _native.HostQueue(described, io_bytes=4096, timeout_seconds=0.001)
        ticket = queue.flush()
        select.select([queue.event_fd()], [], [])
        ((ended, error),) = queue.take_done()
        assert ended == ticket
        assert isinstance(error, _native.QueueError)
        assert error.args[0] == "queue.timeout"
        assert queue.take_done() == []
        with pytest.raises(_native.QueueError) as caught:
            queue.flush()
        assert caught.value.args[0] == "queue.timeout"
