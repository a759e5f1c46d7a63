"""A limit for log lines that other users cause, as they may repeat what causes them forever."""

import time
from collections.abc import Callable
from typing import Final

LINES_MAX: Final = 10
"""Lines in a period."""
PERIOD_SECONDS: Final = 60.0


class LineLimit:
    """Allows `LINES_MAX` lines in each period of `PERIOD_SECONDS`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._period_ends = float("-inf")
        self._lines = 0

    def allow(self) -> bool:
        """Count a line, and return whether it may be written."""
        now = self._clock()
        if now >= self._period_ends:
            self._period_ends, self._lines = now + PERIOD_SECONDS, 0
        self._lines += 1
        return self._lines <= LINES_MAX
