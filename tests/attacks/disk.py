"""Reads and changes of stored blocks, by an adversary who owns the target's drive.

Block *n* of the drive is at byte 4160·*n*: data, then metadata (secure-queue.md §1). Structures for
freshness, where the store has them, precede the volume's blocks (stores.md §2b).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from attacks.pdus import BLOCK
from sealane.cli.demo.adversary import block_start


@dataclass(frozen=True)
class Slot:
    """A stored block and its position."""

    path: Path
    lba: int
    block: bytes

    def changed(self, change: Callable[[bytearray], None]) -> Self:
        """Return a changed copy of the block."""
        block = bytearray(self.block)
        change(block)
        return replace(self, block=bytes(block))

    def holding(self, other: "Slot") -> Self:
        """Return this position with the contents of another block."""
        return replace(self, block=other.block)

    def at(self, lba: int) -> Self:
        """Return this block at another position."""
        return replace(self, lba=lba)


def read_slot(path: Path, lba: int) -> Slot:
    """Read the stored block of a sector."""
    with path.open("rb") as file:
        file.seek(block_start(path, lba))
        return Slot(path, lba, file.read(BLOCK))


def write_slot(slot: Slot) -> None:
    """Store a block behind the target's back."""
    with slot.path.open("r+b") as file:
        file.seek(block_start(slot.path, slot.lba))
        file.write(slot.block)
