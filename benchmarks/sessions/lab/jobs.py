"""What the peers of the lab have in common: a job is a line, the answer is a line of seconds.

A sender reads `BYTES COUNT SECONDS warm|cold`, sends up to so many messages one after the other for
up to so long, and prints how long they took and how many it gave up, as JSON. Warm messages follow
others on the same connection; a cold one begins with a connection of its own, which counts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar

C = TypeVar("C")

WARM_UP: Final = 5
"""Messages that open a connection and are not counted."""
SECONDS_MAX: Final = 20.0
"""For a step of a message: after that it is given up, and the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a sender says of a job."""

    times: list[float]
    """Of the messages that arrived, in seconds."""
    unfinished: int
    """Messages that were given up."""


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


def do(
    job: Job, connect: Callable[[], AbstractContextManager[C]], exchange: Callable[[C], None]
) -> None:
    """Send the messages of a job, and print how long they took."""
    times: list[float] = []
    unfinished = 0

    def alone() -> None:
        with connect() as connection:
            exchange(connection)

    def repeat(send: Callable[[], None]) -> None:
        end = time.monotonic() + job.seconds
        while len(times) < job.count and time.monotonic() < end:
            started = time.perf_counter()
            send()
            times.append(round(time.perf_counter() - started, 6))

    try:
        if job.is_cold:
            repeat(alone)
        else:
            with connect() as connection:
                for _ in range(WARM_UP):
                    exchange(connection)
                repeat(lambda: exchange(connection))
    except (TimeoutError, ConnectionError) as error:
        print(f"given up: {error!r}", file=sys.stderr)
        unfinished = 1
    print(json.dumps({"times": times, "unfinished": unfinished}), flush=True)
