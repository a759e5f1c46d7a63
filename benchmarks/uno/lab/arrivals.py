"""Mixed load: messages that arrive at random, the same ones for each scheme."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from benchmarks.uno import traffic
from benchmarks.uno.lab.cells import FAR, FAR_MICROS, LINE, NEAR, NEAR_MICROS
from numpy.typing import NDArray

UNO_LINE: Final = 100_000_000_000
UNO_NEAR_SECONDS: Final = 14e-6
UNO_FAR_SECONDS: Final = 1.8e-3
"""Line and round trips for which the sizes in `benchmarks.uno.traffic` were chosen."""
NEAR_SCALE: Final = LINE * NEAR_MICROS / 1e6 / (UNO_LINE * UNO_NEAR_SECONDS)
FAR_SCALE: Final = LINE * FAR_MICROS / 1e6 / (UNO_LINE * UNO_FAR_SECONDS)
"""Messages keep their ratio to what is on their path: line times round trip."""
GRID: Final = 100_000
"""Points for the mean of a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A message for the receiver."""

    kind: str
    """`far` or `near`."""
    host: str
    at: float
    """Seconds from the start."""
    bytes: int


def sizes(kind: str, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of a class's message lengths, in bytes."""
    known, scale = {
        "far": (traffic.FAR_SIZES, FAR_SCALE),
        "near": (traffic.NEAR_SIZES, NEAR_SCALE),
    }[kind]
    logs = np.interp(shares, traffic.SHARES, np.log(known))
    return np.maximum(1.0, np.exp(logs) * scale)


def mean_bytes() -> float:
    """Return the mean length of all messages, far and near."""
    shares = (np.arange(GRID) + 0.5) / GRID
    far, near = (float(sizes(kind, shares).mean()) for kind in ("far", "near"))
    return traffic.FAR_SHARE * far + (1 - traffic.FAR_SHARE) * near


def mixed(seed: int, *, load: int, seconds: float) -> list[Arrival]:
    """Return Poisson arrivals in order of time; `load`: per cent of the receiver's line."""
    random = np.random.default_rng(seed)
    per_second = load / 100 * LINE / 8 / mean_bytes()
    found: list[Arrival] = []
    at = random.exponential(1 / per_second)
    while at < seconds:
        kind, hosts = ("far", FAR) if random.random() < traffic.FAR_SHARE else ("near", NEAR)
        host = hosts[random.integers(len(hosts))]
        (length,) = sizes(kind, np.array([random.random()]))
        found.append(Arrival(kind=kind, host=host, at=float(at), bytes=round(float(length))))
        at += random.exponential(1 / per_second)
    return found
