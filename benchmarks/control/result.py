"""What a benchmark of the control plane comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Result:
    """A table to print and the samples it was made from."""

    table: Table
    samples: Sequence[dict[str, Any]]
