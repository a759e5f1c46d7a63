"""Bounds on revoked peers hold in the engine even if the daemon's event loop is stopped.

The tests stop the main thread of a real daemon with ptrace. Its event loop, which asks the broker
and ends revoked connections, then does nothing, while the engine's threads go on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from control_plane import Daemon
from fabric_daemons import fabric_daemons
from patience import PATIENCE_SECONDS
from sealane.client import Client, connect
from sealane.client.grants import listen_session, open_session
from sealane.errors import Error
from stopped import frozen, main_thread_stopped
from trust.test_device_daemons import World, world
from trust.test_revocation import (
    AUTHORIZATION_SECONDS,
    HOST,
    Cluster,
    Load,
    cluster,
)
from trust.test_third_party_anchors import array, create, gateway

__all__ = ["cluster", "world"]

MARGIN_SECONDS = 1.0
"""What a loaded machine may add between an answer's departure and its arrival."""
GRACE_SECONDS = 3
SLACK_SECONDS = 10.0
REGION = 1 << 20
MESSAGE = 65_536
WATCHED_SECONDS = 3.0
"""How long nothing more must come after the bound."""


async def _silent(load: Load, *, seconds: float = WATCHED_SECONDS) -> None:
    """Check that no write is acknowledged for some time."""
    before = load.written
    with contextlib.suppress(TimeoutError):
        await load.goes_on(within=seconds)
    assert load.written == before, f"{load.written - before} writes behind the bound"


@dataclass
class Received:
    """The far end of a session, which counts arrived messages."""

    count: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: Client) -> None:
        async with listen_session(client.sessions, "gradients", region_bytes=REGION) as session:
            with contextlib.suppress(Error):
                while True:
                    await session.receive(offset=0, length=MESSAGE)
                    self.count += 1
                    self.progress.set()

    async def goes_on(self) -> None:
        """Wait until another message has arrived."""
        self.progress.clear()
        await asyncio.wait_for(self.progress.wait(), PATIENCE_SECONDS)


def _ends(fabric: Daemon) -> list[object]:
    """Return the logged reasons for which a fabric's sessions ended."""
    return [line["reason"] for line in fabric.log_lines() if line["event"] == "session_closed"]


async def _sent(client: Client, far: Daemon) -> None:
    """Send one message after the other until the session ends."""
    async with open_session(
        client.sessions,
        "gradients",
        region_bytes=REGION,
        peer_node="b",
        peer_address=far.addresses["fabric_control"],
        rate_bits_per_second=100_000_000,
        wait_seconds=PATIENCE_SECONDS,
    ) as session:
        with contextlib.suppress(Error):
            while True:
                await session.send(offset=0, length=MESSAGE)


@contextlib.asynccontextmanager
async def _writing(daemon: Daemon, name: str) -> AsyncIterator[Load]:
    async with connect(daemon.socket) as client, asyncio.TaskGroup() as tasks:
        volume = await client.volumes.attach(name, host_nqn=HOST)
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()
        yield load
        running.cancel()


@pytest.mark.slow
async def test_revoked_gateway_is_cut_at_the_bound_by_a_target_whose_loop_is_stopped(
    cluster: Cluster,
) -> None:
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=1 << 20)
    async with _writing(cluster.gateway, volume.name) as load:
        # The gateway doesn't learn of its revocation and goes on until it is stopped.
        with (
            main_thread_stopped(cluster.gateway.process.pid),
            main_thread_stopped(cluster.target.process.pid),
        ):
            await asyncio.to_thread(cluster.revoke, "revoke", "--yes", "g", "--reason", "stolen")
            await load.goes_on()
            await asyncio.sleep(AUTHORIZATION_SECONDS + MARGIN_SECONDS)
            await _silent(load)
            assert load.failure is None, "its host waits: nobody has told it anything"


@pytest.mark.slow
async def test_frozen_target_serves_nothing_before_a_fresh_authorization(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client:
        volume = await client.volumes.create(size_bytes=1 << 20)
    async with _writing(cluster.gateway, volume.name) as load:
        with (
            main_thread_stopped(cluster.gateway.process.pid),
            main_thread_stopped(cluster.target.process.pid),
        ):
            with frozen(cluster.target.process.pid):
                await asyncio.sleep(AUTHORIZATION_SECONDS + MARGIN_SECONDS)
                before = load.written
            # The answer to a command may still be in the kernel.
            await asyncio.sleep(MARGIN_SECONDS)
            assert load.written <= before + 1
            await _silent(load)
        # Nobody was revoked: once the event loops run, it is authorized again and goes on.
        await load.goes_on()
        assert load.failure is None


@pytest.mark.slow
async def test_session_with_a_revoked_fabric_is_cut_at_the_grace_by_one_whose_loop_is_stopped() -> (
    None
):
    more = f"idle_timeout_seconds = 600\ntrust_grace_seconds = {GRACE_SECONDS}\n"
    with fabric_daemons(more=more) as site:
        here, there = site.fabrics
        async with (
            connect(here.socket) as near,
            connect(there.socket) as far,
            asyncio.TaskGroup() as tasks,
        ):
            received = Received()
            listening = tasks.create_task(received.run(far))
            sending = tasks.create_task(_sent(near, there))
            await received.goes_on()
            # The revoked fabric is dishonest: its event loop doesn't end its sessions.
            with (
                main_thread_stopped(here.process.pid),
                main_thread_stopped(there.process.pid),
            ):
                await asyncio.to_thread(site.revoke, "b")
                await received.goes_on()
                await asyncio.wait_for(sending, GRACE_SECONDS + SLACK_SECONDS)
            listening.cancel()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (reasons := await asyncio.to_thread(_ends, here)):
                    pass
            # The end whose authorization expired first closed it and notified the other.
            assert reasons[0] in {"session.trust.ended", "session.peer_closed.requested"}


@pytest.mark.slow
async def test_revoked_gateway_stops_at_a_third_party_by_itself(
    world: World, tmp_path: Path
) -> None:
    world.site.write_policy({"s": ["target"], "g": ["gateway"]})
    world.start_broker()
    more = f"authorization_seconds = {AUTHORIZATION_SECONDS}\n"
    with array(world, tmp_path / "image") as disks, gateway(world, disks, "g", more=more) as here:
        made = create(here, "--anchor", "none")
        async with _writing(here, made["name"]) as load:
            # There is no target of ours to enforce the revocation; only the gateway can.
            with main_thread_stopped(here.process.pid):
                await load.goes_on()
                await asyncio.sleep(AUTHORIZATION_SECONDS + MARGIN_SECONDS)
                await _silent(load)
            await load.goes_on()
            assert load.failure is None
