"""End of access with real daemons, under constant writes and with a cut control path."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from attached_hosts import host_at
from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from sealane import __version__
from sealane.client import Volume, connect
from sealane.daemon.node import channels
from sealane.errors import Error
from sealane.transport.nvme.initiator import HostController, NvmeStatusError
from trust.relay import Relay

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:33333333-2222-4333-8444-555555555555"
MIB = 1 << 20
AUTHORIZATION_SECONDS = 3
# Delay of a loaded machine that is tolerated on top of a bound.
SLACK_SECONDS = 10.0


@dataclass
class Cluster:
    """Broker, target and gateway; the target reaches the broker through `relay`."""

    site: Site
    relay: Relay
    broker: Daemon
    target: Daemon
    gateway: Daemon

    def revoke(self, *arguments: str) -> None:
        ended = sealanectl("--socket", self.broker.socket, "node", *arguments)
        assert ended.returncode == 0, ended.stderr

    def nodes(self) -> dict[str, dict[str, Any]]:
        ended = sealanectl("--socket", self.broker.socket, "--output", "json", "node", "list")
        return {row["node"]: row for row in json.loads(ended.stdout)}

    def writes(self) -> int:
        """Return the number of stored writes, from the target's metrics."""
        text = self.metrics(self.target)
        lines = [
            x for x in text.splitlines() if x.startswith("sealane_target_volume_host_writes_total{")
        ]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    def metrics(self, node: Daemon) -> str:
        with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics") as answer:
            return str(answer.read().decode())


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    with short_directory() as root:
        async with contextlib.AsyncExitStack() as stack:
            site = Site(root)
            site.write_policy({"s": ["target"], "g": ["gateway"]})
            broker = stack.enter_context(daemon(site.broker_config()))
            relay = await stack.enter_async_context(Relay(broker.addresses["broker"]).running())
            enrolment = site.enrolment("s", broker)
            direct = f'broker_address = "{broker.addresses["broker"]}"'
            assert direct in enrolment
            metrics = '[metrics]\nlisten = "127.0.0.1:0"\n'
            target_config = site.write_config(
                "s",
                enrolment.replace(direct, f'broker_address = "{relay.address}"')
                + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
                + f'store = "memory"\nauthorization_seconds = {AUTHORIZATION_SECONDS}\n'
                + metrics,
            )
            target = await asyncio.to_thread(stack.enter_context, daemon(target_config))
            gateway_config = site.write_config(
                "g",
                site.enrolment("g", broker)
                + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                + f'target_address = "{target.addresses["target_control"]}"\n'
                + metrics,
            )
            gateway = await asyncio.to_thread(stack.enter_context, daemon(gateway_config))
            yield Cluster(site, relay, broker, target, gateway)


def host_of(volume: Volume) -> HostController:
    return host_at(volume, HOST)


@dataclass
class Load:
    """A host that writes blocks one after another; `failure` is the error that ended it."""

    written: int = 0
    first_block: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    async def run(self, volume: Volume) -> None:
        async with host_of(volume) as host:
            await host.request_queues(1)
            queue = await host.open_queue(1)
            try:
                while True:
                    await queue.write(
                        self.first_block + self.written % (256 - self.first_block),
                        self.written.to_bytes(8, "big") * 512,
                    )
                    self.written += 1
                    self.progress.set()
            except (Error, NvmeStatusError, OSError, TimeoutError) as error:
                self.failure = error
            finally:
                with contextlib.suppress(Error, OSError, TimeoutError):
                    await queue.close()

    async def goes_on(self, *, within: float = 60.0) -> None:
        """Wait until another write is acknowledged."""
        self.progress.clear()
        await asyncio.wait_for(self.progress.wait(), within)


@contextlib.asynccontextmanager
async def _loaded(cluster: Cluster) -> AsyncIterator[tuple[Load, asyncio.Task[None], str]]:
    async with connect(cluster.gateway.socket) as client, asyncio.TaskGroup() as tasks:
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()
        yield load, running, volume.name
        running.cancel()


