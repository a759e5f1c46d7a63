"""Cells measured in the lab: links, losses, message lengths, states of the connection.

Lengths are 1, 8 and 128 MiB at 12.8 Gbit/s, scaled with the rate. The round trip is the paper's,
and so is the ratio of transmission time to round trip; there are fewer packets in flight. There are
two kinds of links. Narrow links allow enough messages for quantiles. Wide links have enough packets
in flight: how far TCP falls back after a loss depends on packets, not on time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from benchmarks.sessions.packets import OVERHEAD_BYTES

from sealane.daemon.config import UNIT_BYTES
from sealane.lab.topology import OUTAGES_MAX, Topology
from sealane.planning.model import Loss, Path, ideal

MIB: Final = 1 << 20
MTU: Final = 1500
FULL_RATE: Final = 12_800_000_000
BACKWARD_SHARE: Final = 4
"""Divisor of the rate in the reverse direction, which carries only acknowledgements. It lets the
machine sustain higher rates."""
BUFFER_BYTES_MIN: Final = 64 * MTU
"""Buffer of a link with a short round trip."""
OUTAGE_PERIOD: Final = 2.0
WAYS: Final = {
    "session": "sealed session of two daemons, auto",
    "cubic": "TCP CUBIC",
    "bbr": "TCP BBR",
    "quic": "QUIC (quinn, CUBIC)",
    "quic-bbr": "QUIC (quinn, BBR)",
}
KEY: Final = ("links", "condition", "full_bytes", "connection", "rate")
"""Names of the parts of a measurement's key."""
CONNECTIONS: Final = ("first", "warm", "cold")
"""Messages on the first connection of a path, on one in use, and each on a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What the links do to packets, drawn for each lane and direction independently."""

    name: str
    loss: Loss
    loss_backward: float | None = None
    """Loss of the direction of the acknowledgements; None: that of the messages."""
    jitter: float = 0.0
    """The most by which a packet's delay differs, as a share of the round trip; order is kept."""
    reorder: float = 0.0
    """Share of packets that arrive up to a quarter of a round trip late, behind others."""
    duplicate: float = 0.0
    outage_round_trips: float = 0.0
    """Length of an outage that begins every OUTAGE_PERIOD seconds."""

    def settings(self, round_trip: float) -> dict[str, Any]:
        """Return the settings of a link with this round trip for a topology."""
        found: dict[str, Any] = {
            "jitter_micros": round(self.jitter * round_trip * 1e6),
            "duplicate": self.duplicate,
        }
        if self.reorder:
            late = round(round_trip / 4 * 1e6)
            found |= {"reorder": self.reorder, "reorder_micros_max": late}
        if self.outage_round_trips:
            lasts = self.outage_round_trips * round_trip
            found["outages"] = [
                {"start_seconds": start, "end_seconds": start + lasts}
                for start in (OUTAGE_PERIOD * n for n in range(1, OUTAGES_MAX + 1))
            ]
        if self.loss.burst_packets > 1:
            return found | {"burst": {"p": self.loss.begin, "r": self.loss.end}}
        return found | {"loss": self.loss.rate}

    @property
    def backward(self) -> dict[str, Any]:
        """Return what differs in the direction of the acknowledgements."""
        return {} if self.loss_backward is None else {"loss": self.loss_backward}


