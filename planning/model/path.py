"""A path in the model: its rate, round trip, losses with their bursts, and units.

All values are in seconds, bits per second and bytes. A unit is one packet's payload.
"""

import math
from dataclasses import dataclass, replace

from sealane.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Losses of consecutive packets: a Gilbert-Elliott chain, whose bad state loses all packets.

    The chain steps once per packet; with `is_timed` once in the time of a packet at the path's
    rate, whether one is sent or not, so that bursts last for a time. Without bursts
    (`burst_packets` up to 1 / (1 - rate), the mean run of independent losses), packets are lost
    independently. UsageError `model.….range`.
    """

    rate: float
    """Probability that a packet is lost, 0 ≤ rate < 1."""
    burst_packets: float = 1.0
    """Mean number of consecutive losses, at least 1."""
    is_timed: bool = False
    """True if a burst ends by time, also while nothing is sent."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UsageError("model.loss.range", f"loss {self.rate}; allowed: from 0 to below 1")
        if not 1 <= self.burst_packets < math.inf:
            raise UsageError(
                "model.burst.range", f"bursts of {self.burst_packets} packets; allowed: at least 1"
            )

    @property
    def is_independent(self) -> bool:
        """True if each packet is lost independently of the one before."""
        return self.burst_packets * (1 - self.rate) <= 1 + 1e-9

    @property
    def end(self) -> float:
        """Probability that the packet after a lost one arrives."""
        return 1 - self.rate if self.is_independent else 1 / self.burst_packets

    @property
    def begin(self) -> float:
        """Probability that the packet after one that arrived is lost."""
        return self.rate * self.end / (1 - self.rate)

    def after(self, steps: int) -> tuple[float, float]:
        """Return the probability of a loss `steps` packets after (an arrival, a loss)."""
        memory = (1 - self.begin - self.end) ** steps
        return self.rate * (1 - memory), self.rate + (1 - self.rate) * memory

    @property
    def again(self) -> float:
        """Probability that the retransmission of a loss is lost, too.

        With bursts: a burst of random length is retransmitted together, and counts as lost again if
        any part of it is.
        """
        if self.is_independent:
            return self.rate
        return self._again(self.rate)

    def again_after(self, steps: int) -> float:
        """Return `again` for a retransmission that leaves `steps` packets' time after the loss."""
        if not self.is_timed or self.is_independent:
            return self.again
        return self._again(self.after(steps)[1])

    def _again(self, first: float) -> float:
        """Return `again`, `first` being the probability that its first packet is lost."""
        survive = (1 - first) * self.end / (1 - (1 - self.end) * (1 - self.begin))
        return float(1 - survive)

    def every(self, count: int) -> "Loss":
        """Return the losses of packets that take `count` alike paths in turn, on one of them."""
        if count == 1 or not self.is_timed or self.is_independent:
            return self
        return replace(self, burst_packets=max(1.0, 1 / (1 - self.after(count)[1])))

    def any_of(self, count: int) -> float:
        """Return the probability that at least one of `count` consecutive packets is lost."""
        if count <= 0:
            return 0.0
        survive: float = (1 - self.rate) * (1 - self.begin) ** (count - 1)
        return 1 - survive


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path between two ends, and its units. UsageError `model.path.range`."""

    rate_bits_per_second: float
    round_trip_seconds: float
    loss: Loss
    unit_bytes: int
    """Payload bytes of one unit."""
    overhead_bytes: int = 0
    """Bytes that each unit's packet adds on the wire."""
    count: int = 1
    """Number of alike paths, whose losses are independent and which share the rate. Units take them
    in turn."""

    def __post_init__(self) -> None:
        if min(self.rate_bits_per_second, self.round_trip_seconds, self.unit_bytes) <= 0:
            raise UsageError("model.path.range", "rate, round trip and unit must be positive")
        if self.overhead_bytes < 0:
            raise UsageError("model.path.range", "the overhead of a unit must not be negative")
        if self.count < 1:
            raise UsageError("model.path.range", "there must be at least one path")

    @property
    def unit_seconds(self) -> float:
        """Time to put one unit on the wire (T_INJ)."""
        return (self.unit_bytes + self.overhead_bytes) * 8 / self.rate_bits_per_second

    def units(self, message_bytes: int) -> int:
        """Return the units of a message; an empty one has one, too."""
        return max(1, math.ceil(message_bytes / self.unit_bytes))


def ideal(path: Path, message_bytes: int) -> float:
    """Return the time without loss and parity: injection and one round trip, in seconds."""
    return path.units(message_bytes) * path.unit_seconds + path.round_trip_seconds
