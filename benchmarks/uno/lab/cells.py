"""What is measured on real sockets: schemes, traffic, and the network.

Two sites, each with four senders, and one receiver at the second site: 50 Mbit/s for each host,
10 ms between hosts of a site and 160 ms between sites, eight links of 12.5 Mbit/s between them.
Buffers and marks are scaled from Uno's evaluation by the product of rate and near round trip.
"""

from dataclasses import dataclass
from typing import Any, Final

from sealane.lab.topology import Topology

LINE: Final = 50_000_000
"""Bits per second of each host."""
NEAR_MICROS: Final = 10_000
FAR_MICROS: Final = 160_000
LINKS: Final = 8
LINK_RATE: Final = 12_500_000
MTU: Final = 1500
BUFFER_BYTES: Final = 356_000
"""Of each port: 5.7 times what is on a near path, as 1 MB is at 100 Gbit/s and 14 µs."""
SENDERS: Final = 4
"""At each site."""
RECEIVER: Final = "sink"
PREPARED_SECONDS: Final = 25.0
"""Time from the start of the schedule of outages to that of traffic with a link that dies."""
FAR: Final = tuple(f"far-{number}" for number in range(SENDERS))
NEAR: Final = tuple(f"near-{number}" for number in range(SENDERS))
NETWORK: Final = "net"
CONTROL: Final = "control"
"""A second network, for calls of the daemons: nothing disturbs them, nor do they."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A transport, or a controller of sessions with what marks for it."""

    name: str
    way: str
    """`session`, `quic`, or a congestion control of the kernel's TCP."""
    congestion: str = "rate"
    marking: str = "phantom"

    @property
    def fabric(self) -> dict[str, object]:
        """Return the settings of the fabrics."""
        return {
            "rate_max_bits_per_second": LINE,
            "paths": 10,
            "congestion": self.congestion,
            "marking": self.marking,
            "line_bits_per_second": LINE,
            "near_rtt_micros": NEAR_MICROS,
            "far_rtt_micros": FAR_MICROS,
        }


SCHEMES: Final = (
    Scheme(name="uno", way="session", congestion="uno"),
    Scheme(name="uno, real queues", way="session", congestion="uno", marking="queue"),
    Scheme(name="gemini", way="session", congestion="gemini", marking="queue"),
    Scheme(name="dctcp", way="session", congestion="dctcp", marking="queue"),
    Scheme(name="rate", way="session"),
    Scheme(name="CUBIC", way="cubic"),
    Scheme(name="BBR", way="bbr"),
    Scheme(name="QUIC", way="quic"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Messages of several senders to one receiver, all from the same time on."""

    name: str
    far: int
    """Number of connections from the other site, spread over its hosts …"""
    near: int
    """… and from hosts of the receiver's site."""
    bytes: int
    """Length of the message of each of them."""
    probes: int = 0
    """Short messages that a near host sends meanwhile, one after the other."""
    dead_link: bool = False
    """One of the links between the sites goes down 200 ms after the start."""

    @property
    def seconds_max(self) -> float:
        """Time after which a message is given up: ten times what the receiver's line takes."""
        return 10 + 80 * (self.far + self.near) * self.bytes / LINE


PROBE_BYTES: Final = 16_000
TRAFFIC: Final = (
    Traffic(name="8 far", far=8, near=0, bytes=2_000_000),
    Traffic(name="4 far + 4 near", far=4, near=4, bytes=2_000_000),
    Traffic(name="8 near", far=0, near=8, bytes=2_000_000),
    Traffic(name="short behind 8 far", far=8, near=0, bytes=3_000_000, probes=100),
    Traffic(name="dead link", far=4, near=0, bytes=2_000_000, dead_link=True),
)
QUICK: Final = (Traffic(name="4 far + 4 near", far=4, near=4, bytes=1_000_000),)


def network(scheme: Scheme, *, dead_link: bool, seed: int) -> Topology:
    """Return the lab, with marks from phantom queues or from real ones, as the scheme needs."""
    far_bytes = LINE * FAR_MICROS // 8_000_000
    marks: dict[str, Any]
    if scheme.marking == "phantom":
        thresholds = {"low_bytes": far_bytes // 50, "high_bytes": far_bytes * 3 // 5}
        marks = {"phantom": {"cap_bytes": far_bytes, **thresholds}}
    else:
        quarter = BUFFER_BYTES // 4
        marks = {"red": {"low_bytes": quarter, "high_bytes": 3 * quarter}}
    # Two access links and a path make up a way.
    access = NEAR_MICROS // 4
    port = {"buffer_bytes": BUFFER_BYTES, **marks}
    sides = {"left": list(FAR), "right": [RECEIVER, *NEAR]}
    control = {"rate_bits_per_second": LINE, "delay_micros": 1000, "buffer_bytes": 10**6}
    return Topology.model_validate(
        {
            "mtu": MTU,
            "seed": seed,
            "slip_micros_max": 2_000,
            "wan": [
                {
                    "name": NETWORK,
                    **sides,
                    "rate_bits_per_second": LINK_RATE,
                    "delay_micros": FAR_MICROS // 2 - 2 * access,
                    "paths": LINKS,
                    **port,
                    "access": {"rate_bits_per_second": LINE, "delay_micros": access, **port},
                    "outages": [
                        {"path": 0, "start_seconds": PREPARED_SECONDS + 0.2, "end_seconds": 3600.0}
                    ]
                    if dead_link
                    else [],
                },
                {"name": CONTROL, **sides, **control},
            ],
        }
    )
