"""Two network namespaces with a clean link between them: a veth pair with all offloads."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sealane.lab.namespaces import Namespace

ADDRESSES: Final = ("10.111.0.1", "10.111.0.2")
"""Addresses of the sending and of the receiving end."""


@contextlib.asynccontextmanager
async def veth(mtu: int) -> AsyncIterator[tuple[Namespace, Namespace]]:
    """Create two namespaces joined by a veth pair; raise OSError without the privilege."""
    async with Namespace.create() as left, Namespace.create() as right:
        await left.route.link(
            "add",
            ifname="wire",
            kind="veth",
            peer={"ifname": "wire", "net_ns_fd": right.descriptor},
        )
        for end, address in zip((left, right), ADDRESSES, strict=True):
            (index,) = await end.route.link_lookup(ifname="wire")
            await end.route.link("set", index=index, mtu=mtu, state="up")
            await end.route.addr("add", index=index, address=address, prefixlen=24)
        yield left, right
