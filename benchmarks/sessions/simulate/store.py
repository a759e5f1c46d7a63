"""Cells that have been measured, kept line by line, so that a run can be broken off and go on."""

import json
from pathlib import Path
from typing import Final

from benchmarks.sessions import intervals
from benchmarks.sessions.digests import digest
from benchmarks.sessions.simulate import cells, curves
from benchmarks.sessions.simulate.cells import Cell, Measured

import sealane.transport.model

SOURCES: Final = (cells, curves, intervals)


def _build() -> str:
    """Digest of what decides a result: the stack, the model, how cells are made."""
    model = Path(str(sealane.transport.model.__file__)).parent
    return digest(SOURCES, sorted(model.glob("*.py")))


class Store:
    """What is known of cells, of this build only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._build = _build()
        self._known: dict[str, Measured] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            # The last line of a run that was killed.
            return
        if found["build"] == self._build:
            measured = Measured.from_dict(found["measured"])
            self._known[measured.cell.key] = measured

    def get(self, cell: Cell, *, with_samples: bool) -> Measured | None:
        """Return what was measured, if it was."""
        found = self._known.get(cell.key)
        return None if found is None or (with_samples and not found.samples) else found

    def put(self, measured: Measured) -> None:
        """Keep it."""
        self._known[measured.cell.key] = measured
        line = json.dumps({"build": self._build, "measured": measured.to_dict()})
        with self._path.open("a") as file:
            file.write(line + "\n")
