"""Mutual-TLS channels of one role to its peers: one per peer, kept, pinned, replaced in time.

gRPC has no hook to verify a server's certificate, so each channel trusts exactly the leaves that
the broker names for that peer; the broker itself is verified by the trust anchor. A channel is
never changed but replaced: when the certificate of either end was renewed, or when its connection
is lost. Calls in progress end on the channel they began on. Each call carries a proof of its caller
(sealane.daemon.node.call_proofs).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import server_name, spiffe_id
from sealane.daemon.node.call_proofs import CallProofs, ChannelProofs
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.runtime.grpc_options import NO_PROXY
from sealane.daemon.runtime.logs import CORRELATION_KEY
from sealane.daemon.runtime.traces import passed_on
from sealane.errors import UnavailableError
from sealane.protocol.status import error_of

CONNECT_SECONDS: Final = 5.0
PIN_SECONDS: Final = 30.0
"""How long a peer's leaves are taken as current before the broker is asked again."""
PEERS_MAX: Final = 1024
UNATTESTED: Final = "peer.unattested"
_RETRY_SECONDS: Final = 0.25

# Separate connections: a new channel must not reuse the connection of the old one.
OPTIONS: Final = (
    NO_PROXY,
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST: Final = {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.IDLE}
_SETTLED: Final = {
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
}

_Message = TypeVar("_Message")
FindPeer = Callable[[str, str], Awaitable[Sequence[x509.Certificate]]]
"""(node, role) → the leaves that peer may show, newest first, verified; empty: any leaf that the
broker issued. UnavailableError `peer.unattested` if it must not be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What this end shows: its leaf and key as PEM, and the metadata of every call."""

    leaf: x509.Certificate
    certificate_pem: bytes
    key_pem: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Connection:
    """A channel, and the leaves at its two ends."""

    channel: grpc.aio.Channel
    own: Own
    pins: tuple[x509.Certificate, ...]
    checked_ns: int
    opened_ns: int
    users: int = 0
    is_retired: bool = False
    is_closed: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None


class Channels:
    """The channels of one role. `own` is called each time, because each renewal changes it.

    `proofs` proves the calls, and is closed with the channels.
    """

    def __init__(
        self,
        own: Callable[[], Own],
        *,
        anchors: TrustAnchors,
        find_peer: FindPeer,
        proofs: CallProofs,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._own = own
        self._anchors = anchors
        self._find_peer = find_peer
        self._proofs = proofs
        self._now_ns = now_ns
        self._peers: dict[tuple[str, str, str], _Peer] = {}
        self._open: set[Connection] = set()

    @property
    def count(self) -> int:
        """Number of open channels, including those that only finish their calls."""
        return len(self._open)

    @contextlib.asynccontextmanager
    async def use(self, address: str, node: str, role: str) -> AsyncIterator[Connection]:
        """Use the channel to `role` of `node` at `address`; failed calls raise Sealane errors."""
        connection = await self._current(address, node, role)
        connection.users += 1
        try:
            yield connection
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=f"{role} {node} at {address}") from error
        except asyncio.CancelledError as error:
            # gRPC cancels the calls of a channel when it is closed, without the caller being
            # cancelled.
            task = asyncio.current_task()
            if connection.is_closed and task is not None and not task.cancelling():
                raise UnavailableError(
                    "peer.closed", f"the channel to {role} {node} was closed"
                ) from error
            raise
        finally:
            connection.users -= 1
            if connection.is_retired and connection.users == 0:
                await self._close(connection)

    async def close(self) -> None:
        """Close all channels and fail their calls; new ones may be opened."""
        for peer in self._peers.values():
            peer.connection = None
        self._peers.clear()
        await asyncio.gather(*map(self._close, [*self._open]))
        self._proofs.close()

    async def _current(self, address: str, node: str, role: str) -> Connection:
        key = (address, node, role)
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                await self._forget_unused()
            # Another task may have added the same peer meanwhile.
            peer = self._peers.setdefault(key, _Peer())
        if peer.connection is not None and self._is_current(peer.connection):
            return peer.connection
        async with peer.turn:
            # Another task may have replaced it meanwhile.
            found = peer.connection
            if found is None or not self._is_current(found):
                found = await self._renewed(peer, address, node, role)
            return found

    def _is_current(self, connection: Connection) -> bool:
        return (
            connection.own.leaf is self._own().leaf
            and self._now_ns() - connection.checked_ns < PIN_SECONDS * 10**9
            and not self._is_lost(connection)
        )

    def _is_lost(self, connection: Connection) -> bool:
        # A channel that has just failed isn't retried for each of the calls that wait for it.
        is_young = self._now_ns() - connection.opened_ns < _RETRY_SECONDS * 10**9
        return connection.channel.get_state() in _LOST and not is_young

    async def _renewed(self, peer: _Peer, address: str, node: str, role: str) -> Connection:
        """Confirm or replace the peer's channel."""
        before = peer.connection
        pins = await self._pins(peer, node, role)
        is_same = before is not None and before.own.leaf is self._own().leaf and before.pins == pins
        if before is not None and is_same and not self._is_lost(before):
            before.checked_ns = self._now_ns()
            return before
        connection = self._opened(address, node, role, pins)
        try:
            while not await _is_connected(connection.channel):
                # The peer may have a new leaf; a failure for any other reason is reported by the
                # call itself.
                found = await self._pins(peer, node, role)
                if found == connection.pins:
                    break
                await self._close(connection)
                connection = self._opened(address, node, role, found)
        except BaseException:
            # The caller didn't wait: nobody else knows this channel.
            await self._close(connection)
            raise
        peer.connection = connection
        await self._retire(before)
        return connection

    async def _pins(self, peer: _Peer, node: str, role: str) -> tuple[x509.Certificate, ...]:
        before = peer.connection
        try:
            return tuple(await self._find_peer(node, role))
        except UnavailableError as error:
            if error.reason == UNATTESTED:
                peer.connection = None
                await self._retire(before)
                raise
            if before is None:
                raise
            # The broker can't be reached: its last answer holds until it expires, which TLS checks.
            return before.pins

    def _opened(
        self, address: str, node: str, role: str, pins: tuple[x509.Certificate, ...]
    ) -> Connection:
        own = self._own()
        roots = b"".join(leaf.public_bytes(Encoding.PEM) for leaf in pins) or self._anchors.pem
        credentials = grpc.ssl_channel_credentials(
            root_certificates=roots, private_key=own.key_pem, certificate_chain=own.certificate_pem
        )
        now = self._now_ns()
        connection = Connection(
            channel=open_channel(
                address,
                server_name(node, role),
                credentials,
                own.metadata,
                proofs=self._proofs.interceptors(spiffe_id(node, role)),
            ),
            own=own,
            pins=pins,
            checked_ns=now,
            opened_ns=now,
        )
        self._open.add(connection)
        return connection

    async def _retire(self, connection: Connection | None) -> None:
        """Close a channel once it is no longer in use."""
        if connection is not None:
            connection.is_retired = True
            if connection.users == 0:
                await self._close(connection)

    async def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.is_closed = True
        await connection.channel.close()

    async def _forget_unused(self) -> None:
        unused = {
            key: peer
            for key, peer in self._peers.items()
            if not peer.turn.locked() and (peer.connection is None or not peer.connection.users)
        }
        # The set is fixed first: while one of them closes, others come and go.
        for key in unused:
            del self._peers[key]
        for peer in unused.values():
            await self._retire(peer.connection)


def open_channel(
    address: str,
    name: str,
    credentials: grpc.ChannelCredentials,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
    *,
    proofs: ChannelProofs | None = None,
) -> grpc.aio.Channel:
    """Open a TLS channel to a server whose certificate must have the DNS name `name`."""
    channel = grpc.aio.secure_channel(
        address,
        credentials,
        options=[
            *OPTIONS,
            ("grpc.ssl_target_name_override", name),
            ("grpc.default_authority", name),
        ],
        interceptors=[
            _UnaryMetadata(metadata),
            _StreamMetadata(metadata),
            *(proofs.both() if proofs is not None else ()),
        ],
    )
    if proofs is not None:
        proofs.channel = channel
    return channel


async def until(
    stream: "grpc.aio.UnaryStreamCall[Any, _Message]", *ends: asyncio.Future[None]
) -> AsyncIterator[_Message]:
    """Yield the messages of a stream until it or one of `ends` is over; ends the call."""
    messages = aiter(stream)
    following: asyncio.Future[_Message] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(messages))
            either: set[asyncio.Future[Any]] = {following, *ends}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            yield message
    finally:
        stream.cancel()
        if following is not None:
            following.cancel()
            await asyncio.wait({following})


async def _is_connected(channel: grpc.aio.Channel) -> bool:
    """Wait for the connection; return False if it has failed, True also if it takes longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            state = channel.get_state(try_to_connect=True)
            while state not in _SETTLED:
                await channel.wait_for_state_change(state)
                state = channel.get_state()
    return channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE


class _Metadata:
    """Adds a channel's metadata to each call, and the correlation id of the call being served."""

    def __init__(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._metadata = metadata

    def added(self, details: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._metadata)
        correlation = structlog.contextvars.get_contextvars().get("correlation_id")
        if isinstance(correlation, str):
            metadata.add(CORRELATION_KEY, correlation)
        for key, value in passed_on():
            metadata.add(key, value)
        return details._replace(metadata=metadata)


class _UnaryMetadata(_Metadata, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self.added(client_call_details), request)


class _StreamMetadata(_Metadata, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self.added(client_call_details), request)
