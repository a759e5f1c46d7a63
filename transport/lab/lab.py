"""A lab: its namespaces, wires and emulators, from a topology."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sealane.transport.lab.emulator import EmulatorProcess, emulating
from sealane.transport.lab.namespaces import Namespace, attach, set_up_host
from sealane.transport.lab.plan import plan
from sealane.transport.lab.topology import Topology


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
        """By the name of the link."""
        self.hosts = hosts
        """By name; none without namespaces."""

    async def report(self) -> dict[str, dict[str, Any]]:
        """Return what each emulator has done so far, by the name of its link."""
        return {name: await emulator.report() for name, emulator in self.emulators.items()}

    async def start_schedule(self) -> None:
        """Start the schedules of all links (again), now."""
        for emulator in self.emulators.values():
            await emulator.start_schedule()


@contextlib.asynccontextmanager
async def laboratory(topology: Topology, *, relays: bool) -> AsyncIterator[Lab]:
    """Build a lab and take it down again; with `relays`, without namespaces.

    UnavailableError if the kernel refuses.
    """
    async with contextlib.AsyncExitStack() as stack:
        hosts: dict[str, Namespace] = {}
        emulators: dict[str, EmulatorProcess] = {}
        for name in () if relays else topology.hosts:
            hosts[name] = _new_namespace(stack)
            await set_up_host(hosts[name])
        attached_by_wan = plan(topology)
        for number, wan in enumerate(topology.wan):
            # Paths of one link take seeds upwards from its own: links stay apart.
            seed = topology.seed + (number << 32)
            if relays:
                running = emulating(topology, wan, None, seed=seed)
            else:
                namespace = _new_namespace(stack)
                attached = attached_by_wan[wan.name]
                for attachment in attached:
                    host = hosts[attachment.host]
                    await attach(host, namespace, attachment, name=wan.name, mtu=topology.mtu)
                running = emulating(topology, wan, attached, namespace, seed=seed)
            emulators[wan.name] = await stack.enter_async_context(running)
        yield Lab(topology, emulators, hosts)


def _new_namespace(stack: contextlib.AsyncExitStack) -> Namespace:
    namespace = Namespace.create()
    stack.callback(namespace.close)
    return namespace
