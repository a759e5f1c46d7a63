"""One gateway with several targets, as real daemons: each target is away alone."""

import asyncio
import contextlib
import json
import secrets
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attached_hosts import host_at
from control_plane import Daemon, Site, daemon, sealanectl, sealaned, short_directory
from patience import PATIENCE_SECONDS
from ports import addresses_of_our_own
from sealane.client import Client, Volume, connect
from sealane.daemon.gateway.last_flush import FLUSH_SECONDS, LEAVE_SECONDS
from sealane.daemon.gateway.targets import ANSWER_SECONDS, LOOK_SECONDS
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.v1 import devices_pb2
from sealane.transport.nvme.volume_queue import VolumeQueue
from small_disk import small_disk
from stopped import frozen

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
MIB = 1 << 20
SLACK_SECONDS = 10.0
"""What a loaded machine may take longer."""
NOTICED_SECONDS = LOOK_SECONDS + ANSWER_SECONDS + SLACK_SECONDS
METRICS = '[metrics]\nlisten = "127.0.0.1:0"\n'


@dataclass
class Cluster:
    """A broker, two targets that keep their addresses, and a gateway with both."""

    site: Site
    stack: contextlib.ExitStack
    broker: Daemon
    addresses: dict[str, str]
    listens: dict[str, str]
    targets: dict[str, Daemon] = field(default_factory=dict)

    def start_target(self, name: str, *, directory: str = "") -> Daemon:
        config = self.site.write_config(
            name,
            self.site.enrolment(name, self.broker)
            + f'[target]\nlisten = "{self.listens[name]}"\nauthorization_seconds = 3\n'
            + f'control_listen = "{self.addresses[name]}"\nstore = "file"\n'
            + (f'directory = "{directory}"\n' if directory else ""),
        )
        self.targets[name] = self.stack.enter_context(daemon(config))
        return self.targets[name]

    def gateway_config(self, *names: str, listen: str = "127.0.0.1:0", more: str = "") -> Path:
        tables = "".join(
            f'[[gateway.targets]]\nnode = "{name}"\naddress = "{self.addresses[name]}"\n'
            for name in names
        )
        return self.site.write_config(
            "g",
            self.site.enrolment("g", self.broker)
            + f'{METRICS}[gateway]\nlisten = "{listen}"\n{more}{tables}',
        )

    def ctl(self, *arguments: str) -> None:
        ended = sealanectl("--socket", self.broker.socket, *arguments)
        assert ended.returncode == 0, ended.stderr


@contextlib.contextmanager
def started(*targets: str) -> Iterator[Cluster]:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        nodes = {name: ["target"] for name in ("s", "s2")}
        site.write_policy(nodes | {"g": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))
        made = Cluster(
            site,
            stack,
            broker,
            dict(zip(nodes, addresses_of_our_own(2), strict=True)),
            dict(zip(nodes, addresses_of_our_own(2), strict=True)),
        )
        for name in targets:
            made.start_target(name)
        yield made


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with started("s", "s2") as made:
        yield made


