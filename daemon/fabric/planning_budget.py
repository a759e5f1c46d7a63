"""A bound on the processor time that a fabric spends on renewing plans."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

SHARE: Final = 8
"""Renewals take at most one of so many parts of a processor, all sessions together."""

_Result = TypeVar("_Result")


class PlanningBudget:
    """Puts off renewals after one that took long. First plans are never put off, but they count.

    For many threads: at worst one renewal more begins than should.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._free_at = 0.0

    def allows_renewal(self) -> bool:
        """Return False while earlier plans have taken more than their share."""
        return self._now() >= self._free_at

    def run(self, plan: Callable[[], _Result]) -> _Result:
        """Make a plan in this thread, and count its processor time."""
        begun = time.thread_time()
        try:
            return plan()
        finally:
            spent = time.thread_time() - begun
            self._free_at = max(self._free_at, self._now()) + (SHARE - 1) * spent
