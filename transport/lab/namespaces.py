"""Network namespaces of a lab: made, wired and set up by short-lived children.

A namespace lives as long as its descriptor here or a process in it: nothing is left in a file
system, so the end of the holder is the end of all of them.
"""

import os
from pathlib import Path
from typing import Final

from pyroute2 import AsyncIPRoute, config
from pyroute2.ethtool.ioctl import IoctlEthtool
from pyroute2.netlink.rtnl.ifaddrmsg import IFA_F_NODAD
from pyroute2.process import ChildProcess, ChildProcessReturnValue

from sealane.transport.lab import kernel
from sealane.transport.lab.plan import Attachment

# The same everywhere, so that frames are forwarded as they are (locally administered).
LINK_ADDRESS: Final = "02:00:00:00:00:01"
IFF_UP: Final = 0x1
IFF_NOARP: Final = 0x80
"""From <linux/if.h>. Without neighbour discovery frames go to the interface's own address."""
IN6_ADDR_GEN_MODE_NONE: Final = 1
"""From <linux/if_link.h>: no link-local address, so no packets but those that someone sends."""
# In the order in which they can be turned off: segmentation needs the ones after it.
OFFLOADS: Final = (
    "generic-receive-offload",
    "generic-segmentation-offload",
    "tcp-segmentation-offload",
    "scatter-gather",
    "tx-checksumming",
)
# Per namespace, in /proc/sys: what a TCP connection learned must not help the next run.
SETTINGS: Final = {"net/ipv4/tcp_no_metrics_save": "1"}

# Children are ended by SIGTERM, which must not reach the event loop through handlers they inherit.
config.disable_mp_signal = True


class Namespace:
    """A network namespace."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> "Namespace":
        """Make a new one; OSError if this process may not."""
        with ChildProcess(target=_make, args=[]) as child:
            _, (descriptor,) = child.communicate()
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    @property
    def path(self) -> str:
        """Where this process and its children find it."""
        return f"/proc/self/fd/{self.descriptor}"

    def enter(self) -> None:
        """Move this process into it: for children only."""
        kernel.enter(self.descriptor, kernel.CLONE_NEWNET)

    def close(self) -> None:
        """Let go of it; it ends with the last process in it."""
        os.close(self.descriptor)


async def set_up_host(host: Namespace) -> None:
    """Start the loopback interface and set what is per namespace."""
    with ChildProcess(target=_set, args=[host.descriptor]) as child:
        child.communicate()
    async with AsyncIPRoute(netns=host.path, flags=0) as route:
        await route.link("set", index=1, state="up")


async def attach(
    host: Namespace, wan: Namespace, attachment: Attachment, *, name: str, mtu: int
) -> None:
    """Lay a veth pair from a host, where it is `name`, to a link's namespace; no offloads."""
    async with AsyncIPRoute(netns=wan.path, flags=0) as route:
        await route.link(
            "add",
            ifname=attachment.port,
            kind="veth",
            mtu=mtu,
            peer={
                "ifname": name,
                "mtu": mtu,
                "address": LINK_ADDRESS,
                "gso_max_segs": 1,
                "net_ns_fd": host.descriptor,
            },
        )
        (near,) = await route.link_lookup(ifname=attachment.port)
        await _start(route, near)
    with ChildProcess(target=_turn_off_offloads, args=[host.descriptor, name]) as child:
        child.communicate()
    async with AsyncIPRoute(netns=host.path, flags=0) as route:
        (far,) = await route.link_lookup(ifname=name)
        await _start(route, far)
        for address in (attachment.ipv4, attachment.ipv6):
            # Without duplicate address detection, which IPv4 does not have anyway.
            await route.addr(
                "add",
                index=far,
                address=str(address.ip),
                prefixlen=address.network.prefixlen,
                flags=IFA_F_NODAD if address.version == 6 else 0,
            )


async def _start(route: AsyncIPRoute, index: int) -> None:
    inet6 = {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", IN6_ADDR_GEN_MODE_NONE)]}
    await route.link("set", index=index, IFLA_AF_SPEC={"attrs": [("AF_INET6", inet6)]})
    await route.link("set", index=index, flags=IFF_UP | IFF_NOARP, mask=IFF_UP | IFF_NOARP)


def _make() -> ChildProcessReturnValue:
    kernel.unshare(kernel.CLONE_NEWNET)
    # Closed by the child's end; the receiver has a descriptor of its own.
    return ChildProcessReturnValue(b"", [Path("/proc/self/ns/net").open("rb")])


def _set(namespace: int) -> None:
    kernel.enter(namespace, kernel.CLONE_NEWNET)
    for name, value in SETTINGS.items():
        Path("/proc/sys", name).write_text(value)


def _turn_off_offloads(namespace: int, interface: str) -> None:
    kernel.enter(namespace, kernel.CLONE_NEWNET)
    ethtool = IoctlEthtool(interface)
    for name in OFFLOADS:
        ethtool.set_offload_flag(name, 0)
