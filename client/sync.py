"""The client without asyncio, for scripts and for libraries that want a file.

    with sealane.client.sync.connect() as client:
        volume = client.volumes.attach(name, host_nqn=my_nqn)
        with client.open(volume) as disk, disk.file() as file:
            shutil.copyfileobj(source, file)

An event loop of its own, on its own thread, does the work. Objects may be shared by threads; calls
block theirs. Errors are those of `sealane.client`.
"""

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sealane.client import collectives, connection
from sealane.client.collectives import Member
from sealane.client.collectives.group import SLOT_BYTES, SLOTS
from sealane.client.connection import DEFAULT_SOCKET, NodeStatus
from sealane.client.disk import Disk as AsyncDisk
from sealane.client.disk import DiskHandle
from sealane.client.disk_queues import FrontEnd
from sealane.client.loop import Loop, entered, left, running
from sealane.client.messages import Reliability
from sealane.client.sync_collectives import Group, entered_group
from sealane.client.sync_session import Operation, Session, entered_session, wait
from sealane.client.volume import Volume, front_end_of
from sealane.client.volumes import Volumes as AsyncVolumes
from sealane.errors import UsageError
from sealane.transport.nvme.volume_queue import Readable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "Client",
    "Disk",
    "DiskFile",
    "DiskHandle",
    "Group",
    "Operation",
    "Session",
    "Volumes",
    "connect",
    "open_disk",
    "wait",
]

_COPY_BYTES: Final = 4 << 20
"""Most bytes that one call of a file's `write` takes."""


class Volumes:
    """Calls about volumes; `name` is always "volumes/<UUID>"."""

    def __init__(self, loop: Loop, volumes: AsyncVolumes) -> None:
        self._loop = loop
        self._volumes = volumes

    def create(
        self,
        *,
        size_bytes: int,
        display_name: str = "",
        target_node: str = "",
        request_id: str = "",
    ) -> Volume:
        """Create a volume of `size_bytes`, a multiple of 4096."""
        return self._loop.run(
            self._volumes.create(
                size_bytes=size_bytes,
                display_name=display_name,
                target_node=target_node,
                request_id=request_id,
            )
        )

    def get(self, name: str, *, with_store: bool = False) -> Volume:
        """Return one volume; `with_store`: also what its store says, asked where it is."""
        return self._loop.run(self._volumes.get(name, with_store=with_store))

    def list(self, *, with_store: bool = False) -> list[Volume]:
        """Return every volume of this tenant; `with_store`: also what their stores say."""
        return self._loop.run(self._volumes.list(with_store=with_store))

    def delete(self, name: str) -> None:
        """Delete a detached volume and all its data."""
        self._loop.run(self._volumes.delete(name))

    def attach(
        self, name: str, *, host_nqn: str, via_traddr: str = "", via_trsvcid: int = 0
    ) -> Volume:
        """Export the volume to `host_nqn`; `via_…` replaces the target's data-path address."""
        return self._loop.run(
            self._volumes.attach(
                name, host_nqn=host_nqn, via_traddr=via_traddr, via_trsvcid=via_trsvcid
            )
        )

    def detach(self, name: str) -> Volume:
        """Stop the export."""
        return self._loop.run(self._volumes.detach(name))


class Disk:
    """A volume as a sequence of bytes: `sealane.client.Disk`, blocking. Threads may share it."""

    def __init__(self, loop: Loop, disk: AsyncDisk) -> None:
        self._loop = loop
        self._disk = disk

    @property
    def size(self) -> int:
        """Bytes."""
        return self._disk.size

    @property
    def sector_bytes(self) -> int:
        """Bytes of a sector; calls that cover whole sectors are the fast ones."""
        return self._disk.sector_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        return self._loop.run(self._disk.read(offset, length))

    def readinto(self, offset: int, buffer: bytearray | memoryview) -> int:
        """Fill `buffer` from `offset`; returns its size in bytes."""
        return self._loop.run(self._disk.readinto(offset, buffer))

    def write(self, offset: int, data: Readable, *, durable: bool = False) -> int:
        """Write `data` at `offset`; returns its size in bytes. `durable`: survives a power cut."""
        return self._loop.run(self._disk.write(offset, data, durable=durable))

    @property
    def handle(self) -> DiskHandle:
        """What opens the same disk in another process, by `open_disk`; it holds the secret."""
        return self._disk.handle

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a disk isn't pickled: pickle its `handle`, and open that where it arrives")

    def flush(self) -> None:
        """Make every write that has returned durable."""
        self._loop.run(self._disk.flush())

    def write_zeroes(self, offset: int, length: int) -> None:
        """Make exactly these bytes zero, without moving whole sectors of them."""
        self._loop.run(self._disk.write_zeroes(offset, length))

    def discard(self, offset: int, length: int) -> None:
        """Give up the whole sectors inside the range: they read as zeros. Others stay."""
        self._loop.run(self._disk.discard(offset, length))

    def file(self, *, length: int | None = None) -> "DiskFile":
        """Return a file over the first `length` bytes of the disk, or all of it, at position 0.

        Who reads from the end, as `torch.load` does, needs the length of what was written. Wrap it
        in `io.BufferedRandom` for small reads and writes. UsageError `disk.range`.
        """
        if length is not None and not 0 <= length <= self.size:
            raise UsageError(
                "disk.range", f"a file of {length} bytes; allowed: 0 to the disk's {self.size}"
            )
        return DiskFile(self, length=self.size if length is None else length)


