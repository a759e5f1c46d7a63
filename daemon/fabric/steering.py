"""How the sessions of a fabric steer what they send: the operator's words for the engine's."""

from dataclasses import dataclass, replace
from typing import Final, Self

from sealane import _native
from sealane.daemon.fabric.known_paths import PathWindow
from sealane.errors import UsageError

CONTROLLERS: Final = {
    ("uno", "phantom"): "uno",
    ("uno", "queue"): "uno-queue",
    ("uno", "none"): "delay",
    ("gemini", "phantom"): "gemini",
    ("gemini", "queue"): "gemini",
    ("gemini", "none"): "delay",
    ("dctcp", "phantom"): "dctcp",
    ("dctcp", "queue"): "dctcp",
}
"""The engine's controller for `fabric.congestion` and `fabric.marking`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """Congestion control of a fabric's sessions, and the network that they are in."""

    congestion: str = "rate"
    """`rate`: the operator's rate with a circuit breaker; otherwise one of CONTROLLERS."""
    allowed: tuple[str, ...] = ()
    """What jobs may choose for a session instead."""
    marking: str = "queue"
    """What marks packets on the way: the switches' queues, phantom queues, or nothing."""
    line_bits_per_second: int = 0
    """Rate of the hosts' links, equal at all fabrics of a network."""
    near_rtt_micros: int = 0
    """Round trip within a data centre, without queues."""
    far_rtt_micros: int = 0
    """Longest round trip between data centres, without queues."""

    def chosen(self, congestion: str) -> Self:
        """Return the settings of a session whose job chooses a controller; empty: the fabric's.

        UsageError `session.congestion.not_allowed` if the operator allows no such choice.
        """
        if congestion in {"", self.congestion}:
            return self
        if congestion not in self.allowed:
            allowed = ", ".join(dict.fromkeys((self.congestion, *self.allowed)))
            raise UsageError(
                "session.congestion.not_allowed",
                f"congestion {congestion[:32]!r} is not allowed here; allowed: {allowed}",
            )
        return replace(self, congestion=congestion)

    @property
    def controller(self) -> str | None:
        """The engine's controller; None: the operator's rate alone."""
        return CONTROLLERS.get((self.congestion, self.marking))

    def for_engine(self, known: PathWindow | None = None) -> _native.Steering:
        """Return the settings as the engine takes them, for a path with a known window."""
        return _native.Steering(
            congestion=self.controller,
            line_bits_per_second=self.line_bits_per_second,
            near_rtt_nanos=self.near_rtt_micros * 1000,
            far_rtt_nanos=self.far_rtt_micros * 1000,
            phantom_marks=self.marking == "phantom",
            window_bytes=0 if known is None else known.window_bytes,
            window_age_nanos=0 if known is None else known.age_nanos,
        )
