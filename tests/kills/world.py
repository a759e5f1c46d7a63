"""Two brokers on three etcd members, a target and two gateways; any process may be killed."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from attached_hosts import host_at
from control_plane import Daemon, Site, short_directory
from etcd_server import Cluster, etcd_cluster
from kills.restarts import start_in_place
from sealane.client import connect
from sealane.errors import Error
from sealane.transport.nvme.initiator import NvmeStatusError

HOST = "nqn.2014-08.org.nvmexpress:uuid:33333333-2222-4333-8444-555555555555"
BLOCK = 4096
VOLUME_BYTES = 4 << 20
PROGRESS_SECONDS = 60.0
BROKERS = ("broker", "broker2")
GATEWAYS = ("g1", "g2")


@dataclass
class World:
    """The processes that may be killed, and their load."""

    site: Site
    etcd: Cluster
    stack: contextlib.ExitStack
    daemons: dict[str, Daemon] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    another_round: asyncio.Condition = field(default_factory=asyncio.Condition)

    def start(self, name: str) -> None:
        """Start a daemon, at its previous addresses if it ran before."""
        self.daemons[name] = start_in_place(self.site, self.stack, name)

    async def kill(self, name: str) -> None:
        """Kill a daemon with SIGKILL and restart it."""
        if name in self.daemons:
            self.daemons[name].kill()
            await asyncio.to_thread(self.start, name)
            return
        member = next(m for m in self.etcd.members if m.name == name)
        member.kill()
        await asyncio.sleep(0.5)
        member.start()
        await asyncio.to_thread(member.wait_listening)

    async def load(self, name: str) -> None:
        """Repeatedly attach, write, flush and detach a gateway's volume."""
        while True:
            try:
                await self._round(name)
            except (Error, NvmeStatusError, OSError, grpc.aio.AioRpcError) as error:
                self.failures[getattr(error, "reason", type(error).__name__)] += 1
                await asyncio.sleep(0.1)
            else:
                async with self.another_round:
                    self.rounds[name] += 1
                    self.another_round.notify_all()

    async def _round(self, name: str) -> None:
        async with asyncio.timeout(PROGRESS_SECONDS), connect(self.daemons[name].socket) as client:
            if name not in self.volumes:
                made = await client.volumes.create(size_bytes=VOLUME_BYTES, display_name=name)
                self.volumes[name] = made.name
            volume = await client.volumes.get(self.volumes[name])
            if volume.state == "attached":
                await client.volumes.detach(volume.name)
            volume = await client.volumes.attach(volume.name, host_nqn=HOST)
            host = host_at(volume, HOST)
            async with host:
                await host.request_queues(1)
                queue = await host.open_queue(1)
                for lba in range(0, VOLUME_BYTES // BLOCK, 64):
                    await queue.write(lba, secrets.token_bytes(8 * BLOCK))
                await queue.flush()
                await queue.close()
            await client.volumes.detach(volume.name)

    async def progressed(self) -> None:
        """Wait until every gateway has completed a whole round."""
        before = self.rounds.copy()
        async with asyncio.timeout(PROGRESS_SECONDS), self.another_round:
            await self.another_round.wait_for(
                lambda: all(self.rounds[g] > before[g] + 1 for g in GATEWAYS)
            )


@contextlib.asynccontextmanager
async def world(ledgers: Path) -> AsyncIterator[World]:
    """Start everything; stop and remove it at the end."""
    with short_directory() as root, etcd_cluster(3) as etcd, contextlib.ExitStack() as stack:
        site = Site(root)
        made = World(site, etcd, stack)
        site.write_policy({"s": ["target"], **{g: ["gateway"] for g in GATEWAYS}})
        for instance, name in enumerate(BROKERS, start=1):
            site.broker_config(
                name, instance=instance, etcd=etcd.endpoints, more="head_seconds = 1\n"
            )
            await asyncio.to_thread(made.start, name)
        await _start_nodes(made)
        yield made


async def _start_nodes(made: World) -> None:
    first, second = BROKERS
    anchors = {(made.site.root / name / "trust-anchor.pem").read_bytes() for name in BROKERS}
    assert len(anchors) == 1

    def enrolment(name: str) -> str:
        return made.site.enrolment(name, made.daemons[first], others={second: made.daemons[second]})

    made.site.write_config(
        "s",
        enrolment("s")
        + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "file"\n'
        + f'directory = "{made.site.root / "stores"}"\n',
    )
    await asyncio.to_thread(made.start, "s")
    for name in GATEWAYS:
        made.site.write_config(
            name,
            enrolment(name)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            + f'target_address = "{made.daemons["s"].addresses["target_control"]}"\n'
            + "command_timeout_seconds = 5\n",
        )
        await asyncio.to_thread(made.start, name)
