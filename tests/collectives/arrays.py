"""Tensors in the regions of a session: `arrays.py NEAR FAR NODE ADDRESS`, two daemons' sockets.

Fails if a tensor is a copy, or if received data differs from what was sent.
"""

import asyncio
import hashlib
import sys
from typing import Any

import pytest
import torch

from sealane.client import Session, connect
from sealane.errors import UnavailableError

REGION = 1 << 20
COUNT = 50_003


def digest(tensor: Any) -> str:
    return hashlib.sha256(bytes(tensor.view(torch.uint8).tolist())).hexdigest()


def tensors(session: Session, dtype: Any) -> tuple[Any, Any]:
    """Return an array in the region and its tensor; torch's two ways give the same memory."""
    array = session.empty(COUNT, dtype)
    tensor, same = torch.from_dlpack(array), torch.frombuffer(array, dtype=dtype)
    assert tensor.dtype == dtype
    assert tensor.data_ptr() == same.data_ptr(), "neither is a copy"
    tensor.zero_()
    same[7] = 3
    assert tensor[7] == 3
    offset = tensor.data_ptr() - torch.frombuffer(session.region, dtype=torch.uint8).data_ptr()
    assert any(session.region[offset : offset + tensor.numel() * tensor.element_size()]), (
        "the region has what the tensor has"
    )
    return array, tensor


async def exchange(near: Session, far: Session, dtype: Any) -> None:
    sent, ours = tensors(near, dtype)
    room, theirs = tensors(far, dtype)
    ours.copy_(torch.randn(COUNT).to(dtype))
    receiving = await far.post_receive(room)
    await near.send(sent)
    await receiving.wait(timeout_seconds=60)
    assert digest(theirs) == digest(ours)
    # The tensor keeps the region's bytes in use even without the array; then they are free again.
    del sent, receiving
    with pytest.raises(UnavailableError) as full:
        near.empty(REGION, "uint8")
    assert full.value.reason == "session.region.full"
    # The session released the array when the send ended.
    del ours
    near.empty(REGION, "uint8")


async def main() -> None:
    near_socket, far_socket, node, address = sys.argv[1:]
    async with connect(near_socket) as near, connect(far_socket) as far:
        listening = far.listen_session("arrays", region_bytes=REGION)
        opening = near.open_session(
            "arrays",
            region_bytes=REGION,
            peer_node=node,
            peer_address=address,
            rate_bits_per_second=500_000_000,
            wait_seconds=20,
        )
        async with asyncio.TaskGroup() as tasks:
            entering = tasks.create_task(listening.__aenter__())
            session = await opening.__aenter__()
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            await exchange(session, entering.result(), dtype)
        await opening.__aexit__(None, None, None)
        await listening.__aexit__(None, None, None)


if __name__ == "__main__":
    asyncio.run(main())