def status(at: Daemon) -> dict[str, Any]:
    ended = sealanectl("--socket", at.socket, "status", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    shown: dict[str, Any] = json.loads(ended.stdout)
    return shown


def states(at: Daemon) -> dict[str, str]:
    return {target["node"]: target["state"] for target in status(at)["targets"]}


def until(condition: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)


async def healthy(at: Daemon, service: str) -> bool:
    async with grpc.aio.insecure_channel(f"unix:{at.socket}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def made(client: Client, target: str) -> Volume:
    """Create a volume on a target, and attach it."""
    volume = await client.volumes.create(size_bytes=MIB, target_node=target)
    assert volume.target_node == target
    return await client.volumes.attach(volume.name, host_nqn=HOST)


@contextlib.asynccontextmanager
async def io(volume: Volume) -> AsyncIterator[VolumeQueue]:
    async with host_at(volume, HOST) as host:
        await host.request_queues(1)
        queue = await host.open_queue(1)
        yield queue
        with contextlib.suppress(Error, OSError, TimeoutError):
            await queue.close()


async def goes_on(queue: VolumeQueue, *, flush: bool = True) -> None:
    """Write, flush and read back within a few seconds."""
    data = secrets.token_bytes(4096)
    async with asyncio.timeout(SLACK_SECONDS):
        await queue.write(0, data)
        if flush:
            await queue.flush()
        back = bytearray(4096)
        await queue.read(0, back)
    assert back == data


async def until_attached(
    client: Client, volume: Volume, *, seconds: float = PATIENCE_SECONDS
) -> None:
    async with asyncio.timeout(seconds):
        while (await client.volumes.get(volume.name)).state != "attached":  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def metrics(at: Daemon) -> str:
    with urllib.request.urlopen(f"http://{at.addresses['metrics']}/metrics") as answer:
        text: str = answer.read().decode()
    return text


async def test_a_target_that_is_away_is_away_alone(cluster: Cluster) -> None:
    config = cluster.gateway_config("s", "s2")
    with daemon(config) as gateway:
        async with connect(gateway.socket) as client:
            away, other = await made(client, "s"), await made(client, "s2")
            async with io(away) as on_away, io(other) as on_other:
                await goes_on(on_away)
                await goes_on(on_other)
                until(lambda: states(gateway) == {"s": "good", "s2": "good"})
                assert await healthy(gateway, "targets")
                # Frozen: nothing is refused, nothing answers.
                with frozen(cluster.targets["s"].process.pid):
                    waiting = asyncio.ensure_future(on_away.write(1, bytes(4096)))
                    await goes_on(on_other)
                    began = time.monotonic()
                    third = await made(client, "s2")
                    assert time.monotonic() - began < SLACK_SECONDS
                    async with io(third) as queue:
                        await goes_on(queue)
                    await asyncio.to_thread(
                        until, lambda: states(gateway)["s"] == "away", seconds=NOTICED_SECONDS
                    )
                    began = time.monotonic()
                    stores = {
                        v.name: v.store_unknown for v in await client.volumes.list(with_store=True)
                    }
                    assert time.monotonic() - began < ANSWER_SECONDS
                    assert stores[away.name] in {"peer.deadline_exceeded", "connection.timeout"}
                    assert stores[other.name] == ""
                    # The rule chooses among the others, without waiting.
                    began = time.monotonic()
                    chosen = await client.volumes.create(size_bytes=MIB)
                    assert (chosen.target_node, time.monotonic() - began < ANSWER_SECONDS) == (
                        "s2",
                        True,
                    )
                    assert not await healthy(gateway, "targets")
                    assert await healthy(gateway, "")
                    shown = sealanectl("--socket", gateway.socket, "status")
                    assert "DEGRADED: target s is away" in shown.stdout
                    top = sealanectl(
                        "--socket", gateway.socket, "top", "--once", "--interval", "0.2"
                    )
                    assert "the target is away (target s)" in top.stdout, top.stderr
                    assert not waiting.done()
                await waiting
                await goes_on(on_away)
                await asyncio.to_thread(until, lambda: states(gateway)["s"] == "good")
                # Killed: connections are refused.
                cluster.targets["s"].kill()
                waiting = asyncio.ensure_future(on_away.write(1, bytes(4096)))
                await goes_on(on_other)
                with pytest.raises(UnavailableError):
                    await client.volumes.create(size_bytes=MIB, target_node="s")
                await asyncio.to_thread(cluster.start_target, "s")
                await waiting
                await goes_on(on_away)
            figures = metrics(gateway)
            assert 'sealane_gateway_target_is_away{target="s2"} 0.0' in figures
            assert 'mode="remote",target="s2"' in figures


async def test_a_revoked_target_stops_its_own_volumes_only(cluster: Cluster) -> None:
    more = "hold_seconds = 1\n"
    with daemon(cluster.gateway_config("s", "s2", more=more)) as gateway:
        async with connect(gateway.socket) as client:
            revoked, other = await made(client, "s"), await made(client, "s2")
            spare = await client.volumes.create(size_bytes=MIB, target_node="s")
            async with io(revoked) as on_revoked, io(other) as on_other:
                await goes_on(on_revoked)
                await asyncio.to_thread(cluster.ctl, "node", "revoke", "s", "--yes")
                await asyncio.to_thread(until, lambda: states(gateway)["s"] == "away", seconds=60)
                await goes_on(on_other)
                with pytest.raises(Error):
                    await client.volumes.attach(spare.name, host_nqn=HOST)
                chosen = await client.volumes.create(size_bytes=MIB)
                assert chosen.target_node == "s2"


async def test_a_restarted_gateway_brings_back_the_volumes_of_targets_that_answer(
    cluster: Cluster,
) -> None:
    [listen] = addresses_of_our_own(1)
    config = cluster.gateway_config("s", "s2", listen=listen)
    with daemon(config) as gateway:
        async with connect(gateway.socket) as client:
            away, other = await made(client, "s"), await made(client, "s2")
            for volume in (away, other):
                async with io(volume) as queue:
                    await goes_on(queue)
    with frozen(cluster.targets["s"].process.pid), daemon(config) as gateway:
        async with connect(gateway.socket) as client:
            await until_attached(client, other, seconds=SLACK_SECONDS)
            assert (await client.volumes.get(away.name)).state == "reattaching"
            async with io(other) as queue:
                await goes_on(queue)
    with daemon(config) as gateway:
        async with connect(gateway.socket) as client:
            await until_attached(client, away)
            async with io(away) as queue:
                await goes_on(queue)


async def test_drain_and_stop_wait_for_an_absent_target_within_bounds(cluster: Cluster) -> None:
    with daemon(cluster.gateway_config("s", "s2")) as gateway:
        async with connect(gateway.socket) as client:
            away, other = await made(client, "s"), await made(client, "s2")
            async with io(away) as on_away, io(other) as on_other:
                await goes_on(on_away)
                await goes_on(on_other)
                # Not flushed: the gateway has to keep it.
                await on_away.write(2, secrets.token_bytes(4096))
            with frozen(cluster.targets["s"].process.pid):
                drain = await asyncio.to_thread(
                    sealanectl,
                    *("--socket", gateway.socket, "node", "drain", "--yes", "--timeout", "8"),
                )
                assert drain.returncode != 0
                assert away.name in drain.stderr
                assert other.name not in drain.stderr
                assert (await client.volumes.get(other.name)).state == "reattaching"
                began = time.monotonic()
                await asyncio.to_thread(gateway.stop)
                bound = LEAVE_SECONDS + 4 * FLUSH_SECONDS + SLACK_SECONDS
                assert time.monotonic() - began < bound


async def test_the_default_is_the_target_with_most_room_that_is_not_drained() -> None:
    with started() as cluster, contextlib.ExitStack() as stack:
        root = cluster.site.root
        (root / "s").mkdir(mode=0o700)
        stack.enter_context(small_disk(root / "s" / "volumes", size_bytes=64 * MIB))
        try:
            for name in ("s", "s2"):
                await asyncio.to_thread(cluster.start_target, name)
            with daemon(cluster.gateway_config("s", "s2")) as gateway:
                # One that hasn't answered yet gets no volume.
                both = {"s": "good", "s2": "good"}
                await asyncio.to_thread(until, lambda: states(gateway) == both)
                async with connect(gateway.socket) as client:
                    for _ in range(3):
                        volume = await client.volumes.create(size_bytes=MIB)
                        assert volume.target_node == "s2"
                    with pytest.raises(UnavailableError) as full:
                        await client.volumes.create(size_bytes=256 * MIB, target_node="s")
                    assert full.value.reason == "store.full"
                    assert len(await client.volumes.list()) == 3
                    drain = await asyncio.to_thread(
                        sealanectl,
                        *("--socket", cluster.targets["s2"].socket, "node", "drain", "--yes"),
                    )
                    assert drain.returncode == 0, drain.stderr
                    # A repeated call has its volume from before, on another target than is best.
                    request = "0b4f6a3e-8f5c-4d0c-9d3e-000000000001"
                    volume = await client.volumes.create(size_bytes=MIB, request_id=request)
                    assert volume.target_node == "s"
                    await asyncio.to_thread(
                        sealanectl, "--socket", cluster.targets["s2"].socket, "node", "undrain"
                    )
                    again = await client.volumes.create(size_bytes=MIB, request_id=request)
                    assert (again.name, again.target_node) == (volume.name, "s")
                    await client.volumes.delete(again.name)
        finally:
            for target in cluster.targets.values():
                target.stop()


async def test_a_reload_adds_a_target_and_removes_none_that_has_volumes(cluster: Cluster) -> None:
    with daemon(cluster.gateway_config("s", "s2")) as gateway:
        async with connect(gateway.socket) as client:
            volume = await made(client, "s2")
            on_s = await client.volumes.create(size_bytes=MIB, target_node="s")
            spare = await client.volumes.create(size_bytes=MIB, target_node="s2")
    with daemon(short(cluster)) as gateway:
        async with connect(gateway.socket) as client:
            # Kept for when its target is configured again.
            assert (await client.volumes.get(volume.name)).state == "reattaching"
            with pytest.raises(UsageError) as unknown:
                await client.volumes.attach(spare.name, host_nqn=HOST)
            assert unknown.value.reason == "volume.target.unknown"
            assert "'s2'" in str(unknown.value)
            with pytest.raises(UsageError, match="allowed: 's'"):
                await client.volumes.create(size_bytes=MIB, target_node="s2")
            assert reload(cluster.gateway_config("s", "s2")) == (0, "")
            await until_attached(client, volume)
            code, message = reload(short(cluster))
            assert (code, "gateway.target.used" in message) == (2, True)
            assert f"{volume.name} on s2" in message
            assert on_s.name not in message
            await client.volumes.detach(volume.name)
            for each in (volume, spare):
                await client.volumes.delete(each.name)
            assert reload(short(cluster)) == (0, "")
            assert [*states(gateway)] == ["s"]


def short(cluster: Cluster) -> Path:
    return cluster.gateway_config(
        more=f'target_node = "s"\ntarget_address = "{cluster.addresses["s"]}"\n'
    )


def reload(config: Path) -> tuple[int, str]:
    ended = sealaned("--config", config, "--reload")
    return ended.returncode, ended.stderr


async def test_volumes_follow_their_device_to_another_target() -> None:
    with started() as cluster:
        directory = str(cluster.site.root / "stores")
        old = cluster.start_target("s", directory=directory)
        with daemon(cluster.gateway_config("s", "s2")) as gateway:
            async with connect(gateway.socket) as client, connect(cluster.broker.socket) as broker:
                volume = await made(client, "s")
                async with io(volume) as queue:
                    data = secrets.token_bytes(4096)
                    await queue.write(1, data)
                    await goes_on(queue)
                    [device] = (
                        await broker.devices.ListDevices(devices_pb2.ListDevicesRequest())
                    ).devices
                    request = devices_pb2.MoveDeviceRequest(
                        device_id=device.device_id, node="s2", unseen=True
                    )
                    await broker.devices.MoveDevice(request, timeout=PATIENCE_SECONDS)
                    waiting = asyncio.ensure_future(queue.write(2, data))
                    assert await asyncio.to_thread(old.stop, signal.SIGTERM) == 0
                    await asyncio.to_thread(cluster.start_target, "s2", directory=directory)
                    await asyncio.wait_for(waiting, 60)
                    back = bytearray(4096)
                    for lba in (1, 2):
                        await queue.read(lba, back)
                        assert back == data
                assert (await client.volumes.get(volume.name)).target_node == "s2"


async def test_check_warns_about_targets_that_do_not_answer(cluster: Cluster) -> None:
    config = cluster.gateway_config("s", "s2")
    checked = sealaned("--config", config, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert cluster.targets["s2"].stop() == 0
    checked = sealaned("--config", config, "--check")
    assert checked.returncode == 0
    assert f"warning: target s2 at {cluster.addresses['s2']}: Connection refused" in checked.stderr
    assert "target s at" not in checked.stderr
