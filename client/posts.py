"""A job's end of a session's ring: posts operations in order, and collects completions."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sealane._native import ChunkBitmap, Completion, JobRing
from sealane.client.operation import Command, Operation, bounded
from sealane.errors import Error, SessionError, UsageError
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:
    from sealane.client.messages import Bytes

COMPLETIONS_PER_TURN: Final = 64


class Posts:
    """The operations on the ring, and the callers that wait for room on it."""

    def __init__(self, ring: JobRing, session: sessions_pb2.Session) -> None:
        self.session = session
        self.ring = ring
        self.region = memoryview(ring.region)
        self.chunk_bytes = ring.chunk_bytes
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._open: dict[int, Operation[Any]] = {}
        # Held while posting, so that operations reach the ring in the order of the calls.
        self._posting = asyncio.Lock()
        # Commands don't wait behind them: the ring may be full of the operations they cancel.
        self._commanding = asyncio.Lock()
        self._room = asyncio.Event()
        self._chunk_watchers: set[asyncio.Event] = set()
        self._ended: Error | None = None
        self._is_draining = False
        self.is_closed = False
        self._are_sends_quiet = False
        self._send_hearers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop.add_reader(ring.fileno(), self._collect)

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new posts, and wait until everything posted has ended, with success or not.

        Raises SessionError `session.wait.timeout`; the session then stays open for what is posted.
        """
        self._is_draining = True
        async with bounded(timeout_seconds):
            with self.hearing_sends():
                await self._idle.wait()

    def close(self) -> None:
        """End all operations and release the rings.

        The fabric still uses the memory of operations in flight until it has noticed: the ring
        keeps that alive.
        """
        self._end(SessionError("session.closed", f"{self.session.name} was closed here"))
        self.is_closed = True
        self.ring.close()

    @contextlib.contextmanager
    def watching_chunks(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set when chunks have landed or operations have ended.

        Quiet sends don't set it.
        """
        changed = asyncio.Event()
        if self._ended is None and not self._chunk_watchers:
            self.ring.wake_for_chunks(True)
        self._chunk_watchers.add(changed)
        try:
            yield changed
        finally:
            self._chunk_watchers.remove(changed)
            if self._ended is None and not self._chunk_watchers:
                self.ring.wake_for_chunks(False)

    def quiet_sends(self) -> None:
        """Let successful sends wake this job only inside `hearing_sends`, not one by one."""
        self._are_sends_quiet = True
        if self._ended is None and not self._send_hearers:
            self.ring.quiet_sends(True)

    @contextlib.contextmanager
    def hearing_sends(self) -> Iterator[None]:
        """Learn of successful sends even if quiet; collect those that have already ended."""
        self._send_hearers += 1
        if self._are_sends_quiet and self._ended is None:
            self.ring.quiet_sends(False)
            # After that: sends that ended earlier don't ring again.
            self._collect()
        try:
            yield
        finally:
            self._send_hearers -= 1
            if self._are_sends_quiet and not self._send_hearers and self._ended is None:
                self.ring.quiet_sends(True)

    def bitmap(self, handle: int, chunk_count: int) -> ChunkBitmap | None:
        """Return the bitmap of a receive; None if it has no slot, and after `close`."""
        return None if self.is_closed else self.ring.bitmap(handle, chunk_count)

    def place(self, data: "Bytes | None", offset: int, length: int | None) -> tuple[int, int]:
        """Return (offset, length) in the region; UsageError for bytes outside it."""
        if (data is None) == (length is None):
            raise UsageError("session.post.range", "either data or the length of a range is needed")
        if length is not None:
            if offset < 0 or length < 0 or offset + length > len(self.region):
                raise UsageError(
                    "session.post.range",
                    f"bytes {offset} to {offset + length}; the region has {len(self.region)}",
                )
            return offset, length
        try:
            return self.ring.region.locate(data)
        except (ValueError, BufferError, TypeError) as error:
            raise UsageError("session.post.elsewhere", str(error)) from error

    async def post(
        self,
        operation: Operation[Any],
        post: Callable[[int], int],
        *,
        deadline_seconds: float | None = None,
    ) -> None:
        """Post a send or a receive; wait for room on the ring, first come first served.

        Raises SessionError `session.message.expired` if there is none by the deadline.
        """
        if deadline_seconds is None:
            await self._post(operation, post, self._posting)
            return
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._post(operation, post, self._posting)
        except TimeoutError as error:
            raise SessionError(
                "session.message.expired", "the ring had no room for it by its deadline"
            ) from error

    async def part(self, post: Callable[[int], int]) -> bool:
        """Post a part of a stream, or its end; return False if the stream can't take it."""
        operation = Command()
        await self.post(operation, post)
        return (await operation).status == "ok"

    async def command(self, post: Callable[[int], int]) -> bool:
        """Post a request about an operation; return False if that isn't in flight."""
        return (await self.ask(post)).status == "ok"

    async def ask(self, post: Callable[[int], int]) -> Completion:
        """Post a request about an operation, and return the fabric's answer.

        The ring reserves room for such requests.
        """
        operation = Command()
        await self._post(operation, post, self._commanding)
        return await operation

    async def _post(
        self, operation: Operation[Any], post: Callable[[int], int], order: asyncio.Lock
    ) -> None:
        """Put an operation on the ring when there is room, in the order of the calls."""
        async with order:
            if self._try_post(operation, post):
                return
            with self.hearing_sends():
                while not self._try_post(operation, post):
                    await self._room.wait()

    def _try_post(self, operation: Operation[Any], post: Callable[[int], int]) -> bool:
        """Put an operation on the ring; return False if it is full; `_room` says when it isn't."""
        if self._ended is not None:
            raise self._ended
        if self._is_draining:
            raise UsageError("session.draining", f"{self.session.name} takes nothing more")
        self._room.clear()
        number = next(self._numbers)
        try:
            operation.handle = post(number)
        except BlockingIOError:
            return False
        except (ValueError, OverflowError) as error:
            raise UsageError("session.post.range", str(error)) from error
        self._open[number] = operation
        if operation.held:
            self.ring.hold(number, operation.held)
        self._idle.clear()
        return True

    def _collect(self) -> None:
        try:
            while completions := self.ring.completions(COMPLETIONS_PER_TURN):
                for completion in completions:
                    self._open.pop(completion.user_data).settle(completion)
        except OSError:
            why = self.ring.close_reason() or "its fabric is gone"
            self._end(SessionError("session.closed", f"{self.session.name} has ended: {why}"))
        self._wake()

    def _end(self, error: Error) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._loop.remove_reader(self.ring.fileno())
        for operation in self._open.values():
            # Completions of the fabric were collected before: the rest is unknown.
            operation.settle(
                SessionError(
                    "session.message.outcome_unknown",
                    f"{error}: whether this message arrived is not known",
                )
            )
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        """Wake all that wait for room, chunks, or the end of all operations."""
        self._room.set()
        for watcher in self._chunk_watchers:
            watcher.set()
        if not self._open:
            self._idle.set()
