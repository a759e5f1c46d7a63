"""Two network namespaces with a clean link between them: a veth pair with all offloads."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sealane.lab.namespaces import Namespace

ADDRESSES: Final = ("10.111.0.1", "10.111.0.2")
"""Addresses of the sending and of the receiving end."""
BURST_BYTES: Final = 1 << 16
QUEUE_MICROS: Final = 20_000
"""Of the token bucket: what may leave at once, and how long packets may wait."""


@contextlib.asynccontextmanager
async def veth(mtu: int, rate: int = 0) -> AsyncIterator[tuple[Namespace, Namespace]]:
    """Create two namespaces joined by a veth pair; raise OSError without the privilege.

    `rate`, unless 0, limits what the first one sends, in bit/s, by a token bucket (tc-tbf(8)).
    """
    async with Namespace.create() as left, Namespace.create() as right:
        await left.route.link(
            "add",
            ifname="wire",
            kind="veth",
            peer={"ifname": "wire", "net_ns_fd": right.descriptor},
        )
        for end, address in zip((left, right), ADDRESSES, strict=True):
            (own,) = await end.route.link_lookup(ifname="lo")
            await end.route.link("set", index=own, state="up")
            (index,) = await end.route.link_lookup(ifname="wire")
            await end.route.link("set", index=index, mtu=mtu, state="up")
            await end.route.addr("add", index=index, address=address, prefixlen=24)
            if rate and end is left:
                limit = {"rate": rate // 8, "burst": BURST_BYTES, "latency": QUEUE_MICROS}
                await end.route.tc("add", "tbf", index=index, **limit)
        yield left, right
