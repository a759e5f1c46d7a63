"""A session between two fabrics, both jobs in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from patience import PATIENCE_SECONDS
from sealane.client.grants import listen_session, open_session
from sealane.client.session import Session
from sealane.protocol.v1 import sessions_pb2

REGION = 2 << 20
RATE = 200_000_000


async def wait_listening(fabric: Any, name: str = "data") -> list[str]:
    """Wait for a listener; return its data addresses by path."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            page = await fabric.sessions.ListSessions(sessions_pb2.ListSessionsRequest())
            for session in page.sessions:
                is_listening = session.state == sessions_pb2.Session.LISTENING
                if is_listening and session.display_name == name:
                    return list(session.data_addresses)


async def taken(end: Session) -> None:
    """Wait until the fabric has accepted everything posted so far; it accepts in order."""
    assert await (await end.post_send(offset=0, length=8)).cancel()


class Narrow(asyncio.DatagramProtocol):
    """A relay to `far` that drops datagrams longer than `most` bytes in both directions."""

    def __init__(self, far: str, most: int) -> None:
        self.lead_to(far)
        self._most = most
        self._initiator: Any = None

    def lead_to(self, far: str) -> None:
        """Relay to another address."""
        host, _, port = far.rpartition(":")
        self._far = (host, int(port))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(data) > self._most:
            return
        is_back = addr == self._far
        if not is_back:
            self._initiator = addr
        self._transport.sendto(data, self._initiator if is_back else self._far)


def opening(
    left: Any, right: Any, name: str = "data", *, region_bytes: int = REGION, **terms: Any
) -> contextlib.AbstractAsyncContextManager[Session]:
    """Open a session from left to right's listener; `terms`: other arguments of `open_session`."""
    return open_session(
        left.sessions,
        name,
        region_bytes=region_bytes,
        peer_node=right.name,
        peer_address=right.address,
        rate_bits_per_second=RATE,
        **terms,
    )


@contextlib.asynccontextmanager
async def connected(
    left: Any,
    right: Any,
    *,
    via: Callable[[list[str]], list[str]] = lambda _: [],
    name: str = "data",
    early: bool = False,
    congestion: tuple[str, str] = ("", ""),
) -> AsyncIterator[tuple[Session, Session]]:
    """Open a session from left to right, both jobs in this process; `congestion`: of each end."""
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(
                stack.enter_async_context(
                    listen_session(
                        right.sessions,
                        name,
                        region_bytes=REGION,
                        early=early,
                        congestion=congestion[1],
                    )
                )
            )
            via_addresses = via(await wait_listening(right, name))
            opened = tasks.create_task(
                stack.enter_async_context(
                    opening(
                        left,
                        right,
                        name,
                        via_addresses=via_addresses,
                        early=early,
                        congestion=congestion[0],
                    )
                )
            )
        yield opened.result(), listening.result()
