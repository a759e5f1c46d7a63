"""The client's face of a session: arrays in the region, both directions, waiting, draining."""

import asyncio
import gc
import random
from typing import Any

import numpy as np
import pytest

from sealane.client.session import Auto, ErasureCoded, Session
from sealane.errors import Error, SessionError, UnavailableError, UsageError
from session_pairs import REGION, connected


def array_of(session: Session, shape: Any, dtype: Any = "float32") -> Any:
    return np.from_dlpack(session.empty(shape, dtype))


async def test_arrays_travel_without_a_copy(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        sent, landed = left.empty((300, 70)), right.empty((300, 70))
        view = np.from_dlpack(sent)
        view[:] = np.random.default_rng(1).normal(size=(300, 70))
        receiving = await right.post_receive(landed)
        await left.send(sent, reliability=ErasureCoded(k=8, m=2, depth=4))
        received = await receiving

        assert (received.offset, received.length) == (landed.offset, landed.nbytes)
        assert np.array_equal(np.asarray(landed), view)
        assert np.shares_memory(np.asarray(sent), np.frombuffer(left.region, np.uint8))


async def test_both_ends_send_at_once(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as ends:
        arrays = [array_of(end, 50_000, "int64") for end in ends]
        rooms = [array_of(end, 50_000, "int64") for end in ends]
        for number, array in enumerate(arrays):
            array[:] = np.arange(50_000) * (number + 1)
        await asyncio.gather(
            *(end.receive(room) for end, room in zip(ends, rooms, strict=True)),
            *(end.send(array, reliability=Auto()) for end, array in zip(ends, arrays, strict=True)),
        )
        assert np.array_equal(rooms[0], arrays[1])
        assert np.array_equal(rooms[1], arrays[0])


async def test_more_sends_than_slots_do_not_stand_in_the_way_of_receives(
    fabrics: tuple[Any, Any],
) -> None:
    async with connected(*fabrics) as (left, right):
        slots = left.ring.slots
        sends = [await left.post_send(offset=0, length=8) for _ in range(slots + 1)]
        answer = await left.post_receive(offset=64, length=8)
        await right.send(offset=0, length=8)
        await answer.wait(timeout_seconds=10)
        assert not any(send.done() for send in sends)
        await asyncio.gather(*(right.receive(offset=0, length=8) for _ in sends))
        await asyncio.gather(*sends)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", np.float32),
        (np.float64, np.float64),
        (np.dtype("int16"), np.int16),
        ("bool", np.bool_),
        ("torch.uint8", np.uint8),
    ],
)
async def test_array_has_the_type_that_was_asked_for(
    fabrics: tuple[Any, Any], dtype: Any, expected: Any
) -> None:
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    async with connected(*fabrics) as (left, _):
        array = left.empty((2, 0, 3), name)
        assert np.from_dlpack(array).dtype == np.asarray(array).dtype == expected
        assert np.from_dlpack(array).shape == memoryview(array).shape == (2, 0, 3)
        filled = left.empty([5], name)
        np.asarray(filled)[:] = 1
        assert np.from_dlpack(filled).all()


async def test_bytes_are_free_when_no_view_is_left(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        half = left.empty(REGION // 2, "uint8")
        view = np.from_dlpack(half)[10:]
        bytes_of_it = memoryview(left.empty(REGION // 2, "uint8"))
        del half
        with pytest.raises(UnavailableError) as full:
            left.empty(1)
        assert full.value.reason == "session.region.full"
        del view
        gc.collect()
        left.empty(REGION // 2, "uint8")
        bytes_of_it.release()
        del bytes_of_it
        gc.collect()

        # What is being sent stays in use, whoever else has forgotten it.
        sending = await left.post_send(left.empty(REGION, "uint8"))
        gc.collect()
        with pytest.raises(UnavailableError):
            left.empty(1)
        await right.receive(offset=0, length=REGION)
        await sending
        gc.collect()
        left.empty(REGION, "uint8")


@pytest.mark.parametrize(
    ("shape", "dtype", "alignment"),
    [((-1,), "int8", 64), ((1,), "complex64", 64), ((1,), "int8", 3), ((1,) * 33, "int8", 64)],
)
async def test_array_that_can_not_be_is_refused(
    fabrics: tuple[Any, Any], shape: Any, dtype: str, alignment: int
) -> None:
    async with connected(*fabrics) as (left, _):
        with pytest.raises(UsageError) as refused:
            left.empty(shape, dtype, alignment=alignment)
        with pytest.raises(Error):
            left.empty((1 << 40, 1 << 40))
    assert refused.value.reason == "session.region.array"


async def test_memory_elsewhere_is_no_message(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        elsewhere = (bytes(8), np.zeros((4, 4))[:, 1], right.empty(8))
        for data in elsewhere:
            with pytest.raises(UsageError) as refused:
                await left.send(data)
            assert refused.value.reason == "session.post.elsewhere"
        for nothing in ({}, {"data": left.empty(1), "length": 1}):
            with pytest.raises(UsageError):
                await left.send(**nothing)


async def test_chunks_can_be_used_before_the_message_is_whole(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        content = random.Random(4).randbytes(REGION // 2)
        left.region[: len(content)] = content
        receiving = await right.post_receive(offset=0, length=REGION)
        chunk_count = -(-len(content) // right.chunk_bytes)
        with pytest.raises(SessionError) as early:
            await receiving.wait_chunks(0, 1, timeout_seconds=0.01)
        sending = await left.post_send(offset=0, length=len(content))
        await receiving.wait_chunks(0, 4, timeout_seconds=10)
        first = bytes(right.region[: 4 * right.chunk_bytes])
        assert not receiving.done(), "a message of 42 ms can't be over"
        await receiving.wait_chunks(timeout_seconds=10)
        await sending

        assert early.value.reason == "session.wait.timeout"
        assert first == content[: len(first)]
        assert receiving.done()
        chunks = receiving.chunks()
        assert chunks is not None
        assert (sum(chunks), len(chunks)) == (chunk_count, receiving.chunk_count)
        with pytest.raises(UsageError):
            await receiving.wait_chunks(0, receiving.chunk_count + 1)


async def test_bitmap_of_a_receive_is_gone_with_its_slot(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        receiving = [await right.post_receive(offset=0, length=8) for _ in range(right.ring.slots)]
        later = await right.post_receive(offset=0, length=8)
        assert later.chunks() is None, "it has no slot yet"
        for first in receiving[:2]:
            await left.send(offset=0, length=8)
            await first
        assert receiving[0].chunks() is None
        assert receiving[1].chunks() == b"\x01"
        assert receiving[2].chunks() == later.chunks() == b"\x00"


async def test_who_stops_waiting_does_not_stop_the_receive(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        receiving = await right.post_receive(offset=0, length=8)
        with pytest.raises(SessionError) as late:
            await receiving.wait(timeout_seconds=0.01)
        with pytest.raises(UsageError):
            receiving.result()
        await left.send(offset=0, length=8)
        first, second = await asyncio.gather(receiving, receiving)

        assert late.value.reason == "session.wait.timeout"
        assert first == second == receiving.result()


async def test_drained_session_takes_nothing_more(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        sending = await left.post_send(offset=0, length=8)
        with pytest.raises(SessionError) as late:
            await left.drain(timeout_seconds=0.01)
        with pytest.raises(UsageError) as refused:
            await left.send(offset=0, length=8)
        await right.receive(offset=0, length=8)
        await left.drain(timeout_seconds=10)

        assert sending.done()
        assert late.value.reason == "session.wait.timeout"
        assert refused.value.reason == "session.draining"
