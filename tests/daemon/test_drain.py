"""`sealanectl node drain` with real daemons: a gateway and a target, volumes, a plain namespace."""

import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attached_hosts import host_at
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from patience import PATIENCE_SECONDS
from sealane.client import Client, Volume, connect
from sealane.daemon.gateway.drain import SETTLE_SECONDS
from sealane.errors import Error
from sealane.protocol.nvme.constants import AnaState
from sealane.transport.nvme.errors import NvmeStatusError
from sealane.transport.nvme.initiator import ControllerEvent, EventKind, HostController

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
PLAIN = "nqn.2026-11.dev.sealane:plain"
MIB = 1 << 20
METRICS = '[metrics]\nlisten = "127.0.0.1:0"\n'
DATA = secrets.token_bytes(4096)


@dataclass
class Cluster:
    target: Daemon
    gateway: Daemon
    second: Daemon


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + METRICS
                    + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
                    + f'store = "file"\n[[target.subsystems]]\nnqn = "{PLAIN}"\n'
                    + f'hosts = [{{nqn = "{HOST}"}}]\n[[target.subsystems.namespaces]]\nnsid = 1\n'
                    + f'store = "memory"\nsize_bytes = {MIB}\n',
                )
            )
        )
        gateways = [
            stack.enter_context(
                daemon(
                    site.write_config(
                        name,
                        site.enrolment(name, broker)
                        + METRICS
                        + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                        + f'target_address = "{target.addresses["target_control"]}"\n',
                    )
                )
            )
            for name in ("g", "h")
        ]
        yield Cluster(target, *gateways)


@pytest.fixture(autouse=True)
def undrained(cluster: Cluster) -> Iterator[None]:
    """Leave every daemon serving."""
    yield
    for each in (cluster.gateway, cluster.second, cluster.target):
        assert node(each, "undrain").returncode == 0


def node(at: Daemon, *verb: str) -> subprocess.CompletedProcess[str]:
    return sealanectl("--socket", at.socket, "node", *verb)


