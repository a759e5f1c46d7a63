"""A front-end queue of an attached volume that this process uses itself."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sealane import _native
from sealane.daemon.gateway.back_end import BackEnd, QueueName
from sealane.protocol.nvme.constants import FRONT_TRANSFER_BYTES, H2C_DATA_BYTES
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.protocol.sector import SECTOR_BYTES
from sealane.transport.nvme.volume_queue import ConnectedQueue, VolumeQueue

_DEPTH: Final = 8
# Associations of hosts never have the number 0.
_NAME: Final = QueueName(association_id=0, queue_id=1)


@asynccontextmanager
async def own_queue(
    native: _native.GatewayVolume,
    back_end: BackEnd,
    *,
    block_count: int,
    open_seconds: float,
    command_seconds: float,
) -> AsyncIterator[VolumeQueue]:
    """Open a queue with a back end; TimeoutError if that takes longer than `open_seconds`.

    No host's queue may be running. `command_seconds` limits one transfer.
    """
    async with asyncio.timeout(open_seconds):
        prepared = await back_end.prepare(_NAME)
    host, controller = socket.socketpair()
    with host, controller:
        host.setblocking(False)
        controller.setblocking(False)
        try:
            native.start_queue(
                controller.fileno(),
                association=_NAME.association_id,
                queue_id=_NAME.queue_id,
                success_flag=False,
                queue_depth=_DEPTH,
                h2c_data_max=H2C_DATA_BYTES,
                in_capsule_max=H2C_DATA_BYTES,
                transfer_max=FRONT_TRANSFER_BYTES,
            )
        except BaseException:
            back_end.discard(prepared)
            raise
        back_end.start(_NAME, prepared)
        connected = ConnectedQueue(
            socket=host,
            queue_id=_NAME.queue_id,
            queue_depth=_DEPTH,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=H2C_DATA_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
        )
        queue = VolumeQueue(
            _native.HostQueue(
                connected.describe(block_bytes=SECTOR_BYTES),
                io_bytes=FRONT_TRANSFER_BYTES,
                timeout_seconds=command_seconds,
            ),
            NamespaceIdentity(block_count=block_count, block_bytes=SECTOR_BYTES, metadata_bytes=0),
        )
    try:
        yield queue
    finally:
        try:
            await queue.close()
        finally:
            await asyncio.to_thread(native.close_queues)
            # Its controller at the target, too: another attempt has one of its own.
            await back_end.close_association(_NAME.association_id)
