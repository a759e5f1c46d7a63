"""The system under attack: broker, target and up to four gateways as daemons; two tenants.

Each test has a proxy on the data path of the volumes that it attaches. It plays the tenant's host,
the network and, where stated, the target's drive.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from attached_hosts import detach_kept
from attacks.proxy import Proxy
from attacks.raw_host import CommandError, QueueLost, RawQueue
from control_plane import Daemon, Site, daemon
from patience import PATIENCE_SECONDS
from ports import choose_ports
from sealane.client import Client, Volume, VolumeEvent, connect

HOST: Final = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4333-8444-555555555555"
SECTOR: Final = 4096
VOLUME_BYTES: Final = 4 << 20
TENANTS: Final = {"s": "t", "g1": "t", "g2": "t", "g3": "u", "g4": "u"}


@dataclass
class Cluster:
    """Daemons that run until the end; gateways start when first requested."""

    site: Site
    stack: contextlib.ExitStack
    broker: Daemon = field(init=False)
    target: Daemon = field(init=False)
    gateways: dict[str, Daemon] = field(default_factory=dict)

    def start(self) -> None:
        """Start broker and target."""
        self._write_policy()
        config = self.site.broker_config()
        choose_ports(config)
        self.broker = self._run(config)
        config = self._target_config()
        choose_ports(config)
        self.target = self._run(config)

    def gateway(self, name: str, *, control_address: str = "", hold_seconds: int = 60) -> Daemon:
        """Start a gateway unless it runs; `control_address` overrides the address of the target."""
        running = self.gateways.get(name)
        if running is None or running.process.poll() is not None:
            control = control_address or self.target.addresses["target_control"]
            config = self.site.write_config(
                name,
                self.site.enrolment(name, self.broker)
                + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
                + f'target_address = "{control}"\nhold_seconds = {hold_seconds}\n',
            )
            self.gateways[name] = self._run(config)
        return self.gateways[name]

    @contextlib.contextmanager
    def impatient_gateway(self, name: str, *, hold_seconds: int) -> Iterator[None]:
        """Within the block, run a gateway that holds commands at most this long."""
        if name in self.gateways:
            self.kill_gateway(name)
        self.gateway(name, hold_seconds=hold_seconds)
        try:
            yield
        finally:
            self.kill_gateway(name)

    def kill_gateway(self, name: str) -> None:
        """Kill a gateway, as a power cut would."""
        process = self.gateways.pop(name).process
        process.send_signal(signal.SIGKILL)
        process.wait()

    def restart_broker(self) -> None:
        """Kill the broker and restart it at the same address, with its state."""
        self.broker = self._again(self.broker, "broker")

    def kill_target(self) -> None:
        """Kill the target process."""
        self.target.process.send_signal(signal.SIGKILL)
        self.target.process.wait()

    def restart_target(self) -> None:
        """Restart a killed target at the same address."""
        self.target = self._again(self.target, "s")

    def _again(self, old: Daemon, name: str) -> Daemon:
        old.process.kill()
        old.process.wait()
        return self._run(self.site.root / f"{name}.toml")

    @property
    def data_address(self) -> tuple[str, int]:
        """Address of the target's NVMe/TCP listener."""
        host, _, port = self.target.addresses["target"].rpartition(":")
        return host, int(port)

    @property
    def stores(self) -> Path:
        """Directory of the target's sector stores."""
        return self.site.root / "s" / "volumes"

    def _target_config(self) -> Path:
        return self.site.write_config(
            "s",
            self.site.enrolment("s", self.broker)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            # As on a drive, block n is at byte 4160·n.
            + 'store = "inline"\n',
        )

    def _run(self, config: Path) -> Daemon:
        # A test that kills a daemon handles that itself; the others must exit cleanly.
        context = daemon(config)
        running = context.__enter__()

        def leave() -> None:
            if running.process.poll() is None:
                context.__exit__(None, None, None)

        self.stack.callback(leave)
        return running

    def _write_policy(self) -> None:
        lines = ["version = 1", "[software]", "allowed = true"]
        for node, tenant in TENANTS.items():
            lines += [
                "[[software.key]]",
                f'fingerprint = "{self.site.key(node).fingerprint}"',
                f'nodes = ["{node}"]',
                f"roles = {json.dumps(['target' if node == 's' else 'gateway'])}",
                f'tenant = "{tenant}"',
            ]
        (self.site.root / "policy.toml").write_text("\n".join(lines) + "\n")


