"""The network of Uno's evaluation, as each scheme needs it."""

from dataclasses import dataclass
from typing import Any, Final

from sealane import _native

LINE: Final = 100_000_000_000
HOST_BUFFER: Final = 1 << 40
"""Hosts wait for their own links; nothing is dropped there."""
HOP_NANOS: Final = 1_000
WAN_NANOS: Final = 886_500
PORT_BYTES: Final = 1_000_000
FAR_PRODUCT: Final = 22_400_515
"""Bytes that fill the longest path: the cap of phantom queues."""
PARTS: Final = 10**9
BURSTS: Final = (39_000, 785_000_000, PARTS, 0)
"""Gilbert-Elliott losses fitted to those that Uno's authors measured between data centres: 5e-5 of
all packets, 1.27 at a time (`uno.md`, section 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Settings of the network that differ between figures."""

    wan_links: int = 8
    wan_nanos: int = WAN_NANOS
    near_bytes: int = PORT_BYTES
    """Buffer of a port within a data centre …"""
    far_bytes: int = PORT_BYTES
    """… and of one between data centres."""
    slowdown: int = 5
    """By how many per cent phantom queues drain more slowly than the line."""
    bursts: bool = False
    """Lose packets between the data centres in bursts."""
    dead_link: bool = False
    """The first link between the data centres carries nothing."""

    def links(self, marking: str) -> dict[str, Any]:
        """Return the links as the simulator takes them; `marking` as for `Scheme`."""
        drain = round(PARTS / (1 + self.slowdown / 100))
        low, high = FAR_PRODUCT * 2 // 100, FAR_PRODUCT * 60 // 100
        phantom = (drain, FAR_PRODUCT, low, high, PARTS)

        def link(*, delay: int, buffer: int, is_far: bool) -> _native.LinkSettings:
            red = (buffer // 4, buffer * 3 // 4, PARTS)
            is_marked = marking == "red" or (marking == "near-red" and not is_far)
            return _native.LinkSettings(
                rate_bits_per_second=LINE,
                delay_nanos=delay,
                buffer_bytes=buffer,
                phantom=phantom if marking == "phantom" else None,
                red=red if is_marked else None,
                gilbert_elliott=BURSTS if self.bursts and is_far else None,
            )

        return {
            "host": _native.LinkSettings(
                rate_bits_per_second=LINE, delay_nanos=HOP_NANOS, buffer_bytes=HOST_BUFFER
            ),
            "near": link(delay=HOP_NANOS, buffer=self.near_bytes, is_far=False),
            "border": link(delay=HOP_NANOS, buffer=self.far_bytes, is_far=True),
            "wan": link(delay=self.wan_nanos, buffer=self.far_bytes, is_far=True),
            "wan_links": self.wan_links,
            "outages": [(0, 0, 10**15)] if self.dead_link else [],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Congestion control, load balancing and recovery together."""

    name: str
    congestion: str
    balance: str
    marking: str
    """`phantom`: phantom queues at all ports; `red`: their real queues; `near-red`: real queues
    within a data centre; `none`."""
    code: tuple[int, int] | None = None
    without: tuple[str, ...] = ()


def scheme(name: str, congestion: str, balance: str, marking: str, **more: Any) -> Scheme:
    """Return a scheme."""
    return Scheme(name=name, congestion=congestion, balance=balance, marking=marking, **more)


UNO: Final = scheme("Uno, ours", "uno", "subflows", "phantom")
RELEASED: Final = scheme("Uno as released", "uno-released", "subflows", "phantom")
RELEASED_ECMP: Final = scheme("Uno as released, one path", "uno-released", "ecmp", "phantom")
GEMINI: Final = scheme("Gemini as published", "gemini-released-5ms", "ecmp", "near-red")
GEMINI_FAIR: Final = scheme(
    "Gemini, our start and UnoLB", "gemini-small-start", "subflows", "near-red"
)
MPRDMA_BBR: Final = scheme("MPRDMA and BBR, one path", "mprdma-bbr-half", "ecmp", "near-red")
CUBIC: Final = scheme("CUBIC, one path", "cubic", "ecmp", "none")
DCTCP: Final = scheme("DCTCP, one path", "dctcp", "ecmp", "red")
