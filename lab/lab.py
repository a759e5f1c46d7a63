"""A lab: its namespaces, wires and emulators, from a topology."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sealane.lab.emulator import EmulatorProcess, Link, emulating
from sealane.lab.namespaces import Namespace, attach, start_host, start_wan
from sealane.lab.plan import plan
from sealane.lab.topology import Topology


class Lab:
    """A running lab."""

    def __init__(
        self,
        topology: Topology,
        emulators: dict[str, EmulatorProcess],
        hosts: dict[str, Namespace],
    ) -> None:
        self.topology = topology
        self.emulators = emulators
        """Emulators by the name of their link."""
        self.hosts = hosts
        """Hosts by name; empty without namespaces."""

    async def report(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all emulators, by the name of their link."""
        return {name: await emulator.report() for name, emulator in self.emulators.items()}

    async def start_schedule(self) -> None:
        """Start, or restart, the schedules of all links now."""
        for emulator in self.emulators.values():
            await emulator.start_schedule()


@contextlib.asynccontextmanager
async def laboratory(topology: Topology, *, relays: bool) -> AsyncIterator[Lab]:
    """Run a lab until the block is left; with `relays`, without namespaces.

    UnavailableError `lab.emulator`, or OSError if the kernel refuses.
    """
    async with contextlib.AsyncExitStack() as stack:
        hosts: dict[str, Namespace] = {}
        links: list[Link] = []
        for name in () if relays else topology.hosts:
            hosts[name] = await stack.enter_async_context(Namespace.create())
        attached_by_wan = plan(topology)
        for number, wan in enumerate(topology.wan):
            # The paths of a link use consecutive seeds from its own, so space links far apart.
            seed = topology.seed + (number << 32)
            if relays:
                links.append(Link(wan=wan, seed=seed))
                continue
            namespace = await stack.enter_async_context(Namespace.create())
            attached = attached_by_wan[wan.name]
            for attachment in attached:
                await attach(hosts[attachment.host], namespace, attachment, name=wan.name)
            await start_wan(namespace, attached, mtu=topology.mtu)
            links.append(Link(wan=wan, seed=seed, namespace=namespace, attached=attached))
        for host, namespace in hosts.items():
            of_host = {
                name: attachment
                for name, attached in attached_by_wan.items()
                for attachment in attached
                if attachment.host == host
            }
            await start_host(namespace, of_host, mtu=topology.mtu)
        emulators = await stack.enter_async_context(emulating(links, topology))
        yield Lab(topology, emulators, hosts)
