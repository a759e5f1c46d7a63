"""The adapter between the asynchronous client and threads.

`sealane.client.synchronous` has a class for each asynchronous one, generated from its source
(`make synchronous`, decision 76). Each generated method is one call into this module or `Loop`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from sealane.client.loop import Loop

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")


def any_thread(method: F) -> F:
    """Mark a plain method that needs no loop: the generated one calls it on the caller's thread.

    Without the mark a plain method runs on the loop's thread, as coroutines do.
    """
    return method


class Facade:
    """An asynchronous object for other threads, which may share it."""

    asynchronous: Any
    """The object itself; it belongs to the loop's thread."""

    def __init__(self, loop: Loop, asynchronous: Any) -> None:
        self.loop = loop
        self.asynchronous = asynchronous


class Block(Facade):
    """A facade of an asynchronous context manager that yields itself: `with facade`."""

    def __enter__(self) -> Self:
        self.loop.run(self.asynchronous.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _leave(self.loop, self.asynchronous, error)


@contextlib.contextmanager
def entered(
    loop: Loop,
    manager: contextlib.AbstractAsyncContextManager[A],
    wrap: Callable[[Loop, A], S],
) -> Iterator[S]:
    """Enter an asynchronous context manager and yield `wrap` of its value."""
    value = loop.run(_enter(manager))
    try:
        yield wrap(loop, value)
    except BaseException as error:
        if not _leave(loop, manager, error):
            raise
    else:
        _leave(loop, manager, None)


def iterated(loop: Loop, items: AsyncIterator[A]) -> Iterator[A]:
    """Iterate over an asynchronous iterator."""
    end = object()

    async def following() -> object:
        return await anext(items, end)

    while (item := loop.run(following())) is not end:
        yield item  # type: ignore[misc] # mypy can't tell the end from an item


async def _enter(manager: contextlib.AbstractAsyncContextManager[A]) -> A:
    return await manager.__aenter__()


def _leave(
    loop: Loop,
    manager: contextlib.AbstractAsyncContextManager[Any],
    error: BaseException | None,
) -> bool:
    """Leave a context manager; what a forked child inherited is its parent's to leave."""
    if loop.is_forked:
        return False

    async def leaving() -> bool:
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        return bool(await manager.__aexit__(kind, error, trace))

    return loop.run(leaving())