async def test_revoked_gateway_is_cut_off_within_the_bound(cluster: Cluster) -> None:
    async with _loaded(cluster) as (load, running, name):
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(cluster.revoke, "revoke", "--yes", "g", "--reason", "stolen")
        await asyncio.wait({running}, timeout=AUTHORIZATION_SECONDS + SLACK_SECONDS)
        ended = asyncio.get_running_loop().time()
        # It failed with a status, so the host was informed.
        assert isinstance(load.failure, NvmeStatusError), load.failure
        assert ended - began < AUTHORIZATION_SECONDS + SLACK_SECONDS
        before = await asyncio.to_thread(cluster.writes)
        async with connect(cluster.gateway.socket) as client:
            with pytest.raises(Error):
                await client.volumes.attach(name, host_nqn=HOST)
            with pytest.raises(Error):
                await client.volumes.create(size_bytes=MIB)
        assert await asyncio.to_thread(cluster.writes) == before
    rows = await asyncio.to_thread(cluster.nodes)
    assert (rows["g"]["state"], rows["g"]["reason"]) == ("revoked", "stolen")
    assert rows["s"]["state"] == "active"
    assert rows["s"]["version"] == __version__
    assert abs(rows["s"]["clock_skew_seconds"]) < 60
    assert rows["s"]["called_from"] == "127.0.0.1"
    text = await asyncio.to_thread(cluster.metrics, cluster.target)
    assert 'sealane_authorizations_lost_total{reason="node.revoked",role="target"} 1.0' in text
    log = (cluster.site.root / "broker" / "audit.jsonl").read_text()
    assert '"node.revoked"' in log
    # Once restored, it attests automatically and serves again.
    await asyncio.to_thread(cluster.revoke, "restore", "g")
    async with connect(cluster.gateway.socket) as client, asyncio.timeout(60):
        while True:
            with contextlib.suppress(Error):
                await client.volumes.create(size_bytes=MIB)
                break
            await asyncio.sleep(0.2)


async def test_cut_control_path_ends_the_queues_and_mending_it_resumes_them(
    cluster: Cluster,
) -> None:
    async with _loaded(cluster) as (load, _, _):
        cluster.relay.cut()
        async with asyncio.timeout(AUTHORIZATION_SECONDS + SLACK_SECONDS):
            # Poll: the process publishes its state only on request.
            while "authorization.stale" not in await _lost(cluster):
                pass
        # Soon the queues are drained; after that nothing is stored.
        async with asyncio.timeout(SLACK_SECONDS):
            while (before := await asyncio.to_thread(cluster.writes)) != await _later(cluster):
                pass
        # The broker is reported as away once a request has failed, after up to the call's timeout.
        async with asyncio.timeout(SLACK_SECONDS):
            while 'sealane_broker_away{role="target"} 1.0' not in await _metrics(cluster):
                pass
        assert load.failure is None, "the host's command is held, not failed"
        assert await asyncio.to_thread(cluster.writes) == before
        cluster.relay.mend()
        await load.goes_on()
        assert load.failure is None
        assert await asyncio.to_thread(cluster.writes) > before


async def test_revocation_reaches_a_target_whose_control_path_is_cut(cluster: Cluster) -> None:
    async with _loaded(cluster) as (load, running, _):
        cluster.relay.cut()
        await asyncio.to_thread(cluster.revoke, "revoke", "--yes", "g", "--role", "gateway")
        async with asyncio.timeout(AUTHORIZATION_SECONDS + SLACK_SECONDS):
            while not await _lost(cluster):
                pass
            while (before := await asyncio.to_thread(cluster.writes)) != await _later(cluster):
                pass
        cluster.relay.mend()
        # The gateway learns of it from its next request to the broker, and fails held commands.
        await asyncio.wait({running}, timeout=channels.PIN_SECONDS + 3 * SLACK_SECONDS)
        assert isinstance(load.failure, NvmeStatusError), load.failure
        assert await asyncio.to_thread(cluster.writes) == before


async def _metrics(cluster: Cluster) -> str:
    return await asyncio.to_thread(cluster.metrics, cluster.target)


async def _lost(cluster: Cluster) -> str:
    text = await _metrics(cluster)
    return "".join(x for x in text.splitlines() if x.startswith("sealane_authorizations_lost"))


async def _later(cluster: Cluster) -> int:
    """Read the metric again after longer than any write takes."""
    await asyncio.sleep(0.5)
    return await asyncio.to_thread(cluster.writes)
