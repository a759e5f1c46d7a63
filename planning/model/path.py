"""What the model knows of a path: rate, round trip, losses and their bursts, units.

Seconds, bits per second and bytes throughout. A unit is one packet's payload.
"""

import math
from dataclasses import dataclass
from typing import Final

from sealane.errors import UsageError

PACKET_OVERHEAD_BYTES: Final = 32 + 7 + 16 + 28
"""Header, message descriptor and tag of a unit's packet (session-wire.md), IPv4 and UDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Losses of packets in a row: a Gilbert-Elliott chain that loses all packets in its bad state.

    The chain steps once a packet. Without bursts (`burst_packets` at most 1 / (1 - rate), the mean
    run of independent losses) every packet is lost by itself.
    """

    rate: float
    """Probability that a packet is lost, 0 ≤ rate < 1."""
    burst_packets: float = 1.0
    """Mean number of packets that are lost in a row, at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UsageError("model.loss.range", f"loss {self.rate} is not within [0, 1)")
        if not 1 <= self.burst_packets < math.inf:
            raise UsageError("model.burst.range", f"bursts of {self.burst_packets}: 1 at least")

    @property
    def is_independent(self) -> bool:
        """Whether a loss says nothing about the next packet."""
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
        """Probability of a loss `steps` packets after (one that arrived, one that was lost)."""
        memory = (1 - self.begin - self.end) ** steps
        return self.rate * (1 - memory), self.rate + (1 - self.rate) * memory

    @property
    def again(self) -> float:
        """Probability that what was lost is lost again when it is sent again.

        A burst of a length drawn from its distribution is sent again as one, and hit as one.
        """
        if self.is_independent:
            return self.rate
        survive = (1 - self.rate) * self.end / (1 - (1 - self.end) * (1 - self.begin))
        return float(1 - survive)

    def any_of(self, count: int) -> float:
        """Probability that of `count` packets in a row at least one is lost."""
        if count <= 0:
            return 0.0
        survive: float = (1 - self.rate) * (1 - self.begin) ** (count - 1)
        return 1 - survive


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path between two ends, and the units that cross it."""

    rate_bits_per_second: float
    round_trip_seconds: float
    loss: Loss
    unit_bytes: int
    """Payload bytes of one unit."""
    overhead_bytes: int = 0
    """Bytes that each unit's packet adds on the wire."""

    def __post_init__(self) -> None:
        if min(self.rate_bits_per_second, self.round_trip_seconds, self.unit_bytes) <= 0:
            raise UsageError("model.path.range", "rate, round trip and unit must be positive")
        if self.overhead_bytes < 0:
            raise UsageError("model.path.range", "the overhead of a unit must not be negative")

    @property
    def unit_seconds(self) -> float:
        """Time to put one unit on the wire (T_INJ)."""
        return (self.unit_bytes + self.overhead_bytes) * 8 / self.rate_bits_per_second

    def units(self, message_bytes: int) -> int:
        """Units of a message; an empty one has a unit too."""
        return max(1, math.ceil(message_bytes / self.unit_bytes))


def ideal(path: Path, message_bytes: int) -> float:
    """Completion time without loss and parity: injection and one round trip, in seconds."""
    return path.units(message_bytes) * path.unit_seconds + path.round_trip_seconds
