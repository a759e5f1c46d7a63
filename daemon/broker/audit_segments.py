"""Files of the audit log: finds its segments at a start, checks how they follow each other.

The first segment has the log's name, `audit.jsonl`; the others have the number of their first
record in theirs, `audit-00000000000000004711.jsonl`. A segment is written under a draft's name,
synced and then renamed. So a file with a segment's name holds its whole first record, and records
are only ever added to the last file.
"""

import datetime as dt
import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from sealane.crypto.anchors import Verifying
from sealane.crypto.audit import GENESIS, LINE_BYTES_MAX, Chain, Head, Record, SegmentStart
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import sync_directory
from sealane.errors import VerificationError

_BLOCK_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A file of the log; `size` (bytes) counts only once another segment follows."""

    path: Path
    before: Head
    """The record before its first one."""
    started: dt.datetime
    """Time of its first record."""
    identity: tuple[int, int]
    """Device and inode."""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The log as a start found it; the last of `segments` is `file`, open to be continued."""

    file: BinaryIO
    segments: list[Segment]
    retired: list[Segment]
    """Those before them whose files are still there: to be removed once the store knows."""
    beginning: Head
    """The record before the first one kept."""
    head: Head
    torn_bytes: int


def segment_path(path: Path, first: int) -> Path:
    """Return the path of the segment whose first record has this number; `path` is the log's."""
    return path if first == 1 else path.with_name(f"{path.stem}-{first:020}{path.suffix}")


def draft_path(path: Path) -> Path:
    """Return the path under which a segment is written before it counts."""
    return path.with_name(f"{path.stem}{path.suffix}.new")


def segment_paths(path: Path) -> list[Path]:
    """Return the paths of the segments there are, oldest first; OSError."""
    name = re.compile(re.escape(path.stem) + r"-[0-9]{20}" + re.escape(path.suffix))
    later = sorted(entry for entry in path.parent.iterdir() if name.fullmatch(entry.name))
    return [path, *later] if path.exists() else later


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what stays the same while a file is renamed, but not if it is replaced."""
    return status.st_dev, status.st_ino


def open_segments(path: Path, kept: Head, *, signer: Verifying) -> Recovered:
    """Open the log at `path`, whose records must include `kept`; creates it if there is none.

    VerificationError `audit.truncated`, `audit.beginning.missing` or those of `SegmentStart.of`;
    OSError.
    """
    draft_path(path).unlink(missing_ok=True)
    paths = segment_paths(path)
    if not paths:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_directory(path.parent)
        paths = [path]
    found = [_read_start(path, each, signer) for each in paths]
    segments = [segment for segment, _ in found]
    beginning = found[-1][1]
    retired = retired_segments(segments, beginning)
    segments = segments[len(retired) :]
    if segments[0].before != beginning:
        raise VerificationError(
            "audit.beginning.missing",
            f"{segments[0].path}: is the oldest segment of the audit log, but no record says that "
            "those before it were retired",
        )
    for segment, successor in itertools.pairwise(segments):
        _check_joint(segment, successor)
    for former in segments[-2:-1]:
        # Frees what a cut that was interrupted left reserved behind its end.
        os.truncate(former.path, former.size)
    descriptor = os.open(segments[-1].path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        head, torn_bytes = _recover(file, segments, path, kept)
    except BaseException:
        file.close()
        raise
    return Recovered(
        file=file,
        segments=segments,
        retired=retired,
        beginning=beginning,
        head=head,
        torn_bytes=torn_bytes,
    )


def retired_segments(segments: list[Segment], beginning: Head) -> list[Segment]:
    """Return those all of whose records are before the log's beginning."""
    return [
        segment
        for segment, successor in itertools.pairwise(segments)
        if successor.before.sequence <= beginning.sequence
    ]


def remove_segments(segments: list[Segment]) -> None:
    """Remove the files, oldest first; OSError."""
    for segment in segments:
        segment.path.unlink(missing_ok=True)
    if segments:
        sync_directory(segments[0].path.parent)


def last_digest(file: BinaryIO, size: int) -> bytes:
    """Return the digest of the last line of a file of `size` bytes; empty if that line is torn."""
    lines = lines_backwards(file, size)
    if next(lines, b"") != b"":
        return b""
    return hashlib.sha256(next(lines, b"")).digest()


