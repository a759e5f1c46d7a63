"""Means and quantiles with confidence intervals; quantiles only where samples suffice."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 200
EXCEEDANCES_MIN: Final = 10
"""Minimum number of samples beyond a quantile that is quoted (reference §9, test 28)."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean and quantiles with 95 % bootstrap intervals; None where there are too few samples."""

    count: int
    mean: float
    mean_interval: Interval
    p50: float
    p90: float | None
    p99: float | None
    p99_interval: Interval | None
    p999: float | None
    p999_interval: Interval | None


def summarize(samples: NDArray[np.float64], *, seed: int) -> Summary:
    """Summarize samples; deterministic for a given seed."""
    count = len(samples)
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    drawn = samples[draws]

    def tail(share: float) -> tuple[float | None, Interval | None]:
        if count * (1 - share) < EXCEEDANCES_MIN - 1e-6:
            return None, None
        again = np.quantile(drawn, share, axis=1, method="inverted_cdf")
        found = float(np.quantile(samples, share, method="inverted_cdf"))
        return found, _interval(again)

    p99, p99_interval = tail(0.99)
    p999, p999_interval = tail(0.999)
    return Summary(
        count=count,
        mean=float(samples.mean()),
        mean_interval=_interval(drawn.mean(axis=1)),
        p50=float(np.median(samples)),
        p90=tail(0.9)[0],
        p99=p99,
        p99_interval=p99_interval,
        p999=p999,
        p999_interval=p999_interval,
    )


def _interval(values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
