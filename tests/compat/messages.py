"""Two jobs that exchange messages while the fabrics under them are replaced."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.client.grants import listen_session, open_session
from sealane.errors import Error
from seeds import SEED

_BYTES = 1 << 18
_RATE = 200_000_000


def _message(number: int) -> bytes:
    return number.to_bytes(8, "big") + random.Random(SEED + number).randbytes(_BYTES - 8)


class Messages:
    """Numbered messages from a job at fabric `a` to one at `b`.

    When a fabric ends, so does its session. The jobs then open the next one, in which the sender
    repeats the message that wasn't acknowledged. At any other time an end is a failure.
    """

    def __init__(
        self,
        socket: Callable[[str], str],
        peer_address: Callable[[], str],
        *,
        name: str = "gradients",
    ) -> None:
        self._name = name
        self._socket = socket
        self._peer_address = peer_address
        self._sent = 0
        self._received = -1
        self._moved = asyncio.Condition()
        self._is_replacing = False
        self.sessions = 0
        self.is_over = False
        self._acknowledged = time.monotonic()
        self.pause_seconds = 0.0
        """The longest time between two acknowledged messages."""

    @contextlib.asynccontextmanager
    async def may_end(self) -> AsyncIterator[None]:
        """Within this block a fabric may be replaced; at its end messages flow again."""
        self._is_replacing = True
        try:
            yield
            await self.went_on()
        finally:
            self._is_replacing = False

    async def run(self) -> None:
        """Exchange messages until `is_over`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._again(self._send))
            tasks.create_task(self._again(self._receive))

    async def went_on(self) -> None:
        """Wait until some more messages were acknowledged."""
        wanted = self._sent + 3
        async with asyncio.timeout(PATIENCE_SECONDS), self._moved:
            await self._moved.wait_for(lambda: self._sent >= wanted)

    async def _again(self, job: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            try:
                await job()
            except (Error, OSError):
                if not self._may_end():
                    raise
                # The fabric is away, or the peer's is and its end wasn't noticed yet.
                await asyncio.sleep(0.05)

    def _may_end(self) -> bool:
        return self.is_over or self._is_replacing

    async def _send(self) -> None:
        async with (
            connect(self._socket("a")) as client,
            open_session(
                client.sessions,
                self._name,
                region_bytes=_BYTES,
                peer_node="b",
                peer_address=self._peer_address(),
                rate_bits_per_second=_RATE,
                wait_seconds=PATIENCE_SECONDS,
            ) as session,
        ):
            self.sessions += 1
            while not self.is_over:
                session.region[:_BYTES] = _message(self._sent)
                await session.send(offset=0, length=_BYTES)
                now = time.monotonic()
                self.pause_seconds = max(self.pause_seconds, now - self._acknowledged)
                self._acknowledged = now
                async with self._moved:
                    self._sent += 1
                    self._moved.notify_all()

    async def _receive(self) -> None:
        async with (
            connect(self._socket("b")) as client,
            listen_session(client.sessions, self._name, region_bytes=_BYTES) as session,
        ):
            while not self.is_over:
                got = await session.receive(offset=0, length=_BYTES)
                content = bytes(session.region[: got.length])
                number = int.from_bytes(content[:8], "big")
                # A message whose acknowledgement was lost with its session arrives twice.
                assert number in {self._received, self._received + 1}
                assert content == _message(number)
                self._received = number
