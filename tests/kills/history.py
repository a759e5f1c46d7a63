"""Possible contents of a tenant's blocks, seen through gateways that get killed.

Models `crash-consistency.md` §2 and §3 as sets of versions: through one gateway, the version
acknowledged last; after its death, any version since the last flush, until a read has returned one.
"""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class _Block:
    # Possible current versions: several only after a write of unknown outcome, or a death.
    now: set[int] = field(default_factory=lambda: {0})
    # Versions that a later gateway may find without another flush.
    durable: set[int] = field(default_factory=lambda: {0})
    since: list[int] = field(default_factory=list)


class History:
    """Versions of all blocks; 0 means never written."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = defaultdict(_Block)
        self._last = 0

    def issued(self, lba: int) -> int:
        """Begin a write; return its version."""
        self._last += 1
        block = self._blocks[lba]
        block.now.add(self._last)
        block.since.append(self._last)
        return self._last

    def acknowledged(self, lba: int, version: int) -> None:
        """Record that a write was acknowledged."""
        self._blocks[lba].now = {version}

    def flush_begins(self) -> dict[int, tuple[set[int], int]]:
        """Return what a flush submitted now makes durable: possible versions and their age."""
        return {lba: (set(block.now), self._last) for lba, block in self._blocks.items()}

    def flushed(self, began: dict[int, tuple[set[int], int]]) -> None:
        """Record that a flush was acknowledged."""
        for lba, (versions, last) in began.items():
            block = self._blocks[lba]
            block.durable = versions
            block.since = [version for version in block.since if version > last]

    def gateway_died(self) -> None:
        """Record a death: acknowledged but unflushed writes may be lost."""
        for block in self._blocks.values():
            block.now = block.durable | block.now | set(block.since)

    def returned(self, lba: int, version: int) -> None:
        """Check the version returned by a read without concurrent writes."""
        block = self._blocks[lba]
        assert version in block.now, (
            f"block {lba} reads as version {version}, allowed: {sorted(block.now)}"
        )
        block.now = {version}
