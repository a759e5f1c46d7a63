"""Sizes of a volume's sector (docs/formats/stores.md); in Rust: `native/proto/src/sector.rs`."""

from typing import Final

SECTOR_BYTES: Final = 4096
"""Of data, which is what hosts read and write: one logical block."""
METADATA_BYTES: Final = 64
"""Behind the data of a sealed sector, where it is stored and on a secure queue."""