async def drained(at: Daemon, *options: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(node, at, "drain", "--yes", *options)


def state_of(at: Daemon) -> dict[str, Any]:
    ended = node(at, "status", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    shown: dict[str, Any] = json.loads(ended.stdout)
    return shown


def gauges(at: Daemon) -> tuple[float, float]:
    with urllib.request.urlopen(f"http://{at.addresses['metrics']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.split() for line in lines if line.startswith("sealane_node_drain"))
    return float(values["sealane_node_draining"]), float(values["sealane_node_drained"])


async def healthy(at: Daemon, service: str) -> bool:
    async with grpc.aio.insecure_channel(f"unix:{at.socket}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.asynccontextmanager
async def attached(client: Client) -> AsyncIterator[Volume]:
    """Attach a new volume; detach it in the end."""
    volume = await client.volumes.create(size_bytes=MIB)
    yield await client.volumes.attach(volume.name, host_nqn=HOST)
    await client.volumes.detach(volume.name)


def host_of(
    volume: Volume, events: Callable[[ControllerEvent], None] | None = None
) -> HostController:
    return host_at(volume, HOST, events=events)


def plain_host(target: Daemon) -> HostController:
    traddr, _, trsvcid = target.addresses["target"].rpartition(":")
    return HostController(traddr=traddr, trsvcid=int(trsvcid), subsystem_nqn=PLAIN, host_nqn=HOST)


def until_drained(at: Daemon) -> None:
    while state_of(at)["state"] != "drained":
        time.sleep(0.1)


async def until(client: Client, volume: Volume, state: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await client.volumes.get(volume.name)).state != state:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_gateways_host_is_told_flushed_put_aside_and_served_again(
    cluster: Cluster,
) -> None:
    seen: asyncio.Queue[ControllerEvent] = asyncio.Queue()
    async with connect(cluster.gateway.socket) as client, attached(client) as volume:
        other = await client.volumes.create(size_bytes=MIB)
        host = host_of(volume, seen.put_nowait)
        await host.connect()
        assert await host.ana_states() == {1: AnaState.OPTIMIZED}
        queue = await host.open_queue(1)
        await queue.write(0, DATA)
        ended = await drained(cluster.gateway)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1] == "drained: the daemon may be stopped"
        told = await asyncio.wait_for(seen.get(), PATIENCE_SECONDS)
        assert (told.kind, told.ana) == (EventKind.ANA_CHANGED, {1: AnaState.INACCESSIBLE})
        with contextlib.suppress(Error):
            await host.close()
        assert (await client.volumes.get(volume.name)).state == "reattaching"
        with pytest.raises(Error, match=r"node\.draining"):
            await client.volumes.attach(other.name, host_nqn=HOST)
        assert state_of(cluster.gateway)["state"] == "drained"
        assert (await client.status()).drain == "drained"
        assert gauges(cluster.gateway) == (1, 1)
        assert not await healthy(cluster.gateway, "sealane.v1.Volumes")
        assert await healthy(cluster.second, "sealane.v1.Volumes")
        # Idempotent.
        assert (await drained(cluster.gateway)).returncode == 0
        for _ in range(2):
            assert (await asyncio.to_thread(node, cluster.gateway, "undrain")).returncode == 0
        await until(client, volume, "attached")
        async with host_of(volume) as again:
            assert await again.ana_states() == {1: AnaState.OPTIMIZED}
            back = bytearray(len(DATA))
            await (await again.open_queue(1)).read(0, back)
        assert back == DATA
        assert state_of(cluster.gateway)["state"] == "serving"
        assert gauges(cluster.gateway) == (0, 0)
        assert await healthy(cluster.gateway, "sealane.v1.Volumes")
        async with attached(client):
            pass


@pytest.mark.slow
async def test_a_busy_host_without_another_path_waits_and_sees_no_error(cluster: Cluster) -> None:
    async with (
        connect(cluster.gateway.socket) as client,
        attached(client) as volume,
        client.open(volume) as disk,
        asyncio.TaskGroup() as tasks,
    ):
        writes = 0

        async def write_on() -> None:
            nonlocal writes
            while True:
                await disk.write(0, DATA)
                writes += 1

        writing = tasks.create_task(write_on())
        ended = await drained(cluster.gateway, "--timeout", "3")
        assert ended.returncode == 0, ended.stderr
        assert "still does I/O" in ended.stdout
        at_end = writes
        await asyncio.sleep(0.5)
        assert (writes, writing.done()) == (at_end, False)
        assert at_end
        assert (await asyncio.to_thread(node, cluster.gateway, "undrain")).returncode == 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while writes == at_end:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        writing.cancel()


async def test_undrained_in_time_nothing_was_interrupted(cluster: Cluster) -> None:
    async with (
        connect(cluster.gateway.socket) as client,
        attached(client) as volume,
        host_of(volume) as host,
        asyncio.TaskGroup() as tasks,
    ):
        queue = await host.open_queue(1)

        async def write_on() -> None:
            while True:
                await queue.write(0, DATA)

        writing = tasks.create_task(write_on())
        drain = tasks.create_task(drained(cluster.gateway, "--timeout", "100"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await host.ana_states() != {1: AnaState.INACCESSIBLE}:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        await asyncio.sleep(2 * SETTLE_SECONDS)
        assert not writing.done()
        assert (await asyncio.to_thread(node, cluster.gateway, "undrain")).returncode == 0
        assert await host.ana_states() == {1: AnaState.OPTIMIZED}
        ended = await drain
        assert (ended.returncode, "node.drain.ended" in ended.stderr) == (4, True)
        assert not writing.done()
        writing.cancel()


@pytest.mark.slow
async def test_a_volume_whose_target_is_away_is_not_closed(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client, attached(client) as volume:
        host = host_of(volume)
        await host.connect()
        await (await host.open_queue(1)).write(0, DATA)
        cluster.target.process.send_signal(signal.SIGSTOP)
        try:
            ended = await drained(cluster.gateway, "--timeout", "1")
            assert ended.returncode == 4
            assert "node.drain.overdue" in ended.stderr
            assert f"gateway {volume.name}: not flushed: " in ended.stderr
        finally:
            cluster.target.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.to_thread(until_drained, cluster.gateway)
        with contextlib.suppress(Error):
            await host.close()
        assert (await asyncio.to_thread(node, cluster.gateway, "undrain")).returncode == 0
        await until(client, volume, "attached")
        async with host_of(volume) as again:
            back = bytearray(len(DATA))
            await (await again.open_queue(1)).read(0, back)
        assert back == DATA


@pytest.mark.slow
async def test_a_detached_volume_does_not_come_back(cluster: Cluster) -> None:
    async with connect(cluster.gateway.socket) as client:
        async with attached(client) as volume:
            assert (await drained(cluster.gateway)).returncode == 0
            assert (await client.volumes.get(volume.name)).state == "reattaching"
        assert (await asyncio.to_thread(node, cluster.gateway, "undrain")).returncode == 0
        assert (await client.volumes.get(volume.name)).state == "available"


@pytest.mark.slow
async def test_a_target_waits_for_its_gateways_and_takes_no_others(cluster: Cluster) -> None:
    async with (
        connect(cluster.gateway.socket) as client,
        connect(cluster.second.socket) as second,
    ):
        async with attached(client) as volume:
            host = host_of(volume)
            await host.connect()
            queue = await host.open_queue(1)
            await queue.write(0, DATA)
            ended = await drained(cluster.target, "--timeout", "1")
            assert ended.returncode == 4
            assert "node.drain.overdue" in ended.stderr
            assert f"target {volume.name}: open at" in ended.stderr
            assert state_of(cluster.target)["state"] == "overdue"
            # The gateway that was here goes on, also with a new queue.
            await queue.flush()
            await (await host.open_queue(2)).write(1, DATA)
            with pytest.raises(Error, match=r"node\.draining"):
                await client.volumes.create(size_bytes=MIB)
            at_second = await second.volumes.attach(volume.name, host_nqn=HOST)
            with pytest.raises((Error, NvmeStatusError)):
                async with host_of(at_second) as stranger:
                    await stranger.open_queue(1)
            await second.volumes.detach(volume.name)
            await host.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.to_thread(until_drained, cluster.target)
        # Nobody else has this volume, so its gateway may come back, and is waited for.
        async with attached_later(client, volume) as later, host_of(later) as host:
            await (await host.open_queue(1)).write(0, DATA)
            assert state_of(cluster.target)["state"] == "overdue"
            assert gauges(cluster.target) == (1, 0)
        assert (await asyncio.to_thread(node, cluster.target, "undrain")).returncode == 0
        async with attached_later(client, volume) as later, host_of(later) as host:
            back = bytearray(len(DATA))
            await (await host.open_queue(1)).read(0, back)
        assert back == DATA


@contextlib.asynccontextmanager
async def attached_later(client: Client, volume: Volume) -> AsyncIterator[Volume]:
    yield await client.volumes.attach(volume.name, host_nqn=HOST)
    await client.volumes.detach(volume.name)


@pytest.mark.slow
async def test_a_plain_namespace_is_inaccessible_during_a_drain(cluster: Cluster) -> None:
    async with plain_host(cluster.target) as host:
        queue = await host.open_queue(1)
        await queue.write(0, DATA)
        assert (await drained(cluster.target)).returncode == 0
        assert await host.ana_states() == {1: AnaState.INACCESSIBLE}
        with pytest.raises(NvmeStatusError, match="Inaccessible"):
            await queue.write(0, DATA)
        assert (await asyncio.to_thread(node, cluster.target, "undrain")).returncode == 0
        assert await host.ana_states() == {1: AnaState.OPTIMIZED}
        await queue.write(0, DATA)
    assert await healthy(cluster.target, "sealane.v1.Subsystems")


def test_an_operator_is_asked_first_and_times_are_checked(cluster: Cluster) -> None:
    ended = node(cluster.gateway, "drain")
    assert (ended.returncode, "confirmation.missing" in ended.stderr) == (2, True)
    for refused in ("-1", "0"):
        ended = node(cluster.gateway, "drain", "--yes", "--timeout", refused)
        assert (ended.returncode, "node.drain.range" in ended.stderr) == (2, True)
    ended = node(cluster.gateway, "drain", "--yes", "--timeout", "nan")
    assert (ended.returncode, "node.drain.range" in ended.stderr) == (2, True)
    assert state_of(cluster.gateway)["state"] == "serving"


@pytest.mark.slow
def test_a_broker_has_nothing_to_wait_for_and_a_restart_ends_a_drain() -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        config = site.broker_config()
        with daemon(config) as broker:
            assert node(broker, "drain", "--yes").returncode == 0
            assert state_of(broker)["state"] == "drained"
        with daemon(config) as broker:
            assert state_of(broker)["state"] == "serving"
