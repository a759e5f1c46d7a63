"""A group without asyncio: what `sealane.client.sync.join` gives its threads."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from sealane.client import collectives
from sealane.client.collectives import Operator
from sealane.client.loop import Loop, entered, left


class Group:
    """`sealane.client.collectives.Group`, blocking. One thread at a time calls its operations."""

    def __init__(self, loop: Loop, group: collectives.Group) -> None:
        self._loop = loop
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(
        self,
        array: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine the arrays of all ranks, element by element; each gets the result in place."""
        self._loop.run(
            self._group.all_reduce(array, operator, dtype=dtype, timeout_seconds=timeout_seconds)
        )

    def reduce_scatter(
        self,
        array: Any,
        into: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine arrays of as many equal parts as there are ranks; rank r gets the r-th part."""
        self._loop.run(
            self._group.reduce_scatter(
                array, into, operator, dtype=dtype, timeout_seconds=timeout_seconds
            )
        )

    def broadcast(self, array: Any, root: int = 0, *, timeout_seconds: float | None = None) -> None:
        """Give all ranks the root's array."""
        self._loop.run(self._group.broadcast(array, root, timeout_seconds=timeout_seconds))

    def all_gather(self, array: Any, into: Any, *, timeout_seconds: float | None = None) -> None:
        """Put the arrays of all ranks into `into`, rank after rank."""
        self._loop.run(self._group.all_gather(array, into, timeout_seconds=timeout_seconds))

    def gather(
        self, array: Any, into: Any = None, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Put the arrays of all ranks into the root's `into`."""
        self._loop.run(self._group.gather(array, into, root, timeout_seconds=timeout_seconds))

    def scatter(
        self, array: Any, into: Any, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Give each rank its part of the root's array."""
        self._loop.run(self._group.scatter(array, into, root, timeout_seconds=timeout_seconds))

    def all_to_all(self, array: Any, into: Any, *, timeout_seconds: float | None = None) -> None:
        """Give rank r the r-th part of `array`, for what it gives."""
        self._loop.run(self._group.all_to_all(array, into, timeout_seconds=timeout_seconds))

    def barrier(self, *, timeout_seconds: float | None = None) -> None:
        """Return when all ranks have called it."""
        self._loop.run(self._group.barrier(timeout_seconds=timeout_seconds))

    def send(
        self, array: Any, to: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Send an array to one rank; returns when it has it."""
        self._loop.run(self._group.send(array, to, tag=tag, timeout_seconds=timeout_seconds))

    def receive(
        self, array: Any, source: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Take the next array of one rank, of the same length and tag."""
        self._loop.run(self._group.receive(array, source, tag=tag, timeout_seconds=timeout_seconds))

    def abort(self) -> None:
        """End the group at once, here and with that everywhere. Any thread may."""
        self._loop.call(self._group.abort)


@contextlib.contextmanager
def entered_group(
    loop: Loop, joining: AbstractAsyncContextManager[collectives.Group]
) -> Iterator[Group]:
    """Be a member of a group inside the block; who leaves it by an error ends the group."""
    group = loop.run(entered(joining))
    try:
        yield Group(loop, group)
    except BaseException:
        loop.call(group.abort)
        raise
    finally:
        loop.run(left(joining))
