"""What earlier sessions found out about a path, so that a new one doesn't start with a guess.

Without numpy and the model, which a fabric without sessions does not load.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sealane._native import WireAddress
from sealane.daemon.runtime.clock import monotonic_ns

PATHS_MAX: Final = 1024
AGE_SECONDS: Final = 600.0
"""Age at which a measurement says nothing any more: routes and their load change."""
PACKETS_MIN: Final = 10_000
"""Packets below which a measurement is no better than the operator's assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLoss:
    """Loss of a path: the probability that a packet is lost, and the mean run of lost packets."""

    rate: float
    burst_packets: float = 1.0
    burst_seconds: float = 0.0
    """Mean length of a run in time, which holds at any rate; 0 if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWindow:
    """A congestion window that suited a path some time ago."""

    window_bytes: int
    age_nanos: int


@dataclass(frozen=True, slots=True)
class PathKey:
    """The paths from this fabric to a peer: the peer's SPIFFE id and its hosts, without ports."""

    peer: str
    hosts: frozenset[str]

    @classmethod
    def of(cls, peer: str, addresses: Iterable[str]) -> "PathKey":
        """Return the key for a peer with these addresses of paths."""
        return cls(peer, frozenset(WireAddress(address).host for address in addresses))


T = TypeVar("T")


class _Newest(Generic[T]):
    """The newest value of each path, of at most PATHS_MAX paths, for AGE_SECONDS."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._known: OrderedDict[Hashable, tuple[int, T]] = OrderedDict()

    def note(self, path: Hashable, value: T) -> None:
        self._known[path] = (self._now_ns(), value)
        self._known.move_to_end(path)
        if len(self._known) > PATHS_MAX:
            self._known.popitem(last=False)

    def get(self, path: Hashable) -> tuple[int, T] | None:
        """Return a value with its age in nanoseconds."""
        if path not in self._known:
            return None
        at, value = self._known[path]
        age = self._now_ns() - at
        return None if age > AGE_SECONDS * 1e9 else (age, value)

    def take(self, path: Hashable) -> tuple[int, T] | None:
        """Return a value with its age, and forget it."""
        found = self.get(path)
        self._known.pop(path, None)
        return found


class PathLosses:
    """The newest measurement of each path."""

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._newest = _Newest[PathLoss](now_ns)

    def note(self, path: PathKey, loss: PathLoss, packets: float) -> None:
        """Keep a measurement that is based on `packets` packets, if these are enough."""
        if packets >= PACKETS_MIN:
            self._newest.note(path, loss)

    def get(self, path: PathKey) -> PathLoss | None:
        """Return the measurement of a path, or None if there is none that is recent."""
        found = self._newest.get(path)
        return None if found is None else found[1]


class PathWindows:
    """The last congestion window of each path and controller.

    A window suits one session, so only the next one starts with it, and one controller: what DCTCP
    fills is another's full buffer. Without a controller (None) there is none.
    """

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._newest = _Newest[int](now_ns)

    def note(self, path: PathKey, controller: str | None, statistics: Mapping[str, int]) -> None:
        """Keep the window with which a session ended, if it has been filled and marks arrived."""
        window = statistics.get("window_bytes", 0)
        is_used = statistics.get("wire_bytes_sent", 0) >= window > 0
        if is_used and not statistics.get("is_fallen_back", 0):
            self._newest.note((path, controller), window)

    def take(self, path: PathKey, controller: str | None) -> PathWindow | None:
        """Return the window of a path with its age, or None if there is none that is recent."""
        found = self._newest.take((path, controller))
        return None if found is None else PathWindow(age_nanos=found[0], window_bytes=found[1])
