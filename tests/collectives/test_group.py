"""Collective operations over real sessions between fabrics, compared with NumPy."""

import asyncio
from typing import Any

import numpy as np
import pytest

from collectives_ring import Ring
from patience import PATIENCE_SECONDS
from sealane._native import Emulator, JobRing, LinkSettings
from sealane.client import grants
from sealane.client.collectives import Group, Member, Operator
from sealane.client.messages import ErasureCoded
from sealane.errors import SessionError, UsageError
from sealane.protocol.v1 import sessions_pb2
from session_pairs import wait_listening

EXPECTED = {
    Operator.SUM: lambda arrays: np.sum(arrays, axis=0),
    Operator.AVERAGE: lambda arrays: np.mean(arrays, axis=0),
    Operator.MAXIMUM: lambda arrays: np.max(arrays, axis=0),
    Operator.MINIMUM: lambda arrays: np.min(arrays, axis=0),
    Operator.PRODUCT: lambda arrays: np.prod(arrays, axis=0),
}


def bfloat16_bits(values: Any) -> Any:
    """Round to nearest even, computed differently from the engine: as fractions of 2^16."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    quotient, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (quotient & 1 == 1))
    return (quotient + up).astype(np.uint16)


def from_bits(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("operator", list(Operator))
async def test_all_reduce_does_what_numpy_does(ring: Ring, operator: Operator) -> None:
    lengths = [0, 1, 3, 5, 10_001]
    chance = np.random.default_rng(7)
    for dtype in ("float32", "int64") if operator is not Operator.AVERAGE else ("float64",):
        data = [[chance.integers(1, 9, n).astype(dtype) for n in lengths] for _ in ring.members]
        arrays = [[one.copy() for one in mine] for mine in data]

        async def act(group: Group, arrays: Any = arrays) -> None:
            for array in arrays[group.rank]:
                await group.all_reduce(array, operator)

        assert await ring.run(act, slot_bytes=4096, slots=4) == [None] * 4
        for place, _ in enumerate(lengths):
            expected = EXPECTED[operator]([mine[place] for mine in data])
            for mine in arrays:
                assert np.allclose(mine[place], expected)
                assert np.array_equal(mine[place], arrays[0][place]), "bit by bit"


async def test_a_short_array_meets_no_segment_of_a_long_one(ring: Ring) -> None:
    async def act(group: Group) -> None:
        # As long as a segment of the others' arrays, which don't fit a message four times.
        await group.all_reduce(np.ones(33 if group.rank == 0 else 4 * 33))

    results = await ring.run(act, slot_bytes=4096, slots=4)
    reasons = {getattr(one, "reason", "") for one in results}
    assert "group.order" in reasons
    assert reasons <= {"group.order", "group.aborted"}


async def test_half_of_the_receives_stay_posted_and_a_long_message_posts_all(ring: Ring) -> None:
    async def act(group: Group) -> list[int]:
        neighbours = group._sessions.neighbours
        assert neighbours is not None
        posted = []
        for length in [4] * 20 + [8192]:
            await group.all_reduce(np.ones(length, np.uint8))
            posted.append(len(neighbours[1]._offered))
        return posted

    slots = 8
    for posted in await ring.run(act, slots=slots, size=2):
        assert min(posted) > slots // 2
        assert max(posted[:-1]) == posted[-1] == slots
        assert len(set(posted)) == slots // 2, "they are posted again together"


async def test_all_receives_are_posted_before_a_long_message_is_awaited(ring: Ring) -> None:
    slots = 8

    async def act(group: Group) -> None:
        neighbours = group._sessions.neighbours
        assert neighbours is not None
        inbox = neighbours[1]
        for _ in range(3):
            await group.all_reduce(np.ones(4, np.uint8))
        assert len(inbox._offered) == slots - 3
        taking = asyncio.ensure_future(inbox.take(np.ones(8192, np.uint8), 0))
        await asyncio.sleep(0)
        assert len(inbox._offered) == slots - 1, "all but the one that is awaited"
        taking.cancel()

    assert await ring.run(act, slots=slots, size=2) == [None, None]


@pytest.mark.parametrize("size", [2, 3])
async def test_bfloat16_is_added_in_single_precision(ring: Ring, size: int) -> None:
    chance = np.random.default_rng(8)
    data = [bfloat16_bits(chance.normal(size=5000)) for _ in range(size)]
    arrays = [one.copy() for one in data]

    async def act(group: Group) -> None:
        await group.all_reduce(arrays[group.rank], dtype="bfloat16")

    assert await ring.run(act, size=size) == [None] * size
    if size == 2:
        expected = bfloat16_bits(from_bits(data[0]) + from_bits(data[1]))
        assert np.array_equal(arrays[0], expected)
    exact = np.sum([from_bits(one) for one in data], axis=0)
    assert np.allclose(from_bits(arrays[0]), exact, rtol=2**-7, atol=2**-7)
    assert all(np.array_equal(one, arrays[0]) for one in arrays)


@pytest.mark.parametrize("operator", [Operator.SUM, Operator.AVERAGE])
async def test_reduce_scatter_gives_each_rank_its_part(ring: Ring, operator: Operator) -> None:
    chance = np.random.default_rng(9)
    data = [chance.normal(size=(4, 1001)) for _ in range(4)]
    given = [one.copy() for one in data]

    async def act(group: Group) -> Any:
        part = np.zeros(1001)
        await group.reduce_scatter(given[group.rank], part, operator)
        with pytest.raises(UsageError):
            await group.reduce_scatter(given[group.rank], np.zeros(1000))
        return part

    expected = EXPECTED[operator](data)
    parts = await ring.run(act, slot_bytes=4096, slots=4)
    assert np.allclose(parts, expected)
    assert np.array_equal(given, data), "what was given stays as it is"


async def test_gather_broadcast_and_barrier(ring: Ring) -> None:
    entered: list[int] = []

    async def act(group: Group) -> Any:
        await asyncio.sleep(0.01 * group.rank)
        entered.append(group.rank)
        await group.barrier()
        assert sorted(entered) == [0, 1, 2, 3]
        gathered = np.zeros((4, 1001), np.int32)
        await group.all_gather(np.full(1001, group.rank + 1, np.int32), gathered)
        told = np.full(70_000, group.rank, np.uint16)
        await group.broadcast(told, root=2)
        return gathered, told

    for gathered, told in await ring.run(act, slot_bytes=8192, slots=2):
        assert (gathered == np.arange(1, 5)[:, None]).all()
        assert (told == 2).all()


async def test_a_rank_that_leaves_ends_the_operation_of_all(ring: Ring) -> None:
    async def stay(group: Group) -> None:
        await group.all_reduce(np.zeros(100_000, np.float32))

    async def leave(group: Group) -> None:
        raise RuntimeError("this rank has failed")

    async with asyncio.timeout(PATIENCE_SECONDS):
        results = await ring.run(stay, stay, leave, stay)

    assert isinstance(results[2], RuntimeError)
    for result in results[:2] + results[3:]:
        assert isinstance(result, SessionError)
        assert result.reason == "group.aborted"


async def test_a_rank_that_leaves_while_others_join_ends_the_group(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = grants.fetch_ring
    fetched = 0

    async def fetch_late(grant: sessions_pb2.SessionGrant, *where: Any) -> JobRing:
        nonlocal fetched
        fetched += 1
        if fetched == 1:
            # As the fabric answers once the session has ended.
            grant.ring_token = bytes(16 * [1])
        else:
            # The failed rank's other session is granted, but not fetched yet.
            await asyncio.sleep(0.3)
        return await fetch(grant, *where)

    monkeypatch.setattr(grants, "fetch_ring", fetch_late)

    async def reduce(group: Group) -> None:
        await group.all_reduce(np.zeros(100, np.float32))

    async with asyncio.timeout(PATIENCE_SECONDS):
        results = await ring.run(reduce, size=2)
    assert all(isinstance(one, SessionError) for one in results), results
    assert {one.reason for one in results} <= {"group.aborted"}


async def test_a_rank_whose_send_is_lost_does_not_wait_for_what_it_would_receive(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = grants.fetch_ring
    reducing = asyncio.Event()

    async def fetch_late(grant: sessions_pb2.SessionGrant, *where: Any) -> JobRing:
        if grant.session.peer_node == "site-0":
            if grant.session.display_name.endswith("/1-0"):
                # Rank 1 never has this session, from which rank 0 receives.
                grant.ring_token = bytes(16 * [1])
            else:
                await reducing.wait()
                await asyncio.sleep(0.2)  # Rank 0 has posted its only send by now.
        return await fetch(grant, *where)

    monkeypatch.setattr(grants, "fetch_ring", fetch_late)

    async def reduce(group: Group) -> None:
        reducing.set()
        await group.all_reduce(np.zeros(100, np.float32))

    async with asyncio.timeout(PATIENCE_SECONDS):
        results = await ring.run(reduce, size=2)
    assert [one.reason for one in results] == ["group.aborted"] * 2
    assert "send: the session ended before it was done" in str(results[0]), "of the send"


async def test_a_rank_that_never_comes_is_a_time_out_everywhere(ring: Ring) -> None:
    async def act(group: Group) -> None:
        await group.barrier(timeout_seconds=0.2)

    async def sleep(group: Group) -> None:
        await asyncio.sleep(0.5)
        with pytest.raises(SessionError) as late:
            await group.barrier()
        raise late.value

    reasons = [one.reason for one in await ring.run(act, act, act, sleep)]
    assert set(reasons) <= {"group.timeout", "group.aborted"}
    assert "group.timeout" in reasons


async def test_ranks_that_do_different_things_are_noticed(ring: Ring) -> None:
    async def reduce(group: Group) -> None:
        await group.all_reduce(np.zeros(100, np.float32))

    async def other(group: Group) -> None:
        await group.all_reduce(np.zeros(104, np.float32))

    async with asyncio.timeout(PATIENCE_SECONDS):
        results = await ring.run(reduce, reduce, other, reduce)
    reasons = {one.reason for one in results}
    assert reasons <= {"group.order", "group.aborted"}
    assert "group.order" in reasons


async def test_group_of_one_is_alone_and_bad_ranks_are_refused(ring: Ring) -> None:
    async def act(group: Group) -> Any:
        array = np.arange(3.0)
        await group.all_reduce(array, Operator.AVERAGE)
        for bad in (
            group.broadcast(array, root=1),
            group.all_gather(array, np.zeros(4)),
            group.all_reduce(np.zeros(3, np.int32), Operator.AVERAGE),
            group.all_reduce(np.zeros((4, 4))[:, 1]),
            group.all_reduce(np.zeros(4, np.bool_)),
        ):
            with pytest.raises(UsageError):
                await bad
        return array

    (array,) = await ring.run(act, size=1)
    assert np.array_equal(array, np.arange(3.0))


async def test_sites_compute_over_lossy_links(ring: Ring) -> None:
    links: list[Emulator] = []
    by_node = {one.name: one for one in ring.fabrics}

    async def route(display_name: str, member: Member) -> str:
        (address,) = await wait_listening(by_node[member.node], display_name)
        settings = LinkSettings(
            rate_bits_per_second=200_000_000,
            delay_nanos=2_000_000,
            buffer_bytes=1 << 24,
            loss_parts_per_billion=10_000_000,
        )
        links.append(Emulator.relay([settings], [settings], seed=3, forward_to=address))
        return links[-1].address or ""

    arrays = [np.random.default_rng(rank).normal(size=200_000) for rank in range(3)]
    expected = np.sum(arrays, axis=0)

    async def act(group: Group) -> None:
        await group.all_reduce(arrays[group.rank])

    try:
        reliability = ErasureCoded(k=16, m=4)
        results = await ring.run(act, size=3, route=route, reliability=reliability)
    finally:
        for link in links:
            link.stop()
    assert results == [None] * 3
    assert all(np.allclose(array, expected) for array in arrays)
    assert sum(link.report()["forward"]["paths"][0]["lost_packets"] for link in links) > 10


async def test_any_two_ranks_exchange_arrays(ring: Ring) -> None:
    async def act(group: Group) -> Any:
        other = (group.rank + 2) % 4
        ours = np.full(5000, group.rank, np.int16)
        theirs = [np.zeros(5000, np.int16), np.zeros(0, np.int8)]
        await asyncio.gather(
            group.send(ours, other, tag=1),
            group.send(np.zeros(0, np.int8), other, tag=2),
            group.receive(theirs[0], other, tag=1),
            group.receive(theirs[1], other, tag=2),
            group.barrier(),
        )
        with pytest.raises(UsageError):
            await group.send(ours, group.rank)
        return int(theirs[0].sum())

    assert await ring.run(act, slot_bytes=1024, slots=3) == [10_000, 15_000, 0, 5_000]


async def test_each_rank_has_something_for_each(ring: Ring) -> None:
    def part(source: int, to: int) -> Any:
        return np.arange(3000, dtype=np.int32) + 10_000 * source + 1000 * to

    async def act(group: Group) -> Any:
        rank, size = group.rank, group.size
        ours = np.array([part(rank, to) for to in range(size)])
        theirs, gathered, own = np.zeros_like(ours), np.zeros_like(ours), np.zeros(3000, np.int32)
        await group.all_to_all(ours, theirs)
        assert np.array_equal(theirs, [part(source, rank) for source in range(size)])
        await group.gather(ours[0], gathered if rank == 2 else None, 2)
        if rank == 2:
            assert np.array_equal(gathered, [part(source, 0) for source in range(size)])
        await group.scatter(ours if rank == 1 else None, own, 1)
        assert np.array_equal(own, part(1, rank))
        with pytest.raises(UsageError, match="for each of 4 ranks"):
            await group.all_to_all(ours, np.zeros(3, np.int32))
        # Rank a sends 2000 a + b elements to rank b.
        sent = [2000 * rank + to for to in range(size)]
        received = [2000 * source + rank for source in range(size)]
        uneven = np.repeat(np.arange(size) + 10 * rank, sent)
        room = np.zeros(sum(received), uneven.dtype)
        await group.all_to_all(uneven, room, send_counts=sent, receive_counts=received)
        assert np.array_equal(room, np.repeat(10 * np.arange(size) + rank, received))
        for wrong in ([1] * size, [sum(sent)], [-1, sum(sent) + 1, 0, 0]):
            with pytest.raises(UsageError, match="make up the whole"):
                await group.all_to_all(uneven, room, send_counts=wrong, receive_counts=received)
        with pytest.raises(UsageError, match="share memory"):
            await group.all_to_all(uneven, uneven[: sum(received)], send_counts=sent)
        with pytest.raises(UsageError, match="for this rank itself"):
            await group.all_to_all(uneven, room.astype(np.int8), send_counts=sent)
        await group.barrier()

    assert await ring.run(act, slot_bytes=4096, slots=3) == [None] * 4


async def test_arrays_are_received_from_whoever_sends_first(ring: Ring) -> None:
    async def act(group: Group) -> list[int]:
        if group.rank == 2:
            # Rank 3 never sends, and rank 1 sends before rank 0.
            found = []
            for _ in range(3):
                array = np.zeros(3000, np.int64)
                source = await group.receive_any(array, tag=7)
                assert (array == source).all()
                found.append(source)
            await group.barrier()
            return found
        if group.rank == 1:
            await group.send(np.full(3000, 1), 2, tag=7)
            await group.send(np.full(3000, 1), 2, tag=7)
            await group.send(np.zeros(1), 0)
        elif group.rank == 0:
            await group.receive(np.zeros(1), 1)
            await group.send(np.zeros(3000, np.int64), 2, tag=7)
        await group.barrier()
        return []

    assert await ring.run(act, slot_bytes=4096, slots=3) == [[], [], [1, 1, 0], []]


async def test_a_receive_from_anyone_ends_when_all_others_have_left(ring: Ring) -> None:
    async def act(group: Group) -> None:
        if group.rank:
            await group.send(np.zeros(1), 0)
            return
        sources = [await group.receive_any(np.zeros(1)) for _ in range(3)]
        assert sorted(sources) == [1, 2, 3]
        await group.receive_any(np.zeros(1), timeout_seconds=PATIENCE_SECONDS)

    results = await ring.run(act)
    assert results[0].reason == "group.aborted"


async def test_a_part_of_another_length_ends_the_group(ring: Ring) -> None:
    async def act(group: Group) -> None:
        own = np.zeros(10 + (group.rank == 1))
        into = np.zeros(group.size * own.size) if group.rank == 0 else None
        async with asyncio.timeout(PATIENCE_SECONDS):
            await group.gather(own, into)
            await group.barrier()

    results = await ring.run(act)
    reasons = {getattr(one, "reason", repr(one)) for one in results}
    assert reasons <= {"group.order", "group.aborted"}
    assert results[0].reason == "group.order"


async def test_an_array_longer_by_whole_pieces_ends_the_group(ring: Ring) -> None:
    async def act(group: Group) -> None:
        if group.rank == 0:
            await group.send(np.zeros(2 * 4096, np.uint8), 1)
        elif group.rank == 1:
            await group.receive(np.zeros(4096, np.uint8), 0)
        await group.barrier()

    results = await ring.run(act, slot_bytes=4096)
    assert getattr(results[1], "reason", "") == "group.order"


async def test_another_tag_than_expected_ends_the_group(ring: Ring) -> None:
    async def send(group: Group) -> None:
        await group.send(np.zeros(1), 1, tag=1)
        await group.barrier()

    async def receive(group: Group) -> None:
        await group.receive(np.zeros(1), 0, tag=2)

    results = await ring.run(send, receive, size=2)
    assert [one.reason for one in results] == ["group.aborted", "group.order"]
