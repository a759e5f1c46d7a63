"""A TCP relay on a control path that a test can cut and restore."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Relays connections to one address; while cut, old ones are closed and new ones refused."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.is_cut = False
        self.was_refused = asyncio.Event()
        """A connection came while it was cut."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        """Listen until the end of the block."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self.cut()
            self._server.close()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """Accept connections again."""
        self.is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            self.was_refused.set()
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        if self.is_cut:
            # Cut while connecting to the far end.
            self.cut()
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
