"""In two guests: a session over verbs whose far machine dies. `verbs_machines.py near|far`.

The near machine has the broker and fabric a, and hands the far one the files of fabric b.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path

from verbs_guest import opened

from control_plane import Site, daemon, write_key
from patience import PATIENCE_SECONDS
from sealane.client import Client, connect
from sealane.client.grants import listen_session
from sealane.client.session import Session
from sealane.errors import Error
from sealane.protocol.v1 import sessions_pb2

NEAR, FAR = "10.9.0.1", "10.9.0.2"
SITE = Path("/tmp/site")  # noqa: S108 - the same path on both machines, which run nothing else
FILES = ("b.toml", "b.pem", "broker/trust-anchor.pem")
FILES_PORT, CONTROL_PORT = 9000, 7443
REGION = 1 << 20
MESSAGES = 8
IDLE_SECONDS = 10


def message(number: int) -> bytes:
    """Return what both machines know of a message."""
    return random.Random(number).randbytes(200_000)


def section(address: str) -> str:
    """Return a [fabric] section that has queue pairs only."""
    return (
        f'[fabric]\ncontrol_listen = "{address}:{CONTROL_PORT}"\ndata_listen = ["{address}"]\n'
        f'rate_max_bits_per_second = 1000000000\nwires = ["verbs"]\n'
        f"idle_timeout_seconds = {IDLE_SECONDS}\n"
    )


async def near() -> dict[str, object]:
    """Send messages, lose the far machine, and go on."""
    site = Site(SITE)
    site.write_policy({"a": ["fabric"], "b": ["fabric"]})
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(daemon(site.broker_config(listen=f"{NEAR}:0")))
        config = site.write_config("a", site.enrolment("a", broker) + section(NEAR))
        site.write_config("b", site.enrolment("b", broker) + section(FAR))
        fabric = stack.enter_context(daemon(config))
        files = await asyncio.start_server(hand_over, NEAR, FILES_PORT)
        async with (
            files,
            connect(fabric.socket) as client,
            contextlib.AsyncExitStack() as sessions,
            asyncio.timeout(5 * PATIENCE_SECONDS),
        ):
            session = await opened(
                sessions, client, f"{FAR}:{CONTROL_PORT}", region_bytes=REGION, rate=100_000_000
            )
            return await haul(client, session)


async def haul(client: Client, session: Session) -> dict[str, object]:
    """Send messages until the far machine is gone; report how the session ended."""
    for number in range(MESSAGES):
        data = message(number)
        session.region[: len(data)] = data
        await session.send(offset=0, length=len(data))
    killing = await asyncio.create_subprocess_exec("lab-ready", "kill")
    began, reason = time.monotonic(), ""
    while not reason:
        try:
            await session.send(offset=0, length=1000)
        except Error as error:
            reason = error.reason
    seconds = time.monotonic() - began
    assert await killing.wait() == 0
    # The daemon goes on.
    asked = sessions_pb2.GetSessionRequest(name=session.session.name)
    seen = await client.sessions.GetSession(asked)
    (path,) = seen.paths
    return {
        "reason": reason,
        "close_reason": seen.close_reason,
        "seconds": seconds,
        "wire": path.wire,
        "packets_sent": path.statistics["packets_sent"],
    }


async def hand_over(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the far machine its files."""
    files = {name: (SITE / name).read_text() for name in FILES}
    writer.write(json.dumps(files).encode())
    await writer.drain()
    writer.close()


async def far() -> dict[str, object]:
    """Receive messages until this machine dies."""
    async with asyncio.timeout(5 * PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(NEAR, FILES_PORT)
                packed = await reader.read()
                writer.close()
                break
            await asyncio.sleep(0.5)
    (SITE / "broker").mkdir()
    for name, text in json.loads(packed).items():
        write_key(SITE / name, text.encode())
    with daemon(SITE / "b.toml") as fabric:
        async with (
            connect(fabric.socket) as client,
            listen_session(client.sessions, "gradients", region_bytes=REGION) as session,
        ):
            for number in range(MESSAGES):
                data = message(number)
                got = await session.receive(offset=0, length=len(data))
                assert bytes(session.region[: got.length]) == data, number
                print(f"message {number} is whole", file=sys.stderr)
            while True:
                await session.receive(offset=0, length=1000)


if __name__ == "__main__":
    SITE.mkdir()
    print(json.dumps(asyncio.run({"near": near, "far": far}[sys.argv[1]]())))
