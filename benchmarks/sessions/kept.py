"""Results kept line by line, so that a run can be broken off and goes on when run again."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

T = TypeVar("T")


class Records:
    """What was measured by one build, by its key: a file with a line of JSON for each.

    Lines of other builds stay and are not looked at.
    """

    def __init__(self, path: Path, *, made_by: str) -> None:
        self._path = path
        self._made_by = made_by
        self._known: dict[str, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            self._read(line)
        if text and not text.endswith("\n"):
            # A killed run has begun this line: the next one is another.
            with path.open("a") as file:
                file.write("\n")

    def _read(self, line: str) -> None:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            # Of a run that was killed.
            return
        if found.get("made_by") == self._made_by:
            self._known[found["key"]] = found["record"]

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the newest record of that key, if there is one."""
        return self._known.get(key)

    def all(self) -> Sequence[dict[str, Any]]:
        """Return all records, by the first time that their keys were measured."""
        return list(self._known.values())

    def put(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record, of what JSON can say; `get` returns it as JSON has it."""
        line = json.dumps({"made_by": self._made_by, "key": key, "record": record})
        with self._path.open("a") as file:
            file.write(line + "\n")
        self._read(line)


def run_missing(
    missing: Sequence[Callable[[], T]],
    keep: Callable[[T], None],
    *,
    total: int,
    minutes: float,
    jobs: int,
) -> None:
    """Measure what is missing, `jobs` at once, in order, and keep each as it ends.

    None starts after `minutes`. `total` is for the progress bar: with what is kept already.
    """
    left = list(reversed(missing))
    end = time.monotonic() + 60 * minutes
    running: set[Future[T]] = set()
    with ThreadPoolExecutor(jobs) as pool, Progress() as progress:
        task = progress.add_task("cells", total=total, completed=total - len(left))
        while running or (left and time.monotonic() < end):
            while left and len(running) < jobs and time.monotonic() < end:
                running.add(pool.submit(left.pop()))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                keep(future.result())
                progress.advance(task)
