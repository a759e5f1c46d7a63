"""Sessions for a job: open one or listen for one at the fabric, then fetch its rings."""

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from sealane._native import JobRing, Region
from sealane.client.calls import sayable, translated
from sealane.client.listener import Listener, check_backlog
from sealane.client.session import Session
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:  # the stub's asynchronous type exists for type checkers only
    from sealane.protocol.v1.sessions_pb2_grpc import SessionsAsyncStub

TOKEN_BYTES: Final = 16
DESCRIPTORS: Final = 5
GRANTED: Final = b"\x01"
INTRODUCTION: Final = bytes(TOKEN_BYTES)
INTRODUCED: Final = b"\x02"
HAND_OVER_TIMEOUT_SECONDS: Final = 10.0
OPEN_TIMEOUT_SECONDS: Final = 30.0
"""Longer than a fabric tries: its call to the peer, then the validation of the path."""
ABSENT: Final = "session.listener.absent"
RING_REFUSED: Final = "session.ring.refused"
_LISTENER_POLL_SECONDS: Final = 0.05
_REQUEST_RANGE: Final = "session.request.range"
_FABRIC: Final = "the fabric"


@contextlib.asynccontextmanager
async def open_session(
    sessions: "SessionsAsyncStub",
    display_name: str,
    *,
    region_bytes: int = 0,
    peer_node: str,
    peer_address: str,
    rate_bits_per_second: int,
    via_addresses: Sequence[str] = (),
    wait_seconds: float = 0.0,
    peer_tenant: str = "",
    secret: bytes = b"",
    congestion: str = "",
    early: bool = False,
    region_of: Session | None = None,
    directory: str = "",
) -> AsyncIterator[Session]:
    """Open a session to the listener of that name at the peer; close it on leaving the block.

    `peer_address` is the control address of the peer's fabric. `rate_bits_per_second` limits each
    end's sending, headers included. `via_addresses`: relays, one for each path, that get the data
    packets instead of the peer's own addresses; the session has no other paths. `wait_seconds`: how
    long to retry while there is no such listener. `peer_tenant`: the tenant that the peer's node
    must belong to, our own if empty. `secret`: 16 to 64 bytes that the listener must know, too.
    `congestion`: the controller of what this end sends (`rate`, `uno`, `gemini` or `dctcp`), one
    that the fabric's operator allows; empty: `fabric.congestion`.
    `early`: return once the peers have agreed on keys, without waiting for a path to answer, so
    that a message of up to ten packets is acknowledged two round trips after the call if its
    receive is posted by then; if no path answers in time, the session ends. Without effect where
    the fabric finds its unit by itself.
    `region_of`: a session of this process whose region this one shares, instead of one of
    `region_bytes`: arrays in it belong to both. It may be closed if others have the region open.
    `directory`: where a relative path of the ring socket begins.
    """
    job_token = await introduce(sessions, directory)
    with sayable(_REQUEST_RANGE):
        request = sessions_pb2.OpenSessionRequest(
            job_token=job_token,
            display_name=display_name,
            region_bytes=region_bytes,
            region_of=_name_of(region_of),
            peer_node=peer_node,
            peer_address=peer_address,
            rate_bits_per_second=rate_bits_per_second,
            via_addresses=via_addresses,
            peer_tenant=peer_tenant,
            secret=secret,
            congestion=congestion,
            early=early,
        )
    give_up = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            grant = await _granted(sessions, request)
            break
        except Error as error:
            is_early = asyncio.get_running_loop().time() < give_up
            if error.reason != ABSENT or not is_early:
                raise
        await asyncio.sleep(_LISTENER_POLL_SECONDS)
    with contextlib.closing(await _taken(grant, directory, region_of)) as session:
        yield session


@contextlib.asynccontextmanager
async def listen_session(
    sessions: "SessionsAsyncStub",
    display_name: str,
    *,
    region_bytes: int = 0,
    peer_nodes: Sequence[str] = (),
    peer_tenants: Sequence[str] = (),
    secret: bytes = b"",
    congestion: str = "",
    early: bool = False,
    region_of: Session | None = None,
    directory: str = "",
) -> AsyncIterator[Session]:
    """Wait for a peer to open a session of this name; close it on leaving the block.

    The peer's node must be one of `peer_nodes` (none: any node) of `peer_tenants` (none: our own
    tenant), and its job must know `secret` (16 to 64 bytes; empty: any job). Other offers are
    refused, and the listener goes on waiting. `congestion`: as for `open_session`. `early`: return
    once the peers have agreed on keys, so that a receive can be posted before a path has answered;
    the session then ends, and the listener with it, if none answers in time. `region_of`,
    `directory`: as in `open_session`.
    """
    request = await _listen_request(
        sessions,
        directory,
        display_name=display_name,
        region_bytes=region_bytes,
        region_of=_name_of(region_of),
        peer_nodes=peer_nodes,
        peer_tenants=peer_tenants,
        secret=secret,
        congestion=congestion,
        early=early,
    )
    with contextlib.closing(await _accepted(sessions, request, directory, region_of)) as session:
        yield session