class DiskFile(io.RawIOBase):
    """The first bytes of a disk as an unbuffered binary file of fixed size.

    Reads at its end return nothing; writes at its end fail with ENOSPC. `flush`, and so `close`,
    makes what was written durable. There is no file descriptor: `mmap` and `fileno` don't work.
    """

    def __init__(self, disk: Disk, *, length: int) -> None:
        self._disk = disk
        self._length = length
        self._position = 0

    def __len__(self) -> int:
        """Bytes of the file."""
        return self._length

    def __bool__(self) -> bool:
        """Whether it is there: yes, also if it is empty."""
        return True

    def readable(self) -> bool:
        """Whether it can be read: yes."""
        return True

    def writable(self) -> bool:
        """Whether it can be written: yes."""
        return True

    def seekable(self) -> bool:
        """Whether it has a position: yes."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill the buffer as far as the disk goes; returns the bytes read."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(0, self._length - self._position))
        if length:
            self._disk.readinto(self._position, view[:length])
        self._position += length
        return length

    def write(self, data: "ReadableBuffer") -> int:
        """Write as much as the disk and one call take; returns the bytes written."""
        self._check_open()
        view = memoryview(data).cast("B")
        length = min(len(view), _COPY_BYTES, max(0, self._length - self._position))
        if view and not length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if length:
            self._disk.write(self._position, view[:length])
        self._position += length
        return length

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, also behind the end; returns it."""
        self._check_open()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        if whence not in bases:
            raise ValueError(f"whence is {whence}; allowed: 0, 1, 2")
        position = bases[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def tell(self) -> int:
        """Return the position."""
        self._check_open()
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Refuse: a disk has one size."""
        raise io.UnsupportedOperation(f"a disk can't be cut to {size} bytes")

    def flush(self) -> None:
        """Make every write that has returned durable."""
        if not self.closed:
            self._disk.flush()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")


class Client:
    """An open connection to the daemon on this machine."""

    def __init__(self, loop: Loop, client: connection.Client) -> None:
        self._loop = loop
        self._client = client
        self.volumes = Volumes(loop, client.volumes)

    def status(self) -> NodeStatus:
        """Return what the daemon is."""
        return self._loop.run(self._client.status())

    @contextlib.contextmanager
    def open(
        self,
        volume: Volume,
        *,
        queue_count: int = 2,
        timeout_seconds: float = 60.0,
        hold_seconds: float = 60.0,
    ) -> Iterator[Disk]:
        """Read and write a volume that `attach` returned: `with client.open(volume) as disk`."""
        disk = AsyncDisk(
            front_end_of(volume),
            queue_count=queue_count,
            timeout_seconds=timeout_seconds,
            hold_seconds=hold_seconds,
        )
        with _opened(self._loop, disk) as opened:
            yield opened

    @contextlib.contextmanager
    def open_session(
        self,
        display_name: str,
        *,
        region_bytes: int,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        via_addresses: Sequence[str] = (),
        wait_seconds: float = 0.0,
        peer_tenant: str = "",
        secret: bytes = b"",
    ) -> Iterator[Session]:
        """Open a session to a listener of that name; close it on leaving the block."""
        opening = self._client.open_session(
            display_name,
            region_bytes=region_bytes,
            peer_node=peer_node,
            peer_address=peer_address,
            rate_bits_per_second=rate_bits_per_second,
            via_addresses=via_addresses,
            wait_seconds=wait_seconds,
            peer_tenant=peer_tenant,
            secret=secret,
        )
        with entered_session(self._loop, opening) as session:
            yield session

    @contextlib.contextmanager
    def join(
        self,
        name: str,
        *,
        rank: int,
        members: Sequence[Member],
        rate_bits_per_second: int,
        reliability: Reliability | None = None,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        timeout_seconds: float = 60.0,
        secret: bytes = b"",
    ) -> Iterator[Group]:
        """Form a group with all members, as `sealane.client.collectives.join`."""
        joining = collectives.join(
            self._client,
            name,
            rank=rank,
            members=members,
            rate_bits_per_second=rate_bits_per_second,
            reliability=reliability,
            slot_bytes=slot_bytes,
            slots=slots,
            timeout_seconds=timeout_seconds,
            secret=secret,
        )
        with entered_group(self._loop, joining) as group:
            yield group

    @contextlib.contextmanager
    def listen_session(
        self,
        display_name: str,
        *,
        region_bytes: int,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
    ) -> Iterator[Session]:
        """Wait for a peer to open a session of that name; close it on leaving the block."""
        listening = self._client.listen_session(
            display_name,
            region_bytes=region_bytes,
            peer_nodes=peer_nodes,
            peer_tenants=peer_tenants,
            secret=secret,
        )
        with entered_session(self._loop, listening) as session:
            yield session


@contextlib.contextmanager
def connect(socket: str | os.PathLike[str] = DEFAULT_SOCKET) -> Iterator[Client]:
    """Connect to the daemon at `socket`; UnavailableError `daemon.unreachable` if there is none."""
    with running() as loop:
        connected = connection.connect(socket)
        client = loop.run(entered(connected))
        try:
            yield Client(loop, client)
        finally:
            if not loop.is_forked:
                loop.run(left(connected))


@contextlib.contextmanager
def open_disk(
    front_end: FrontEnd | DiskHandle,
    *,
    queue_count: int = 2,
    timeout_seconds: float = 60.0,
    hold_seconds: float = 60.0,
) -> Iterator[Disk]:
    """Read and write a plain namespace without a daemon, given where it is, or a disk's `handle`.

    A handle has the other values, too.
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
    with running() as loop, _opened(loop, handle.open()) as opened:
        yield opened


@contextlib.contextmanager
def _opened(loop: Loop, disk: AsyncDisk) -> Iterator[Disk]:
    loop.run(disk.open())
    try:
        yield Disk(loop, disk)
    finally:
        if not loop.is_forked:
            loop.run(disk.close())
