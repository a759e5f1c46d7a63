"""The daemon's clocks; everything below the daemon gets time as an argument."""

import datetime as dt
import time


def utc_now() -> dt.datetime:
    """Return the wall-clock time, for certificates."""
    return dt.datetime.now(dt.UTC)


def monotonic_ns() -> int:
    """Return nanoseconds since the machine was started, suspension included (CLOCK_BOOTTIME).

    For everything that only lasts: neither a suspended machine nor a moved wall clock stretches a
    bound. The engine's permits are on this clock, too.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