CONDITIONS: Final = (
    Condition(name="0", loss=Loss(rate=0.0)),
    Condition(name="1e-4", loss=Loss(rate=1e-4)),
    Condition(name="1e-3", loss=Loss(rate=1e-3)),
    Condition(name="1e-2", loss=Loss(rate=1e-2)),
    Condition(name="1e-2, bursts of 8", loss=Loss(rate=1e-2, burst_packets=8.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Identical links of one kind; each transport has `lanes` of them in parallel."""

    name: str
    round_trip: float
    """Round trip in seconds without queues."""
    full_rate: int
    """Rate in bit/s at which messages have their full length."""
    rates: tuple[int, ...]
    """Rates in bit/s; the first that this machine sustains on all links is used."""
    lanes: int
    """Links per transport; their messages are summarized together."""
    sizes: tuple[int, ...]
    """Message lengths before scaling."""
    conditions: tuple[Condition, ...]
    seconds_warm: tuple[float, ...]
    """Time limit of a cell, by length; slow transports send fewer messages."""
    seconds_cold: float


WIDE: Final = Links(
    name="wide",
    round_trip=0.025,
    full_rate=FULL_RATE,
    rates=(400_000_000, 300_000_000, 200_000_000, 100_000_000),
    lanes=1,
    sizes=(128 * MIB,),
    conditions=CONDITIONS[2:],
    seconds_warm=(20.0,),
    seconds_cold=5.0,
)
NARROW: Final = Links(
    name="narrow",
    round_trip=0.025,
    full_rate=FULL_RATE,
    rates=(100_000_000, 70_000_000, 50_000_000, 30_000_000, 20_000_000),
    lanes=3,
    sizes=(MIB, 8 * MIB, 128 * MIB),
    conditions=CONDITIONS,
    seconds_warm=(20.0, 20.0, 40.0),
    seconds_cold=4.0,
)
LINKS: Final = (WIDE, NARROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Amount of work per cell."""

    count: int
    """Messages per cell and transport, over all lanes."""
    share: float
    """Share of the time limits."""


FULL: Final = Effort(count=1002, share=1.0)
QUICK: Final = Effort(count=60, share=0.15)
TRIAL: Final = Effort(count=1002, share=0.1)
"""Used to find out whether the machine sustains a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Messages of one length over one kind of link."""

    links: Links
    condition: Condition
    full_bytes: int
    """Message length before scaling."""
    connection: str
    """One of CONNECTIONS."""
    rate: int

    @property
    def bytes(self) -> int:
        """Message length on this link."""
        return self.full_bytes * self.rate // self.links.full_rate

    @property
    def path(self) -> Path:
        """Model of the link."""
        return path_of(self.links, self.condition, self.rate)

    @property
    def ideal(self) -> float:
        """Completion in seconds without loss, parity and connection setup."""
        return ideal(self.path, self.bytes)

    @property
    def seconds(self) -> float:
        """Time limit."""
        if self.connection != "warm":
            return self.links.seconds_cold
        return self.links.seconds_warm[self.links.sizes.index(self.full_bytes)]

    @property
    def expected_losses(self) -> float:
        """Mean number of lost packets per message."""
        return self.path.units(self.bytes) * self.condition.loss.rate

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        """Key of the measurement."""
        return self.links.name, self.condition.name, self.full_bytes, self.connection, self.rate


def path_of(links: Links, condition: Condition, rate: int) -> Path:
    """Return the link as the model and the planner describe it."""
    return Path(
        rate_bits_per_second=rate,
        round_trip_seconds=links.round_trip,
        loss=condition.loss,
        unit_bytes=UNIT_BYTES,
        overhead_bytes=OVERHEAD_BYTES,
    )


def cells(links: Links, condition: Condition, rate: int) -> Iterator[Cell]:
    """Yield all cells of one condition, those of a path that nobody knows first."""
    for connection, size in product(CONNECTIONS, links.sizes):
        if connection != "first" or size == links.sizes[len(links.sizes) // 2]:
            yield Cell(
                links=links,
                condition=condition,
                full_bytes=size,
                connection=connection,
                rate=rate,
            )


def topology(links: Links, condition: Condition, rate: int) -> Topology:
    """Return a topology with a link for each transport and lane, buffered for a round trip."""
    link = {
        "rate_bits_per_second": rate,
        "delay_micros": round(links.round_trip / 2 * 1e6),
        "buffer_bytes": max(round(rate / 8 * links.round_trip), BUFFER_BYTES_MIN),
        **condition.settings(links.round_trip),
        "backward": {"rate_bits_per_second": rate // BACKWARD_SHARE, **condition.backward},
    }
    return Topology.model_validate(
        {
            "mtu": MTU,
            "wan": [
                {"name": f"{way}-{lane}", "left": [f"{way}-{lane}-l"], "right": [f"{way}-{lane}-r"]}
                | link
                for way, lane in product(WAYS, range(links.lanes))
            ],
        }
    )
