"""A session in the client library: arrays in the region, both directions, waiting, draining."""

import asyncio
import gc
import random
from typing import Any

import numpy as np
import pytest

from patience import PATIENCE_SECONDS
from sealane._native import latencies
from sealane.client.messages import Auto, ErasureCoded, Unreliable
from sealane.client.session import Session
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
        await answer.wait(timeout_seconds=PATIENCE_SECONDS)
        assert not any(send.done() for send in sends)
        await asyncio.gather(*(right.receive(offset=8 * i, length=8) for i in range(len(sends))))
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

        # An array being sent stays in use even without other references.
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
        await receiving.wait_chunks(0, 4, timeout_seconds=PATIENCE_SECONDS)
        first = bytes(right.region[: 4 * right.chunk_bytes])
        assert not receiving.done(), "a message of 42 ms can't be over"
        await receiving.wait_chunks(timeout_seconds=PATIENCE_SECONDS)
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
        slots = right.ring.slots
        receiving = [await right.post_receive(offset=8 * i, length=8) for i in range(slots)]
        later = await right.post_receive(offset=8 * slots, length=8)
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
        await left.drain(timeout_seconds=PATIENCE_SECONDS)

        assert sending.done()
        assert late.value.reason == "session.wait.timeout"
        assert refused.value.reason == "session.draining"