@contextlib.asynccontextmanager
async def listen_sessions(
    sessions: "SessionsAsyncStub",
    display_name: str,
    *,
    region_bytes: int = 0,
    backlog: int = 2,
    peer_nodes: Sequence[str] = (),
    peer_tenants: Sequence[str] = (),
    secret: bytes = b"",
    congestion: str = "",
    early: bool = False,
    region_of: Session | None = None,
    directory: str = "",
) -> AsyncIterator[Listener]:
    """Accept sessions of this name from many peers: `accept` returns one after the other.

    `backlog` listeners wait at the fabric at any time, each with a region of its own, unless
    `region_of` gives them one. Otherwise as `listen_session`.
    """
    check_backlog(backlog)
    request = await _listen_request(
        sessions,
        directory,
        display_name=display_name,
        region_bytes=region_bytes,
        region_of=_name_of(region_of),
        peer_nodes=peer_nodes,
        peer_tenants=peer_tenants,
        secret=secret,
        congestion=congestion,
        early=early,
    )

    async def accepted() -> Session:
        while True:
            try:
                return await _accepted(sessions, request, directory, region_of)
            except Error as error:
                # The peer has left again before this job took its end.
                if error.reason != RING_REFUSED:
                    raise

    listener = Listener(accepted, backlog)
    async with listener.running():
        yield listener


async def _listen_request(
    sessions: "SessionsAsyncStub", directory: str, **fields: Any
) -> sessions_pb2.ListenSessionRequest:
    job_token = await introduce(sessions, directory)
    with sayable(_REQUEST_RANGE):
        return sessions_pb2.ListenSessionRequest(job_token=job_token, **fields)


async def _accepted(
    sessions: "SessionsAsyncStub",
    request: sessions_pb2.ListenSessionRequest,
    directory: str,
    region_of: Session | None,
) -> Session:
    with translated(_FABRIC):
        grant = await sessions.ListenSession(request)
    return await _taken(grant, directory, region_of)


def _name_of(session: Session | None) -> str:
    return "" if session is None else session.region_name


async def _taken(
    grant: sessions_pb2.SessionGrant, directory: str, region_of: Session | None
) -> Session:
    region = None if region_of is None else region_of.ring.region
    ring = await fetch_ring(grant, directory, region)
    return Session(ring, grant.session, region_name=_name_of(region_of))


async def _granted(
    sessions: "SessionsAsyncStub", request: sessions_pb2.OpenSessionRequest
) -> sessions_pb2.SessionGrant:
    with translated(_FABRIC):
        return await sessions.OpenSession(request, timeout=OPEN_TIMEOUT_SECONDS)


async def introduce(sessions: "SessionsAsyncStub", directory: str = "") -> bytes:
    """Return the token that names this process in calls: its sessions end when it ends.

    `directory`: where a relative path of the ring socket begins.

    Raises UnavailableError if the fabric's ring socket isn't served, or there are too many jobs.
    """
    with translated(_FABRIC):
        fabric = await sessions.GetFabric(
            sessions_pb2.GetFabricRequest(), timeout=HAND_OVER_TIMEOUT_SECONDS
        )
    ring_socket = os.path.join(directory, fabric.ring_socket)  # noqa: PTH118
    async with _asked(ring_socket, INTRODUCTION) as connection:
        answer = connection.recv(1 + TOKEN_BYTES)
    if answer[:1] != INTRODUCED or len(answer) != 1 + TOKEN_BYTES:
        raise UnavailableError(
            "session.job.refused", "the fabric doesn't accept this process as a job: see its log"
        )
    return answer[1:]


@contextlib.asynccontextmanager
async def _asked(ring_socket: str, token: bytes) -> AsyncIterator[socket.socket]:
    """Send a token to the ring socket and wait for an answer, which the block reads."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HAND_OVER_TIMEOUT_SECONDS):
                await loop.sock_connect(connection, ring_socket)
                # A process that may not come in is told so at once; its token can't be sent then.
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(connection, token)
                await _wait_readable(loop, connection)
            yield connection
        except OSError as error:
            raise UnavailableError(
                "session.ring.unreachable",
                f"{ring_socket} does not answer: {error.strerror or error}",
            ) from error


async def fetch_ring(
    grant: sessions_pb2.SessionGrant, directory: str = "", shared: Region | None = None
) -> JobRing:
    """Redeem a grant at the fabric's ring socket; `directory` as in `introduce`.

    `shared`: the region that the session shares with another one.

    Raises UnavailableError if the token is spent or too old, or the socket isn't served; UsageError
    `session.ring.version` if the fabric's release has other rings than this client.
    """
    ring_socket = os.path.join(directory, grant.ring_socket)  # noqa: PTH118
    async with _asked(ring_socket, grant.ring_token) as connection:
        answer, descriptors = _receive_descriptors(connection)
    if answer != GRANTED or len(descriptors) != DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise UnavailableError(
            RING_REFUSED, "the fabric does not know this grant: it is spent or too old"
        )
    region, submission, completion, doorbell, call = descriptors
    try:
        return JobRing(region, submission, completion, doorbell, call, region=shared)
    except RuntimeError as error:
        raise UsageError(
            "session.ring.version", f"{error}: use the client of the fabric's release"
        ) from error


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
