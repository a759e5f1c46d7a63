"""What a collector of the audit log is."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

CONNECT_SECONDS: Final = 10.0
SEND_SECONDS: Final = 60.0
"""Time limit for a collector to take what is sent at once."""

SendRecords = Callable[[list[bytes]], Awaitable[None]]
"""Sends lines of the log, without newlines; returns once the collector has them, or OSError.

It has a time limit of its own: TimeoutError, or another OSError.
"""


class AuditCollector(Protocol):
    """Takes records over one connection at a time."""

    def connect(self) -> contextlib.AbstractAsyncContextManager[SendRecords]:
        """Connect for as long as the block runs; OSError, or UnicodeError for a host's name."""
