"""Fairness over time, from the bytes that have arrived from each sender at sampled times."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from benchmarks.uno.cells import jain
from numpy.typing import NDArray

STEP_SECONDS: Final = 0.1
"""Length of the intervals in which shares are compared."""
FAIR: Final = 0.95
"""Jain's index from which shares count as fair."""

Span = tuple[float, float]
"""Start and end in seconds."""


def in_steps(
    at: Sequence[float], arrived: Sequence[Sequence[int]], step: float = STEP_SECONDS
) -> NDArray[np.float64]:
    """Return the bytes of each sender in each whole interval from 0 on.

    `arrived` are counts by sender that only grow, read at the ascending times `at` in seconds;
    between two of them bytes are taken to arrive evenly.
    """
    counts = np.array(arrived, dtype=np.float64)
    # A whole interval must not be lost to rounding.
    edges = step * np.arange(int(at[-1] / step + 1e-9) + 1)
    known = [np.interp(edges, at, counts[:, sender]) for sender in range(counts.shape[1])]
    return np.diff(np.stack(known, axis=1), axis=0)


def busy(
    spans: Sequence[Sequence[Span]], steps: int, step: float = STEP_SECONDS
) -> NDArray[np.bool_]:
    """Return, by interval and sender, whether its spans cover the whole interval together."""
    found = np.zeros((steps, len(spans)), dtype=np.bool_)
    for sender, mine in enumerate(spans):
        for start, end in _merged(mine):
            first = int(np.ceil(start / step - 1e-9))
            last = int(end / step + 1e-9)
            found[max(first, 0) : max(last, 0), sender] = True
    return found


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order of time, those that overlap or touch as one."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def indices(
    taken: NDArray[np.float64], is_busy: NDArray[np.bool_], step: float = STEP_SECONDS
) -> list[tuple[float, float]]:
    """Return (start, Jain's index) of each interval in which two senders or more are busy.

    An interval in which nothing arrives from any of them has none.
    """
    found = []
    for number, (amounts, mine) in enumerate(zip(taken, is_busy, strict=True)):
        shares = amounts[mine]
        if len(shares) > 1 and shares.sum() > 0:
            found.append((step * number, jain(shares)))
    return found


def fair_after(found: Sequence[tuple[float, float]], step: float = STEP_SECONDS) -> float | None:
    """Return the seconds after which all intervals are fair; None without intervals.

    If not even the last one is fair, that is its end.
    """
    if not found:
        return None
    unfair = [start for start, index in found if index < FAIR]
    return unfair[-1] + step if unfair else 0.0
