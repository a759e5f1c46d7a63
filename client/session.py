"""A job's end of a session: post sends and receives, await their completions (docs/ring-abi.md).

The payload lies in the session's region, memory shared with the fabric; keys never come here.
"""

import array
import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from sealane._native import Completion, JobRing
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.protocol.status import error_of
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:  # the stub's asynchronous type exists for type checkers only
    from sealane.protocol.v1.sessions_pb2_grpc import SessionsAsyncStub

TOKEN_BYTES = 16
DESCRIPTORS = 4
GRANTED = b"\x01"
HAND_OVER_TIMEOUT_SECONDS = 10.0
OPEN_TIMEOUT_SECONDS = 30.0
"""Above what a fabric takes to give up: its call to the peer, then the validation of the path."""
COMPLETIONS_PER_TURN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRepeat:
    """Lost packets are sent again after a time-out: no overhead, whole round trips of delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureCoded:
    """Every k packets travel with m of parity; up to m losses cost no time."""

    k: int = 32
    m: int = 8


Reliability = SelectiveRepeat | ErasureCoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message that the peer has whole."""

    message: int
    length: int
    duration_seconds: float
    """From the first transmission to the acknowledgement of the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that has arrived whole in the region."""

    message: int
    offset: int
    length: int
    immediate: int | None


class _RingSession:
    """What both directions share: the ring, the region, and who awaits which completion."""

    def __init__(self, ring: JobRing, session: sessions_pb2.Session) -> None:
        self.session = session
        """What the fabric said at the grant: name, peer, unit, rate."""
        self.region = memoryview(ring.region)
        """The shared memory, writable; messages are ranges of it."""
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        # Held while posting, so that operations reach the ring in the order they were asked for.
        self._posting = asyncio.Lock()
        self._room = asyncio.Event()
        self._ended: Error | None = None
        self._loop.add_reader(ring.fileno(), self._collect)

    def statistics(self) -> dict[str, int]:
        """Return the session's counters, as the fabric published them last."""
        return self._ring.statistics()

    def _try_post(
        self,
        *,
        offset: int,
        length: int,
        number: int,
        reliability: Reliability | None,
        immediate: int | None,
    ) -> bool:
        """Put an operation on the ring; False if there is no room, which `_room` then reports."""
        if self._ended is not None:
            raise self._ended
        self._room.clear()
        try:
            if reliability is None:
                self._ring.post_receive(offset=offset, length=length, user_data=number)
            else:
                k, m = (0, 0)
                if isinstance(reliability, ErasureCoded):
                    k, m = reliability.k, reliability.m
                self._ring.post_send(
                    offset=offset, length=length, user_data=number, k=k, m=m, immediate=immediate
                )
        except BlockingIOError:
            return False
        except (ValueError, OverflowError) as error:
            raise UsageError("session.post.range", str(error)) from error
        return True

    async def _run(
        self,
        *,
        offset: int,
        length: int,
        reliability: Reliability | None,
        immediate: int | None = None,
    ) -> Completion:
        """Post when there is room, and wait for the end of the operation."""
        number = next(self._numbers)
        future: asyncio.Future[Completion] = self._loop.create_future()
        async with self._posting:
            while not self._try_post(
                offset=offset,
                length=length,
                number=number,
                reliability=reliability,
                immediate=immediate,
            ):
                await self._room.wait()
            self._waiting[number] = future
        completion = await future
        if completion.status != "ok":
            raise SessionError(
                f"session.message.{completion.status}",
                f"{completion.kind} of message {completion.message} ended as {completion.status}",
            )
        return completion

    def _collect(self) -> None:
        try:
            while completions := self._ring.completions(COMPLETIONS_PER_TURN):
                for completion in completions:
                    future = self._waiting.pop(completion.user_data, None)
                    if future is not None and not future.done():
                        future.set_result(completion)
        except OSError:
            self._end(SessionError("session.closed", f"{self.session.name} has ended"))
        self._room.set()

    def _end(self, error: Error) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._loop.remove_reader(self._ring.fileno())
        for future in self._waiting.values():
            if not future.done():
                # What the fabric had completed was taken before: of the rest nobody knows.
                unknown = SessionError("session.message.outcome_unknown", str(error))
                future.set_exception(unknown)
        self._waiting.clear()
        self._room.set()

    def close(self) -> None:
        """Give the rings back; the fabric then ends the session. Views of the region stay."""
        self._end(SessionError("session.closed", f"{self.session.name} was closed here"))
        self._ring.close()


