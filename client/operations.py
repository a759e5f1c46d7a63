"""Operations of a session that were posted: sends, streams, receives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sealane._native import ChunkBitmap, Completion
from sealane.client.messages import Received, Sent
from sealane.errors import Error, SessionError, UsageError

if TYPE_CHECKING:
    from sealane.client.messages import Bytes
    from sealane.client.session import Session

R = TypeVar("R")

_WHY: Final = {
    "outcome_unknown": "the session ended before the peer's answer",
    "aborted": "the session ended before it was done",
    "too_long": "the message is longer than the room that the receiver has for it",
    "refused": "the fabric can't do it",
    "cancelled": "it was given up, here or by the peer",
    "limit": "this job has as many under way as it may: `sealanectl session limits`",
    "overlap": "another receive is under way in the same bytes",
    "draining": "this fabric or the peer's stops, and sends nothing new",
}
"""Ends of an operation that are errors, for people; exactly: docs/formats/ring-abi.md."""


class Operation(Generic[R]):
    """A send or a receive that was posted. Await it, or `wait` with a time-out.

    Who stops waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of tasks may wait, now or later; `asyncio.gather` and its like wait for many.
    """

    GOOD = frozenset({"ok", "partial"})
    """Statuses that are no error."""

    def __init__(self, session: "Session", held: object, result: Callable[[Completion], R]) -> None:
        self._session = session
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
            self._error = SessionError(
                f"session.message.{outcome.status}", f"{outcome.kind}: {_WHY[outcome.status]}"
            )
        else:
            self._completion = outcome
        self._held.clear()
        self._ended.set()


class Command(Operation[Completion]):
    """What names another operation; it may be too late for it."""

    GOOD = frozenset({"ok", "refused"})

    def __init__(self, session: "Session") -> None:
        super().__init__(session, None, lambda completion: completion)


class SendOperation(Operation[Sent]):
    """A send that was posted."""

    def __init__(self, session: "Session", held: object) -> None:
        super().__init__(
            session,
            held,
            lambda completion: Sent(
                message=completion.message,
                length=completion.length,
                duration_seconds=completion.duration_ns / 1e9,
                is_partial=completion.status == "partial",
            ),
        )

    async def cancel(self) -> bool:
        """Give the message up at both ends, unless it has ended: then False.

        The operation ends as `session.message.cancelled`; so does the receive, unless it had all.
        """
        ring = self._session.ring
        return await self._session.command(
            lambda number: ring.post_cancel(operation=self.handle, user_data=number)
        )


class StreamOperation(SendOperation):
    """A message whose parts are written one by one, anywhere in the receiver's buffer.

    A reliable one ends when all that was written before `end` has arrived, an unreliable one when
    all has left.
    """

    async def write(
        self,
        remote_offset: int,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        """Send `data`, or a range of the region, to that offset of the receiver's buffer.

        In any order, with gaps, and again. Offset and length are multiples of the session's
        `unit_bytes`; a part that reaches the end of the stream's range may be shorter. The bytes
        must not change until the stream has ended. Raises UsageError `session.stream.part` if the
        stream has ended, or for a part that can't be.
        """
        start, size = self._session.place(data, offset, length)
        self._held.append(data)
        unit = self._session.session.unit_bytes
        await self._do(
            lambda number: self._session.ring.post_continue(
                stream=self.handle,
                offset=start,
                length=size,
                remote_offset=remote_offset,
                user_data=number,
            ),
            f"{size} bytes to {remote_offset}: whole units of {unit} bytes are needed, within the "
            "stream's range, before its end",
        )

    async def end(self) -> None:
        """Say that nothing more will be written."""
        ring = self._session.ring
        await self._do(
            lambda number: ring.post_end(stream=self.handle, user_data=number),
            "there is no stream to end: it has ended, or was told to",
        )

    async def _do(self, post: Callable[[int], int], refused: str) -> None:
        if not await self._session.part(post):
            raise UsageError("session.stream.part", refused)


class ReceiveOperation(Operation[Received]):
    """A receive that was posted: what has landed of it can be seen before it is whole.

    Chunks are `Session.chunk_bytes` long, the last one of a message shorter.
    """

    def __init__(self, session: "Session", held: object, *, offset: int, length: int) -> None:
        super().__init__(
            session,
            held,
            lambda completion: Received(
                message=completion.message,
                offset=offset,
                length=completion.length,
                immediate=completion.immediate,
                is_partial=completion.status == "partial",
                chunks=self._landed,
            ),
        )
        self._landed: bytes | None = None
        self._bitmap: ChunkBitmap | None = None
        self.chunk_count = -(-length // session.chunk_bytes)
        """Chunks of the buffer, of which a message may take fewer."""

    def settle(self, outcome: Completion | Error) -> None:
        """Say how it ended, and keep what had landed of a partial message."""
        if not isinstance(outcome, Error) and outcome.status == "partial":
            self._landed = self.chunks()
        super().settle(outcome)

    async def complete(self) -> bool:
        """End the receive with what has landed; nothing changes its bytes any more.

        False if it had ended. One that no slot had been found for ends as
        `session.message.cancelled`.
        """
        ring = self._session.ring
        return await self._session.command(
            lambda number: ring.post_complete(receive=self.handle, user_data=number)
        )

    async def packet_map(self, chunk: int) -> bytes | None:
        """Return a byte for each unit of a chunk: 1 if it has landed. Asks the fabric.

        None if nothing of the message has arrived yet, or all of it has.
        """
        self._check_chunks(chunk, chunk + 1)
        ring = self._session.ring
        completion = await self._session.ask(
            lambda number: ring.post_packet_map(receive=self.handle, chunk=chunk, user_data=number)
        )
        if completion.status != "ok":
            return None
        units = self._session.chunk_bytes // self._session.session.unit_bytes
        return bytes(completion.packets[unit // 8] >> unit % 8 & 1 for unit in range(units))

    async def immediate(self) -> int | None:
        """Return the sender's immediate, known from the first packet on. Asks the fabric.

        None if nothing of the message has arrived yet, or it has none.
        """
        if not self.done():
            ring = self._session.ring
            completion = await self._session.ask(
                lambda number: ring.post_packet_map(receive=self.handle, chunk=0, user_data=number)
            )
            if completion.status == "ok":
                return completion.immediate
        return self.result().immediate if self.done() else None

    def bitmap(self) -> ChunkBitmap | None:
        """Return the live bitmap: a read-only buffer of a byte for each chunk of the buffer.

        `memoryview` and `numpy.frombuffer` take it without a copy; a byte becomes 1 when its chunk
        is whole in the region. It is for looking: before bytes of the region are used, ask
        `chunks` or `wait_chunks`. The bytes are about this receive while `is_current`; they belong
        to a later one that has its slot. None while the fabric has not taken the receive, and once
        a later one has its slot.
        """
        if self._bitmap is None:
            self._bitmap = self._session.bitmap(self.handle, self.chunk_count)
        return self._bitmap

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk of the buffer: 1 if it is whole in the region.

        None while the fabric has not taken the receive, and once a later receive has its slot.
        """
        bitmap = self.bitmap()
        return None if bitmap is None else bitmap.read()

    async def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until the chunks `start` to `end` (all: None) are in the region, or it has ended.

        Raises as `wait`, if the receive ends badly before.
        """
        end = self.chunk_count if end is None else end
        self._check_chunks(start, end)
        async with bounded(timeout_seconds):
            with self._session.watching_chunks() as changed:
                while not self.done():
                    changed.clear()
                    chunks = self.chunks()
                    if chunks is not None and all(chunks[start:end]):
                        return
                    await changed.wait()
        self.result()

    def _check_chunks(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.chunk_count:
            raise UsageError(
                "session.chunks.range", f"chunks {start} to {end}; there are {self.chunk_count}"
            )


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
