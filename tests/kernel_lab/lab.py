"""What the tests use: a guest that runs the steps of jobs/, and what came of it."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_lab import emulation
from kernel_lab.emulation import Guest, GuestOptions

JOBS = Path(__file__).resolve().parent / "jobs"
# Where a guest finds what listens on this machine's loopback address.
HOST_ADDRESS = "10.0.2.2"
TIMEOUT_SECONDS = 240.0

Calls = dict[str, Callable[[Guest], None]]


@dataclass(frozen=True)
class Run:
    """What a guest that ran to its end leaves: its console, and the files of /out."""

    output: str
    directory: Path

    def json(self, name: str) -> Any:
        """Return what the job wrote to /out/NAME.json."""
        return json.loads((self.directory / f"{name}.json").read_text())

    def text(self, name: str) -> str:
        """Return what the job wrote to /out/NAME.txt."""
        return (self.directory / f"{name}.txt").read_text()


class GuestFailedError(AssertionError):
    """The job ended with another status than 0, or not at all; `output` is the guest's console."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Lab:
    """Runs jobs, each in a guest of its own; `directory` receives what they leave."""

    cache: Path
    directory: Path

    def run(
        self,
        *steps: str | Sequence[object],
        calls: Calls | None = None,
        timeout: float = TIMEOUT_SECONDS,
        options: dict[str, Any] | None = None,
    ) -> Run:
        """Boot a guest and run steps in it one after the other, up to the first that fails.

        A step is a function of jobs/*.sh with its arguments. `calls` are what the job may ask for
        with lab-ready; each is called with the guest, in a thread of its own.
        """
        __tracebackhide__ = True
        output = bytearray()

        def console(data: bytes) -> None:
            output.extend(data)
            sys.stdout.write(data.decode(errors="replace"))

        def on_ready(guest: Guest, word: str) -> int:
            (calls or {})[word](guest)
            return 0

        lines = [step if isinstance(step, str) else " ".join(map(str, step)) for step in steps]
        settings = GuestOptions(
            cache=self.cache,
            job=(str(JOBS / "run"), *lines),
            timeout=timeout,
            out=self.directory,
            **{"file": (), **(options or {})},
        )
        settings = GuestOptions(**{**vars(settings), "file": (*settings.file, str(JOBS))})
        status = emulation.run(settings, console=console, on_ready=on_ready)
        text = output.decode(errors="replace")
        if status != 0:
            raise GuestFailedError(
                f"the guest's job ended with status {status}: see its output", text
            )
        return Run(text, self.directory)
