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
"""Time from the start of the schedule of outages to that of the traffic which they meet."""
FAR: Final = tuple(f"far-{number}" for number in range(SENDERS))
NEAR: Final = tuple(f"near-{number}" for number in range(SENDERS))
SESSIONS_MAX: Final = 128
"""Of a fabric: those of a run, and those that end with the one before."""
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
            "sessions_max": SESSIONS_MAX,
            "limits": {"sessions": SESSIONS_MAX},
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
class Links:
    """What happens to the links between the sites."""

    outages: tuple[tuple[float, float], ...] = ()
    """Starts and ends of the times in which the first link is down, in seconds from the start of
    the traffic."""
    has_bursts: bool = False
    """All links lose everything for a mean of BURST_MICROS, GOOD_MICROS apart, in both
    directions."""


BURST_MICROS: Final = 10_000
GOOD_MICROS: Final = 990_000
OUTAGE_SECONDS: Final = 0.2
"""Time from the start of the traffic to the first outage."""
FLAP_SECONDS: Final = 2 * FAR_MICROS / 1e6
"""A flapping link is down for so long, and then up for so long: two far round trips each."""
FLAPS: Final = 100


def flaps() -> tuple[tuple[float, float], ...]:
    """Return the outages of a flapping link."""
    starts = [OUTAGE_SECONDS + 2 * FLAP_SECONDS * number for number in range(FLAPS)]
    return tuple((start, start + FLAP_SECONDS) for start in starts)


STEADY: Final = Links()
DEAD: Final = Links(outages=((OUTAGE_SECONDS, 3600.0),))
FLAPPING: Final = Links(outages=flaps())
BURSTS: Final = Links(has_bursts=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Messages of several senders to one receiver: at the same time, or at random ones."""

    name: str
    far: int
    """Number of connections from the other site, spread over its hosts …"""
    near: int
    """… and from hosts of the receiver's site."""
    bytes: int = 0
    """Length of the message of each of them, all from the start on …"""
    load: int = 0
    """… or per cent of the receiver's line that messages of mixed lengths take (`arrivals`) …"""
    seconds: float = 0.0
    """… which arrive in this time. A message takes the first free connection of its host."""
    probes: int = 0
    """Short messages that a near host sends meanwhile, one after the other."""
    links: Links = STEADY

    @property
    def seconds_max(self) -> float:
        """Time after which a message is given up: ten times what the receiver's line takes."""
        if self.load:
            return MIXED_SECONDS_MAX
        return 10 + 80 * (self.far + self.near) * self.bytes / LINE


MIXED_SECONDS_MAX: Final = 30.0
PROBE_BYTES: Final = 16_000
MIXED_FAR: Final = 6 * SENDERS
MIXED_NEAR: Final = 4 * SENDERS
"""Connections on which messages rarely wait for each other at a load of 80 %."""


def mixed_load(load: int, seconds: float = 10.0) -> Traffic:
    """Return traffic at a load in per cent of the receiver's line."""
    name = f"mixed, {load} %"
    return Traffic(name=name, far=MIXED_FAR, near=MIXED_NEAR, load=load, seconds=seconds)


TRAFFIC: Final = (
    Traffic(name="8 far", far=8, near=0, bytes=2_000_000),
    Traffic(name="4 far + 4 near", far=4, near=4, bytes=2_000_000),
    Traffic(name="8 near", far=0, near=8, bytes=2_000_000),
    Traffic(name="short behind 8 far", far=8, near=0, bytes=3_000_000, probes=100),
    mixed_load(40),
    mixed_load(80),
    Traffic(name="dead link", far=4, near=0, bytes=2_000_000, links=DEAD),
    Traffic(name="flapping link", far=4, near=0, bytes=2_000_000, links=FLAPPING),
    Traffic(name="bursts", far=4, near=0, bytes=2_000_000, links=BURSTS),
)
QUICK: Final = (
    Traffic(name="4 far + 4 near", far=4, near=4, bytes=1_000_000),
    mixed_load(40, 2.0),
)


def outages(links: Links) -> list[dict[str, Any]]:
    """Return the schedule of a topology, which starts PREPARED_SECONDS before the traffic."""
    return [
        {
            "path": 0,
            "start_seconds": PREPARED_SECONDS + start,
            "end_seconds": PREPARED_SECONDS + end,
        }
        for start, end in links.outages
    ]


def network(scheme: Scheme, links: Links, *, seed: int) -> Topology:
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
    timed = {"good_micros": GOOD_MICROS, "bad_micros": BURST_MICROS}
    bursts: dict[str, Any] = {"timed_bursts": timed} if links.has_bursts else {}
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
                    "outages": outages(links),
                    **bursts,
                },
                {"name": CONTROL, **sides, **control},
            ],
        }
    )
