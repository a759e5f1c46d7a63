"""What the command line of `sealane demo` chose."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line chose."""

    input: Path | None
    output: Path
    messages: int
    volume_bytes: int | None
    seed: int
    all_reduce: bool
