"""The emulated drive under a plain and a sealed namespace."""

from dataclasses import dataclass
from typing import Final, Self

from benchmarks.storage.cells import Cell

_DATA_BYTES: Final = 4096
_BLOCK_BYTES: Final = 4160


@dataclass(frozen=True)
class Direction:
    """What a drive can do in one direction, at most; and how long an operation takes, at least."""

    bytes_per_second: float
    operations_per_second: float
    nanoseconds: int

    def operations(self, io_bytes: int) -> float:
        """Operations of so many bytes per second."""
        return min(self.operations_per_second, self.bytes_per_second / io_bytes)

    def figures(self, scale: float, block_bytes: int) -> str:
        """Write it down for the engine, as many times as fast as `scale`.

        A drive formatted with metadata moves them along with the data, of which its figures tell.
        """
        moved = self.bytes_per_second * scale * block_bytes / _DATA_BYTES
        return f"{moved:.0f},{self.operations_per_second * scale:.0f},{self.nanoseconds}"


# WD SN655, 3.84 TB, as the Hazel paper's evaluation saw it.
READ: Final = Direction(6.8e9, 1.2e6, 25_000)
WRITE: Final = Direction(2.7e9, 0.65e6, 15_000)


@dataclass(frozen=True)
class Drive:
    """A drive as the engine takes it, without and with 64 bytes of metadata for each block."""

    plain: str
    sealed: str

    @classmethod
    def of_rate(cls, rate: int, cell: Cell) -> Self:
        """Make the SN655 so slow that it does `rate` of the cell's operations a second."""

        def figures(block_bytes: int) -> str:
            scales = {way: rate / way.operations(cell.io_bytes) for way in (READ, WRITE)}
            return ":".join(way.figures(scale, block_bytes) for way, scale in scales.items())

        return cls(figures(_DATA_BYTES), figures(_BLOCK_BYTES))
