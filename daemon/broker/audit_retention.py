"""Retention of the audit log: which of its oldest segments are retired when it is cut."""

import datetime as dt
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sealane.crypto.audit import Head
from sealane.daemon.broker.audit_segments import Segment
from sealane.daemon.runtime.clock import utc_now

CLOCK_DRIFT_MAX: Final = dt.timedelta(hours=1)
"""From which deviation on a clock is not believed to say what is old."""


class TimeWatch:
    """Compares the clock that records have with the machine's own, which nobody sets."""

    def __init__(self) -> None:
        """Take the clock of now for the right one."""
        self._began = _clock_offset()

    def is_steady(self) -> bool:
        """Return whether the clock was set by `CLOCK_DRIFT_MAX` at most, all in all."""
        return abs(_clock_offset() - self._began) <= CLOCK_DRIFT_MAX.total_seconds()


def _clock_offset() -> float:
    """Return the clock's distance from the time since the machine booted, in seconds."""
    return utc_now().timestamp() - time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much of the log is kept: None is everything.

    If `is_forwarded`, only what a collector has may be retired.
    """

    age: dt.timedelta | None = None
    bytes_max: int | None = None
    is_forwarded: bool = False


def beginning_after(
    segments: Sequence[Segment],
    retention: Retention,
    *,
    now: dt.datetime,
    forwarded: int | None,
) -> Head:
    """Return where a log of these closed segments begins from now on.

    The last segment always stays, and so do those with a record after number `forwarded`; None if
    records aren't forwarded.
    """
    beginning = segments[0].before
    total = sum(segment.size for segment in segments)
    for segment, successor in itertools.pairwise(segments):
        last = successor.before
        # All its records are older than the next segment's first one.
        is_old = retention.age is not None and now - successor.started > retention.age
        is_too_much = retention.bytes_max is not None and total > retention.bytes_max
        if not (is_old or is_too_much):
            break
        if forwarded is not None and last.sequence > forwarded:
            break
        total -= segment.size
        beginning = last
    return beginning
