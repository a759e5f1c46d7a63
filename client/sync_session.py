"""A session without asyncio: what `sealane.client.sync` gives its threads."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

from sealane._native import ChunkBitmap, RegionArray
from sealane.client import operation as waiting
from sealane.client import operations
from sealane.client import session as asynchronous
from sealane.client.loop import Loop, entered, left
from sealane.client.messages import Received, Reliability, SelectiveRepeat, Sent, Unreliable
from sealane.protocol.v1 import sessions_pb2

if TYPE_CHECKING:
    from sealane.client.messages import Bytes

R = TypeVar("R")


class Operation(Generic[R]):
    """A send or receive that was posted; it goes on whether or not anybody waits."""

    def __init__(self, loop: Loop, operation: waiting.Operation[R]) -> None:
        self._loop = loop
        self._operation = operation

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._operation.done()

    def wait(self, *, timeout_seconds: float | None = None) -> R:
        """Wait for the end; raises as `sealane.client.Operation.wait`."""
        return self._loop.run(self._operation.wait(timeout_seconds=timeout_seconds))

    @property
    def asynchronous(self) -> waiting.Operation[R]:
        """The operation as it is on the loop."""
        return self._operation


class SendOperation(Operation[Sent]):
    """A send that was posted."""

    def __init__(self, loop: Loop, operation: operations.SendOperation) -> None:
        super().__init__(loop, operation)
        self._send = operation

    def cancel(self) -> bool:
        """Give the message up at both ends, unless it has ended: then False."""
        return self._loop.run(self._send.cancel())


class StreamOperation(SendOperation):
    """A message whose parts are written one by one."""

    def __init__(self, loop: Loop, operation: operations.StreamOperation) -> None:
        super().__init__(loop, operation)
        self._stream = operation

    def write(
        self,
        remote_offset: int,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        """Send a part, as `sealane.client.StreamOperation.write`."""
        self._loop.run(self._stream.write(remote_offset, data, offset=offset, length=length))

    def end(self) -> None:
        """Say that nothing more will be written."""
        self._loop.run(self._stream.end())


class ReceiveOperation(Operation[Received]):
    """A receive that was posted, with what has landed of it so far."""

    def __init__(self, loop: Loop, operation: operations.ReceiveOperation) -> None:
        super().__init__(loop, operation)
        self._receive = operation
        self.chunk_count = operation.chunk_count

    def immediate(self) -> int | None:
        """Return the sender's immediate, known from the first packet on."""
        return self._loop.run(self._receive.immediate())

    def bitmap(self) -> ChunkBitmap | None:
        """Return the live bitmap, as `sealane.client.ReceiveOperation.bitmap`."""
        return self._loop.call(self._receive.bitmap)

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk, as `sealane.client.ReceiveOperation.chunks`."""
        return self._loop.call(self._receive.chunks)

    def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until these chunks are in the region, or the receive has ended."""
        self._loop.run(self._receive.wait_chunks(start, end, timeout_seconds=timeout_seconds))

    def complete(self) -> bool:
        """End the receive with what has landed, unless it has ended: then False."""
        return self._loop.run(self._receive.complete())

    def packet_map(self, chunk: int) -> bytes | None:
        """Return a byte for each unit of a chunk: 1 if it has landed."""
        return self._loop.run(self._receive.packet_map(chunk))


class Session:
    """`sealane.client.Session`, blocking. Threads may share it."""

    def __init__(self, loop: Loop, session: asynchronous.Session) -> None:
        self._loop = loop
        self._session = session
        self.region = session.region
        self.chunk_bytes = session.chunk_bytes

    @property
    def session(self) -> sessions_pb2.Session:
        """What the fabric said at the grant: name, peer, unit, rate."""
        return self._session.session

    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, alignment: int = 64
    ) -> RegionArray:
        """Allocate an array in the region, as `sealane.client.Session.empty`."""
        return self._session.empty(shape, dtype, alignment=alignment)

    def post_send(
        self,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> SendOperation:
        """Post a message that lies in the region, and return while it goes out."""
        posting = self._session.post_send(
            data, offset=offset, length=length, reliability=reliability, immediate=immediate
        )
        return SendOperation(self._loop, self._loop.run(posting))

    def post_stream(
        self,
        length: int,
        *,
        reliability: SelectiveRepeat | Unreliable | None = None,
        immediate: int | None = None,
    ) -> StreamOperation:
        """Begin a message whose parts are written later."""
        posting = self._session.post_stream(length, reliability=reliability, immediate=immediate)
        return StreamOperation(self._loop, self._loop.run(posting))

    def post_receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Offer room in the region to the next message."""
        posting = self._session.post_receive(into, offset=offset, length=length)
        return ReceiveOperation(self._loop, self._loop.run(posting))

    def send(
        self,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
    ) -> Sent:
        """Send a message; returns when the peer has it."""
        return self.post_send(
            data, offset=offset, length=length, reliability=reliability, immediate=immediate
        ).wait()

    def receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Take the next message; returns when it is whole."""
        return self.post_receive(into, offset=offset, length=length).wait()

    def statistics(self) -> dict[str, int]:
        """Return the session's counters, as the fabric published them last."""
        return self._loop.call(self._session.statistics)

    def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Post nothing more, and wait until everything posted has ended."""
        self._loop.run(self._session.drain(timeout_seconds=timeout_seconds))


def wait(posted: Sequence[Operation[R]], *, timeout_seconds: float | None = None) -> list[R]:
    """Wait for many operations of one client; returns their results in order.

    Raises what the first one raises that ended badly; the others go on.
    """
    if not posted:
        return []
    return posted[0]._loop.run(  # noqa: SLF001 - of this module
        waiting.wait_all(
            [operation.asynchronous for operation in posted], timeout_seconds=timeout_seconds
        )
    )


@contextlib.contextmanager
def entered_session(
    loop: Loop, manager: AbstractAsyncContextManager[asynchronous.Session]
) -> Iterator[Session]:
    """Hold a session open inside the block."""
    session = loop.run(entered(manager))
    try:
        yield Session(loop, session)
    finally:
        loop.run(left(manager))
