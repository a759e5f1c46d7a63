"""Options of `sealane demo`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options from the command line."""

    input: Path | None
    output: Path
    messages: int
    volume_bytes: int | None
    seed: int
    all_reduce: bool
    accelerator: bool = False
