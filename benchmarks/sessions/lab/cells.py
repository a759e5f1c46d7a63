"""What is measured in the lab: links, losses, lengths, warm and cold, and by whom.

Lengths are scaled with the rate: 1, 8 and 128 MiB at 12.8 Gbit/s. The round trip is that of the
paper, and so is the time on the wire over the round trip; packets in flight are fewer. Of the two
kinds of links one has messages enough for quantiles. The other has packets enough in flight: how
far TCP falls back at a loss is a matter of packets, not of time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from benchmarks.sessions.packets import OVERHEAD_BYTES

from sealane.lab.topology import Topology
from sealane.planning.model import Loss, Path, ideal

MIB: Final = 1 << 20
MTU: Final = 1500
UNIT_BYTES: Final = MTU - OVERHEAD_BYTES
ROUND_TRIP: Final = 0.025
FULL_RATE: Final = 12_800_000_000
BACKWARD_SHARE: Final = 4
"""The way back has this part of the rate, for acknowledgements: the machine carries more so."""
WAYS: Final = {
    "session": "sealed session, scheme by plan",
    "cubic": "TCP CUBIC",
    "bbr": "TCP BBR",
    "quic": "QUIC (quinn, CUBIC)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Losses of the link, both ways, each packet of each lane by itself."""

    name: str
    loss: Loss

    @property
    def settings(self) -> dict[str, Any]:
        """As a topology has them."""
        if self.loss.burst_packets > 1:
            return {"burst": {"p": self.loss.begin, "r": self.loss.end}}
        return {"loss": self.loss.rate}


CONDITIONS: Final = (
    Condition(name="0", loss=Loss(rate=0.0)),
    Condition(name="1e-4", loss=Loss(rate=1e-4)),
    Condition(name="1e-3", loss=Loss(rate=1e-3)),
    Condition(name="1e-2", loss=Loss(rate=1e-2)),
    Condition(name="1e-2, bursts of 8", loss=Loss(rate=1e-2, burst_packets=8.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of one kind, all alike; each way of sending has `lanes` of them, side by side."""

    name: str
    rates: tuple[int, ...]
    """In bit/s: the first that this machine carries on all links is taken."""
    lanes: int
    """Messages of a way's links are taken together."""
    sizes: tuple[int, ...]
    """Lengths before scaling."""
    conditions: tuple[Condition, ...]
    seconds_warm: tuple[float, ...]
    """Longest time for a cell, by length; slow ways get fewer messages."""
    seconds_cold: float


WIDE: Final = Links(
    name="wide",
    rates=(400_000_000, 300_000_000, 200_000_000, 100_000_000),
    lanes=1,
    sizes=(128 * MIB,),
    conditions=CONDITIONS[2:],
    seconds_warm=(20.0,),
    seconds_cold=5.0,
)
NARROW: Final = Links(
    name="narrow",
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
    """How much is measured."""

    count: int
    """Messages of a cell and way, all lanes together."""
    share: float
    """Of the longest times."""


FULL: Final = Effort(count=1002, share=1.0)
QUICK: Final = Effort(count=60, share=0.15)
TRIAL: Final = Effort(count=1002, share=0.1)
"""To see whether the machine carries a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One length over one kind of link, warm or cold; each way has links of its own."""

    links: Links
    condition: Condition
    full_bytes: int
    """Before scaling."""
    is_cold: bool
    rate: int

    @property
    def bytes(self) -> int:
        """On this link."""
        return self.full_bytes * self.rate // FULL_RATE

    @property
    def path(self) -> Path:
        """The same for the model."""
        return path_of(self.condition, self.rate)

    @property
    def ideal(self) -> float:
        """Seconds without loss, parity and opening."""
        return ideal(self.path, self.bytes)

    @property
    def seconds(self) -> float:
        """Longest time for it."""
        if self.is_cold:
            return self.links.seconds_cold
        return self.links.seconds_warm[self.links.sizes.index(self.full_bytes)]

    @property
    def expected_losses(self) -> float:
        """Lost packets of a message, in the mean."""
        return self.path.units(self.bytes) * self.condition.loss.rate

    @property
    def key(self) -> tuple[str, str, int, bool, int]:
        """Name of the measurement."""
        return self.links.name, self.condition.name, self.full_bytes, self.is_cold, self.rate


def path_of(condition: Condition, rate: int) -> Path:
    """Return the link as the model and the planner know it."""
    return Path(
        rate_bits_per_second=rate,
        round_trip_seconds=ROUND_TRIP,
        loss=condition.loss,
        unit_bytes=UNIT_BYTES,
        overhead_bytes=OVERHEAD_BYTES,
    )


def cells(links: Links, condition: Condition, rate: int) -> Iterator[Cell]:
    """All of one condition; warm ones first."""
    for is_cold, size in product((False, True), links.sizes):
        yield Cell(links=links, condition=condition, full_bytes=size, is_cold=is_cold, rate=rate)


def topology(links: Links, condition: Condition, rate: int) -> Topology:
    """Return a link for each way and lane, with a buffer of one round trip."""
    link = {
        "rate_bits_per_second": rate,
        "delay_micros": round(ROUND_TRIP / 2 * 1e6),
        "buffer_bytes": round(rate / 8 * ROUND_TRIP),
        **condition.settings,
        "backward": {"rate_bits_per_second": rate // BACKWARD_SHARE},
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
