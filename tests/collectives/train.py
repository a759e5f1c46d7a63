"""One rank of a training run: `train.py BACKEND STORE RANK SIZE`; prints what it computed."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sealane.client.torch

PAGE = Path(__file__).parents[2] / "docs" / "start" / "collectives.md"


def collectives(rank: int, size: int) -> None:
    """Try each operation; exit on a wrong result."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.full((3, 1000), rank + 1).to(dtype)
        dist.all_reduce(tensor)
        assert (tensor == sum(range(1, size + 1))).all()
        columns = torch.zeros(4, 6).to(dtype)[:, 1::2]
        columns += rank
        dist.all_reduce(columns, op=dist.ReduceOp.MAX)
        assert (columns == size - 1).all()
        dist.broadcast(tensor.fill_(rank), src=size - 1)
        assert (tensor == size - 1).all()
        gathered = [torch.zeros(5, 2).to(dtype) for _ in range(size)]
        dist.all_gather(gathered, torch.full((5, 2), rank).to(dtype))
        assert all((part == index).all() for index, part in enumerate(gathered))
        parts = [torch.full((3, 4), rank + index).to(dtype) for index in range(size)]
        part = torch.zeros(3, 4).to(dtype)
        dist.reduce_scatter(part, parts)
        assert (part == sum(range(size)) + rank * size).all()
        rooted = torch.full((7,), rank + 1).to(dtype)
        dist.reduce(rooted, dst=size - 1)
        assert (rooted == (sum(range(1, size + 1)) if rank == size - 1 else rank + 1)).all()
        whole = torch.zeros(size * 5).to(dtype)
        dist.all_gather_into_tensor(whole, torch.full((5,), rank).to(dtype))
        assert (whole.reshape(size, 5) == torch.arange(size)[:, None]).all()
        dist.reduce_scatter_tensor(part, torch.stack(parts))
        assert (part == sum(range(size)) + rank * size).all()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    assert work.is_completed()
    dist.barrier()


