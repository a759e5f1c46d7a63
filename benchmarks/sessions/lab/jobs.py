"""What the peers of the lab have in common: a job is a line, the answer is a line of seconds.

A sender reads `BYTES COUNT SECONDS warm|cold`, sends up to so many messages one after the other for
up to so long, and prints the completion times as a JSON list. Warm messages follow others on the
same connection; a cold one begins with a connection of its own, which counts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

WARM_UP: Final = 10
"""Messages that open a connection and are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Messages of one length."""

    bytes: int
    count: int
    seconds: float
    is_cold: bool

    def line(self) -> str:
        """As a sender reads it."""
        return f"{self.bytes} {self.count} {self.seconds} {'cold' if self.is_cold else 'warm'}"


def jobs() -> Iterator[Job]:
    """Read jobs until the input ends."""
    for line in sys.stdin:
        size, count, seconds, temperature = line.split()
        yield Job(
            bytes=int(size),
            count=int(count),
            seconds=float(seconds),
            is_cold=temperature == "cold",
        )


def repeat(job: Job, send: Callable[[], None]) -> list[float]:
    """Call `send` as often as the job says; returns how long each call took, in seconds."""
    end = time.monotonic() + job.seconds
    found: list[float] = []
    while len(found) < job.count and time.monotonic() < end:
        started = time.perf_counter()
        send()
        found.append(time.perf_counter() - started)
    return found


def answer(times: list[float]) -> None:
    """Print completion times."""
    print(json.dumps([round(seconds, 6) for seconds in times]), flush=True)
