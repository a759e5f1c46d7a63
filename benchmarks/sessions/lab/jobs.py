"""Jobs of the lab's senders: one line of input per job, one line of JSON per answer.

A sender reads `BYTES COUNT SECONDS first|warm|cold WARM_UP`, sends up to COUNT messages one after
the other for up to SECONDS, and prints how long each took and how many it gave up. First messages
are those on a new connection, warm ones those on one that has carried WARM_UP messages; each cold
message opens a connection, and that time counts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar

C = TypeVar("C")

WARM_UP_MAX: Final = 5
WARM_UP_BYTES: Final = 1 << 26
SECONDS_MAX: Final = 20.0
"""Time limit of a step of a message; after that the message is given up and the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a job."""

    times: list[float]
    """Completion times of the messages that arrived, in seconds."""
    unfinished: int
    """Messages that were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A series of messages of one length."""

    bytes: int
    count: int
    seconds: float
    connection: str

    def line(self) -> str:
        """Return the line that a sender reads."""
        return f"{self.bytes} {self.count} {self.seconds} {self.connection} {self.warm_up}"

    @property
    def warm_up(self) -> int:
        """Messages sent on a warm connection before any is counted."""
        if self.connection != "warm":
            return 0
        return max(1, min(WARM_UP_MAX, WARM_UP_BYTES // self.bytes))


def jobs() -> Iterator[Job]:
    """Yield jobs from standard input until it ends."""
    for line in sys.stdin:
        size, count, seconds, connection, _ = line.split()
        yield Job(
            bytes=int(size),
            count=int(count),
            seconds=float(seconds),
            connection=connection,
        )


def do(
    job: Job, connect: Callable[[], AbstractContextManager[C]], exchange: Callable[[C], None]
) -> None:
    """Send the messages of a job and print the answer."""
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
        if job.connection == "cold":
            repeat(alone)
        else:
            with connect() as connection:
                for _ in range(job.warm_up):
                    exchange(connection)
                repeat(lambda: exchange(connection))
    except (TimeoutError, ConnectionError) as error:
        print(f"given up: {error!r}", file=sys.stderr)
        unfinished = 1
    print(json.dumps({"times": times, "unfinished": unfinished}), flush=True)
