"""One rank of a training run: `train.py BACKEND STORE RANK SIZE`; prints what it computed."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sealane.client.torch


def collectives(rank: int, size: int) -> None:
    """Try each operation; a wrong result ends the process."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.full((3, 1000), rank + 1).to(dtype)
        dist.all_reduce(tensor)
        assert (tensor == sum(range(1, size + 1))).all()
        columns = torch.zeros(4, 6).to(dtype)[:, 1::2]
        columns += rank
        dist.all_reduce(columns, op=dist.ReduceOp.MAX)
        assert (columns == size - 1).all()
        dist.broadcast(tensor.fill_(rank), src=1)
        assert (tensor == 1).all()
        gathered = [torch.zeros(5, 2).to(dtype) for _ in range(size)]
        dist.all_gather(gathered, torch.full((5, 2), rank).to(dtype))
        assert all((part == index).all() for index, part in enumerate(gathered))
        parts = [torch.full((3, 4), rank + index).to(dtype) for index in range(size)]
        part = torch.zeros(3, 4).to(dtype)
        dist.reduce_scatter(part, parts)
        assert (part == sum(range(size)) + rank * size).all()
        rooted = torch.full((7,), rank + 1).to(dtype)
        dist.reduce(rooted, dst=1)
        assert (rooted == (sum(range(1, size + 1)) if rank == 1 else rank + 1)).all()
        whole = torch.zeros(size * 5).to(dtype)
        dist.all_gather_into_tensor(whole, torch.full((5,), rank).to(dtype))
        assert (whole.reshape(size, 5) == torch.arange(size)[:, None]).all()
        dist.reduce_scatter_tensor(part, torch.stack(parts))
        assert (part == sum(range(size)) + rank * size).all()
    if rank == 0:
        dist.send(torch.arange(100_000), dst=1, tag=3)
    elif rank == 1:
        received = torch.zeros(100_000, dtype=torch.int64)
        dist.recv(received, src=0, tag=3)
        assert (received == torch.arange(100_000)).all()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    assert work.is_completed()
    dist.barrier()


def training(rank: int, size: int) -> list[float]:
    """Take five steps on a share of the data; the loss is that of all."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inputs, wanted = torch.randn(64, 20), torch.randn(64, 1)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[rank::size]), wanted[rank::size])
        loss.backward()
        optimizer.step()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        losses.append(float(shared) / size)
    return losses


def main() -> None:
    """Join, compute, leave."""
    backend, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group(
        backend,
        init_method=f"file://{Path(store).resolve()}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    if backend == "sealane":
        assert isinstance(dist.group.WORLD, sealane.client.torch.SealaneProcessGroup)
        collectives(rank, size)
    losses = training(rank, size)
    dist.destroy_process_group()
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
