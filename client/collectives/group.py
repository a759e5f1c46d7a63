"""A group of jobs, one at each site: the ring and its operations."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sealane.client.collectives import schedule
from sealane.client.collectives.link import Counter, Inbox, Outbox
from sealane.client.collectives.reduction import Elements, Merge, Operator, flat
from sealane.client.collectives.schedule import Arrival, Schedule
from sealane.client.collectives.sessions import GroupSessions, Member, Pair, Route, Terms
from sealane.client.messages import Auto, Reliability
from sealane.errors import UsageError

if TYPE_CHECKING:
    from sealane.client.connection import Client

SIZE_MAX: Final = 64
SLOT_BYTES: Final = 256 << 10
SLOTS: Final = 16
_TAG_MASK: Final = (1 << 32) - 1
_SHORT: Final = 1 << 15
"""Marks messages of a short all-reduce: another rank's array may be long enough for segments."""


class Group:
    """A ring of jobs; `join` makes it. All ranks call the same operations in the same order.

    Operations of one rank run one after the other. One that fails or times out ends the group at
    this rank: its sessions close, so its neighbours' operations fail, then those of their
    neighbours, around the ring. Errors are SessionError: `group.timeout`, `group.aborted`,
    `group.order`.
    """

    rank: int
    """This job's place in the ring, from 0."""
    size: int
    """Number of ranks."""

    def __init__(
        self, client: "Client", name: str, rank: int, members: Sequence[Member], terms: Terms
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self._sessions = GroupSessions(client, name, rank, members, terms)
        self._terms = terms
        self._turn = asyncio.Lock()
        self._any_turn = asyncio.Lock()
        self._sequence = itertools.count()

    async def open(self) -> None:
        """Connect to both neighbours."""
        await self._sessions.open()

    async def all_reduce(
        self,
        array: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine the arrays of all ranks, element by element; each gets the result in place.

        All ranks get the same bits. `array` is contiguous and has the buffer protocol; with `dtype`
        "bfloat16" its 16-bit integers are read as bfloat16.
        """
        elements, name = flat(array, dtype)
        merge = Merge(operator, elements, name, self.size)
        if elements.nbytes * self.size <= self._terms.slot_bytes:
            await self._reduce_all(elements, merge, timeout_seconds)
            return
        plan = schedule.all_reduce(self.rank, self.size, elements.size, self._piece(elements))
        await self._run(plan, elements, timeout_seconds, merge)

    async def _reduce_all(
        self, elements: Elements, merge: Merge, timeout_seconds: float | None
    ) -> None:
        """Collect the short arrays of all ranks, and combine them here in the order of ranks.

        That is size - 1 steps around the ring, half as many as with segments.
        """
        length = elements.size
        all_ranks = np.empty((self.size, length), elements.dtype)
        all_ranks[self.rank] = elements
        plan = schedule.all_gather(self.rank, self.size, length, self._piece(elements))
        await self._run(plan, all_ranks.reshape(-1), timeout_seconds, mark=_SHORT)
        result, *others = all_ranks
        for number, theirs in enumerate(others, start=2):
            merge(result, theirs, is_last=number == self.size)
        elements[:] = result

    async def reduce_scatter(
        self,
        array: Any,
        into: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine arrays that have a part for each rank; rank r gets the r-th part.

        Parts are equal in length, and `into` is as long as one. `array` doesn't change.
        """
        given, name = flat(array, dtype)
        own, _ = flat(into, dtype)
        self._check_whole(given, own)
        elements = given.copy()
        merge = Merge(operator, elements, name, self.size)
        plan = schedule.reduce_scatter(self.rank, self.size, own.size, self._piece(own))
        await self._run(plan, elements, timeout_seconds, merge)
        own[:] = elements[self.rank * own.size : (self.rank + 1) * own.size]

    async def broadcast(
        self, array: Any, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Copy the root's array to all ranks."""
        self._check_rank(root)
        elements, _ = flat(array)
        piece = self._piece(elements)
        plan = schedule.broadcast(self.rank, self.size, elements.size, piece, root)
        await self._run(plan, elements, timeout_seconds)

    async def all_gather(
        self, array: Any, into: Any, *, timeout_seconds: float | None = None
    ) -> None:
        """Collect the arrays of all ranks, equal in length and type, in `into`, by rank."""
        own, _ = flat(array)
        elements, _ = flat(into)
        self._check_whole(elements, own)
        elements[self.rank * own.size : (self.rank + 1) * own.size] = own
        plan = schedule.all_gather(self.rank, self.size, own.size, self._piece(own))
        await self._run(plan, elements, timeout_seconds)

    async def gather(
        self,
        array: Any,
        into: Any = None,
        root: int = 0,
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Collect the arrays of all ranks, equal in length and type, in the root's `into`."""
        self._check_rank(root)
        own, _ = flat(array)
        if self.rank != root:
            await self.send(own, root, timeout_seconds=timeout_seconds)
            return
        parts = self._parts(own, into)
        parts[root][:] = own
        others = (rank for rank in range(self.size) if rank != root)
        await self._together(
            self.receive(parts[rank], rank, timeout_seconds=timeout_seconds) for rank in others
        )

    async def scatter(
        self,
        array: Any,
        into: Any,
        root: int = 0,
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Copy to each rank its part of the root's `array`; other ranks' `array` is ignored."""
        self._check_rank(root)
        own, _ = flat(into)
        if self.rank != root:
            await self.receive(own, root, timeout_seconds=timeout_seconds)
            return
        parts = self._parts(own, array)
        others = (rank for rank in range(self.size) if rank != root)
        await self._together(
            self.send(parts[rank], rank, timeout_seconds=timeout_seconds) for rank in others
        )
        own[:] = parts[root]

    async def all_to_all(
        self,
        array: Any,
        into: Any,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Send part r of `array` to rank r; its part for this rank becomes part r of `into`.

        Parts are equal in length unless counts, in elements by rank, say otherwise: what rank a
        sends to b is what b receives from a.
        """
        given, _ = flat(array)
        room, _ = flat(into)
        if send_counts is receive_counts is None:
            self._check_whole(room, given[: given.size // self.size])
        if np.may_share_memory(given, room):
            raise UsageError("group.array", "what is sent and what is received share memory")
        ours, theirs = self._cut(given, send_counts), self._cut(room, receive_counts)
        own, place = ours[self.rank], theirs[self.rank]
        if (own.size, own.dtype) != (place.size, place.dtype):
            raise UsageError(
                "group.array",
                f"{own.size} elements of {own.dtype} for this rank itself, and room for "
                f"{place.size} of {place.dtype}",
            )
        place[:] = own
        others = [rank for rank in range(self.size) if rank != self.rank]
        await self._together(
            call
            for rank in others
            for call in (
                self.send(ours[rank], rank, timeout_seconds=timeout_seconds),
                self.receive(theirs[rank], rank, timeout_seconds=timeout_seconds),
            )
        )

    async def barrier(self, *, timeout_seconds: float | None = None) -> None:
        """Return when all ranks have called it."""
        await self.all_gather(
            np.zeros(1, np.uint8), np.zeros(self.size, np.uint8), timeout_seconds=timeout_seconds
        )

    async def send(
        self, array: Any, to: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Send an array to one rank, which calls `receive`; return when it has the array.

        Arrays from one rank to another arrive in the order of the calls; tags are only compared.
        Sends don't wait for the operations of all ranks.
        """
        elements, _ = flat(array)
        pair = await self._pair(to, timeout_seconds)
        async with pair.sending, self._sessions.guarded(self._seconds(timeout_seconds)):
            for piece, piece_tag in self._pieces(elements, tag):
                await pair.outbox.send(piece, piece_tag)
            await pair.outbox.flush()

    async def receive(
        self, array: Any, source: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Receive the next array from one rank, which must have the same length and tag."""
        elements, _ = flat(array)
        pair = await self._pair(source, timeout_seconds)
        async with pair.receiving, self._sessions.guarded(self._seconds(timeout_seconds)):
            for piece, piece_tag in self._pieces(elements, tag):
                async with await pair.inbox.take(piece, piece_tag) as theirs:
                    piece[:] = theirs

    async def receive_any(
        self, array: Any, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> int:
        """Receive the next array of whichever rank sends one first; return that rank.

        It must have the same length and tag, as for `receive`. Connects to all ranks.
        """
        async with self._any_turn:
            source = await self._sessions.first_sender(self._seconds(timeout_seconds))
            await self.receive(array, source, tag=tag, timeout_seconds=timeout_seconds)
        return source

    def abort(self) -> None:
        """End the group at once, at this rank and thereby at all others."""
        self._sessions.abort()

    async def close(self) -> None:
        """Wait until the other ranks have all data, then leave."""
        await self._sessions.close()

    async def _run(
        self,
        plan: Schedule,
        elements: Elements,
        timeout_seconds: float | None,
        merge: Merge | None = None,
        *,
        mark: int = 0,
    ) -> None:
        """Run a schedule, sending and receiving at the same time.

        `mark` tells messages from those of other kinds of schedules for the same operation.
        """
        if self._sessions.neighbours is None:
            return  # alone
        outbox, inbox = self._sessions.neighbours
        async with self._turn, self._sessions.guarded(self._seconds(timeout_seconds)):
            first = next(self._sequence) << 16 | mark
            sending = Sending(outbox, plan, elements, first)
            if len(plan.sends) <= outbox.slots:
                # No send waits for what this rank does later, so one task is enough.
                await _receive(inbox, plan, elements, first, merge=merge, before=sending.up_to)
                return
            arrived = Counter()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sending.all(arrived))
                await _receive(inbox, plan, elements, first, merge=merge, before=arrived.set)

    async def _pair(self, peer: int, timeout_seconds: float | None) -> Pair:
        self._check_rank(peer)
        if peer == self.rank:
            raise UsageError("group.rank", "a rank can't send to itself")
        return await self._sessions.pair(peer, self._seconds(timeout_seconds))

    def _pieces(self, elements: Elements, tag: int) -> Iterator[tuple[Elements, int]]:
        """Cut an array into pieces that fit a slot, with tags; an empty array is one piece."""
        step, size = self._piece(elements), max(elements.size, 1)
        for number, at in enumerate(range(0, size, step)):
            yield elements[at : at + step], _pair_tag(tag, number, is_last=at + step >= size)

    def _check_whole(self, whole: Elements, own: Elements) -> None:
        if whole.size != own.size * self.size or whole.dtype != own.dtype:
            raise UsageError(
                "group.array",
                f"{whole.size} elements of {whole.dtype}; {own.size} of {own.dtype} for each of "
                f"{self.size} ranks are needed",
            )

    def _parts(self, own: Elements, array: Any) -> list[Elements]:
        """Cut an array into a part for each rank, each like `own`."""
        whole, _ = flat(array)
        self._check_whole(whole, own)
        return self._cut(whole, None)

    def _cut(self, whole: Elements, counts: Sequence[int] | None) -> list[Elements]:
        """Cut an array into a part for each rank; `counts` None: equal ones."""
        lengths = [whole.size // self.size] * self.size if counts is None else list(counts)
        is_whole = sum(lengths) == whole.size and min(lengths, default=0) >= 0
        if len(lengths) != self.size or not is_whole:
            raise UsageError(
                "group.array",
                f"parts of {lengths} elements, of {whole.size} in all; parts for each of "
                f"{self.size} ranks are needed that make up the whole",
            )
        ends = itertools.accumulate(lengths)
        return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    async def _together(self, calls: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run calls at once; raise the reason of the first failure."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for call in calls:
                    tasks.create_task(call)
        except BaseExceptionGroup:
            if self._sessions.failure is not None:
                raise self._sessions.failure from None
            raise

    def _seconds(self, wanted: float | None) -> float:
        return self._terms.timeout_seconds if wanted is None else wanted

    def _piece(self, elements: Elements) -> int:
        return max(1, self._terms.slot_bytes // elements.itemsize)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError("group.rank", f"rank {rank}; there are {self.size}")


@contextlib.asynccontextmanager
async def join(
    client: "Client",
    name: str,
    *,
    rank: int,
    members: Sequence[Member],
    rate_bits_per_second: int,
    reliability: Reliability | None = None,
    slot_bytes: int = SLOT_BYTES,
    slots: int = SLOTS,
    timeout_seconds: float = 60.0,
    route: Route | None = None,
    secret: bytes = b"",
) -> AsyncIterator[Group]:
    """Form a group with all members; leave it at the end of the block.

    All ranks call it with the same arguments except `rank` and `client`. A session is accepted
    only from the node of the member that it should come from; `secret`, 16 to 64 bytes that all
    members know, also keeps out other jobs on those nodes. At most `slots` messages of
    `slot_bytes` are in flight to the next rank, of those up to 4 KiB sometimes half as many;
    the path stays full if `slots` times `slot_bytes` is at least rate times round trip.
    `timeout_seconds` bounds joining, and each operation that names no time-out of its own.
    """
    if not 0 <= rank < len(members) <= SIZE_MAX:
        raise UsageError(
            "group.rank", f"rank {rank} of {len(members)}; at most {SIZE_MAX} ranks are allowed"
        )
    terms = Terms(
        rate_bits_per_second=rate_bits_per_second,
        reliability=reliability or Auto(),
        slot_bytes=slot_bytes,
        slots=slots,
        timeout_seconds=timeout_seconds,
        route=route,
        secret=secret,
    )
    group = Group(client, name, rank, members, terms)
    try:
        if group.size > 1:
            async with asyncio.timeout(timeout_seconds):
                await group.open()
        yield group
    except BaseException:
        group.abort()
        raise
    finally:
        await group.close()


def _pair_tag(tag: int, number: int, *, is_last: bool) -> int:
    """Return what tells a piece from others: arrays of other lengths have another last piece."""
    return (tag & 0xFFFF) << 16 | is_last << 15 | number & 0x7FFF


class Sending:
    """Sends the pieces of a schedule, each once what it waits for has arrived."""

    def __init__(self, outbox: Outbox, plan: Schedule, elements: Elements, first: int) -> None:
        self._outbox = outbox
        self._elements = elements
        self._pieces = deque(enumerate(plan.sends, start=first))

    async def up_to(self, received: int) -> None:
        """Send all that waits for at most this number of received messages."""
        while self._pieces and self._pieces[0][1].after <= received:
            tag, piece = self._pieces.popleft()
            await self._outbox.send(self._elements[piece.start : piece.end], tag & _TAG_MASK)

    async def all(self, arrived: Counter) -> None:
        """Send everything, as messages arrive."""
        while self._pieces:
            await arrived.reach(self._pieces[0][1].after)
            await self.up_to(arrived.value)


async def _receive(
    inbox: Inbox,
    plan: Schedule,
    elements: Elements,
    first: int,
    *,
    merge: Merge | None,
    before: Callable[[int], Awaitable[None]],
) -> None:
    """Receive all messages of a schedule.

    Call `before(n)` with the number received so far, before each message and once at the end.
    """
    for number, receive in enumerate(plan.receives):
        await before(number)
        ours = elements[receive.start : receive.end]
        async with await inbox.take(ours, (first + number) & _TAG_MASK) as theirs:
            if merge is None or receive.arrival is Arrival.STORE:
                ours[:] = theirs
            else:
                merge(ours, theirs, is_last=receive.arrival is Arrival.FINISH)
    await before(len(plan.receives))
