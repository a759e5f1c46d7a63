"""PDUs over a raw non-blocking socket, read to the exact byte.

So the socket can be handed to the engine without any bytes read too early.
"""

import asyncio
import contextlib
import select
import socket

from sealane import _native
from sealane.errors import ProtocolError, UnavailableError

_COMMON_BYTES = 8

# A peer that disappears silently holds a queue for at most this time: idle connections are probed,
# and dropped if sent data stays unacknowledged. The options stay with the socket in the engine.
VANISHED_SECONDS = 30
_PROBE_SECONDS = 5
# Limits of time and bytes for a peer that broke the protocol, until the connection is cut.
TERMINATION_SECONDS = 1.0
DRAIN_BYTES_MAX = 1 << 20
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, VANISHED_SECONDS // _PROBE_SECONDS - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_SECONDS * 1000),
)


class PduFaultError(ProtocolError):
    """A malformed PDU. `fatal_status` and `offset` are sent in a termination request.

    That request quotes the header that was received last.
    """

    def __init__(self, message: str, *, fatal_status: int, offset: int = 0) -> None:
        super().__init__("pdu.malformed", message)
        self.fatal_status = fatal_status
        self.offset = offset


class DataDigestFaultError(ProtocolError):
    """The data of a command doesn't match its digest; the connection is intact."""

    def __init__(self, header: _native.PduHeader) -> None:
        super().__init__("pdu.data_digest", "the data does not match its digest")
        self.header = header


class PduStream:
    """One connection. `data_max` limits the data of a PDU before anything is allocated.

    Digests are used after `use_digests`, which is called between ICResp and the next PDU.
    """

    def __init__(self, connection: socket.socket, *, data_max: int) -> None:
        connection.setblocking(False)
        for level, option, value in _SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        self.socket = connection
        self._data_max = data_max
        self._sending = asyncio.Lock()
        self._header_digest = False
        self._data_digest = False
        self._last_header = b""

    @property
    def digests(self) -> tuple[bool, bool]:
        """Whether headers and data carry digests."""
        return self._header_digest, self._data_digest

    @property
    def is_left(self) -> bool:
        """Whether the peer closed its side, even if data it sent before is still unread."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def use_digests(self, *, header: bool, data: bool) -> None:
        """Use the negotiated digests."""
        self._header_digest, self._data_digest = header, data

    async def receive(self) -> tuple[_native.PduHeader, bytes]:
        """Return the next PDU: header and data.

        ProtocolError if it is malformed, UnavailableError at the end of the stream.
        """
        common = self._last_header = await self._exact(_COMMON_BYTES)
        used = {"header_digest": self._header_digest, "data_digest": self._data_digest}
        try:
            _, header_bytes, data_bytes = _native.pdu_lengths(common, self._data_max, **used)
            rest = await self._exact(header_bytes - _COMMON_BYTES)
            self._last_header = common + rest
            header = _native.decode_pdu(self._last_header, **used)
        except _native.PduError as error:
            fatal_status, offset, text = error.args
            raise PduFaultError(text, fatal_status=fatal_status, offset=offset) from error
        data = await self._exact(data_bytes)
        try:
            return header, _native.pdu_data(header, data)
        except _native.DataDigestError as error:
            raise DataDigestFaultError(header) from error

    def encode_command(self, entry: bytes, data: bytes) -> bytes:
        """Return a command capsule with its data."""
        return _native.encode_capsule_cmd(
            entry, data, header_digest=self._header_digest, data_digest=self._data_digest
        )

    def encode_response(self, completion: bytes) -> bytes:
        """Return a response capsule."""
        return _native.encode_capsule_resp(completion, header_digest=self._header_digest)

    def encode_data(self, command_id: int, data: bytes) -> bytes:
        """Return the data of a command as C2HData PDUs."""
        return _native.encode_c2h_data(
            command_id, data, header_digest=self._header_digest, data_digest=self._data_digest
        )

    async def send(self, *parts: bytes) -> None:
        """Send all of `parts` as a whole; concurrent calls don't mix."""
        try:
            async with self._sending:
                await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(parts))
        except OSError as error:
            raise UnavailableError("connection.lost", f"the connection failed: {error}") from error

    async def _terminate(self, *, from_host: bool, fault: PduFaultError | None) -> None:
        """Send a termination request with the kind and place of the peer's error."""
        fatal_status, offset = (1, 0) if fault is None else (fault.fatal_status, fault.offset)
        await self.send(
            _native.encode_termination(from_host, fatal_status, offset, self._last_header)
        )

    async def farewell(self, *, from_host: bool, fault: PduFaultError | None) -> None:
        """Send a termination request and let the peer receive it, limited in time and bytes."""
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(TERMINATION_SECONDS):
                await self._terminate(from_host=from_host, fault=fault)
                await self._drain()

    async def _drain(self) -> None:
        """Shut down the sending side, and discard what the peer still sends until it closes.

        Closing with unread bytes would reset the connection, and the peer would lose the last PDU.
        """
        loop = asyncio.get_running_loop()
        bytes_max = DRAIN_BYTES_MAX
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while bytes_max > 0 and (dropped := await loop.sock_recv(self.socket, 4096)):
                bytes_max -= len(dropped)

    def abort(self) -> None:
        """Stop both directions: calls that wait on this stream end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def _exact(self, length: int) -> bytes:
        buffer = bytearray(length)
        view = memoryview(buffer)
        loop = asyncio.get_running_loop()
        while view:
            try:
                count = await loop.sock_recv_into(self.socket, view)
            except OSError as error:
                raise UnavailableError(
                    "connection.lost", f"the connection failed: {error}"
                ) from error
            if count == 0:
                raise UnavailableError("connection.lost", "the peer closed the connection")
            view = view[count:]
        return bytes(buffer)
