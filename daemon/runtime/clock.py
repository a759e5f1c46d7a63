"""The daemon's clocks; everything below the daemon gets time as an argument."""

import datetime as dt
import time


def utc_now() -> dt.datetime:
    """Return the wall-clock time, for certificates."""
    return dt.datetime.now(dt.UTC)


def monotonic_ns() -> int:
    """Return nanoseconds since the machine's boot, including time suspended (CLOCK_BOOTTIME).

    For durations and deadlines: neither a suspended machine nor a changed wall clock extends them.
    The engine's permits use this clock, too.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
