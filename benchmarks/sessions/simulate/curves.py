"""Predictions of the model for a scheme, and Go-Back-N, which the stack doesn't implement."""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sealane.planning.model import (
    NACK_FACTOR,
    RTO_FACTOR,
    Completion,
    ErasureCoded,
    Path,
    SelectiveRepeat,
    completion,
)
from sealane.planning.model import Scheme as ModelScheme

FACTORS: Final = {"reports": NACK_FACTOR, "timeout": RTO_FACTOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The stack's protection against loss: selective repeat (`k` = 0), MDS or XOR (`m` = 1)."""

    k: int = 0
    m: int = 0
    depth: int = 1
    detection: Literal["reports", "timeout"] = "reports"
    """`reports`: the peer reports gaps (the paper's NACK); `timeout`: only after 3 round trips."""

    @property
    def name(self) -> str:
        """Readable name, used in legends."""
        if not self.k:
            ways = {"reports": "SR (NACK)", "timeout": "SR (3 RTT)"}
            return ways[self.detection]
        name = f"{'XOR' if self.m == 1 else 'MDS'} ({self.k}, {self.m})"
        return name + (f" × {self.depth}" if self.depth > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The model's prediction of a completion time, in seconds."""

    mean: float
    p50: float
    p99: float
    p999: float
    deviation: float
    """Standard deviation of one message's completion."""
    is_exact: bool
    """Whether the model is exact; otherwise it is a lower bound or approximates bursts."""


def modelled(scheme: Scheme) -> ModelScheme:
    """Return the model's counterpart of a scheme."""
    factor = FACTORS[scheme.detection]
    if scheme.k:
        return ErasureCoded(scheme.k, scheme.m, scheme.depth, timeout_factor=factor)
    return SelectiveRepeat(factor)


def distribution(path: Path, message_bytes: int, scheme: Scheme) -> Completion:
    """Return the distribution of completion times of a message on an idle path."""
    return completion(path, message_bytes, modelled(scheme))


def curve(path: Path, message_bytes: int, scheme: Scheme) -> Curve:
    """Return the model's mean and quantiles."""
    found = distribution(path, message_bytes, scheme)
    injection = path.units(message_bytes) * path.unit_seconds
    timeout = FACTORS[scheme.detection] * path.round_trip_seconds
    return Curve(
        mean=found.mean,
        p50=found.quantile(0.5),
        p99=found.quantile(0.99),
        p999=found.quantile(0.999),
        deviation=_deviation(found),
        is_exact=path.loss.is_independent and scheme.depth == 1 and injection <= timeout,
    )


def _deviation(found: Completion) -> float:
    weights = np.diff(found.cumulative, prepend=0.0)
    return float(np.sqrt((weights * (found.times - found.mean) ** 2).sum()))


def go_back_n(path: Path, message_bytes: int, count: int, *, seed: int) -> NDArray[np.float64]:
    """Draw completion times of Go-Back-N, which most hardware uses, in seconds.

    The receiver drops everything after a gap and immediately requests retransmission from there.
    Nothing follows the last unit, so its loss is detected by a timeout of 3 round trips. Losses are
    independent.
    """
    random = np.random.default_rng(seed)
    units, unit = path.units(message_bytes), path.unit_seconds
    elapsed = np.zeros(count)
    left = np.full(count, units)
    running = np.arange(count)
    while running.size:
        if path.loss.rate:
            lost = random.geometric(path.loss.rate, running.size)
        else:
            lost = np.full(running.size, units + 1)
        remaining = left[running]
        is_hit = lost <= remaining
        is_last = lost == remaining
        sent = np.minimum(lost, remaining)
        wait = np.where(is_last, RTO_FACTOR, NACK_FACTOR) * path.round_trip_seconds + unit
        elapsed[running] += sent * unit + np.where(is_hit, wait, 0.0)
        left[running] = remaining - np.where(is_hit, lost - 1, remaining)
        running = running[is_hit]
    return elapsed + path.round_trip_seconds
