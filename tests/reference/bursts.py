"""Losses by bursts that last for a time, drawn naively: each path's bursts, one after another."""

import random
from collections.abc import Sequence


def lost_units(
    times: Sequence[float],
    *,
    paths: int,
    mean_burst: float,
    rate: float,
    runs: int,
    seed: int,
) -> list[int]:
    """Draw how many of the packets that leave at `times` are lost, `runs` times.

    They take `paths` paths in turn. On each, bursts and the times between them are exponentially
    distributed; a share `rate` of the time is a burst, in which everything is lost.
    """
    dice = random.Random(seed)
    mean_rest = mean_burst * (1 - rate) / rate
    found = []
    for _ in range(runs):
        lost = 0
        for path in range(paths):
            is_burst = dice.random() < rate
            until = dice.expovariate(1 / (mean_burst if is_burst else mean_rest))
            for time in times[path::paths]:
                while until <= time:
                    is_burst = not is_burst
                    until += dice.expovariate(1 / (mean_burst if is_burst else mean_rest))
                lost += is_burst
        found.append(lost)
    return found
