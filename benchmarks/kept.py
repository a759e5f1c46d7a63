"""Results saved line by line, so that an interrupted run can be continued."""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

T = TypeVar("T")


def add_run_options(
    parser: argparse.ArgumentParser, *, output: str, group: str = "sealane-sessions"
) -> None:
    """Add the options of a run that can be continued: its limits, and its directory."""
    add = parser.add_argument
    add(
        "--minutes",
        type=float,
        default=10.0,
        help="minutes after which no cell starts (default 10)",
    )
    add("--jobs", type=int, default=os.cpu_count(), help="concurrent cells (default: one per core)")
    add(
        "--output",
        type=Path,
        default=Path(group) / output,
        help="directory for results",
    )


class Records:
    """Records of one build by key, in a file with a line of JSON for each.

    Lines of other builds are ignored and stay in the file.
    """

    def __init__(self, path: Path, *, made_by: str) -> None:
        self._path = path
        self._made_by = made_by
        self._known: dict[str, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            self._read(line)
        if text and not text.endswith("\n"):
            # A killed run left an incomplete line: end it.
            with path.open("a") as file:
                file.write("\n")

    def _read(self, line: str) -> None:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            # The incomplete line of a killed run.
            return
        if found.get("made_by") == self._made_by:
            self._known[found["key"]] = found["record"]

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the newest record for a key, if there is one."""
        return self._known.get(key)

    def all(self) -> Sequence[dict[str, Any]]:
        """Return all records, ordered by the first measurement of their keys."""
        return list(self._known.values())

    def put(self, key: str, record: dict[str, Any]) -> None:
        """Save a record of JSON values; `get` returns it after a JSON round trip."""
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
    """Run `missing` in order, `jobs` at a time, and pass each result to `keep`.

    None starts after `minutes`. `total` is for the progress bar and includes earlier results.
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
