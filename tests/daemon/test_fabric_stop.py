"""SIGTERM to a daemon with open sessions: messages in flight arrive, and peers get the reason."""

import asyncio
import contextlib
import secrets

from fabric_daemons import fabric_daemons
from patience import PATIENCE_SECONDS
from sealane.client import connect
from sealane.client.grants import listen_session, open_session
from sealane.protocol.v1 import sessions_pb2

REGION = 2 << 20
LENGTH = 1 << 20
DRAIN_SECONDS = 20
RATE = 20_000_000


async def test_sigterm_drains_sessions_and_their_peers_are_told() -> None:
    with fabric_daemons(more=f"drain_timeout_seconds = {DRAIN_SECONDS}\n") as made:
        near, far = made.fabrics
        data = secrets.token_bytes(LENGTH)
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            connect(near.socket) as here,
            connect(far.socket) as there,
            contextlib.AsyncExitStack() as sessions,
        ):
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(
                    sessions.enter_async_context(
                        listen_session(there.sessions, "data", region_bytes=REGION)
                    )
                )
                opening = tasks.create_task(
                    sessions.enter_async_context(
                        open_session(
                            here.sessions,
                            "data",
                            region_bytes=REGION,
                            peer_node="b",
                            peer_address=far.addresses["fabric_control"],
                            rate_bits_per_second=RATE,
                            wait_seconds=PATIENCE_SECONDS,
                        )
                    )
                )
            sender, receiver = opening.result(), listening.result()
            sender.region[:LENGTH] = data
            receive = await receiver.post_receive(offset=0, length=LENGTH)
            send = await sender.post_send(offset=0, length=LENGTH)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await receive.packet_map(0) is None:
                    pass  # each check asks the fabric; no part of the message has arrived yet
            # Another 0.4 s of it are still in flight.
            stopping = asyncio.create_task(asyncio.to_thread(near.stop))  # noqa: TID251 - awaited below
            await asyncio.gather(send, receive)
            assert bytes(receiver.region[:LENGTH]) == data
            assert await stopping == 0
            request = sessions_pb2.GetSessionRequest(name=receiver.session.name)
            while True:
                told = await there.sessions.GetSession(request)
                if told.close_reason:
                    break
                await asyncio.sleep(0.01)
            assert told.close_reason == "session.peer_closed.draining"
