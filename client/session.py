"""A job's end of a session: messages both ways, out of and into shared memory.

Payload lies in the session's region, memory shared with the fabric; the job never has keys. Usage:
docs/start/client-sessions.md; format of the rings: docs/formats/ring-abi.md.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sealane._native import JobRing, RegionArray
from sealane.client.facade import any_thread
from sealane.client.messages import (
    Auto,
    ErasureCoded,
    Received,
    Reliability,
    SelectiveRepeat,
    Sent,
    Unreliable,
)
from sealane.client.operations import ReceiveOperation, SendOperation, StreamOperation
from sealane.client.posts import Posts
from sealane.errors import SessionError, UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:
    from sealane.client.messages import Bytes

_IMMEDIATE_END: Final = 1 << 32
_PRIORITY_MAX: Final = 7
_NANOS_PER_SECOND: Final = 1_000_000_000
_DEADLINE_SECONDS_MAX: Final = 1e9


class Session:
    """A session: the i-th send of either end lands in the i-th receive of the other.

    It ends when either end closes it, or when the job or the fabric of either end dies.
    """

    session: sessions_pb2.Session
    """The fabric's grant: name, peer, unit, rate."""
    region: memoryview
    """The whole shared memory, writable. `empty` doesn't know which bytes it is used for."""
    chunk_bytes: int
    """Length of a chunk, the unit in which a receive reports progress."""

    region_name: str
    """The session for which the fabric created the region; that one may have ended."""

    def __init__(
        self, ring: JobRing, session: sessions_pb2.Session, *, region_name: str = ""
    ) -> None:
        self.session = session
        self.region_name = region_name or session.name
        self.posts = Posts(ring, session)
        self.ring = ring
        self.region = self.posts.region
        self.chunk_bytes = ring.chunk_bytes

    @any_thread
    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, alignment: int = 64
    ) -> RegionArray:
        """Allocate an uninitialised array in the region.

        `dtype` is a type of NumPy or torch, or its name ("float32", "bfloat16").
        `numpy.from_dlpack`, `torch.from_dlpack` and `torch.frombuffer` take the array without a
        copy. Its bytes are freed with the last view of it. Raises UnavailableError
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
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> SendOperation:
        """Post a send of `data`, which lies in the region, or of a range of the region.

        Waits for room on the ring. The bytes must not change until the send has ended. Messages of
        a higher `priority` (0 to 7) leave before all that wait, but come to the i-th receive like
        others. One that has not ended after `deadline_seconds` is cancelled at both ends, and one
        that finds no room on the ring by then is not posted (`session.message.expired`). Raises
        UsageError for bytes outside the region.
        """
        code = reliability if isinstance(reliability, ErasureCoded) else None
        check_terms(immediate, priority, deadline_seconds)
        nanos_left = _nanos_left(deadline_seconds)
        offset, length = self.posts.place(data, offset, length)
        operation = SendOperation(self.posts, data)
        await self.posts.post(
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
                priority=priority,
                deadline_nanos=nanos_left(),
            ),
            deadline_seconds=deadline_seconds,
        )
        return operation

    async def post_stream(
        self,
        length: int,
        *,
        reliability: SelectiveRepeat | Unreliable | None = None,
        immediate: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> StreamOperation:
        """Begin a message whose parts are written later, up to `length` bytes in all."""
        check_terms(immediate, priority, deadline_seconds)
        nanos_left = _nanos_left(deadline_seconds)
        operation = StreamOperation(self.posts, None)
        await self.posts.post(
            operation,
            lambda number: self.ring.post_stream(
                length=length,
                user_data=number,
                unreliable=isinstance(reliability, Unreliable),
                immediate=immediate,
                priority=priority,
                deadline_nanos=nanos_left(),
            ),
            deadline_seconds=deadline_seconds,
        )
        return operation

    async def post_receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Post a receive into `into`, which lies in the region, or into a range of the region.

        Waits for room on the ring. Raises UsageError for bytes outside the region.
        """
        offset, length = self.posts.place(into, offset, length)
        operation = ReceiveOperation(self.posts, into, offset=offset, length=length)
        await self.posts.post(
            operation,
            lambda number: self.ring.post_receive(offset=offset, length=length, user_data=number),
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
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> Sent:
        """Send a message and return when the peer has it: `post_send`, then `wait`.

        The default reliability is selective repeat. `immediate`: 32 bits for the receiver.
        """
        operation = await self.post_send(
            data,
            offset=offset,
            length=length,
            reliability=reliability,
            immediate=immediate,
            priority=priority,
            deadline_seconds=deadline_seconds,
        )
        return await operation.wait()

    async def receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Receive the next message and return when it is complete: `post_receive`, then `wait`.

        Raises SessionError if the message is longer than its buffer, or the session has ended.
        """
        return await (await self.post_receive(into, offset=offset, length=length)).wait()

    def statistics(self) -> dict[str, int]:
        """Return the session's counters as last published by the fabric.

        Raises SessionError `session.closed` after `close`.
        """
        if self.posts.is_closed:
            raise SessionError("session.closed", f"{self.session.name} was closed here")
        return self.ring.statistics()

    async def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new posts, and wait until everything posted has ended, with success or not.

        Raises SessionError `session.wait.timeout`; the session then stays open for what is posted.
        """
        await self.posts.drain(timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Release the rings; the fabric then ends the session. Views of the region stay valid.

        Operations in flight end here at once, but the fabric may still read and write their arrays
        until it has ended the session. So `empty` reuses none of their bytes before; never, if the
        fabric is killed in between. Bytes given as a range are the caller's to keep unused.
        """
        self.posts.close()


def check_terms(immediate: int | None, priority: int, deadline_seconds: float | None) -> None:
    """Raise UsageError `session.post.…` for an immediate, priority or deadline out of range."""
    if immediate is not None and not 0 <= immediate < _IMMEDIATE_END:
        raise UsageError("session.post.immediate", f"immediate {immediate}; allowed: 0 to 2^32 - 1")
    if not 0 <= priority <= _PRIORITY_MAX:
        raise UsageError(
            "session.post.priority", f"priority {priority}; allowed: 0 to {_PRIORITY_MAX}"
        )
    if deadline_seconds is not None and not 0 < deadline_seconds <= _DEADLINE_SECONDS_MAX:
        raise UsageError(
            "session.post.deadline",
            f"a deadline in {deadline_seconds} s; allowed: above 0, up to "
            f"{_DEADLINE_SECONDS_MAX:.0f} s",
        )


def _nanos_left(deadline_seconds: float | None) -> Callable[[], int | None]:
    """Return a function that says how long it is until a deadline, in nanoseconds."""
    if deadline_seconds is None:
        return lambda: None
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_seconds
    return lambda: max(1, round((end - loop.time()) * _NANOS_PER_SECOND))
