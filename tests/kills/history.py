"""What a tenant's blocks may hold, seen through gateways that live and die.

`crash-consistency.md` §2 and §3 as sets: through one gateway the version acknowledged last,
after its death any from the last flush on, and once one was returned, that one.
"""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class _Block:
    # What it may be now: several only after a write whose outcome nobody knows, or a death.
    now: set[int] = field(default_factory=lambda: {0})
    # What a later gateway may find if no flush comes.
    durable: set[int] = field(default_factory=lambda: {0})
    since: list[int] = field(default_factory=list)


class History:
    """Versions of all blocks; 0 is what was never written."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = defaultdict(_Block)
        self._last = 0

    def issued(self, lba: int) -> int:
        """Begin a write; returns its version."""
        self._last += 1
        block = self._blocks[lba]
        block.now.add(self._last)
        block.since.append(self._last)
        return self._last

    def acknowledged(self, lba: int, version: int) -> None:
        """End a write."""
        self._blocks[lba].now = {version}

    def flush_begins(self) -> dict[int, tuple[set[int], int]]:
        """What a flush submitted now vouches for: of each block what it may be, and since when."""
        return {lba: (set(block.now), self._last) for lba, block in self._blocks.items()}

    def flushed(self, began: dict[int, tuple[set[int], int]]) -> None:
        """The flush was acknowledged."""
        for lba, (versions, last) in began.items():
            block = self._blocks[lba]
            block.durable = versions
            block.since = [version for version in block.since if version > last]

    def gateway_died(self) -> None:
        """What was acknowledged and not flushed may be lost."""
        for block in self._blocks.values():
            block.now = block.durable | block.now | set(block.since)

    def returned(self, lba: int, version: int) -> None:
        """A read, during which nothing was written, returned a version."""
        block = self._blocks[lba]
        assert version in block.now, (
            f"block {lba} reads as version {version}, allowed: {sorted(block.now)}"
        )
        block.now = {version}
