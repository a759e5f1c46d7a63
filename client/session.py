"""A job's end of a session: messages both ways, out of and into shared memory (docs/client.md).

The payload lies in the session's region, memory shared with the fabric; keys never come here.
What crosses the rings is in docs/ring-abi.md.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sealane._native import Completion, JobRing, RegionArray
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMPLETIONS_PER_TURN: Final = 64

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRepeat:
    """Lost packets are sent again: no overhead, but round trips of delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureCoded:
    """Every k packets travel with m of parity; up to m losses cost no time.

    `depth` blocks of k are interleaved: a burst of losses is shared by them.
    """

    k: int = 32
    m: int = 8
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """As the session's plan has it for the length: by what is known of the path's loss."""


Reliability = SelectiveRepeat | ErasureCoded | Auto
_NO_CODE: Final = ErasureCoded(k=0, m=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message that the peer has whole."""

    message: int
    length: int
    duration_seconds: float
    """From the first transmission to the acknowledgement of the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that has arrived whole in the region."""

    message: int
    offset: int
    length: int
    immediate: int | None


class Operation(Generic[R]):
    """A send or a receive that was posted. Await it, or `wait` with a time-out.

    Who stops waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of tasks may wait, now or later; `asyncio.gather` and its like wait for many.
    """

    def __init__(self, session: "Session", held: object, result: Callable[[Completion], R]) -> None:
        self._session = session
        # The memory of a send or a receive is not free again before its end.
        self._held = held
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
        async with _bounded(timeout_seconds):
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
        elif outcome.status != "ok":
            self._error = SessionError(
                f"session.message.{outcome.status}",
                f"{outcome.kind} of message {outcome.message} ended as {outcome.status}",
            )
        else:
            self._completion = outcome
        self._held = None
        self._ended.set()


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
            ),
        )
        self.chunk_count = -(-length // session.chunk_bytes)
        """Chunks of the buffer, of which a message may take fewer."""

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk of the buffer: 1 if it is whole in the region.

        None while the fabric has not taken the receive, and once a later receive has its slot.
        """
        return self._session.ring.bitmap(self.handle, self.chunk_count)

    async def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until the chunks `start` to `end` (all: None) are in the region, or it has ended.

        Raises as `wait`, if the receive ends badly before.
        """
        end = self.chunk_count if end is None else end
        if not 0 <= start <= end <= self.chunk_count:
            raise UsageError(
                "session.chunks.range", f"chunks {start} to {end}; there are {self.chunk_count}"
            )
        async with _bounded(timeout_seconds):
            with self._session.watching_chunks() as changed:
                while not self.done():
                    changed.clear()
                    chunks = self.chunks()
                    if chunks is not None and all(chunks[start:end]):
                        return
                    await changed.wait()
        self.result()


class Session:
    """A session: the i-th send of either end lands in the i-th receive of the other.

    It ends for good when it is closed, when the peer closes it, or when a process of it dies.
    """

    def __init__(self, ring: JobRing, session: sessions_pb2.Session) -> None:
        self.session = session
        """What the fabric said at the grant: name, peer, unit, rate."""
        self.ring = ring
        self.region = memoryview(ring.region)
        """All of the shared memory, writable. `empty` knows nothing of what is used through it."""
        self.chunk_bytes = ring.chunk_bytes
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._open: dict[int, Operation[Any]] = {}
        # Held while posting, so that operations reach the ring in the order they were asked for.
        self._posting = asyncio.Lock()
        self._room = asyncio.Event()
        self._chunk_watchers: set[asyncio.Event] = set()
        self._ended: Error | None = None
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop.add_reader(ring.fileno(), self._collect)

    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, alignment: int = 64
    ) -> RegionArray:
        """Allocate an array in the region, its bytes as they happen to be.

        `dtype` is a name as NumPy and torch have them ("float32", "bfloat16"), or their own types.
        `numpy.from_dlpack`, `torch.from_dlpack` and `torch.frombuffer` take it without a copy. Its
        bytes are free again when no view of it is left. Raises UnavailableError
        `session.region.full`, UsageError `session.region.array`.
        """
        name = str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")
        dimensions = [shape] if isinstance(shape, int) else list(shape)
        try:
            return self.ring.region.empty(dimensions, name, alignment)
        except MemoryError as error:
            raise UnavailableError("session.region.full", str(error)) from error
        except (ValueError, OverflowError) as error:
            raise UsageError("session.region.array", str(error)) from error

    async def post_send(
        self,
        data: "Buffer | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> Operation[Sent]:
        """Post a message: `data`, which lies in the region, or a range of it. Waits for room.

        The bytes must not change until the send has ended. Raises UsageError for bytes elsewhere.
        """
        code = reliability if isinstance(reliability, ErasureCoded) else _NO_CODE
        offset, length = self._range(data, offset, length)
        operation = Operation(
            self,
            data,
            lambda completion: Sent(
                message=completion.message,
                length=completion.length,
                duration_seconds=completion.duration_ns / 1e9,
            ),
        )
        await self._post(
            operation,
            lambda number: self.ring.post_send(
                offset=offset,
                length=length,
                user_data=number,
                k=code.k,
                m=code.m,
                depth=code.depth,
                auto=isinstance(reliability, Auto),
                immediate=immediate,
            ),
        )
        return operation

    async def post_receive(
        self, into: "Buffer | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Offer `into`, which lies in the region, or a range of it, to the next message.

        Waits for room on the ring. Raises UsageError for bytes elsewhere.
        """
        offset, length = self._range(into, offset, length)
        operation = ReceiveOperation(self, into, offset=offset, length=length)
        await self._post(
            operation,
            lambda number: self.ring.post_receive(offset=offset, length=length, user_data=number),
        )
        return operation

    async def send(
        self,
        data: "Buffer | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> Sent:
        """Send a message and return when the peer has it: `post_send`, then `wait`.

        Selective repeat unless said otherwise. `immediate`: 32 bits for the receiver.
        """
        operation = await self.post_send(
            data, offset=offset, length=length, reliability=reliability, immediate=immediate
        )
        return await operation.wait()

    async def receive(
        self, into: "Buffer | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Take the next message and return when it is whole: `post_receive`, then `wait`.

        Raises SessionError if the message is longer than the room for it, or the session ended.
        """
        return await (await self.post_receive(into, offset=offset, length=length)).wait()

    def statistics(self) -> dict[str, int]:
        """Return the session's counters, as the fabric published them last."""
        return self.ring.statistics()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Post nothing more, and wait until everything posted has ended, well or not.

        Raises SessionError `session.wait.timeout`; the session stays as it is, without new posts.
        """
        self._is_draining = True
        async with _bounded(timeout_seconds):
            await self._idle.wait()

    def close(self) -> None:
        """Give the rings back; the fabric then ends the session. Views of the region stay."""
        self._end(SessionError("session.closed", f"{self.session.name} was closed here"))
        self.ring.close()

    @contextlib.contextmanager
    def watching_chunks(self) -> Iterator[asyncio.Event]:
        """Have an event set whenever chunks have landed or operations have ended."""
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

    def _range(self, data: "Buffer | None", offset: int, length: int | None) -> tuple[int, int]:
        if (data is None) == (length is None):
            raise UsageError("session.post.range", "either data or the length of a range is needed")
        if data is None:
            return offset, length or 0
        try:
            return self.ring.region.locate(data)
        except (ValueError, BufferError, TypeError) as error:
            raise UsageError("session.post.elsewhere", str(error)) from error

    async def _post(self, operation: Operation[Any], post: Callable[[int], int]) -> None:
        """Put an operation on the ring when there is room."""
        async with self._posting:
            while not self._try_post(operation, post):
                await self._room.wait()

    def _try_post(self, operation: Operation[Any], post: Callable[[int], int]) -> bool:
        """Put an operation on the ring; False if there is no room, which `_room` then reports."""
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
        self._idle.clear()
        return True

    def _collect(self) -> None:
        try:
            while completions := self.ring.completions(COMPLETIONS_PER_TURN):
                for completion in completions:
                    self._open.pop(completion.user_data).settle(completion)
        except OSError:
            self._end(SessionError("session.closed", f"{self.session.name} has ended"))
        self._tell()

    def _end(self, error: Error) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._loop.remove_reader(self.ring.fileno())
        for operation in self._open.values():
            # What the fabric had completed was taken before: of the rest nobody knows.
            operation.settle(
                SessionError(
                    "session.message.outcome_unknown",
                    f"{error}: whether this message arrived is not known",
                )
            )
        self._open.clear()
        self._tell()

    def _tell(self) -> None:
        """Wake who waits for room, chunks, or the end of everything."""
        self._room.set()
        for watcher in self._chunk_watchers:
            watcher.set()
        if not self._open:
            self._idle.set()


async def wait_all(
    operations: Sequence[Operation[R]], *, timeout_seconds: float | None = None
) -> list[R]:
    """Wait for many operations; returns their results in order.

    Raises what the first one raises that ended badly, or SessionError `session.wait.timeout`; the
    others go on.
    """
    async with _bounded(timeout_seconds):
        return await asyncio.gather(*operations)


@contextlib.asynccontextmanager
async def _bounded(seconds: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SessionError(
            "session.wait.timeout", f"not within {seconds:g} s; it goes on"
        ) from error
