"""PDUs over a raw non-blocking socket, read to the exact byte.

So the socket can be handed to the engine with nothing over-read.
"""

import asyncio
import socket

from sealane import _native
from sealane.errors import ProtocolError, UnavailableError

_COMMON_BYTES = 8


class PduStream:
    """One connection. `data_max` bounds the data of a PDU before anything is allocated."""

    def __init__(self, connection: socket.socket, *, data_max: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
