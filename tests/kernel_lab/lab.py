"""Interface for tests: guests that run steps of jobs/, and their results."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_lab import emulation
from kernel_lab.emulation import Guest, GuestOptions

JOBS = Path(__file__).resolve().parent / "jobs"
# Address at which a guest reaches this machine's loopback address.
HOST_ADDRESS = "10.0.2.2"
TIMEOUT_SECONDS = 240.0

Calls = dict[str, Callable[[Guest], None]]


@dataclass(frozen=True)
class Run:
    """Results of a guest that ran to its end: its console, and the files in /out."""

    output: str
    directory: Path

    def json(self, name: str) -> Any:
        """Return the contents of /out/NAME.json."""
        return json.loads((self.directory / f"{name}.json").read_text())

    def text(self, name: str) -> str:
        """Return the contents of /out/NAME.txt."""
        return (self.directory / f"{name}.txt").read_text()


EMULATOR_FAULT = b"Oops: int3"
"""A kernel changes its own code behind a breakpoint, which other processors may meet. QEMU's
threads sometimes run the breakpoint and then read the changed code: a panic, nearly always at the
start."""


class GuestFailedError(AssertionError):
    """The job failed or didn't end; `output` is the guest's console."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Lab:
    """Runs each job in its own guest; results go to `directory`."""

    cache: Path
    directory: Path

    def run(
        self,
        *steps: str | Sequence[object],
        calls: Calls | None = None,
        timeout: float = TIMEOUT_SECONDS,
        options: dict[str, Any] | None = None,
    ) -> Run:
        """Boot a guest and run steps in order until one fails.

        A step is a function of jobs/*.sh with its arguments. `calls` are functions that the
        job can request with lab-ready; each is called with the guest, in its own thread.
        """
        __tracebackhide__ = True
        output = bytearray()
        called: list[str] = []

        def console(data: bytes) -> None:
            output.extend(data)
            sys.stdout.write(data.decode(errors="replace"))

        def on_ready(guest: Guest, word: str) -> int:
            called.append(word)
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
        if status == emulation.NO_STATUS and EMULATOR_FAULT in output and not called:
            print("kernel lab: the emulator's fault; once more")
            output.clear()
            status = emulation.run(settings, console=console, on_ready=on_ready)
        text = output.decode(errors="replace")
        if status != 0:
            raise GuestFailedError(
                f"the guest's job ended with status {status}: see its output", text
            )
        return Run(text, self.directory)
