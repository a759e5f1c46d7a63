"""A host's I/O queue whose controller stops answering."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from patience import PATIENCE_SECONDS
from sealane.errors import UnavailableError
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme import volume_queue
from sealane.transport.nvme.volume_queue import ConnectedQueue, VolumeQueue, bulk_queue

BLOCK = 4096


@pytest.fixture
async def silent() -> AsyncIterator[VolumeQueue]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connected = ConnectedQueue(
        socket=ours,
        queue_id=1,
        queue_depth=8,
        h2c_data_max=8192,
        transfer_max=8192,
        in_capsule_max=8192,
    )
    namespace = NamespaceIdentity(block_bytes=BLOCK, block_count=16, metadata_bytes=0)
    queue = bulk_queue(connected, namespace)
    with theirs:
        yield queue
        await queue.close()


async def test_a_cancelled_write_ends_its_queue_rather_than_wait_for_ever(
    silent: VolumeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_queue, "CANCEL_SECONDS", 0.05)
    other = asyncio.ensure_future(silent.flush())
    writing = asyncio.ensure_future(silent.write(0, bytes(BLOCK)))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing, other}, timeout=PATIENCE_SECONDS)
    assert writing.cancelled()
    # It isn't known whether it was written, so nothing may follow it on this queue.
    with pytest.raises(UnavailableError, match="closed"):
        await other
    with pytest.raises(UnavailableError, match="closed"):
        await silent.write(0, bytes(BLOCK))
