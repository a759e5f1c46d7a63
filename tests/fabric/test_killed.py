"""A fabric that is killed during a transfer: the errors of its job and its peer."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from patience import PATIENCE_SECONDS
from sealane._native import JobRing, SessionEndpoint, SharedRegion
from sealane.client.session import Session
from sealane.errors import SessionError
from sealane.protocol.v1 import sessions_pb2

REGION = 1 << 20
RATE = 4_000_000
"""A message as long as the region takes two seconds."""

FABRIC = f"""
import socket, sys
from sealane._native import SessionEndpoint, SharedRegion

channel = socket.socket(fileno=int(sys.argv[1]))
endpoint = SessionEndpoint(["127.0.0.1:0"], SharedRegion({REGION}))
socket.send_fds(channel, [endpoint.local_addresses[0].encode()], endpoint.take_job_fds())
endpoint.start(
    peer_addresses=[channel.recv(100).decode()], connection_id_local=1, connection_id_peer=2,
    send_key=bytearray(b"f" * 32), receive_key=bytearray(b"b" * 32),
    rate_bits_per_second={RATE}, idle_timeout_ns=30 * 10**9, initiator=True, version=6,
)
channel.recv(1)
"""


@pytest.fixture
def fabric() -> Iterator[tuple[int, socket.socket]]:
    """Yield a process with one end of a session, and the channel to it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", FABRIC, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        ours.settimeout(PATIENCE_SECONDS)
        try:
            yield process.pid, ours
        finally:
            process.kill()


@pytest.fixture
def right() -> Iterator[SessionEndpoint]:
    endpoint = SessionEndpoint(["127.0.0.1:0"], SharedRegion(REGION))
    yield endpoint
    endpoint.close()


async def test_killed_fabric_leaves_an_unknown_outcome_and_an_aborted_receive(
    fabric: tuple[int, socket.socket], right: SessionEndpoint
) -> None:
    pid, channel = fabric
    receiving = JobRing(*right.take_job_fds())
    address, descriptors, _, _ = socket.recv_fds(channel, 100, 5)
    sender = Session(JobRing(*descriptors), sessions_pb2.Session(name="sessions/x"))
    right.start(
        peer_addresses=[address.decode()],
        connection_id_local=2,
        connection_id_peer=1,
        send_key=bytearray(b"b" * 32),
        receive_key=bytearray(b"f" * 32),
        rate_bits_per_second=RATE,
        idle_timeout_ns=10**9,
        initiator=False,
        version=6,
    )
    channel.sendall(right.local_addresses[0].encode())
    receiving.post_receive(offset=0, length=REGION, user_data=7)
    async with asyncio.timeout(PATIENCE_SECONDS):
        sending = asyncio.ensure_future(sender.send(offset=0, length=REGION))
        await asyncio.to_thread(wait_begun, right)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SessionError) as unknown:
            await sending
        with pytest.raises(SessionError) as closed:
            await sender.send(offset=0, length=1)
        await asyncio.to_thread(wait_closed, right)
    (aborted,) = receiving.completions()
    receiving.close()

    assert unknown.value.reason == "session.message.outcome_unknown"
    assert closed.value.reason == "session.closed"
    assert right.state() == ("closed", "session.closed.idle_timeout")
    assert (aborted.user_data, aborted.status) == (7, "aborted")


def wait_begun(endpoint: SessionEndpoint) -> None:
    poller = select.poll()
    for _ in range(PATIENCE_SECONDS * 1000):
        if endpoint.statistics().get("units_received", 0) > 0:
            return
        poller.poll(1)
    raise AssertionError(endpoint.statistics())


def wait_closed(endpoint: SessionEndpoint) -> None:
    poller = select.poll()
    poller.register(endpoint.fileno(), select.POLLIN)
    while endpoint.state()[0] != "closed":
        assert poller.poll(PATIENCE_SECONDS * 1000), endpoint.state()
