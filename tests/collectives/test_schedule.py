"""Ring schedules, run in order without a network, and checked against the expected results."""

from collections import deque

import pytest

from sealane.client.collectives import schedule
from sealane.client.collectives.schedule import Arrival, Schedule

SHAPES = [(2, 0, 4), (2, 1, 4), (3, 2, 1), (4, 17, 3), (5, 40, 8), (8, 7, 2), (8, 1000, 64)]


def run(plans: list[Schedule], data: list[list[int]]) -> None:
    """Run all ranks, one message at a time; fail on a deadlock."""
    size = len(plans)
    wires: list[deque[list[int]]] = [deque() for _ in range(size)]
    sent, received = [0] * size, [0] * size
    while True:
        has_moved = False
        for rank, plan in enumerate(plans):
            while sent[rank] < len(plan.sends) and plan.sends[sent[rank]].after <= received[rank]:
                send = plan.sends[sent[rank]]
                wires[(rank + 1) % size].append(data[rank][send.start : send.end])
                sent[rank] += 1
                has_moved = True
            if wires[rank] and received[rank] < len(plan.receives):
                receive = plan.receives[received[rank]]
                theirs = wires[rank].popleft()
                assert len(theirs) == receive.end - receive.start
                for place, value in zip(range(receive.start, receive.end), theirs, strict=True):
                    is_stored = receive.arrival is Arrival.STORE
                    data[rank][place] = value if is_stored else data[rank][place] + value
                received[rank] += 1
                has_moved = True
        if not has_moved:
            break
    assert sent == [len(plan.sends) for plan in plans]
    assert received == [len(plan.receives) for plan in plans]
    assert not any(wires)


@pytest.mark.parametrize(("size", "length", "piece"), SHAPES)
def test_all_reduce_sums_at_every_rank(size: int, length: int, piece: int) -> None:
    data = [[(rank + 1) * (place + 1) for place in range(length)] for rank in range(size)]
    expected = [sum(column) for column in zip(*data, strict=True)]
    plans = [schedule.all_reduce(rank, size, length, piece) for rank in range(size)]
    run(plans, data)
    assert data == [expected] * size
    for plan in plans:
        elements = sum(send.end - send.start for send in plan.sends)
        assert elements <= 2 * (size - 1) * -(-length // size)
        finished = [one for one in plan.receives if one.arrival is Arrival.FINISH]
        assert sum(one.end - one.start for one in finished) in (length // size, -(-length // size))


@pytest.mark.parametrize(("size", "length", "piece"), SHAPES)
def test_reduce_scatter_leaves_each_rank_the_sum_of_its_number(
    size: int, length: int, piece: int
) -> None:
    data = [[(rank + 1) * place for place in range(length * size)] for rank in range(size)]
    expected = [sum(column) for column in zip(*data, strict=True)]
    plans = [schedule.reduce_scatter(rank, size, length, piece) for rank in range(size)]
    run(plans, data)
    for rank, plan in enumerate(plans):
        own = slice(rank * length, (rank + 1) * length)
        assert data[rank][own] == expected[own]
        finished = [one for one in plan.receives if one.arrival is Arrival.FINISH]
        assert sum(one.end - one.start for one in finished) == length


@pytest.mark.parametrize(("size", "length", "piece"), SHAPES)
def test_all_gather_puts_ranks_in_order(size: int, length: int, piece: int) -> None:
    data = [[0] * (length * size) for _ in range(size)]
    for rank in range(size):
        data[rank][rank * length : (rank + 1) * length] = range(rank * 1000, rank * 1000 + length)
    expected = [rank * 1000 + place for rank in range(size) for place in range(length)]
    run([schedule.all_gather(rank, size, length, piece) for rank in range(size)], data)
    assert data == [expected] * size


@pytest.mark.parametrize(("size", "length", "piece"), SHAPES)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_reaches_all(size: int, length: int, piece: int, root: int) -> None:
    data = [[rank] * length for rank in range(size)]
    run([schedule.broadcast(rank, size, length, piece, root) for rank in range(size)], data)
    assert data == [[root] * length] * size
