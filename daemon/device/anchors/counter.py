"""Monotonic counters: numbers that only increase, whatever happens to the machine's disks.

The broker's start epoch is one (broker-store.md). It is incremented before the broker serves, so
that no two starts grant from the same arena. anchors.md states the guarantees of each kind.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from sealane.daemon.runtime.files import write_durably
from sealane.errors import UnavailableError, VerificationError

# A file with a higher value was tampered with; TPM counters have 64 bits, too.
COUNTER_MAX: Final = (1 << 64) - 1
_TEXT: Final = re.compile(rb"(0|[1-9][0-9]{0,19})\n")


class MonotonicCounter(Protocol):
    """A counter that never goes back. Its calls block: run them outside the event loop."""

    def read(self) -> int:
        """Return the current value; 0 may mean that it was never incremented."""
        ...

    def increment(self) -> int:
        """Add at least 1 and return the new value, once no restart can restore an older one.

        No two calls return the same value, even if two processes share the counter.
        """
        ...


class FileCounter:
    """A counter in a file, durable across power failures.

    For development only: restoring a copy of the file rolls it back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """Return the stored value, 0 if there is none; VerificationError `counter.malformed`."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise self._failed(error) from error
        match = _TEXT.fullmatch(content)
        if match is None or int(match[1]) > COUNTER_MAX:
            raise VerificationError(
                "counter.malformed",
                f"{self._path}: not a counter: write a higher value than its last one",
            )
        return int(match[1])

    def increment(self) -> int:
        """Add 1, make it durable and return the new value."""
        with self._locked():
            value = self.read() + 1
            if value > COUNTER_MAX:
                raise UnavailableError(
                    "counter.exhausted",
                    f"{self._path}: the counter has reached its maximum, {COUNTER_MAX}",
                )
            try:
                write_durably(self._path, b"%d\n" % value)
            except OSError as error:
                raise self._failed(error) from error
            return value

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A separate lock file, because the counter's file is replaced at each increment.
        path = self._path.with_name(self._path.name + ".lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError("counter.failed", f"counter {self._path}: {error.strerror}")