def lines_backwards(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the text after the last newline (empty unless torn), then the lines, last first."""
    rest = b""
    position = size
    while position:
        start = max(0, position - _BLOCK_BYTES)
        file.seek(start)
        rest = file.read(position - start) + rest
        position = start
        *lines, last = reversed(rest.split(b"\n"))
        yield from lines
        rest = last
        if len(rest) > LINE_BYTES_MAX:
            raise VerificationError("audit.record.malformed", "a line of the audit log is too long")
    yield rest


def _read_start(log: Path, path: Path, signer: Verifying) -> tuple[Segment, Head]:
    """Return a segment and where the log begins by its first record."""
    with path.open("rb") as file:
        line = file.readline(LINE_BYTES_MAX + 1)
        status = os.fstat(file.fileno())
    segment = Segment(
        path=path,
        before=GENESIS,
        started=utc_now(),
        identity=identity(status),
        size=status.st_size,
    )
    if path == log:
        if not line.endswith(b"\n"):
            return segment, GENESIS
        record = Record.decode(line.removesuffix(b"\n"))
        before = Head(sequence=record.sequence - 1, digest=record.previous)
        return replace(segment, before=before, started=record.time), GENESIS
    record = Record.decode(line.removesuffix(b"\n"))
    start = SegmentStart.of(record, signer=signer)
    if path != segment_path(log, record.sequence):
        raise VerificationError(
            "audit.truncated", f"{path}: begins with record {record.sequence}: it was replaced"
        )
    return replace(segment, before=start.before, started=record.time), start.beginning


def _check_joint(segment: Segment, successor: Segment) -> None:
    with segment.path.open("rb") as file:
        found = last_digest(file, segment.size)
    if found != successor.before.digest:
        raise VerificationError(
            "audit.truncated",
            f"{successor.path}: does not continue {segment.path}: one of them was truncated, "
            "changed or replaced, or a segment between them is missing",
        )


def _recover(file: BinaryIO, segments: list[Segment], path: Path, kept: Head) -> tuple[Head, int]:
    """Find the end of the chain, which must contain `kept`, and remove a torn line after it.

    What the store knows may be older than the log's beginning, after a restore: then the whole log
    is checked from its beginning, which is signed.
    """
    size = file.seek(0, os.SEEK_END)
    torn = next(lines_backwards(file, size), b"")
    whole = [*segments[:-1], replace(segments[-1], size=size - len(torn))]
    if kept.sequence < whole[0].before.sequence:
        head = _follow(whole, whole[0].before, 0)
    else:
        following = [segment for segment in whole if segment.before.sequence > kept.sequence]
        holder = whole[-len(following) - 1]
        offset = _end_of(holder, kept)
        if offset is None:
            raise VerificationError(
                "audit.truncated",
                f"{path}: does not hold the {kept.sequence} records that were acknowledged: the "
                "log was truncated, changed, or replaced by an older copy",
            )
        head = _follow([holder, *following], kept, offset)
    if torn:
        file.truncate(size - len(torn))
        os.fsync(file.fileno())
    return head, len(torn)


def _end_of(segment: Segment, kept: Head) -> int | None:
    """Return the offset behind the record `kept`; None if the segment doesn't hold it."""
    if segment.before == kept:
        return 0
    offset = segment.size
    with segment.path.open("rb") as file:
        for line in itertools.islice(lines_backwards(file, segment.size), 1, None):
            record = Record.decode(line)
            if record.sequence <= kept.sequence:
                before = Head(sequence=record.sequence - 1, digest=record.previous)
                return offset if Chain(before).follow(line) == kept else None
            offset -= len(line) + 1
    return None


def _follow(segments: list[Segment], head: Head, offset: int) -> Head:
    """Check all records of `segments` after `head`, which ends at `offset` of the first one."""
    chain = Chain(head)
    for segment in segments:
        with segment.path.open("rb") as file:
            file.seek(offset)
            while offset < segment.size:
                line = file.readline(LINE_BYTES_MAX + 1)
                chain.follow(line.removesuffix(b"\n"))
                offset += len(line)
        offset = 0
    return chain.head
