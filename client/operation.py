"""Operations posted on a session's ring."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from sealane._native import Completion
from sealane.client.facade import any_thread
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
        "the message is longer than the receiver's buffer for it",
    ),
    "refused": ("session.message.refused", "the fabric can't do it"),
    "cancelled": ("session.message.cancelled", "it was cancelled, here or by the peer"),
    "expired": ("session.message.expired", "it had not ended by its deadline, and was cancelled"),
    "limit": (
        "session.message.limit",
        "this job has its maximum of operations in flight: `sealanectl session limits`",
    ),
    "overlap": ("session.message.overlap", "another receive in flight uses the same bytes"),
    "draining": (
        "session.message.draining",
        "this fabric or the peer's is stopping, and sends nothing new",
    ),
}
"""Error statuses of an operation: reason id and text; definitions: docs/formats/ring-abi.md."""


class Operation(Generic[R]):
    """A posted send or receive; `wait` for it.

    Giving up waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of callers may wait, also after the end. With asyncio it is awaitable: `asyncio.gather` and the
    like wait for many.
    """

    GOOD = frozenset({"ok", "partial"})
    """Statuses that aren't errors."""

    def __init__(self, held: object, result: Callable[[Completion], R]) -> None:
        self.held = [held]
        """The memory of a send or receive; the session keeps it alive until its end."""
        self._result = result
        self._ended = asyncio.Event()
        self._completion: Completion | None = None
        self._error: Error | None = None
        self._failed: Callable[[Error], object] | None = None
        self.handle = -1
        """Identifies the operation on the ring."""

    @any_thread
    def done(self) -> bool:
        """Return whether the operation has ended, with success or not."""
        return self._ended.is_set()

    def __await__(self) -> Generator[Any, None, R]:
        return self.wait().__await__()

    async def wait(self, *, timeout_seconds: float | None = None) -> R:
        """Wait for the end and return the result.

        Raises SessionError: `session.wait.timeout` after the time-out (the operation goes on),
        `session.message.…` if the message did not arrive, or may not have.
        """
        if timeout_seconds is None:
            await self._ended.wait()
        else:
            async with bounded(timeout_seconds):
                await self._ended.wait()
        return self.result()

    @any_thread
    def result(self) -> R:
        """Return the result; raises as `wait`, and UsageError before the end."""
        if self._error is not None:
            raise self._error
        if self._completion is None:
            raise UsageError("session.operation.pending", "the operation has not ended")
        return self._result(self._completion)

    def settle(self, outcome: Completion | Error) -> None:
        """Set the outcome; called by the session."""
        if isinstance(outcome, Error):
            self._error = outcome
        elif outcome.status not in self.GOOD:
            reason, why = _FAULTS[outcome.status]
            self._error = SessionError(reason, f"{outcome.kind}: {why}")
        else:
            self._completion = outcome
        # Not emptied: if the session was closed here, the fabric may still use what it holds.
        self.held = []
        self._ended.set()
        if self._error is not None and self._failed is not None:
            self._failed(self._error)

    def when_failed(self, callback: Callable[[Error], object]) -> None:
        """Call `callback` when the operation ends with an error, at once if it has.

        It must not use the session. One callback at most.
        """
        self._failed = callback
        if self._error is not None:
            callback(self._error)


class Command(Operation[Completion]):
    """A request about another operation, which may have ended already."""

    GOOD = frozenset({"ok", "refused"})

    def __init__(self) -> None:
        super().__init__(None, lambda completion: completion)
        self.held = []


async def wait_all(
    operations: Sequence[Operation[R]], *, timeout_seconds: float | None = None
) -> list[R]:
    """Wait for many operations; return their results in order.

    Raises the first error of any of them, or SessionError `session.wait.timeout`; the others go on.
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
