"""Revocation of a fabric that has an open session, with real daemons."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from control_plane import Daemon
from fabric_daemons import FabricDaemons, fabric_daemons
from sealane.client import Client, connect
from sealane.client.grants import listen_session, open_session
from sealane.daemon.config import AUTHORIZATION_SECONDS
from sealane.errors import Error
from sealane.protocol.v1 import sessions_pb2

REGION = 1 << 20
# channels.md: the next request, after a third of the lifetime; plus the delay of a loaded machine.
BOUND_SECONDS = AUTHORIZATION_SECONDS / 3
SLACK_SECONDS = 15.0


@pytest.fixture
def site() -> Iterator[FabricDaemons]:
    # The idle timeout must not be what ends the session.
    with fabric_daemons(more="idle_timeout_seconds = 600\n") as made:
        yield made


async def _sessions(client: Client) -> list[sessions_pb2.Session]:
    return [*(await client.sessions.ListSessions(sessions_pb2.ListSessionsRequest())).sessions]


async def _is_open(client: Client, name: str) -> bool:
    states = {each.name: each.state for each in await _sessions(client)}
    return states.get(name) == sessions_pb2.Session.ESTABLISHED


async def _opened(client: Client, far: Daemon, opened: asyncio.Event) -> None:
    """Keep a session with `far` open until it ends."""
    while True:
        try:
            async with open_session(
                client.sessions,
                "gradients",
                region_bytes=REGION,
                peer_node="b",
                peer_address=far.addresses["fabric_control"],
                rate_bits_per_second=100_000_000,
            ):
                opened.set()
                await asyncio.Event().wait()
        except Error as error:
            # The listener starts in another task.
            if error.reason != "session.listener.absent":
                raise
        await asyncio.sleep(0.05)


async def _listened(client: Client) -> None:
    async with listen_session(client.sessions, "gradients", region_bytes=REGION):
        await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_session_with_a_revoked_fabric_ends_within_the_bound(site: FabricDaemons) -> None:
    here, there = site.fabrics
    async with connect(here.socket) as near, connect(there.socket) as far:
        opened = asyncio.Event()
        held = [
            asyncio.ensure_future(_listened(far)),
            asyncio.ensure_future(_opened(near, there, opened)),
        ]
        await asyncio.wait_for(opened.wait(), 60)
        (session,) = await _sessions(near)
        assert session.state == sessions_pb2.Session.ESTABLISHED
        # Stop it, because a revoked node can't be trusted to end the session.
        there.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.to_thread(site.revoke, "b")
            async with asyncio.timeout(BOUND_SECONDS + SLACK_SECONDS):
                # Poll: the process publishes its state only on request.
                while await _is_open(near, session.name):
                    pass
            (ended,) = [s for s in await _sessions(near) if s.name == session.name]
            assert ended.close_reason == "session.peer.revoked"
            lost = [x for x in here.log_lines() if x["event"] == "authorization_lost"]
            assert [(x["peer"], x["reason"]) for x in lost] == [
                ("spiffe://sealane/fabric/b", "node.revoked")
            ]
        finally:
            there.process.send_signal(signal.SIGCONT)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        # It can't open another session.
        with pytest.raises(Error) as caught:
            async with open_session(
                near.sessions,
                "gradients",
                region_bytes=REGION,
                peer_node="b",
                peer_address=there.addresses["fabric_control"],
                rate_bits_per_second=100_000_000,
            ):
                pass
        assert caught.value.reason in {"peer.unattested", "node.revoked"}