class SendSession(_RingSession):
    """The sending end."""

    async def send(
        self,
        *,
        offset: int,
        length: int,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> Sent:
        """Send a range of the region as one message; return when the peer has it.

        The range must not change until then. Selective repeat unless said otherwise. Raises
        SessionError if it did not arrive or nobody knows, UsageError for a range out of bounds.
        """
        completion = await self._run(
            offset=offset,
            length=length,
            reliability=reliability or SelectiveRepeat(),
            immediate=immediate,
        )
        return Sent(
            message=completion.message,
            length=completion.length,
            duration_seconds=completion.duration_ns / 1e9,
        )


class ReceiveSession(_RingSession):
    """The receiving end. The i-th receive takes the i-th message."""

    async def receive(self, *, offset: int, length: int) -> Received:
        """Offer a range of the region to the next message; return when it has arrived.

        Raises SessionError if the message is longer than the range or the session ended.
        """
        completion = await self._run(offset=offset, length=length, reliability=None)
        return Received(
            message=completion.message,
            offset=offset,
            length=completion.length,
            immediate=completion.immediate,
        )


@contextlib.asynccontextmanager
async def open_session(
    sessions: "SessionsAsyncStub",
    display_name: str,
    *,
    region_bytes: int,
    peer_node: str,
    peer_address: str,
    rate_bits_per_second: int,
    via_address: str = "",
) -> AsyncIterator[SendSession]:
    """Open a session to the listener of that name at the peer; close it on leaving the block."""
    request = sessions_pb2.OpenSessionRequest(
        display_name=display_name,
        region_bytes=region_bytes,
        peer_node=peer_node,
        peer_address=peer_address,
        rate_bits_per_second=rate_bits_per_second,
        via_address=via_address,
    )
    try:
        grant = await sessions.OpenSession(request, timeout=OPEN_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer="the fabric") from error
    session = SendSession(await fetch_ring(grant), grant.session)
    try:
        yield session
    finally:
        session.close()


@contextlib.asynccontextmanager
async def listen_session(
    sessions: "SessionsAsyncStub", display_name: str, *, region_bytes: int
) -> AsyncIterator[ReceiveSession]:
    """Wait for a peer to open a session of this name; close it on leaving the block."""
    request = sessions_pb2.ListenSessionRequest(
        display_name=display_name, region_bytes=region_bytes
    )
    try:
        grant = await sessions.ListenSession(request)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer="the fabric") from error
    session = ReceiveSession(await fetch_ring(grant), grant.session)
    try:
        yield session
    finally:
        session.close()


async def fetch_ring(grant: sessions_pb2.SessionGrant) -> JobRing:
    """Redeem a grant at the fabric's ring socket.

    Raises UnavailableError if the token is spent or too old, or nobody serves the socket.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HAND_OVER_TIMEOUT_SECONDS):
                await loop.sock_connect(connection, grant.ring_socket)
                await loop.sock_sendall(connection, grant.ring_token)
                await _wait_readable(loop, connection)
            answer, descriptors = _receive_descriptors(connection)
        except OSError as error:
            raise UnavailableError(
                "session.ring.unreachable",
                f"{grant.ring_socket} does not hand over rings: {error.strerror or error}",
            ) from error
    if answer != GRANTED or len(descriptors) != DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise UnavailableError(
            "session.ring.refused", "the fabric does not know this grant: it is spent or too old"
        )
    region, submission, completion, doorbell = descriptors
    return JobRing(region, submission, completion, doorbell)


def _receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(DESCRIPTORS * descriptors.itemsize)
    answer, ancillary, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return answer, list(descriptors)


async def _wait_readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
