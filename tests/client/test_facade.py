"""The adapter of the synchronous client: blocks, iterators, callbacks, interrupts."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

import pytest

from patience import PATIENCE_SECONDS
from sealane import client as asynchronous
from sealane.client import collectives, synchronous
from sealane.client.facade import Block, Facade, entered, iterated
from sealane.client.loop import Loop, running
from sealane.errors import SessionError, UsageError


@pytest.fixture
def loop() -> Iterator[Loop]:
    with running() as made:
        yield made


class Room:
    """A context manager that notes how it was left."""

    def __init__(self) -> None:
        self.left: list[type[BaseException] | None] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.left.append(kind)
        return False


def test_a_block_is_left_with_the_error_that_ended_it(loop: Loop) -> None:
    room = Room()
    with entered(loop, room, Facade) as facade:
        assert facade.asynchronous is room
    with pytest.raises(KeyboardInterrupt), entered(loop, room, Facade):
        raise KeyboardInterrupt
    with Block(loop, room) as block:
        assert block.asynchronous is room
    with pytest.raises(SessionError), Block(loop, room):
        raise SessionError("test", "")
    assert room.left == [None, KeyboardInterrupt, None, SessionError]


def test_an_error_may_end_inside_an_asynchronous_block(loop: Loop) -> None:
    @contextlib.asynccontextmanager
    async def forgiving() -> AsyncIterator[None]:
        with contextlib.suppress(SessionError):
            yield

    with entered(loop, forgiving(), lambda *_: None):
        raise SessionError("test", "")


def test_an_iterator_yields_every_item_then_the_error(loop: Loop) -> None:
    async def items() -> AsyncIterator[int | None]:
        yield 1
        yield None
        raise SessionError("test", "")

    found: list[int | None] = []
    with pytest.raises(SessionError):
        found.extend(iterated(loop, items()))

    async def few() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert list(iterated(loop, few())) == [1, 2]


def test_a_callback_that_calls_the_client_is_refused(loop: Loop) -> None:
    async def call(callback: Callable[[], object]) -> None:
        callback()

    with pytest.raises(UsageError) as caught:
        loop.run(call(lambda: loop.call(len, "")))
    assert caught.value.reason == "client.callback"
    assert loop.call(len, "abc") == 3


def test_an_interrupt_cancels_the_call(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_cancelled = threading.Event(), threading.Event()

    async def call() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    def interrupted(_: object) -> None:
        assert has_begun.wait(PATIENCE_SECONDS)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run(call())
    assert is_cancelled.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("mirrored", "original"),
    [
        (synchronous.Client, asynchronous.Client),
        (synchronous.Disk, asynchronous.Disk),
        (synchronous.Group, collectives.Group),
        (synchronous.ReceiveOperation, asynchronous.ReceiveOperation),
        (synchronous.SendOperation, asynchronous.SendOperation),
        (synchronous.Session, asynchronous.Session),
        (synchronous.StreamOperation, asynchronous.StreamOperation),
        (synchronous.Volumes, asynchronous.Volumes),
    ],
)
def test_every_coroutine_has_a_method_of_the_same_arguments(mirrored: type, original: type) -> None:
    coroutines = dict(inspect.getmembers(original, inspect.iscoroutinefunction))
    names = {name for name in coroutines if not name.startswith("_")} - {"open", "close"}
    for name in names:
        method = getattr(mirrored, name)
        original_arguments = inspect.signature(coroutines[name]).parameters
        assert inspect.signature(method).parameters == original_arguments
        assert not inspect.iscoroutinefunction(method)
    assert names
