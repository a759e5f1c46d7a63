"""Network namespaces of a lab, created, connected and set up by short-lived child processes.

A namespace exists while its descriptor here is open or a process is in it. Nothing is in a file
system, so all of them end with the holder.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from pyroute2 import AsyncIPRoute, config
from pyroute2.ethtool.ioctl import IoctlEthtool
from pyroute2.process import ChildProcess, ChildProcessReturnValue

from sealane.lab import kernel
from sealane.lab.plan import Attachment

# The same everywhere, so that frames can be forwarded unchanged (locally administered).
LINK_ADDRESS: Final = "02:00:00:00:00:01"
IFF_UP: Final = 0x1
IFF_NOARP: Final = 0x80
"""From <linux/if.h>. Without neighbour discovery, frames go to the interface's own address."""
IN6_ADDR_GEN_MODE_NONE: Final = 1
"""From <linux/if_link.h>: no link-local address, so all packets come from programs."""
# In an order in which they can be turned off: segmentation depends on those after it.
OFFLOADS: Final = (
    "generic-receive-offload",
    "generic-segmentation-offload",
    "tcp-segmentation-offload",
    "scatter-gather",
    "tx-checksumming",
)
# Per namespace, in /proc/sys: TCP must not carry metrics of one run over to the next.
SETTINGS: Final = {"net/ipv4/tcp_no_metrics_save": "1"}

# Children are ended by SIGTERM, which must not reach the event loop through inherited handlers.
config.disable_mp_signal = True


class Namespace:
    """A network namespace."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.route = AsyncIPRoute(netns=self.path, flags=0)
        """Its routing netlink socket."""

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls) -> "AsyncIterator[Namespace]":
        """Create a namespace until the block is left; OSError if the kernel refuses."""
        with ChildProcess(target=_make, args=[]) as child:
            _, (descriptor,) = child.communicate()
        os.set_inheritable(descriptor, False)
        try:
            namespace = cls(descriptor)
            async with namespace.route:
                yield namespace
        finally:
            # The namespace ends with the last process in it.
            os.close(descriptor)

    @property
    def path(self) -> str:
        """Its path for this process and its children."""
        return f"/proc/self/fd/{self.descriptor}"

    def enter(self) -> None:
        """Move this process, a child, into the namespace."""
        kernel.enter(self.descriptor, kernel.CLONE_NEWNET)


async def attach(host: Namespace, wan: Namespace, attachment: Attachment, *, name: str) -> None:
    """Connect a host to a link's namespace by a veth pair, whose end at the host is `name`."""
    await wan.route.link(
        "add",
        ifname=attachment.port,
        kind="veth",
        peer={
            "ifname": name,
            "address": LINK_ADDRESS,
            "net_ns_fd": host.descriptor,
        },
    )


async def start_wan(wan: Namespace, attached: list[Attachment], *, mtu: int) -> None:
    """Bring up a link's ends of the veth pairs to its hosts."""
    for attachment in attached:
        await _start(wan.route, attachment.port, mtu=mtu)


async def start_host(host: Namespace, attachments: dict[str, Attachment], *, mtu: int) -> None:
    """Bring up a host's interfaces (by link name), with addresses and without offloads."""
    with ChildProcess(target=_set_up, args=[host.descriptor, list(attachments)]) as child:
        child.communicate()
    await host.route.link("set", index=1, state="up")
    for name, attachment in attachments.items():
        index = await _start(host.route, name, mtu=mtu)
        for address in (attachment.ipv4, attachment.ipv6):
            await host.route.addr(
                "add",
                index=index,
                address=str(address.ip),
                prefixlen=address.network.prefixlen,
            )


async def _start(route: AsyncIPRoute, name: str, *, mtu: int) -> int:
    (index,) = await route.link_lookup(ifname=name)
    assert isinstance(index, int)  # noqa: S101 - the library has no types
    inet6 = {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]}
    await route.link("set", index=index, IFLA_AF_SPEC={"attrs": [("AF_INET6", inet6)]})
    flags = IFF_UP | IFF_NOARP
    await route.link("set", index=index, mtu=mtu, flags=flags, mask=flags)
    return index


def _make() -> ChildProcessReturnValue:
    kernel.unshare(kernel.CLONE_NEWNET)
    # Closed when the child ends; the receiver gets a descriptor of its own.
    return ChildProcessReturnValue(b"", [Path("/proc/self/ns/net").open("rb")])


def _set_up(namespace: int, interfaces: list[str]) -> None:
    kernel.enter(namespace, kernel.CLONE_NEWNET)
    for name, value in SETTINGS.items():
        Path("/proc/sys", name).write_text(value)
    for interface in interfaces:
        ethtool = IoctlEthtool(interface)
        for name in OFFLOADS:
            ethtool.set_offload_flag(name, 0)
