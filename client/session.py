"""A job's end of a session: messages both ways, out of and into shared memory.

The payload lies in the session's region, memory shared with the fabric; keys never come here. How
it is used: docs/start/client-sessions.md; what crosses the rings: docs/formats/ring-abi.md.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from sealane._native import ChunkBitmap, Completion, JobRing, RegionArray
from sealane.client.messages import (
    Auto,
    ErasureCoded,
    Received,
    Reliability,
    SelectiveRepeat,
    Sent,
    Unreliable,
)
from sealane.client.operations import (
    Command,
    Operation,
    ReceiveOperation,
    SendOperation,
    StreamOperation,
    bounded,
)
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:
    from sealane.client.messages import Bytes

COMPLETIONS_PER_TURN: Final = 64
_IMMEDIATE_END: Final = 1 << 32


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
        # Commands don't wait behind those: what they cancel may be what there is no room for.
        self._commanding = asyncio.Lock()
        self._room = asyncio.Event()
        self._chunk_watchers: set[asyncio.Event] = set()
        self._ended: Error | None = None
        self._is_draining = False
        self._is_closed = False
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
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> SendOperation:
        """Post a message: `data`, which lies in the region, or a range of it. Waits for room.

        The bytes must not change until the send has ended. Raises UsageError for bytes elsewhere.
        """
        code = reliability if isinstance(reliability, ErasureCoded) else None
        _check_immediate(immediate)
        offset, length = self.place(data, offset, length)
        operation = SendOperation(self, data)
        await self._post(
            operation,
            lambda number: self.ring.post_send(
                offset=offset,
                length=length,
                user_data=number,
                k=code.k if code else 0,
                m=code.m if code else 0,
                depth=code.depth if code else 1,
                auto=isinstance(reliability, Auto),
                unreliable=isinstance(reliability, Unreliable),
                immediate=immediate,
            ),
            self._posting,
        )
        return operation

    async def post_stream(
        self,
        length: int,
        *,
        reliability: SelectiveRepeat | Unreliable | None = None,
        immediate: int | None = None,
    ) -> StreamOperation:
        """Begin a message whose parts are written later, into the first `length` bytes there."""
        _check_immediate(immediate)
        operation = StreamOperation(self, None)
        await self._post(
            operation,
            lambda number: self.ring.post_stream(
                length=length,
                user_data=number,
                unreliable=isinstance(reliability, Unreliable),
                immediate=immediate,
            ),
            self._posting,
        )
        return operation

    async def post_receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Offer `into`, which lies in the region, or a range of it, to the next message.

        Waits for room on the ring. Raises UsageError for bytes elsewhere.
        """
        offset, length = self.place(into, offset, length)
        operation = ReceiveOperation(self, into, offset=offset, length=length)
        await self._post(
            operation,
            lambda number: self.ring.post_receive(offset=offset, length=length, user_data=number),
            self._posting,
        )
        return operation

    async def send(
        self,
        data: "Bytes | None" = None,
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
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Take the next message and return when it is whole: `post_receive`, then `wait`.

        Raises SessionError if the message is longer than the room for it, or the session ended.
        """
        return await (await self.post_receive(into, offset=offset, length=length)).wait()

    def statistics(self) -> dict[str, int]:
        """Return the session's counters, as the fabric published them last.

        Raises SessionError `session.closed` after `close`.
        """
        if self._is_closed:
            raise SessionError("session.closed", f"{self.session.name} was closed here")
        return self.ring.statistics()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Post nothing more, and wait until everything posted has ended, well or not.

        Raises SessionError `session.wait.timeout`; the session stays as it is, without new posts.
        """
        self._is_draining = True
        async with bounded(timeout_seconds):
            await self._idle.wait()

    def close(self) -> None:
        """Give the rings back; the fabric then ends the session. Views of the region stay."""
        self._end(SessionError("session.closed", f"{self.session.name} was closed here"))
        self._is_closed = True
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

    def bitmap(self, handle: int, chunk_count: int) -> ChunkBitmap | None:
        """Find the bitmap of a receive; None without a slot of its own, and after `close`."""
        return None if self._is_closed else self.ring.bitmap(handle, chunk_count)

    def place(self, data: "Bytes | None", offset: int, length: int | None) -> tuple[int, int]:
        """Return (offset, length) in the region; UsageError for bytes elsewhere."""
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

    async def part(self, post: Callable[[int], int]) -> bool:
        """Post a part of a stream, or its end; False if the stream can't have it (any more)."""
        operation = Command(self)
        await self._post(operation, post, self._posting)
        return (await operation).status == "ok"

    async def command(self, post: Callable[[int], int]) -> bool:
        """Post what names another operation; False if that is not under way (any more)."""
        return (await self.ask(post)).status == "ok"

    async def ask(self, post: Callable[[int], int]) -> Completion:
        """Post what names another operation, and return what the fabric says.

        The ring keeps room for it, however many operations wait.
        """
        operation = Command(self)
        await self._post(operation, post, self._commanding)
        return await operation

    async def _post(
        self, operation: Operation[Any], post: Callable[[int], int], order: asyncio.Lock
    ) -> None:
        """Put an operation on the ring when there is room, in the order of those who want to."""
        async with order:
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
            why = self.ring.close_reason() or "its fabric is gone"
            self._end(SessionError("session.closed", f"{self.session.name} has ended: {why}"))
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


def _check_immediate(immediate: int | None) -> None:
    if immediate is not None and not 0 <= immediate < _IMMEDIATE_END:
        raise UsageError("session.post.immediate", f"immediate {immediate}; it has 32 bits")
