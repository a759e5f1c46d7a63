"""Result of a control-plane benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    """A table to print, and the samples behind it."""

    table: Table
    samples: Sequence[dict[str, Any]]
