"""Distributions of completion times, with rounds of retransmissions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

TAIL: Final = 1e-9
"""Remaining probability at which a distribution is cut off."""
RESOLUTION: Final = 512
"""Instants per round at which a distribution is evaluated; exact for up to as many units."""
ROUNDS_MAX: Final = 4096
"""Largest number of rounds; a loss of 99 % needs some 2000."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A step distribution: at `times[i]` seconds, the probability grows to `cumulative[i]`."""

    times: Values
    cumulative: Values

    @property
    def mean(self) -> float:
        """The mean, in seconds."""
        spans = np.diff(self.times)
        return float(self.times[0] + ((1 - self.cumulative[:-1]) * spans).sum())

    def quantile(self, probability: float) -> float:
        """Return the time by which a message is complete with this probability, in seconds."""
        index = int(np.searchsorted(self.cumulative, probability - TAIL))
        return float(self.times[min(index, len(self.times) - 1)])

    def later(self, seconds: float) -> "Completion":
        """Return the distribution shifted by `seconds`."""
        return Completion(self.times + seconds, self.cumulative)


def certain(seconds: float) -> Completion:
    """Return the distribution of a constant time."""
    return Completion(np.array([seconds]), np.array([1.0]))


def mixture(parts: Sequence[tuple[float, Completion]]) -> Completion:
    """Return the mixture of several distributions, with weights that add up to 1."""
    times = np.concatenate([part.times for _, part in parts])
    steps = np.concatenate([w * np.diff(part.cumulative, prepend=0.0) for w, part in parts])
    order = np.argsort(times, kind="stable")
    cumulative = np.cumsum(steps[order])
    return Completion(times[order], cumulative / cumulative[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Things that are retransmitted independently: units, bursts or blocks, `spacing` apart.

    `pending(n)` is the probability that one is incomplete after n transmissions, for an array of
    n ≥ 1; it never increases.
    """

    count: int
    first: float
    """Time of the first one's first transmission, in seconds."""
    spacing: float
    pending: Callable[[Values], Values]
    weight: float = 1.0
    """Independent events per item: below 1 where the losses of neighbours are correlated."""

    @property
    def last(self) -> float:
        """Time of the last one's first transmission, in seconds."""
        return self.first + (self.count - 1) * self.spacing

    def rounds(self) -> int:
        """Return the transmissions after which none is pending, except with probability TAIL."""
        rounds = 8
        while rounds < ROUNDS_MAX:
            left = self.count * self.pending(np.array([float(rounds)]))[0]
            if left < TAIL:
                break
            rounds *= 2
        numbers = np.arange(1.0, rounds + 1)
        return int(np.searchsorted(-self.count * self.pending(numbers), -TAIL)) + 1

    def log_done(self, at: Values, step: float) -> Values:
        """Return the log of the probability that all are complete, at times after all were sent."""
        # Items sent more often than that count as complete.
        transmissions = np.arange(1.0, self.rounds() + 1)
        logs = np.log1p(-np.minimum(self.pending(transmissions), 1 - 1e-15))
        if self.count == 1 or self.spacing == 0:
            index = ((at - self.first) // step).astype(np.int64)
            return np.asarray(self.weight * self.count * logs[np.minimum(index, len(logs) - 1)])
        total = np.zeros(len(at))
        newest = self._sent(at)
        for n, log in enumerate(logs, 1):
            # Items that were sent exactly n times.
            older = self._sent(at - n * step)
            total += (newest - older) * log
            newest = older
            if not newest.any():
                break
        return self.weight * total

    def _sent(self, at: Values) -> Values:
        """Count the items whose first transmission is at or before each time."""
        sent = np.floor((at - self.first) / self.spacing) + 1
        return np.asarray(np.clip(sent, 0, self.count))


def repeated(
    items: Sequence[Items], step: float, end: float, resolution: int = RESOLUTION
) -> Completion:
    """Return the completion of all items, each retransmitted every `step` seconds until complete.

    Nothing is complete before `end`, when all have been sent once. Exact if each round ends before
    the next begins or the wire carries both; otherwise a lower bound.
    """
    instants = [np.array([end])]
    for group in items:
        points = np.linspace(group.first, group.last, min(group.count, resolution))
        # Rounds that end before everything has been sent once don't matter.
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
