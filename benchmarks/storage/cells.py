"""Cells (access pattern, operation, depth, queues) and the samples measured for them."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

SEQUENTIAL_BYTES: Final = 128 << 10
RANDOM_BYTES: Final = 4 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination: commands of `io_bytes`, `depth` of them outstanding on each queue."""

    pattern: str
    operation: str
    io_bytes: int
    depth: int
    queues: int

    @property
    def name(self) -> str:
        """Short name, used to select cells on the command line."""
        size = f"{self.io_bytes >> 10}k"
        return f"{self.pattern}-{size}-{self.operation}-qd{self.depth}-q{self.queues}"

    @property
    def title(self) -> str:
        """Readable name."""
        return f"{self.pattern} {self.io_bytes >> 10} KiB {self.operation}"


def all_cells(depths: tuple[int, ...], queues: tuple[int, ...]) -> Iterator[Cell]:
    """Yield every combination of sequential 128 KiB and random 4 KiB access."""
    patterns = (("sequential", SEQUENTIAL_BYTES), ("random", RANDOM_BYTES))
    for (pattern, io_bytes), operation, depth, count in itertools.product(
        patterns, ("read", "write"), depths, queues
    ):
        yield Cell(
            pattern=pattern, operation=operation, io_bytes=io_bytes, depth=depth, queues=count
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one cell on one system."""

    system: str
    cell: str
    round: int
    commands: int
    seconds: float
    bytes_per_second: float
    commands_per_second: float
    latency_p50_us: float
    latency_p99_us: float
    latency_p999_us: float
    cpu_us_per_command: dict[str, float]
    """By process: load, target and gateway, where present."""

    def to_json(self) -> dict[str, object]:
        """Return the sample as a dictionary."""
        return asdict(self)
