"""One rank of failing runs: `failures.py STORE RANK SIZE`; exits if a run ends wrongly."""

import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sealane.client.torch

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=10)
"""More than the ranks of a loaded machine take to meet."""


def init(store: str, rank: int, size: int, timeout: timedelta) -> Any:
    dist.init_process_group(
        "sealane",
        init_method=f"file://{Path(store).resolve()}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    group = dist.group.WORLD
    assert isinstance(group, sealane.client.torch.SealaneProcessGroup)
    dist.barrier()
    return group


def fails(reason: str, work: Any = None) -> float:
    """Reduce, or wait; it must fail for this reason. Return the seconds that it took."""
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        work.wait() if work is not None else dist.all_reduce(torch.ones(1000))
    return time.monotonic() - started


def wait_for(path: Path) -> None:
    """Wait until the other rank has reached this point."""
    # Poll, because another process creates the file.
    while not path.exists():
        time.sleep(0.05)


def late(store: str, rank: int, size: int) -> None:
    """Rank 1 doesn't take part within the group's timeout; all ranks get an error."""
    init(store, rank, size, SHORT)
    is_over = Path(f"{store}.over")
    if rank == 0:
        assert fails("group.timeout") >= SHORT.total_seconds()
        assert fails("group.timeout") < SHORT.total_seconds(), "a group that is over stays so"
        is_over.touch()
    else:
        wait_for(is_over)
        fails("group.aborted")
    dist.destroy_process_group()


def aborted(store: str, rank: int, size: int) -> None:
    """Rank 0 aborts the running operation; the others' operations end, too."""
    group = init(store, rank, size, LONG)
    is_over = Path(f"{store}.over")
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        with pytest.raises(RuntimeError, match=r"group\.wait"):
            work.wait(timedelta(milliseconds=50))
        group.abort()
        assert fails("group.aborted", work) < LONG.total_seconds()
        assert work.is_completed()
        assert not work.is_success()
        is_over.touch()
    else:
        wait_for(is_over)
        assert fails("group.aborted") < LONG.total_seconds()
    dist.destroy_process_group()


def unequal(store: str, rank: int, size: int) -> None:
    """Ranks pass tensors of different lengths; a rank that notices reports it, and none hangs."""
    init(store, rank, size, LONG)
    with pytest.raises(RuntimeError, match=r"the ranks run different operations|group\.aborted"):
        dist.all_reduce(torch.ones(1000 + 8 * rank))
    with pytest.raises(RuntimeError, match=r"group\.(order|aborted)"):
        dist.barrier()
    dist.destroy_process_group()


def dead(store: str, rank: int, size: int) -> None:
    """Rank 1 dies; the others fail before the timeout."""
    init(store, rank, size, LONG)
    if rank == 1:
        os._exit(0)
    assert fails("group.aborted") < LONG.total_seconds()
    dist.destroy_process_group()


def main() -> None:
    """Fail in each way."""
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for number, way in enumerate((late, aborted, unequal, dead)):
        way(f"{store}-{number}", rank, size)


if __name__ == "__main__":
    main()
