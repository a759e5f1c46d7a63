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


def under_way(
    spans: Sequence[Sequence[Span]], steps: int, step: float = STEP_SECONDS
) -> NDArray[np.int64]:
    """Return, by interval and sender, how many of its messages last for the whole interval.

    `spans` are those of each sender's messages. One that covers an interval with several, none of
    which lasts so long, counts as having one.
    """
    found = np.zeros((steps, len(spans)), dtype=np.int64)
    for sender, mine in enumerate(spans):
        for start, end in mine:
            found[_whole(start, end, step), sender] += 1
        for start, end in _merged(mine):
            together = found[_whole(start, end, step), sender]
            np.maximum(together, 1, out=together)
    return found


def _whole(start: float, end: float, step: float) -> slice:
    """Return the intervals that lie between two times."""
    first, last = int(np.ceil(start / step - 1e-9)), int(np.floor(end / step + 1e-9))
    return slice(max(first, 0), max(last, 0))


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
    taken: NDArray[np.float64], counts: NDArray[np.int64], step: float = STEP_SECONDS
) -> list[tuple[float, float]]:
    """Return (start, Jain's index) of each interval in which two senders or more are busy.

    `counts` are the messages that each has under way: compared is what each message gets. An
    interval in which nothing arrives from any of the busy ones has no index.
    """
    found = []
    for number, (amounts, messages) in enumerate(zip(taken, counts, strict=True)):
        shares = amounts[messages > 0] / messages[messages > 0]
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