@dataclass
class Attacked:
    """A volume attached through the proxy, with the reports of gateway and target about it."""

    cluster: Cluster
    proxy: Proxy
    client: Client
    volume: Volume
    events: asyncio.Queue[VolumeEvent]
    seen: list[VolumeEvent] = field(default_factory=list)

    @property
    def store(self) -> Path:
        """File of the volume's sectors."""
        return self.cluster.stores / f"{self.volume.name.removeprefix('volumes/')}.sectors"

    @contextlib.asynccontextmanager
    async def queue(self, count: int = 1) -> AsyncIterator[RawQueue]:
        """Open an I/O queue of the tenant's host."""
        async with self.queues(count) as queues:
            yield queues[0]

    @contextlib.asynccontextmanager
    async def queues(self, count: int) -> AsyncIterator[list[RawQueue]]:
        """Open several I/O queues in one association of the tenant's host."""
        attachment = self.volume.attachment
        assert attachment is not None
        async with RawQueue.association(
            attachment, host_nqn=HOST, secret=attachment.dhchap_secret, count=count
        ) as queues:
            yield queues

    async def refusal(
        self, *reasons: str, origin: str | None = None, lba: int | None = None
    ) -> VolumeEvent:
        """Wait for a refusal with one of `reasons`; fail if none is reported in time."""
        return await self.event(
            lambda event: (
                event.kind == "refused"
                and event.reason in reasons
                and origin in (None, event.origin)
                and lba in (None, event.lba)
            )
        )

    async def event(self, matches: Callable[[VolumeEvent], bool]) -> VolumeEvent:
        """Wait for an event; earlier unconsumed ones count, too."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    for event in self.seen:
                        if matches(event):
                            self.seen.remove(event)
                            return event
                    self.seen.append(await self.events.get())
        except TimeoutError:
            raise AssertionError(f"not reported; reported were: {self.seen}") from None

    def drain(self) -> None:
        """Discard the reports so far."""
        self.seen.clear()
        while not self.events.empty():
            self.events.get_nowait()

    async def contents(self, lba: int, blocks: int = 1) -> bytes:
        """Read on a new queue, as a host would after the attack."""
        async with self.queue() as queue:
            return await queue.read(lba, blocks)


@contextlib.asynccontextmanager
async def attacked(
    cluster: Cluster,
    *,
    gateway: str = "g1",
    proxy: Proxy | None = None,
    volume: Volume | None = None,
) -> AsyncIterator[Attacked]:
    """Attach a volume through a proxy; by default both are new."""
    async with contextlib.AsyncExitStack() as stack:
        if proxy is None:
            proxy = await stack.enter_async_context(Proxy(cluster.data_address).listening())
        # In a thread: starting a daemon takes seconds, in which other tasks' timeouts would expire.
        daemon = await asyncio.to_thread(cluster.gateway, gateway)
        client = await stack.enter_async_context(connect(daemon.socket))
        if volume is None:
            volume = await client.volumes.create(size_bytes=VOLUME_BYTES)
        else:
            await detach_kept(client, volume.name)
        watched = await stack.enter_async_context(client.volumes.watch(volume.name))
        events: asyncio.Queue[VolumeEvent] = asyncio.Queue()

        async def collect() -> None:
            async for event in watched:
                events.put_nowait(event)

        collector = asyncio.ensure_future(collect())
        traddr, trsvcid = proxy.address
        here = await client.volumes.attach(
            volume.name, host_nqn=HOST, via_traddr=traddr, via_trsvcid=trsvcid
        )
        try:
            yield Attacked(cluster, proxy, client, here, events)
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)
            if cluster.gateways.get(gateway) is not None:
                await detach_kept(client, volume.name)


@dataclass(frozen=True)
class Outcome:
    """Result of a host's command: success, an error or a lost queue."""

    error: CommandError | QueueLost | None

    @property
    def is_success(self) -> bool:
        """Whether the host was told of success."""
        return self.error is None


async def attempt(command: Awaitable[object]) -> Outcome:
    """Run a host's command that may fail; return its outcome."""
    try:
        await command
    except (CommandError, QueueLost) as error:
        return Outcome(error)
    return Outcome(None)


def pattern(lba: int, version: int, blocks: int = 1) -> bytes:
    """Return the contents of a run of sectors in a version; no two sectors are equal."""
    return b"".join(
        f"sector {lba + index} version {version} ".encode().ljust(32, b".") * (SECTOR // 32)
        for index in range(blocks)
    )
