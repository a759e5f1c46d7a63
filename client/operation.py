"""What was posted on a session's ring, until it ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sealane._native import Completion
from sealane.errors import Error, SessionError, UsageError
from sealane.reasons import ReasonId

R = TypeVar("R")

_FAULTS: Final[Mapping[str, tuple[ReasonId, str]]] = {
    "outcome_unknown": (
        "session.message.outcome_unknown",
        "the session ended before the peer's answer",
    ),
    "aborted": ("session.message.aborted", "the session ended before it was done"),
    "too_long": (
        "session.message.too_long",
        "the message is longer than the room that the receiver has for it",
    ),
    "refused": ("session.message.refused", "the fabric can't do it"),
    "cancelled": ("session.message.cancelled", "it was given up, here or by the peer"),
    "limit": (
        "session.message.limit",
        "this job has as many under way as it may: `sealanectl session limits`",
    ),
    "overlap": ("session.message.overlap", "another receive is under way in the same bytes"),
    "draining": (
        "session.message.draining",
        "this fabric or the peer's stops, and sends nothing new",
    ),
}
"""Ends of an operation that are errors: reason id and text; exactly: docs/formats/ring-abi.md."""


class Operation(Generic[R]):
    """A send or a receive that was posted. Await it, or `wait` with a time-out.

    Who stops waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of tasks may wait, now or later; `asyncio.gather` and its like wait for many.
    """

    GOOD = frozenset({"ok", "partial"})
    """Statuses that are no error."""

    def __init__(self, held: object, result: Callable[[Completion], R]) -> None:
        # The memory of a send or a receive is not free again before its end.
        self._held = [held]
        self._result = result
        self._ended = asyncio.Event()
        self._completion: Completion | None = None
        self._error: Error | None = None
        self.handle = -1
        """Names the operation on the ring."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def __await__(self) -> Generator[Any, None, R]:
        return self.wait().__await__()

    async def wait(self, *, timeout_seconds: float | None = None) -> R:
        """Wait for the end.

        Raises SessionError: `session.wait.timeout` if that takes too long (it goes on),
        `session.message.…` if the message did not arrive or nobody knows.
        """
        async with bounded(timeout_seconds):
            await self._ended.wait()
        return self.result()

    def result(self) -> R:
        """Return what came of it; raises as `wait`, and UsageError while it goes on."""
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise UsageError("session.operation.pending", "the operation has not ended")
        return self._result(self._completion)

    def settle(self, outcome: Completion | Error) -> None:
        """Say how it ended; the session does."""
        if isinstance(outcome, Error):
            self._error = outcome
        elif outcome.status not in self.GOOD:
            reason, why = _FAULTS[outcome.status]
            self._error = SessionError(reason, f"{outcome.kind}: {why}")
        else:
            self._completion = outcome
        self._held.clear()
        self._ended.set()


class Command(Operation[Completion]):
    """What names another operation; it may be too late for it."""

    GOOD = frozenset({"ok", "refused"})

    def __init__(self) -> None:
        super().__init__(None, lambda completion: completion)


async def wait_all(
    operations: Sequence[Operation[R]], *, timeout_seconds: float | None = None
) -> list[R]:
    """Wait for many operations; returns their results in order.

    Raises what the first one raises that ended badly, or SessionError `session.wait.timeout`; the
    others go on.
    """
    async with bounded(timeout_seconds):
        return await asyncio.gather(*operations)


@contextlib.asynccontextmanager
async def bounded(seconds: float | None) -> AsyncIterator[None]:
    """Raise SessionError `session.wait.timeout` if the block takes longer than that."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SessionError(
            "session.wait.timeout", f"not within {seconds:g} s; it goes on"
        ) from error
