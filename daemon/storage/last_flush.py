"""The flush before a volume is detached: nothing else would send its journal again."""

import asyncio
import socket
from typing import Final

from sealane import _native
from sealane.daemon.storage.back_end import BackEnd, QueueName
from sealane.errors import Error, UnavailableError
from sealane.protocol.nvme.constants import FRONT_TRANSFER_BYTES, H2C_DATA_BYTES
from sealane.protocol.nvme.identify import NamespaceIdentity
from sealane.transport.nvme.volume_queue import ConnectedQueue, VolumeQueue

FLUSH_SECONDS: Final = 5.0
"""Longest wait for a back end, and again for the flush."""
_BLOCK_BYTES: Final = 4096
_DEPTH: Final = 2
# No host's association has the number 0.
_NAME: Final = QueueName(association_id=0, queue_id=1)


async def flush_journal(native: _native.GatewayVolume, back_end: BackEnd) -> None:
    """Make every acknowledged change durable at the target, on a queue of the gateway's own.

    UnavailableError if that can't be had in time. No host's queue may run.
    """
    if not native.statistics()["journal_bytes"]:
        return
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            queue = await _open(native, back_end)
        try:
            await queue.flush()
        finally:
            await queue.close()
            await asyncio.to_thread(native.close_queues)
    except TimeoutError as error:
        raise UnavailableError("connection.timeout", "the target isn't reached") from error
    except OSError as error:
        raise UnavailableError("connection.lost", str(error)) from error
    except Error as error:
        raise UnavailableError(error.reason, str(error.args[0])) from error


async def _open(native: _native.GatewayVolume, back_end: BackEnd) -> VolumeQueue:
    """Open a front-end queue whose host is this process."""
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
        queue = ConnectedQueue(
            socket=host,
            queue_id=_NAME.queue_id,
            queue_depth=_DEPTH,
            h2c_data_max=H2C_DATA_BYTES,
            in_capsule_max=H2C_DATA_BYTES,
            transfer_max=FRONT_TRANSFER_BYTES,
        )
        return VolumeQueue(
            _native.HostQueue(
                queue.describe(block_bytes=_BLOCK_BYTES),
                io_bytes=_BLOCK_BYTES,
                timeout_seconds=FLUSH_SECONDS,
            ),
            NamespaceIdentity(block_count=1, block_bytes=_BLOCK_BYTES, metadata_bytes=0),
        )
