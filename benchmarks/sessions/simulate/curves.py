"""The model's word on a cell, and Go-Back-N, which the stack does not have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from benchmarks.sessions.simulate.cells import Scheme

FACTORS: Final = {"reports": NACK_FACTOR, "timeout": RTO_FACTOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What the model says, in seconds."""

    mean: float
    p50: float
    p99: float
    p999: float
    deviation: float
    """Standard deviation of a message."""
    is_exact: bool
    """Whether the model is: else it is a lower bound, or approximates bursts."""


def modelled(scheme: "Scheme") -> ModelScheme:
    """Return the model's name for a scheme."""
    factor = FACTORS[scheme.detection]
    if scheme.k:
        return ErasureCoded(scheme.k, scheme.m, scheme.depth, timeout_factor=factor)
    return SelectiveRepeat(factor)


def distribution(path: Path, message_bytes: int, scheme: "Scheme") -> Completion:
    """Completion times of one message on an idle path."""
    return completion(path, message_bytes, modelled(scheme))


def curve(path: Path, message_bytes: int, scheme: "Scheme") -> Curve:
    """Mean and quantiles of the model."""
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
    """Draw completion times of Go-Back-N, in seconds: what hardware mostly does.

    A receiver drops everything behind a gap and asks for it from there at once; of the last unit
    there is nothing behind, so it waits for a time-out of 3 round trips. Independent losses.
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
