"""Reads acknowledged records back from the audit log, from a position that is kept in a file.

The position is no secret and not protected: at worst records are read twice, or a receiver sees by
their numbers and hashes that some are missing.
"""

from pathlib import Path
from typing import BinaryIO, Final

from sealane.crypto.audit import LINE_BYTES_MAX, Chain, Head
from sealane.daemon.broker.audit import AuditLog
from sealane.daemon.broker.audit_segments import Segment
from sealane.daemon.runtime.files import read_bounded, write_durably
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import VerificationError

# The position of a file that holds none: no record has this number.
_NOWHERE: Final = Head(sequence=2**64, digest=b"")


class AuditSource:
    """Acknowledged records after a position, in order. Its calls read files: use one thread."""

    def __init__(self, log: AuditLog, position: Path) -> None:
        """Read from `log`; the position is kept in the file `position`."""
        self._log = log
        self._position = position
        self._segment: Segment | None = None
        self._file: BinaryIO | None = None
        self._chain = Chain()

    @property
    def head(self) -> Head:
        """The last record that was read."""
        return self._chain.head

    def close(self) -> None:
        """Close the file that is being read, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def rewind(self) -> Head:
        """Go to the kept position, or to the log's beginning, and return the position; OSError.

        The log's beginning if there is no position, or it isn't one of this log: that is then kept.
        Reads nothing if this is the position already.
        """
        position = self._kept_position()
        if self._file is not None and self.head == position:
            return self.head
        with self._log.reading() as segments:
            before = [s for s in segments if position and s.before.sequence <= position.sequence]
            self._open(before[-1] if before else segments[0])
            if position is not None and not self._skip_to(position):
                get_logger().warning(
                    "audit_forward_restarted",
                    message="the kept position is none of this log: forwarding from its beginning",
                )
                self._open(segments[0])
                self.keep()
        return self.head

    def keep(self) -> None:
        """Make the end of what was read the position of the next `rewind`; OSError."""
        head = self.head
        write_durably(self._position, f"{head.sequence}:{head.digest.hex()}".encode())

    def read(self, bytes_max: int) -> list[bytes]:
        """Return the next lines, without newlines: one, or some `bytes_max` at most; OSError.

        VerificationError `audit.chain.broken`, `audit.record.malformed` or `audit.truncated` if
        they aren't those that the broker acknowledged.
        """
        head = self._log.head
        lines: list[bytes] = []
        size = 0
        while self.head.sequence < head.sequence and size < bytes_max:
            line = self._next_line()
            self._chain.follow(line)
            lines.append(line)
            size += len(line)
        if self.head.sequence == head.sequence and self.head != head:
            raise self._truncated()
        return lines

    def _next_line(self) -> bytes:
        while True:
            if self._file is None:
                raise self._truncated()
            line = self._file.readline(LINE_BYTES_MAX + 1)
            if line.endswith(b"\n"):
                return line.removesuffix(b"\n")
            if line:
                raise self._truncated()
            with self._log.reading() as segments:
                self._open_after(segments)

    def _open_after(self, segments: list[Segment]) -> None:
        """Open the segment that continues where the current one ends."""
        for segment in segments:
            is_other = self._segment is None or segment.path != self._segment.path
            if segment.before == self.head and is_other:
                self._open(segment)
                return
        raise self._truncated()

    def _open(self, segment: Segment) -> None:
        self.close()
        self._segment = segment
        self._chain = Chain(segment.before)
        self._file = segment.path.open("rb")

    def _skip_to(self, position: Head) -> bool:
        """Read up to `position`; return False if the log has no such record."""
        if position.sequence > self._log.head.sequence:
            return False
        while self.head.sequence < position.sequence:
            self._chain.follow(self._next_line())
        return self.head == position

    def _kept_position(self) -> Head | None:
        try:
            text = read_bounded(self._position).decode("ascii")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            return _NOWHERE
        sequence, _, digest = text.partition(":")
        try:
            return Head(sequence=int(sequence), digest=bytes.fromhex(digest))
        except ValueError:
            return _NOWHERE

    def _truncated(self) -> VerificationError:
        return VerificationError(
            "audit.truncated",
            f"{self._log.path}: does not hold the records that were acknowledged after number "
            f"{self.head.sequence}: the log was truncated, changed or replaced",
        )
