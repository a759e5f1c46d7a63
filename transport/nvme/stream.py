"""PDUs over a raw non-blocking socket, read to the exact byte.

So the socket can be handed to the engine with nothing over-read.
"""

import asyncio
import socket

from sealane import _native
from sealane.errors import ProtocolError, UnavailableError

_COMMON_BYTES = 8

# A peer that vanished without a word holds a queue no longer than this: probed when idle, and given
# up when what was sent stays unacknowledged. The options stay with the socket in the engine.
VANISHED_SECONDS = 30
_PROBE_SECONDS = 5
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, VANISHED_SECONDS // _PROBE_SECONDS - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_SECONDS * 1000),
)


class PduStream:
    """One connection. `data_max` bounds the data of a PDU before anything is allocated."""

    def __init__(self, connection: socket.socket, *, data_max: int) -> None:
        connection.setblocking(False)
        for level, option, value in _SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        self.socket = connection
        self._data_max = data_max

    async def receive(self) -> tuple[_native.PduHeader, bytes]:
        """Next PDU: header and data. ProtocolError if malformed, UnavailableError at the end."""
        common = await self._exact(_COMMON_BYTES)
        try:
            _, header_bytes, data_bytes = _native.pdu_lengths(common, self._data_max)
            header = _native.decode_pdu(common + await self._exact(header_bytes - _COMMON_BYTES))
        except _native.PduError as error:
            raise ProtocolError("pdu.malformed", str(error.args[2])) from error
        return header, await self._exact(data_bytes)

    async def send(self, *parts: bytes) -> None:
        """Send all of `parts`."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(parts))
        except OSError as error:
            raise UnavailableError("connection.lost", f"the connection failed: {error}") from error

    async def terminate(self, *, from_host: bool) -> None:
        """Tell the peer that it broke the rules."""
        await self.send(_native.encode_termination(from_host, 1, 0))

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
