"""Files over a disk, for libraries that read and write files."""

import errno
import io
import os
from typing import TYPE_CHECKING, Final

from sealane.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from sealane.client.synchronous import Disk

_COPY_BYTES: Final = 4 << 20
"""Most bytes that one call of a file's `write` takes."""


class Files:
    """The methods of a synchronous disk that an asynchronous one lacks."""

    def file(self: "Disk", *, length: int | None = None) -> "DiskFile":  # type: ignore[misc] # mixin
        """Return a file over the first `length` bytes of the disk, or all of it, at position 0.

        Libraries that seek from the end, as `torch.load` does, need the length that was written.
        Wrap the file in `io.BufferedRandom` for small reads and writes. UsageError `disk.range`.
        """
        if length is not None and not 0 <= length <= self.size:
            raise UsageError(
                "disk.range", f"a file of {length} bytes; allowed: 0 to the disk's {self.size}"
            )
        return DiskFile(self, length=self.size if length is None else length)


class DiskFile(io.RawIOBase):
    """The first bytes of a disk as an unbuffered binary file of fixed size.

    At its end reads return nothing and writes fail with ENOSPC. `flush`, and therefore `close`,
    makes all writes durable. There is no file descriptor: `mmap` and `fileno` don't work.
    """

    def __init__(self, disk: "Disk", *, length: int) -> None:
        self._disk = disk
        self._length = length
        self._position = 0

    def __len__(self) -> int:
        """Bytes of the file."""
        return self._length

    def __bool__(self) -> bool:
        """Return True: a file is true even when it is empty."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Fill the buffer, or up to the end of the file; return the number of bytes read."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(0, self._length - self._position))
        if length:
            self._disk.readinto(self._position, view[:length])
        self._position += length
        return length

    def write(self, data: "ReadableBuffer") -> int:
        """Write up to the end of the file, 4 MiB at most; return the number of bytes written."""
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
        """Set the position, which may lie behind the end, and return it."""
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
        """Raise UnsupportedOperation: the size of a disk is fixed."""
        raise io.UnsupportedOperation(f"a disk can't be truncated to {size} bytes")

    def flush(self) -> None:
        """Make durable every write that has returned."""
        if not self.closed:
            self._disk.flush()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")
