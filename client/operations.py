"""Posted operations of a session: sends, streams, receives."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sealane._native import ChunkBitmap, Completion
from sealane.client.messages import Received, Sent
from sealane.client.operation import Operation, R, bounded
from sealane.client.posts import Posts
from sealane.errors import Error, UsageError

if TYPE_CHECKING:
    from sealane.client.messages import Bytes


class Posted(Operation[R]):
    """An operation that can post requests about itself."""

    def __init__(self, posts: Posts, held: object, result: Callable[[Completion], R]) -> None:
        super().__init__(held, result)
        self._posts = posts


class SendOperation(Posted[Sent]):
    """A posted send."""

    def __init__(self, posts: Posts, held: object) -> None:
        super().__init__(
            posts,
            held,
            lambda completion: Sent(
                message=completion.message,
                length=completion.length,
                duration_seconds=completion.duration_ns / 1e9,
                is_partial=completion.status == "partial",
            ),
        )

    async def wait(self, *, timeout_seconds: float | None = None) -> Sent:
        """Wait for the end and return the result; raises as `Operation.wait`."""
        if self.done():
            return self.result()
        with self._posts.hearing_sends():
            return await super().wait(timeout_seconds=timeout_seconds)

    async def cancel(self) -> bool:
        """Cancel the message at both ends; return False if it has already ended.

        The operation ends as `session.message.cancelled`, and so does the receive, unless it was
        complete.
        """
        ring = self._posts.ring
        return await self._posts.command(
            lambda number: ring.post_cancel(operation=self.handle, user_data=number)
        )


class StreamOperation(SendOperation):
    """A message whose parts are written one by one, anywhere in the receiver's buffer.

    A reliable stream ends when all parts written before `end` have arrived, an unreliable one when
    all have left. If the parts leave gaps, the receiver's message is partial.
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

        Parts may come in any order, leave gaps, and overwrite each other. Offset and length are
        multiples of the session's `unit_bytes`; a part that reaches the end of the stream's range
        may be shorter. The bytes must not change until the stream has ended. Raises UsageError
        `session.stream.part` if the stream has ended, or the part breaks these rules.
        """
        start, size = self._posts.place(data, offset, length)
        self.held.append(data)
        unit = self._posts.session.unit_bytes
        await self._do(
            lambda number: self._posts.ring.post_continue(
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
        """End the stream: no more parts will be written."""
        ring = self._posts.ring
        await self._do(
            lambda number: ring.post_end(stream=self.handle, user_data=number),
            "there is no stream to end: it has ended, or `end` was called before",
        )

    async def _do(self, post: Callable[[int], int], refused: str) -> None:
        if not await self._posts.part(post):
            raise UsageError("session.stream.part", refused)


class ReceiveOperation(Posted[Received]):
    """A posted receive, whose chunks can be used before the message is complete.

    Chunks are `Session.chunk_bytes` long; the last one of a message may be shorter.
    """

    chunk_count: int
    """Chunks of the buffer; a message may take fewer."""

    def __init__(self, posts: Posts, held: object, *, offset: int, length: int) -> None:
        super().__init__(
            posts,
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
        self.chunk_count = -(-length // posts.chunk_bytes)

    def settle(self, outcome: Completion | Error) -> None:
        """Set the outcome, and keep the map of chunks of a partial message."""
        if not isinstance(outcome, Error) and outcome.status == "partial":
            self._landed = self.chunks()
        super().settle(outcome)

    async def complete(self) -> bool:
        """End the receive with what has landed; its bytes no longer change.

        Return False if it had already ended. A receive that has no slot yet ends as
        `session.message.cancelled`.
        """
        ring = self._posts.ring
        return await self._posts.command(
            lambda number: ring.post_complete(receive=self.handle, user_data=number)
        )

    async def packet_map(self, chunk: int) -> bytes | None:
        """Ask the fabric for the map of a chunk: a byte for each unit, 1 if it has landed.

        None before the first packet has arrived, and once all have.
        """
        self._check_chunks(chunk, chunk + 1)
        ring = self._posts.ring
        completion = await self._posts.ask(
            lambda number: ring.post_packet_map(receive=self.handle, chunk=chunk, user_data=number)
        )
        if completion.status != "ok":
            return None
        units = self._posts.chunk_bytes // self._posts.session.unit_bytes
        return bytes(completion.packets[unit // 8] >> unit % 8 & 1 for unit in range(units))

    async def immediate(self) -> int | None:
        """Ask the fabric for the sender's immediate, which is known from the first packet on.

        None before that, or if the message has none.
        """
        if not self.done():
            ring = self._posts.ring
            completion = await self._posts.ask(
                lambda number: ring.post_packet_map(receive=self.handle, chunk=0, user_data=number)
            )
            if completion.status == "ok":
                return completion.immediate
        return self.result().immediate if self.done() else None

    def bitmap(self) -> ChunkBitmap | None:
        """Return the live bitmap: a read-only buffer of a byte for each chunk of the buffer.

        `memoryview` and `numpy.frombuffer` take it without a copy; a byte becomes 1 when its chunk
        is complete in the region. It only informs: before using bytes of the region, call `chunks`
        or `wait_chunks`. It describes this receive while `is_current`; afterwards a later receive
        has its slot. None before the fabric has taken the receive, and once a later one has its
        slot.
        """
        if self._bitmap is None:
            self._bitmap = self._posts.bitmap(self.handle, self.chunk_count)
        return self._bitmap

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk of the buffer: 1 if it is complete in the region.

        None before the fabric has taken the receive, and once a later receive has its slot.
        """
        bitmap = self.bitmap()
        return None if bitmap is None else bitmap.read()

    async def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until chunks `start` to `end` (None: all) are in the region or the receive ends.

        Raises as `wait` if the receive fails first.
        """
        end = self.chunk_count if end is None else end
        self._check_chunks(start, end)
        async with bounded(timeout_seconds):
            with self._posts.watching_chunks() as changed:
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
