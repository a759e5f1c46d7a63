"""A man in the middle between gateways and a target, who controls every byte but knows no key.

`Proxy` relays PDUs on any number of connections, applies its rules to each, and records closed
connections for replays. It can inject on any open link at any time, cut links, and refuse or stall
new ones.
"""

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from attacks.pdus import COMMON_BYTES, FABRICS, PDU_BYTES_MAX, Kind, Pdu, Way, parse
from attacks.rules import Rule
from patience import PATIENCE_SECONDS

HISTORY_PDUS_MAX: Final = 4096
_HEADER_BYTES_MIN: Final = 24
_QUEUE_ID_OFFSET: Final = COMMON_BYTES + 42
_TICKET: Final = slice(768, 784)


@dataclass(slots=True, eq=False)
class Link:
    """A connection through the proxy, open or recorded."""

    number: int
    queue_id: int | None = None
    ticket: bytes = b""
    is_open: bool = True
    entries: dict[int, bytes] = field(default_factory=dict)
    history: deque[Pdu] = field(default_factory=lambda: deque(maxlen=HISTORY_PDUS_MAX))
    writers: dict[Way, asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def is_io(self) -> bool:
        """Whether it has carried the Connect of an I/O queue."""
        return bool(self.queue_id)


class Proxy:
    """Relays to `target` while `listening`; `rules` are applied in order to every PDU."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.rules: list[Callable[[Pdu], list[Pdu]]] = []
        self.links: list[Link] = []
        self.is_refusing = False
        self.is_lingering = False
        """Whether the target's side stays open when a gateway gives a connection up."""
        self.is_hiding_ends = False
        """Whether the gateway's side stays open when the target gives a connection up."""
        self.address: tuple[str, int] = ("", 0)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Proxy"]:
        """Relay until the end of the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PDU_BYTES_MAX)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = (host, port)
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, rule: Rule) -> Rule:
        """Add a rule permanently."""
        self.rules.append(rule)
        return rule

    def io_links(self, *, open_only: bool = True) -> list[Link]:
        """Links of I/O queues, oldest first."""
        return [link for link in self.links if link.is_io and (link.is_open or not open_only)]

    async def inject(self, *pdus: Pdu) -> None:
        """Send PDUs on their own links and directions, bypassing the rules."""
        for pdu in pdus:
            writer = self.links[pdu.link].writers[pdu.way]
            writer.write(pdu.encode())
            await writer.drain()

    def cut(self, *links: Link) -> None:
        """Reset connections on both sides."""
        for link in links:
            for writer in link.writers.values():
                writer.transport.abort()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until passing PDUs make `condition` true."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(lambda: bool(condition()))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError, OSError):
            if not self.is_refusing:
                await self._join(reader, writer)
        self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self.target, limit=PDU_BYTES_MAX)
        link = Link(len(self.links))
        link.writers = {Way.TO_TARGET: up_writer, Way.TO_GATEWAY: writer}
        self.links.append(link)
        pumps = [
            asyncio.ensure_future(self._pump(link, reader, Way.TO_TARGET)),
            asyncio.ensure_future(self._pump(link, up_reader, Way.TO_GATEWAY)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if self.is_lingering and not pumps[1].done():
                await asyncio.wait(pumps[1:])
            if self.is_hiding_ends and not pumps[0].done():
                await asyncio.wait(pumps[:1])
        finally:
            # Without waiting, because a second cancellation may come while this one is handled.
            link.is_open = False
            for pump in pumps:
                pump.cancel()
            up_writer.close()
            writer.close()
            await asyncio.gather(*pumps, return_exceptions=True)
            await self._notify()

    async def _pump(self, link: Link, reader: asyncio.StreamReader, way: Way) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(COMMON_BYTES)
                (length,) = struct.unpack_from("<I", head, 4)
                if not _HEADER_BYTES_MIN <= length <= PDU_BYTES_MAX:
                    return
                rest = await reader.readexactly(length - COMMON_BYTES)
                pdu = parse(link.number, way, head + rest)
                self._learn(link, pdu)
                outgoing = [pdu]
                for rule in list(self.rules):
                    outgoing = [each for one in outgoing for each in rule(one)]
                for each in outgoing:
                    # PDUs for a closed link are lost, as on any wire.
                    with contextlib.suppress(OSError):
                        await self.inject(each)
                await self._notify()

    @staticmethod
    def _learn(link: Link, pdu: Pdu) -> None:
        if pdu.kind == Kind.COMMAND:
            link.entries[pdu.cid] = bytes(pdu.header[8:72])
            if pdu.opcode == FABRICS and pdu.header[12] == 0x01 and len(pdu.data) >= _TICKET.stop:
                (link.queue_id,) = struct.unpack_from("<H", pdu.header, _QUEUE_ID_OFFSET)
                link.ticket = bytes(pdu.data[_TICKET])
        if pdu.kind not in (Kind.IC_REQ, Kind.IC_RESP, Kind.H2C_TERM, Kind.C2H_TERM):
            pdu.entry = link.entries.get(pdu.cid, b"")
        link.history.append(pdu.copy())