def pairs(rank: int, size: int) -> None:
    """Exchange between two ranks: in turn, at the same time, strided and empty tensors."""
    if size != 2:
        return
    if rank == 0:
        dist.send(torch.arange(100_000), dst=1, tag=3)
    else:
        received = torch.zeros(100_000, dtype=torch.int64)
        dist.recv(received, src=0, tag=3)
        assert (received == torch.arange(100_000)).all()
    rows = torch.zeros(6, 4)[::2]
    operations = [
        dist.P2POp(dist.isend, torch.full((4, 3), rank + 1.0).t(), 1 - rank),
        dist.P2POp(dist.irecv, rows, 1 - rank),
        dist.P2POp(dist.isend, torch.zeros(0), 1 - rank),
        dist.P2POp(dist.irecv, torch.zeros(0), 1 - rank),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (rows == 2.0 - rank).all()


def odd_tensors(rank: int, size: int) -> None:
    """Try empty, strided and half-precision tensors, and invalid calls."""
    for shape in ((0,), (3, 0)):
        empty = torch.zeros(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, src=0)
        dist.all_gather([torch.zeros(shape) for _ in range(size)], empty)
        dist.reduce_scatter(torch.zeros(shape), [torch.zeros(shape) for _ in range(size)])
    wide = torch.full((4, 6), float(rank)).t()
    dist.broadcast(wide, src=size - 1)
    assert (wide == size - 1).all()
    columns = torch.zeros(3, 2 * size)[:, ::2]
    dist.all_gather(list(columns.t()), torch.full((6,), float(rank))[::2])
    assert (columns == torch.arange(size)).all()
    half = torch.full((101,), rank + 1, dtype=torch.float16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert (half == (size + 1) / 2).all()
    turned = torch.full((5,), 1 + 2j, dtype=torch.complex64)
    dist.all_reduce(turned)
    assert (turned == size * (1 + 2j)).all()
    for meaningless, operator in (
        (torch.ones(3, dtype=torch.bool), dist.ReduceOp.SUM),
        (torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG),
        (torch.ones(3, dtype=torch.int64), dist.ReduceOp.BAND),
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"group\.(operator|array)"):
            dist.all_reduce(meaningless, op=operator)


def from_each_to_each(rank: int, size: int) -> None:
    """Gather, scatter and all-to-all, also of strided tensors; each pair has its own session."""
    gathered = [torch.zeros(4, 2).t() for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2, 4), float(rank)), gathered, dst=0)
    assert all((part == number).all() for number, part in enumerate(gathered or []))
    own = torch.zeros(6)[::2]
    parts = [torch.full((3,), 10.0 + number) for number in range(size)]
    dist.scatter(own, parts if rank == size - 1 else None, src=size - 1)
    assert (own == 10 + rank).all()
    theirs = [torch.zeros(70_000, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(theirs, [torch.full((70_000,), 10 * rank + n) for n in range(size)])
    assert all((part == 10 * number + rank).all() for number, part in enumerate(theirs))
    whole = torch.zeros(2 * size)
    dist.all_to_all_single(whole, torch.arange(2.0 * size) + 100 * rank)
    assert (whole.view(size, 2)[:, 0] == torch.arange(size) * 100 + 2 * rank).all()
    # Rank a sends a + b rows of three to rank b; 0 sends itself none.
    splits = [rank + number for number in range(size)]
    rows = torch.full((sum(splits), 3), float(rank))
    room = torch.zeros(sum(splits), 3)
    dist.all_to_all_single(room, rows, splits, splits)
    senders = torch.repeat_interleave(torch.arange(float(size)), torch.tensor(splits))
    assert (room == senders[:, None]).all()
    shapes = [(number + 1, rank + 1) for number in range(size)]
    rooms = [torch.zeros(rank + 1, number + 1) for number in range(size)]
    dist.all_to_all(rooms, [torch.full(shape, 10.0 * rank) for shape in shapes])
    assert all((part == 10.0 * number).all() for number, part in enumerate(rooms))
    with pytest.raises((RuntimeError, ValueError), match=r"group\.array|[Ss]plit"):
        dist.all_to_all_single(whole, whole.clone(), [3] * size, [2] * size)
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            source = dist.recv(room := torch.zeros(5))
            assert (room == source).all()
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((5,), float(rank)), 0)
    several = [torch.full((3, 2), 1.0 + rank), torch.full((5,), 10.0)]
    dist.all_reduce_coalesced(several)
    assert (several[0] == size * (size + 1) / 2).all()
    assert (several[1] == 10.0 * size).all()


def subgroups(rank: int, size: int) -> None:
    """Use groups of all ranks and of single ranks besides the job's group."""
    together = dist.new_group(list(range(size)))
    alone = [dist.new_group([number]) for number in range(size)][rank]
    ones = torch.ones(10)
    dist.all_reduce(ones, group=together)
    assert (ones == size).all()
    dist.all_reduce(ones, group=alone)
    dist.broadcast(ones, src=rank, group=alone)
    dist.barrier(group=alone)
    assert (ones == size).all()


def training(rank: int, size: int) -> list[float]:
    """Train for five steps of two parts on a share of the data; the loss is over all ranks."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inputs, wanted = torch.randn(64, 20), torch.randn(64, 1)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        own, hoped = inputs[rank::size].chunk(2), wanted[rank::size].chunk(2)
        with model.no_sync():
            first = torch.nn.functional.mse_loss(model(own[0]), hoped[0])
            first.backward()
        second = torch.nn.functional.mse_loss(model(own[1]), hoped[1])
        second.backward()
        optimizer.step()
        shared = (first + second).detach()
        dist.all_reduce(shared)
        losses.append(float(shared) / size)
    return losses


def main() -> None:
    """Join, compute, leave."""
    backend, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    where = f"file://{Path(store).resolve()}"
    if backend == "gloo":
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size)
    else:
        # The example of the documentation.
        (example,) = re.findall(r"```python\n(import .*?)```", PAGE.read_text(), re.DOTALL)
        exec(example, {"torch": torch, "INIT": where, "RANK": rank, "SIZE": size})  # noqa: S102
        assert isinstance(dist.group.WORLD, sealane.client.torch.SealaneProcessGroup)
        collectives(rank, size)
        pairs(rank, size)
        odd_tensors(rank, size)
        from_each_to_each(rank, size)
        subgroups(rank, size)
    losses = training(rank, size)
    dist.destroy_process_group()
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
