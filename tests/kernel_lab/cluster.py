"""Broker, target and gateway as processes that a test can kill and restart."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from control_plane import Daemon, Site, daemon, short_directory
from kernel_lab.build import HOST_NQN
from sealane.client import Attachment, connect

ANY_PORT = "127.0.0.1:0"

# Writes a configuration, given the addresses of the last start (none at first).
Configure = Callable[[dict[str, str]], Path]


class Node:
    """A daemon; a restart keeps its addresses, so that hosts reconnect."""

    def __init__(self, configure: Configure) -> None:
        self._configure = configure
        self._running = contextlib.ExitStack()
        self._addresses: dict[str, str] = {}
        self.daemon = self._start()

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses that the daemon listens on."""
        return self.daemon.addresses

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        self.daemon.kill()
        self._running.close()

    def start(self) -> None:
        """Start the daemon again, after `kill`."""
        self.daemon = self._start()

    def restart(self) -> None:
        """Stop the daemon cleanly and restart it."""
        self._running.close()
        self.daemon = self._start()

    def close(self) -> None:
        """Stop the daemon; raise AssertionError unless it exits cleanly."""
        self._running.close()

    def _start(self) -> Daemon:
        started = self._running.enter_context(daemon(self._configure(self._addresses)))
        self._addresses = dict(started.addresses)
        return started


@dataclass(frozen=True)
class Disk:
    """A subsystem with one namespace, for the guest to connect to."""

    nqn: str
    port: int
    uuid: str
    volume: str = ""  # its name, if it is a gateway's
    secret: str = ""

    def connect(self, *options: str) -> tuple[object, ...]:
        """Return the step that connects to it."""
        secret = (f"--dhchap-secret={self.secret}",) if self.secret else ()
        return ("connect", self.nqn, self.port, *secret, *options)


@dataclass
class Cluster:
    """The three roles of the storage data path."""

    site: Site
    broker: Daemon
    target: Node
    gateway: Node
    start_gateway: Callable[[str], Node]
    """Starts another gateway, h, of the same target."""
    others: list[Node] = field(default_factory=list)
    """Gateways besides the first."""
    _shown: dict[Path, int] = field(default_factory=dict)

    def new_log_lines(self) -> list[str]:
        """Return what target and gateways have logged since the last call."""
        lines: list[str] = []
        for log in (each.daemon.log for each in (self.target, self.gateway, *self.others)):
            text = log.read_text()
            # A restarted daemon begins a new file.
            start = min(self._shown.get(log, 0), len(text))
            self._shown[log] = len(text)
            lines += [f"{log.stem}: {line}" for line in text[start:].splitlines()]
        return lines

    def create_volume(self, *, size_mib: int) -> str:
        """Create a volume; return its name."""

        async def create() -> str:
            async with connect(self.gateway.daemon.socket) as client:
                return (await client.volumes.create(size_bytes=size_mib << 20)).name

        return asyncio.run(create())

    def attach(self, name: str, *, at: Node | None = None, fail_over: bool = False) -> Disk:
        """Export a volume to the lab's guest, by default at the gateway."""

        async def attach() -> Attachment:
            async with connect((at or self.gateway).daemon.socket) as client:
                volume = await client.volumes.attach(name, host_nqn=HOST_NQN, fail_over=fail_over)
            assert volume.attachment is not None
            return volume.attachment

        at = asyncio.run(attach())
        return Disk(
            at.subsystem_nqn,
            at.trsvcid,
            name.removeprefix("volumes/"),
            volume=name,
            secret=at.dhchap_secret,
        )

    def attachment(self, name: str, *, at: Node | None = None) -> Attachment:
        """Return an attachment with its counters, by default the gateway's."""

        async def get() -> Attachment:
            async with connect((at or self.gateway).daemon.socket) as client:
                volume = await client.volumes.get(name)
            assert volume.attachment is not None
            return volume.attachment

        return asyncio.run(get())

    def detach(self, name: str, *, at: Node | None = None) -> None:
        """Detach a volume, by default from the gateway."""

        async def detach() -> None:
            async with connect((at or self.gateway).daemon.socket) as client:
                await client.volumes.detach(name)

        asyncio.run(detach())

    def delete_volume(self, name: str) -> None:
        """Delete a detached volume."""

        async def delete() -> None:
            async with connect(self.gateway.daemon.socket) as client:
                await client.volumes.delete(name)

        asyncio.run(delete())

    def remove_volume(self, name: str) -> None:
        """Detach a volume and delete it."""
        self.detach(name)
        self.delete_volume(name)


@contextlib.contextmanager
def cluster(*, store: str, subsystems: Callable[[Path], str] = lambda _: "") -> Iterator[Cluster]:
    """Run the three daemons until the end of the block.

    `subsystems` returns the target's plain subsystems as TOML, and may write files to the given
    directory.
    """
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"], "h": ["gateway"]})
        broker = stack.enter_context(daemon(site.broker_config()))

        plain = subsystems(root)

        def configure_target(known: dict[str, str]) -> Path:
            return site.write_config(
                "s",
                site.enrolment("s", broker)
                + f'[target]\nlisten = "{known.get("target", ANY_PORT)}"\n'
                + f'control_listen = "{known.get("target_control", ANY_PORT)}"\n'
                + f'store = "{store}"\n{plain}',
            )

        target = Node(configure_target)
        stack.callback(target.close)

        def start_gateway(name: str) -> Node:
            def configure(known: dict[str, str]) -> Path:
                listen = known.get("gateway", ANY_PORT)
                return site.write_config(
                    name,
                    site.enrolment(name, broker)
                    + f'[gateway]\nlisten = "{listen}"\ntarget_node = "s"\n'
                    + f'target_address = "{target.addresses["target_control"]}"\n',
                )

            gateway = Node(configure)
            stack.callback(gateway.close)
            return gateway

        def start_other(name: str) -> Node:
            made.others.append(start_gateway(name))
            return made.others[-1]

        made = Cluster(site, broker, target, start_gateway("g"), start_other)
        yield made
