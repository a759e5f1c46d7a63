"""The daemon's clocks; everything below the daemon gets time as an argument."""

import datetime as dt
import time


def utc_now() -> dt.datetime:
    """Return the wall-clock time, for certificates."""
    return dt.datetime.now(dt.UTC)


def monotonic_ns() -> int:
    """Return monotonic nanoseconds, for everything that only lasts."""
    return time.monotonic_ns()


def boot_ns() -> int:
    """Return nanoseconds since the machine was started, suspension included.

    For bounds that protect something: neither a suspended machine nor a moved wall clock stretches
    them.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
