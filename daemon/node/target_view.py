"""A target as a gateway sees it: shown by `sealanectl status`, compared for new volumes."""

from dataclasses import dataclass
from enum import StrEnum

from sealane.errors import Reason


class TargetState(StrEnum):
    """How a target was when it was last asked."""

    GOOD = "good"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    """It answers, but its device or one of its stores doesn't serve."""
    AWAY = "away"
    UNKNOWN = "unknown"
    """It hasn't been asked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetView:
    """A target of a gateway's configuration, as it was when it was last asked."""

    node: str
    address: str
    state: TargetState = TargetState.UNKNOWN
    reason: Reason | None = None
    """Why it is away."""
    detail: str = ""
    """The same for people."""
    free_bytes: int | None = None
    """Room for new volumes; None: it doesn't say."""
    capacity_bytes: int = 0
    volumes: int = 0
    has_room_for_volume: bool = True
    """Whether it has fewer volumes than it can have."""
