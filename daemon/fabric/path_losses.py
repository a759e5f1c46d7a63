"""What earlier sessions measured on a path, so that a new one doesn't start with a guess.

Without numpy and the model, which a fabric without sessions does not load.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True)
class PathKey:
    """The paths from this fabric to a peer: the peer's SPIFFE id and its hosts, without ports."""

    peer: str
    hosts: frozenset[str]

    @classmethod
    def of(cls, peer: str, addresses: Iterable[str]) -> "PathKey":
        """Return the key for a peer with these addresses (host:port)."""
        hosts = (address.rpartition(":")[0].strip("[]") for address in addresses)
        return cls(peer, frozenset(str(ipaddress.ip_address(host)) for host in hosts))


class PathLosses:
    """The newest measurement of each path, of at most PATHS_MAX paths."""

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._now_ns = now_ns
        self._known: OrderedDict[PathKey, tuple[int, PathLoss]] = OrderedDict()

    def note(self, path: PathKey, loss: PathLoss, packets: float) -> None:
        """Keep a measurement that is based on `packets` packets, if these are enough."""
        if packets < PACKETS_MIN:
            return
        self._known[path] = (self._now_ns(), loss)
        self._known.move_to_end(path)
        if len(self._known) > PATHS_MAX:
            self._known.popitem(last=False)

    def get(self, path: PathKey) -> PathLoss | None:
        """Return the measurement of a path, or None if there is none that is recent."""
        found = self._known.get(path)
        if found is None or self._now_ns() - found[0] > AGE_SECONDS * 1e9:
            return None
        return found[1]