async def test_stream_lands_where_its_parts_say(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        unit = left.session.unit_bytes
        content = random.Random(5).randbytes(40 * unit)
        left.region[: len(content)] = content
        right.region[:REGION] = bytes(REGION)
        receiving = await right.post_receive(offset=0, length=100 * unit)
        stream = await left.post_stream(50 * unit + 7, immediate=5)
        # In arbitrary order, with a gap and a repetition; the last part is short.
        await stream.write(20 * unit, offset=0, length=10 * unit)
        await stream.write(0, offset=10 * unit, length=5 * unit)
        await stream.write(20 * unit, offset=0, length=10 * unit)
        await stream.write(50 * unit, offset=20 * unit, length=7)
        assert not stream.done()
        await stream.end()
        sent, received = await asyncio.gather(stream, receiving)

        expected = bytearray(100 * unit)
        expected[20 * unit : 30 * unit] = content[: 10 * unit]
        expected[: 5 * unit] = content[10 * unit : 15 * unit]
        expected[50 * unit : 50 * unit + 7] = content[20 * unit : 20 * unit + 7]
        assert bytes(right.region[: 100 * unit]) == expected
        assert received.immediate == 5
        assert not sent.is_partial
        assert received.is_partial
        assert received.chunks is not None
        assert 0 in received.chunks
        with pytest.raises(UsageError) as late:
            await stream.write(0, offset=0, length=unit)
        assert late.value.reason == "session.stream.part"


@pytest.mark.parametrize(("remote_offset", "length"), [(1, 1408), (0, 100), (14080, 1408)])
async def test_part_that_can_not_be_is_refused_and_the_stream_goes_on(
    fabrics: tuple[Any, Any], remote_offset: int, length: int
) -> None:
    async with connected(*fabrics) as (left, right):
        receiving = await right.post_receive(offset=0, length=14080)
        stream = await left.post_stream(14080)
        with pytest.raises(UsageError) as refused:
            await stream.write(remote_offset, offset=0, length=length)
        await stream.write(1408, offset=0, length=1408)
        await stream.end()
        await asyncio.gather(stream, receiving)
    assert refused.value.reason == "session.stream.part"


async def test_streams_wait_for_slots_without_holding_others_up(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        unit, slots = left.session.unit_bytes, left.ring.slots
        streams = [await left.post_stream(unit) for _ in range(slots + 2)]
        writes = [
            asyncio.ensure_future(stream.write(0, offset=0, length=unit)) for stream in streams
        ]
        receives = [
            await right.post_receive(offset=index * unit, length=unit)
            for index in range(len(streams))
        ]
        await asyncio.gather(*writes[:slots])
        assert not any(write.done() for write in writes[slots:])
        for stream in streams[:slots]:
            await stream.end()
        await asyncio.gather(*streams[:slots])
        for stream in streams[slots:]:
            await stream.end()
        await asyncio.gather(*streams, *writes, *receives)


async def test_ring_full_of_waiting_sends_has_room_to_cancel_them(
    fabrics: tuple[Any, Any],
) -> None:
    async with (
        connected(*fabrics) as (left, _),
        asyncio.timeout(PATIENCE_SECONDS),
        asyncio.TaskGroup() as tasks,
    ):
        sends = [await left.post_send(offset=0, length=8) for _ in range(left.ring.entries - 1)]
        more = tasks.create_task(left.post_send(offset=0, length=8))
        await asyncio.sleep(0)
        assert await sends[-1].cancel()
        assert await sends[0].cancel()
        assert not (await more).done()
        assert not any(send.done() for send in sends[1:-1])


async def test_cancelled_send_ends_at_both_ends(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        receiving = await right.post_receive(offset=0, length=REGION)
        sending = await left.post_send(offset=0, length=REGION)
        await receiving.wait_chunks(0, 1)
        assert await sending.cancel()
        for operation in (sending, receiving):
            with pytest.raises(SessionError) as cancelled:
                await operation.wait(timeout_seconds=PATIENCE_SECONDS)
            assert cancelled.value.reason == "session.message.cancelled"
        assert not await sending.cancel()
        # Before there is credit, and before a slot is free.
        waiting = [await left.post_send(offset=0, length=8) for _ in range(left.ring.slots + 1)]
        assert await waiting[-1].cancel()
        assert await waiting[0].cancel()
        landed = [
            await right.post_receive(offset=8 * index, length=8)
            for index in range(len(waiting) - 1)
        ]
        results = await asyncio.gather(*waiting, *landed, return_exceptions=True)
        reasons = [one.reason for one in results if isinstance(one, Error)]
        assert reasons == ["session.message.cancelled"] * 3, "two sends, and the receive of one"


async def test_message_of_higher_priority_overtakes_a_long_one(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        long = REGION - 1024
        receiving = await right.post_receive(offset=0, length=long)
        urgent = await right.post_receive(offset=long, length=1024)
        left.region[long:] = bytes(range(256)) * 4
        sending = await left.post_send(offset=0, length=long)
        await receiving.wait_chunks(0, 1)
        await left.send(offset=long, length=1024, priority=1)
        assert (await urgent).message == 1
        assert bytes(right.region[long:]) == bytes(range(256)) * 4
        assert not sending.done(), "it overtook it"
        await asyncio.gather(sending.wait(), receiving.wait())


async def test_message_ends_at_its_deadline_wherever_it_is(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        # The peer has posted nothing for it, or it has no slot yet.
        sends = [
            await left.post_send(offset=0, length=8, deadline_seconds=0.05)
            for _ in range(left.ring.slots + 1)
        ]
        stream = await left.post_stream(8, deadline_seconds=0.05)
        ended = await asyncio.wait_for(
            asyncio.gather(*(one.wait() for one in [*sends, stream]), return_exceptions=True),
            10,  # well before anything else wakes the worker
        )
        reasons = {one.reason for one in ended if isinstance(one, Error)}
        assert (len(ended), reasons) == (left.ring.slots + 2, {"session.message.expired"})
        # Those that had a slot use up the receives that are posted for them.
        for _ in range(left.ring.slots):
            with pytest.raises(SessionError) as cancelled:
                await right.receive(offset=0, length=8)
            assert cancelled.value.reason == "session.message.cancelled"
        await asyncio.gather(
            left.send(offset=0, length=8, deadline_seconds=PATIENCE_SECONDS),
            right.receive(offset=0, length=8),
        )
        cancelled_before = await left.post_send(offset=0, length=8, deadline_seconds=60)
        assert await cancelled_before.cancel()
        with pytest.raises(SessionError) as early:
            await cancelled_before.wait()
        assert early.value.reason == "session.message.cancelled", "not by its deadline"


async def test_receive_ends_with_what_has_landed(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        units = right.chunk_bytes // right.session.unit_bytes
        receiving = await right.post_receive(offset=0, length=REGION)
        assert await receiving.packet_map(0) is None
        sending = await left.post_send(offset=0, length=REGION, immediate=3)
        await receiving.wait_chunks(0, 2)
        assert await receiving.packet_map(0) == b"\x01" * units
        assert await receiving.packet_map(receiving.chunk_count - 1) == bytes(units)
        assert await receiving.complete()
        received, sent = await asyncio.gather(receiving, sending)

        assert received.is_partial
        assert received.immediate == 3
        assert received.chunks is not None
        assert received.chunks[:2] == b"\x01\x01"
        assert 2 <= sum(received.chunks) < receiving.chunk_count
        assert sent.is_partial
        assert not await receiving.complete()
        before = bytes(right.region)
        await right.post_receive(offset=0, length=8)
        await left.send(offset=0, length=0)
        assert bytes(right.region) == before


async def test_each_reliable_send_is_in_the_histogram_of_messages(fabrics: tuple[Any, Any]) -> None:
    counts, nanos = latencies()["fabric"]["send"]
    async with connected(*fabrics) as (left, right):
        for _ in range(2):
            whole = await right.post_receive(offset=0, length=5000)
            await left.send(offset=0, length=5000)
            await whole.wait(timeout_seconds=PATIENCE_SECONDS)
        # Ends when it has left, so it says nothing of the way.
        last = await right.post_receive(offset=0, length=5000)
        await left.send(offset=0, length=5000, reliability=Unreliable())
        await last.wait(timeout_seconds=PATIENCE_SECONDS)
        stream = await left.post_stream(0)
        await stream.end()
    counts_after, nanos_after = latencies()["fabric"]["send"]
    assert sum(counts_after) == sum(counts) + 2
    assert nanos_after > nanos


async def test_unreliable_message_ends_when_it_has_left(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        left.region[:100_000] = random.Random(6).randbytes(100_000)
        whole = await right.post_receive(offset=0, length=100_000)
        await left.send(offset=0, length=100_000, reliability=Unreliable())
        await whole.wait(timeout_seconds=PATIENCE_SECONDS)
        assert right.region[:100_000] == left.region[:100_000]

        unit = left.session.unit_bytes
        parts = await right.post_receive(offset=0, length=10 * unit)
        stream = await left.post_stream(10 * unit, reliability=Unreliable())
        await stream.write(0, offset=0, length=unit)
        await stream.end()
        await stream.wait(timeout_seconds=PATIENCE_SECONDS)
        assert left.statistics()["retransmitted_packets"] == 0
        received = await parts.wait(timeout_seconds=PATIENCE_SECONDS)
        assert received.is_partial
