"""The client without asyncio, for scripts and for libraries that need a file.

    with sealane.client.sync.connect() as client:
        volume = client.volumes.attach(name, host_nqn=my_nqn)
        with client.open(volume) as disk, disk.file() as file:
            shutil.copyfileobj(source, file)

Calls run on an event loop on a thread of its own, and block the thread that makes them. Threads may
share objects. The errors are those of `sealane.client`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sealane.client import connection, fan_out, operation
from sealane.client.disk import DiskHandle
from sealane.client.disk_file import DiskFile
from sealane.client.disk_queues import FrontEnd
from sealane.client.facade import entered
from sealane.client.loop import running
from sealane.client.messages import Reliability, Sent
from sealane.client.operation import R
from sealane.client.synchronous import (
    Client,
    Disk,
    Group,
    Listener,
    Operation,
    ReceiveOperation,
    SendOperation,
    Session,
    StreamOperation,
    Volumes,
)
from sealane.errors import Error

if TYPE_CHECKING:
    from sealane.client.messages import Bytes

__all__ = [
    "Client",
    "Disk",
    "DiskFile",
    "DiskHandle",
    "Group",
    "Listener",
    "Operation",
    "ReceiveOperation",
    "SendOperation",
    "Session",
    "StreamOperation",
    "Volumes",
    "connect",
    "open_disk",
    "send_to_all",
    "wait",
]


@contextlib.contextmanager
def connect(
    socket: str | os.PathLike[str] | None = None, *, traceparent: str = ""
) -> Iterator[Client]:
    """Connect to the daemon at `socket`, as `sealane.client.connect` does."""
    opened = connection.connect(socket, traceparent=traceparent)
    with running() as loop, entered(loop, opened, Client) as client:
        yield client


@contextlib.contextmanager
def open_disk(
    front_end: FrontEnd | DiskHandle,
    *,
    queue_count: int = 2,
    timeout_seconds: float = 60.0,
    hold_seconds: float = 60.0,
) -> Iterator[Disk]:
    """Read and write a plain namespace without a daemon, given its front end or a disk's `handle`.

    A handle brings its own settings; the other arguments are then ignored.
    """
    handle = (
        front_end
        if isinstance(front_end, DiskHandle)
        else DiskHandle(
            front_end=front_end,
            queue_count=queue_count,
            timeout_seconds=timeout_seconds,
            hold_seconds=hold_seconds,
        )
    )
    with running() as loop, Disk(loop, handle.open()) as disk:
        yield disk


def wait(posted: Sequence[Operation[R]], *, timeout_seconds: float | None = None) -> list[R]:
    """Wait for many operations of one client; return their results in order.

    Raises the first error of any of them; the others go on.
    """
    if not posted:
        return []
    waiting = operation.wait_all(
        [one.asynchronous for one in posted], timeout_seconds=timeout_seconds
    )
    return posted[0].loop.run(waiting)


def send_to_all(
    sessions: Sequence[Session],
    data: "Bytes",
    *,
    reliability: Reliability | None = None,
    immediate: int | None = None,
    priority: int = 0,
    deadline_seconds: float | None = None,
) -> list[Sent | Error]:
    """Send `data` over each of these sessions of one client, as `sealane.client.send_to_all`."""
    if not sessions:
        return []
    return sessions[0].loop.run(
        fan_out.send_to_all(
            [session.asynchronous for session in sessions],
            data,
            reliability=reliability,
            immediate=immediate,
            priority=priority,
            deadline_seconds=deadline_seconds,
        )
    )
