"""Choice of a path for a queue, and of the time to retry a lost path. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sealane.errors import UsageError
from sealane.protocol.nvme.constants import AnaState

_SHARE = 0.25
_JITTER = 0.25


class PathState(Enum):
    """State of a path."""

    CONNECTING = "connecting"
    LIVE = "live"
    WAITING = "waiting"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectPolicy:
    """Delays grow from `first_seconds` to `most_seconds`; finally a lost path is given up.

    `give_up_seconds` is NVMe's controller loss timeout; None: never give up.
    """

    first_seconds: float = 0.5
    most_seconds: float = 30.0
    give_up_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.first_seconds <= self.most_seconds:
            raise UsageError(
                "paths.delay",
                f"delays from {self.first_seconds} to {self.most_seconds} s; allowed: above 0, "
                "the last not below the first",
            )


def delay_within(lasted_seconds: float, *, first_seconds: float, most_seconds: float) -> float:
    """Return the delay before the next attempt of an outage that has lasted so long.

    It is a quarter of that, so that the pause is at most a quarter longer than the outage, or than
    `first_seconds` more.
    """
    return min(max(first_seconds, _SHARE * lasted_seconds), most_seconds)


class Backoff:
    """Delays between connection attempts of one path. `random` returns numbers in [0, 1).

    A delay is `delay_within`, which jitter shortens by up to a quarter, so that hosts that lost a
    target at the same time don't reconnect at the same time.
    """

    def __init__(self, policy: ReconnectPolicy, random: Callable[[], float]) -> None:
        self._policy = policy
        self._random = random
        self._lost_since: float | None = None

    def succeeded(self) -> None:
        """Start again with the first delay at the next loss."""
        self._lost_since = None

    def failed(self, now: float) -> float | None:
        """Return the seconds until the next attempt; None: give the path up."""
        if self._lost_since is None:
            self._lost_since = now
        limit = self._policy.give_up_seconds
        if limit is not None and now - self._lost_since >= limit:
            return None
        delay = delay_within(
            now - self._lost_since,
            first_seconds=self._policy.first_seconds,
            most_seconds=self._policy.most_seconds,
        )
        return delay * (1 - _JITTER * self._random())


@dataclass(frozen=True, slots=True, kw_only=True)
class PathView:
    """Properties of a path that the choice depends on. `ana`: empty if not reported."""

    state: PathState
    ana: Mapping[int, AnaState]


def ordered(paths: Sequence[PathView], *, nsid: int, queue_id: int) -> list[int]:
    """Return the indices of the paths that lead to a namespace, best first.

    Optimized paths come before others; among equal ones queues alternate, by queue id.
    Inaccessible, lost and changing paths are left out.
    """
    ranks: dict[AnaState, list[int]] = {AnaState.OPTIMIZED: [], AnaState.NON_OPTIMIZED: []}
    for index, path in enumerate(paths):
        state = path.ana.get(nsid, AnaState.INACCESSIBLE) if path.ana else AnaState.OPTIMIZED
        if path.state is PathState.LIVE and state in ranks:
            ranks[state].append(index)
    turned = []
    for equals in ranks.values():
        start = queue_id % len(equals) if equals else 0
        turned += equals[start:] + equals[:start]
    return turned
