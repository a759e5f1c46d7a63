"""Saved results, so that an interrupted run can be continued."""

from pathlib import Path
from typing import Final

from benchmarks.digests import MODEL, digest
from benchmarks.kept import Records
from benchmarks.sessions import intervals
from benchmarks.sessions.simulate import cells, curves
from benchmarks.sessions.simulate.cells import Cell, Measured

SOURCES: Final = (cells, curves, intervals)


class Store:
    """Results of cells measured with this build."""

    def __init__(self, path: Path) -> None:
        self._records = Records(path, made_by=digest(SOURCES, MODEL))

    def get(self, cell: Cell, *, with_samples: bool) -> Measured | None:
        """Return the result of a cell, if there is one."""
        found = self._records.get(cell.key)
        if found is None or (with_samples and not found["samples"]):
            return None
        return Measured.from_dict(found)

    def put(self, measured: Measured) -> None:
        """Save a result."""
        self._records.put(measured.cell.key, measured.to_dict())
