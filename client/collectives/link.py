"""One direction to or from a neighbour: arrays pass through slots in a session's region."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from sealane.client.collectives.reduction import Elements
from sealane.client.messages import Reliability
from sealane.client.operations import ReceiveOperation, SendOperation
from sealane.client.session import Session
from sealane.errors import Error, SessionError

_SHORT_BYTES: Final = 4096
"""The slots of messages up to this long are posted again several at a time."""


class Outbox:
    """Sends arrays; the caller may reuse its memory when `send` returns.

    `lost` is called once a send has failed: a rank that only receives by then would not notice.
    """

    def __init__(
        self,
        session: Session,
        *,
        slots: int,
        slot_bytes: int,
        reliability: Reliability,
        lost: Callable[[Error], object],
    ) -> None:
        self.slots = slots
        self._session = session
        # A rank waits for what it receives; sends are looked at when their slots are needed.
        session.posts.quiet_sends()
        self._reliability = reliability
        self._free = deque(np.asarray(session.empty(slot_bytes, "uint8")) for _ in range(slots))
        self._under_way: deque[tuple[SendOperation, Elements]] = deque()
        self._loop = asyncio.get_running_loop()
        self._lost = lost

    async def send(self, elements: Elements, tag: int) -> None:
        """Copy elements into the region and post them; wait while all slots are in flight."""
        while self._under_way and self._under_way[0][0].done():
            await self._reclaim()
        if not self._free:
            await self._reclaim()
        slot = self._free.popleft()
        message = slot[: elements.nbytes]
        message[:] = elements.view(np.uint8)
        operation = await self._session.post_send(
            message, reliability=self._reliability, immediate=tag
        )
        self._under_way.append((operation, slot))
        operation.when_failed(self._has_failed)

    async def flush(self) -> None:
        """Wait until the peer has received everything."""
        while self._under_way:
            await self._reclaim()

    async def _reclaim(self) -> None:
        """Wait for the oldest send; its slot is free then."""
        operation, slot = self._under_way.popleft()
        await operation
        self._free.append(slot)

    def _has_failed(self, error: Error) -> None:
        # Not at once: the session that reports it is in the middle of its completions.
        self._loop.call_soon(self._lost, error)


class Inbox:
    """Receives arrays into slots.

    At least half the slots are posted, all of them for long messages. Those of short messages are
    posted again together, as each post wakes the fabric's threads at both ends; a sender with more
    short messages in flight waits for credit.
    """

    def __init__(self, session: Session, *, slots: int, slot_bytes: int) -> None:
        self._session = session
        self._slots = [np.asarray(session.empty(slot_bytes, "uint8")) for _ in range(slots)]
        self._offered: deque[tuple[ReceiveOperation, Elements]] = deque()
        self._spare: list[Elements] = []
        self._ended: SessionError | None = None

    async def open(self) -> None:
        """Post a receive for each slot."""
        for slot in self._slots:
            await self._offer(slot)

    async def _offer(self, slot: Elements) -> None:
        try:
            self._offered.append((await self._session.post_receive(slot), slot))
        except SessionError as error:
            # A peer that has done its part may leave. `take` raises this if more was needed.
            self._ended = error

    def head(self) -> "ReceiveOperation | None":
        """Return the receive of the next array; None if the session has ended."""
        return self._offered[0][0] if self._offered else None

    async def take(self, like: Elements, tag: int) -> "Taken":
        """Wait for the next array, which must be as long as `like` and have the tag.

        Raises SessionError `group.order` if the peer is at another operation.
        """
        if not self._offered and self._ended is not None:
            raise self._ended
        if like.nbytes > _SHORT_BYTES:
            await self._offer_spare()
        operation, slot = self._offered.popleft()
        received = await operation
        if (received.length, received.immediate) != (like.nbytes, tag):
            raise SessionError(
                "group.order",
                f"{received.length} bytes with tag {received.immediate} arrived, but "
                f"{like.nbytes} with tag {tag} are next: the ranks run different operations",
            )
        return Taken(self, slot, slot[: like.nbytes].view(like.dtype))

    async def give_back(self, slot: Elements, length: int) -> None:
        """Post a receive for the slot of a message of `length` bytes again, at once if it is long.

        A slot of a short message waits for others.
        """
        self._spare.append(slot)
        is_enough = 2 * len(self._spare) >= len(self._slots)
        if length > _SHORT_BYTES or is_enough or not self._offered:
            await self._offer_spare()

    async def _offer_spare(self) -> None:
        spare, self._spare = self._spare, []
        for slot in spare:
            await self._offer(slot)


class Taken:
    """Received elements, valid inside the block."""

    def __init__(self, inbox: Inbox, slot: Elements, elements: Elements) -> None:
        self._inbox = inbox
        self._slot = slot
        self._elements = elements

    async def __aenter__(self) -> Elements:
        return self._elements

    async def __aexit__(self, *_: object) -> None:
        await self._inbox.give_back(self._slot, self._elements.nbytes)


class Counter:
    """Counts received messages, and lets a task wait for a count."""

    def __init__(self) -> None:
        self.value = 0
        self._changed = asyncio.Event()

    async def set(self, value: int) -> None:
        """Set the count."""
        self.value = value
        self._changed.set()

    async def reach(self, value: int) -> None:
        """Wait for a count; one task waits at a time."""
        while self.value < value:
            self._changed.clear()
            await self._changed.wait()
