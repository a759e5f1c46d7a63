"""Where the target's inline store keeps a block, for whoever owns the drive.

Block *n* of the drive lies at byte 4160·*n*: data, then metadata (secure-queue.md §1). In
front of the volume's blocks is what keeps them fresh, if anything does (stores.md §2b).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from attacks.pdus import BLOCK
from sealane.cli.demo.adversary import block_start


@dataclass(frozen=True)
class Slot:
    """One stored block and its place."""

    path: Path
    lba: int
    block: bytes

    def changed(self, change: Callable[[bytearray], None]) -> Self:
        """Change a copy of the block."""
        block = bytearray(self.block)
        change(block)
        return replace(self, block=bytes(block))

    def holding(self, other: "Slot") -> Self:
        """Put the block of another place here."""
        return replace(self, block=other.block)

    def at(self, lba: int) -> Self:
        """Put this block at another place."""
        return replace(self, lba=lba)


def read_slot(path: Path, lba: int) -> Slot:
    """Read what is stored for a sector."""
    with path.open("rb") as file:
        file.seek(block_start(path, lba))
        return Slot(path, lba, file.read(BLOCK))


def write_slot(slot: Slot) -> None:
    """Store a block behind the target's back."""
    with slot.path.open("r+b") as file:
        file.seek(block_start(slot.path, slot.lba))
        file.write(slot.block)
