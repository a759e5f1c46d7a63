"""Distributions of completion times, and of the rounds in which what was lost is sent again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

TAIL: Final = 1e-9
"""Probability beyond which a distribution is cut off."""
RESOLUTION: Final = 512
"""Instants of a round at which a distribution is evaluated; exact up to as many units."""
ROUNDS_MAX: Final = 4096
"""Rounds of a distribution, most: at a loss of 99 % some 2000 are left above the tail."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A distribution in steps: at `times[i]` seconds the probability grows to `cumulative[i]`."""

    times: Values
    cumulative: Values

    @property
    def mean(self) -> float:
        """Mean, in seconds."""
        spans = np.diff(self.times)
        return float(self.times[0] + ((1 - self.cumulative[:-1]) * spans).sum())

    def quantile(self, probability: float) -> float:
        """Time by which a message is complete with this probability, in seconds."""
        index = int(np.searchsorted(self.cumulative, probability - TAIL))
        return float(self.times[min(index, len(self.times) - 1)])

    def later(self, seconds: float) -> "Completion":
        """Shift it."""
        return Completion(self.times + seconds, self.cumulative)


def certain(seconds: float) -> Completion:
    """Nothing can happen."""
    return Completion(np.array([seconds]), np.array([1.0]))


def mixture(parts: Sequence[tuple[float, Completion]]) -> Completion:
    """One of several, by weights that add up to 1."""
    times = np.concatenate([part.times for _, part in parts])
    steps = np.concatenate([w * np.diff(part.cumulative, prepend=0.0) for w, part in parts])
    order = np.argsort(times, kind="stable")
    cumulative = np.cumsum(steps[order])
    return Completion(times[order], cumulative / cumulative[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """What is repeated by itself: units, bursts or blocks, `spacing` apart, all alike.

    `pending(n)` is the probability that one is not done after n transmissions, for an array of
    n ≥ 1; it never grows.
    """

    count: int
    first: float
    """When the first is sent for the first time, in seconds."""
    spacing: float
    pending: Callable[[Values], Values]
    weight: float = 1.0
    """Independent events an item stands for: below 1 where neighbours share their fate."""

    @property
    def last(self) -> float:
        """When the last is sent for the first time."""
        return self.first + (self.count - 1) * self.spacing

    def rounds(self) -> int:
        """Transmissions after which none is pending, but for the tail."""
        rounds = 8
        while rounds < ROUNDS_MAX:
            left = self.count * self.pending(np.array([float(rounds)]))[0]
            if left < TAIL:
                break
            rounds *= 2
        numbers = np.arange(1.0, rounds + 1)
        return int(np.searchsorted(-self.count * self.pending(numbers), -TAIL)) + 1

    def log_done(self, at: Values, step: float) -> Values:
        """Logarithm of the probability that all are done at times when all have been sent."""
        # What was sent more often than that is done.
        transmissions = np.arange(1.0, self.rounds() + 1)
        logs = np.log1p(-np.minimum(self.pending(transmissions), 1 - 1e-15))
        if self.count == 1 or self.spacing == 0:
            index = ((at - self.first) // step).astype(np.int64)
            return np.asarray(self.weight * self.count * logs[np.minimum(index, len(logs) - 1)])
        total = np.zeros(len(at))
        newest = self._sent(at)
        for n, log in enumerate(logs, 1):
            # Those that were sent exactly n times.
            older = self._sent(at - n * step)
            total += (newest - older) * log
            newest = older
            if not newest.any():
                break
        return self.weight * total

    def _sent(self, at: Values) -> Values:
        """Count the items that are sent for the first time up to then."""
        sent = np.floor((at - self.first) / self.spacing) + 1
        return np.asarray(np.clip(sent, 0, self.count))


def repeated(
    items: Sequence[Items], step: float, end: float, resolution: int = RESOLUTION
) -> Completion:
    """Completion of all items, each repeated `step` seconds after its transmission until done.

    Nothing is complete before `end`, when all have been sent once. Exact while one round ends
    before the next begins or the wire carries both; else a lower bound.
    """
    instants = [np.array([end])]
    for group in items:
        points = np.linspace(group.first, group.last, min(group.count, resolution))
        # Rounds that end before all has been sent once decide nothing.
        points += step * np.maximum(np.ceil((end - points) / step), 1.0)
        rounds = np.arange(0.0, group.rounds())
        instants.append((points[None, :] + step * rounds[:, None]).ravel())
    times = np.unique(np.concatenate(instants))
    times = times[times >= end]
    middles = np.append((times[1:] + times[:-1]) / 2, times[-1] + step / 2)
    logs = np.zeros(len(times))
    for group in items:
        logs += group.log_done(middles, step)
    cumulative = np.exp(logs)
    keep = int(np.searchsorted(cumulative, 1 - TAIL)) + 1
    times, cumulative = times[:keep], cumulative[:keep]
    cumulative[-1] = 1.0
    return Completion(times, cumulative)
