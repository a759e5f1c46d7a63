"""The emulated drive under a plain and a sealed namespace."""

from dataclasses import dataclass
from typing import Final, Self

from benchmarks.storage.cells import Cell

_DATA_BYTES: Final = 4096
_BLOCK_BYTES: Final = 4160


@dataclass(frozen=True)
class Direction:
    """A drive's maximum rates and minimum latency in one direction."""

    bytes_per_second: float
    operations_per_second: float
    nanoseconds: int

    def operations(self, io_bytes: int) -> float:
        """Return the rate of operations of `io_bytes`, per second."""
        return min(self.operations_per_second, self.bytes_per_second / io_bytes)

    def figures(self, scale: float, block_bytes: int) -> str:
        """Format the figures for the engine, with rates multiplied by `scale`.

        The figures count data only. A drive formatted with metadata moves metadata as well, so the
        byte rate is raised by its share.
        """
        moved = self.bytes_per_second * scale * block_bytes / _DATA_BYTES
        return f"{moved:.0f},{self.operations_per_second * scale:.0f},{self.nanoseconds}"


# WD SN655, 3.84 TB, as measured in the Hazel paper.
READ: Final = Direction(6.8e9, 1.2e6, 25_000)
WRITE: Final = Direction(2.7e9, 0.65e6, 15_000)


@dataclass(frozen=True)
class Drive:
    """Engine settings of a drive, without and with 64 bytes of metadata per block."""

    plain: str
    sealed: str

    @classmethod
    def of_rate(cls, rate: int, cell: Cell) -> Self:
        """Return an SN655 scaled to do `rate` of the cell's operations per second."""

        def figures(block_bytes: int) -> str:
            scales = {way: rate / way.operations(cell.io_bytes) for way in (READ, WRITE)}
            return ":".join(way.figures(scale, block_bytes) for way, scale in scales.items())

        return cls(figures(_DATA_BYTES), figures(_BLOCK_BYTES))
