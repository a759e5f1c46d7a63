"""The broker's audit log: append-only files of chained records (sealane.crypto.audit).

`record` returns once the record is durable and the store holds the new head of the log. So the
record of anything granted after that can't be removed unnoticed. Concurrent records share one
fsync.

Space behind the end of the file is reserved (sealane.daemon.runtime.reserve). While the reserve
can't be kept full, the log is *low*: grants and actions are still recorded, into the reserve, but
refusals are only counted, so nobody can use up the reserve by being refused. A log that can't be
written at all refuses everything and ends the broker: nothing is granted without a record.

From a size or age on, the log is cut: it continues in another file, a segment
(sealane.daemon.broker.audit_segments). The order of events: the draft of the segment is made, with
a reserve of its own; all records before the cut are synced; the segment's first record is written
into the draft and synced; the draft gets its name, and the directory is synced; the former segment
is closed. Without space for the draft's reserve, the log goes on in its file. A cut is a task of
the log: no caller of `record` waits for it, is failed by it, or can cancel it.

A cut also retires the oldest segments, if the configuration says so: the first record of the new
segment says where the log begins from then on. Their files are removed once the store's head covers
that record, also at an inspection or after a start.
"""

import asyncio
import contextlib
import datetime as dt
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.anchors import Verifying
from sealane.crypto.audit import GENESIS, Chain, Detail, Head, Outcome
from sealane.daemon.broker.audit_head import HeadKeeper
from sealane.daemon.broker.audit_retention import Retention, TimeWatch, beginning_after
from sealane.daemon.broker.audit_segments import (
    Recovered,
    Segment,
    draft_path,
    identity,
    last_digest,
    open_segments,
    remove_segments,
    retired_segments,
    segment_path,
)
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import sync_directory
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.reserve import RESERVE_BYTES, Reserve
from sealane.errors import UnavailableError, VerificationError
from sealane.transport.tasks import TaskOwner

# A checkpoint costs a signature (50 µs); records after the last one are protected by the head in
# the store.
CHECKPOINT_RECORDS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """From which size or age of a segment on the log continues in another one."""

    bytes_max: int = 64 << 20
    age: dt.timedelta = dt.timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line to write; `begins` is the segment of which it is the first.

    With such a line, the log begins after the record `beginning`.
    """

    content: bytes
    head: Head
    begins: Segment | None = None
    beginning: Head = GENESIS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """The file that the next segment will be, with its reserve."""

    file: BinaryIO
    reserve: Reserve


class Audit(Protocol):
    """Receives records of grants, refusals, key releases, policy changes, revocations and moves."""

    @property
    def head(self) -> Head:
        """Head of the log: the last acknowledged record."""

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        """Record an action of `subject` (a SPIFFE id, a peer, "operator"), or its refusal.

        Returns once the record is durable; UnavailableError `audit.unwritable`. `detail` holds
        names, ids, digests and numbers, never a secret.
        """


class AuditLog:
    """Owner of the files. `open` creates one; `close` ends its thread with a last checkpoint."""

    def __init__(
        self,
        recovered: Recovered,
        *,
        path: Path,
        keeper: HeadKeeper,
        signing_key: ec.EllipticCurvePrivateKey,
        cutting: Cutting,
        retention: Retention,
    ) -> None:
        self.path = path
        file = recovered.file
        chain = Chain(recovered.head)
        self._file = file
        self._chain = chain
        self._keeper = keeper
        self._signing_key = signing_key
        self._cutting = cutting
        self._retention = retention
        self._clock = TimeWatch()
        self.forwarded = 0 if retention.is_forwarded else None
        """Number of the last record that a collector has; None if records aren't forwarded."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broker-audit")
        # Filled by the event loop, emptied by the thread.
        self._pending: deque[_Line] = deque()
        # Replaced by the thread; the last one is `_file`.
        self._segments = recovered.segments
        self._retired = recovered.retired
        self._beginning = recovered.beginning
        self._readers = 0
        self._reading = threading.Lock()
        self._draft: _Draft | None = None
        self._tasks = TaskOwner()
        self._cut_task: asyncio.Task[None] | None = None
        # Without space for a segment, the next attempt is at an inspection.
        self._may_cut = True
        self._written = chain.head
        self._kept = chain.head
        self._keeping = asyncio.Lock()
        self._advanced = asyncio.Event()
        self._failure: OSError | None = None
        self._checkpointed = chain.head.sequence
        self._size = os.fstat(file.fileno()).st_size
        self._reserve = Reserve(file.fileno())
        self._is_low = False
        self._not_recorded = 0
        self._troubled = asyncio.Event()

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        keeper: HeadKeeper,
        signing_key: ec.EllipticCurvePrivateKey,
        signer: Verifying | None = None,
        cutting: Cutting | None = None,
        retention: Retention | None = None,
    ) -> "AuditLog":
        """Open or create the log at `path`.

        `signer` accepts the signatures that are in it; default: those of `signing_key`.

        All records up to the stored head must be there: VerificationError `audit.truncated`; so
        must all segments since the log's recorded beginning: `audit.beginning.missing`. A torn last
        line after the head was never acknowledged and is removed. Complete records after the
        head are kept, and an `audit.recovered` record counts them. If the stored head itself was
        retired, as after a restore of the store, all records that are left count, and the record
        says so.
        """
        kept = await keeper.read()
        try:
            recovery = await asyncio.to_thread(
                open_segments, path, kept, signer=signer or signing_key.public_key()
            )
        except OSError as error:
            raise UnavailableError("audit.unwritable", f"{path}: {error.strerror}") from error
        log = cls(
            recovery,
            path=path,
            keeper=keeper,
            signing_key=signing_key,
            cutting=cutting or Cutting(),
            retention=retention or Retention(),
        )
        log._kept = kept
        try:
            await log._recover(recovery)
        except BaseException:
            log._thread.shutdown(wait=True)
            log._file.close()
            raise
        return log

    async def _recover(self, recovery: Recovered) -> None:
        """Record what the start found, and then remove what was retired."""
        loop, kept = asyncio.get_running_loop(), self._kept
        await loop.run_in_executor(self._thread, self._extend_reserve)
        is_retired = kept.sequence < recovery.beginning.sequence
        known = recovery.beginning if is_retired else kept
        unacknowledged = recovery.head.sequence - known.sequence
        if unacknowledged or recovery.torn_bytes:
            get_logger().warning(
                "audit_recovered",
                records=unacknowledged,
                torn_bytes=recovery.torn_bytes,
                stored_head_retired=is_retired,
            )
            detail: dict[str, Detail] = {"stored_head_retired": True} if is_retired else {}
            await self.record(
                "audit.recovered",
                subject="broker",
                outcome="done",
                reason="",
                unacknowledged_records=unacknowledged,
                torn_bytes=recovery.torn_bytes,
                **detail,
            )
        await loop.run_in_executor(self._thread, self._remove_retired)

    @property
    def head(self) -> Head:
        """Head of the log: the last acknowledged record."""
        return self._kept

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        """See `Audit.record`; while the log is low, refusals are only counted.

        An operator's record says which user called, as `LocalAuthorizer` bound it to the call.
        """
        if self._is_low and outcome in {"refused", "failed"}:
            self._not_recorded += 1
            return
        call = structlog.contextvars.get_contextvars()
        if isinstance(correlation := call.get("correlation_id"), str):
            detail["correlation_id"] = correlation
        if subject == "operator" and isinstance(uid := call.get("uid"), int):
            detail["uid"] = uid
        now = utc_now()
        line = self._chain.append(
            kind, subject=subject, outcome=outcome, reason=reason, detail=detail, now=now
        )
        self._pending.append(_Line(content=line, head=self._chain.head))
        if self._chain.head.sequence - self._checkpointed >= CHECKPOINT_RECORDS:
            self._append_checkpoint()
        await self._settle(self._chain.head.sequence)
        if self._size >= self._cutting.bytes_max:
            self._start_cut()

    async def advanced(self, sequence: int) -> None:
        """Wait until `head` is beyond record `sequence`; for one caller."""
        while self._kept.sequence <= sequence:
            self._advanced.clear()
            await self._advanced.wait()

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[Segment]]:
        """Yield the segments, oldest first; none of their files is removed within the block."""
        with self._reading:
            self._readers += 1
            segments = list(self._segments)
        try:
            yield segments
        finally:
            with self._reading:
                self._readers -= 1

    @property
    def is_low(self) -> bool:
        """Whether the file system has no space for the log except the reserve."""
        return self._is_low

    async def troubled(self) -> None:
        """Wait until the log is low or can't be written."""
        await self._troubled.wait()

    async def inspect(self) -> None:
        """Check the files' names and sizes and the last record, and refill the reserve.

        Cuts the log if its last segment has the age for that. VerificationError `audit.truncated`;
        UnavailableError `audit.unwritable`.
        """
        was_low = self._is_low
        await asyncio.get_running_loop().run_in_executor(self._thread, self._inspect_file)
        if self._is_low:
            self._troubled.set()
        if was_low and not self._is_low:
            self._troubled.clear()
            missed, self._not_recorded = self._not_recorded, 0
            await self.record(
                "audit.reserve", subject="broker", outcome="done", refusals_not_recorded=missed
            )
        self._may_cut = True
        has_unsigned = self._chain.head.sequence > self._checkpointed
        if self.forwarded is not None and has_unsigned and not self._is_low:
            # So that a receiver can soon check what it got.
            self._append_checkpoint()
            await self._settle(self._chain.head.sequence)
        segment = self._segments[-1]
        has_records = self._chain.head.sequence > segment.before.sequence + 1
        if has_records and utc_now() - segment.started >= self._cutting.age:
            self._start_cut()
            await self._cut_ended()

    async def close(self) -> None:
        """Wait for a cut, write a last checkpoint, wait for the thread and close the file."""
        await self._cut_ended()
        if self._failure is None and self._chain.head.sequence > self._checkpointed:
            self._append_checkpoint()
            await self._settle(self._chain.head.sequence)
        self._thread.shutdown(wait=True)
        self._file.close()
        if self._draft is not None:
            self._draft.file.close()

    def _start_cut(self) -> None:
        """Cut the log in a task, unless one does or there is no space for another segment."""
        is_cutting = self._cut_task is not None and not self._cut_task.done()
        if not (is_cutting or self._is_low) and self._may_cut:
            self._cut_task = self._tasks.start(self._cut(), name="broker-audit-cut")

    async def _cut_ended(self) -> None:
        if self._cut_task is not None:
            await asyncio.wait([self._cut_task])

    async def _cut(self) -> None:
        """Continue the log in another segment, unless there is no space for one."""
        loop = asyncio.get_running_loop()
        try:
            if not await loop.run_in_executor(self._thread, self._prepare_segment):
                self._may_cut = False
                return
            self._append_segment()
            await self._settle(self._chain.head.sequence)
            await loop.run_in_executor(self._thread, self._remove_retired)
        except UnavailableError as error:
            # If the file's state is unknown, `troubled` ends, and the inspection raises.
            get_logger().warning("audit_cut_failed", reason=error.reason, message=error.args[0])

    def _append_segment(self) -> None:
        before, now = self._chain.head, utc_now()
        closed = [*self._segments[:-1], replace(self._segments[-1], size=self._size)]
        retention = self._retention
        if retention.age is not None and not self._clock.is_steady():
            get_logger().warning(
                "audit_clock_set",
                message="the clock was set by more than an hour: no audit record is retired by "
                "age until the broker is restarted",
            )
            retention = replace(retention, age=None)
        beginning = beginning_after(closed, retention, now=now, forwarded=self.forwarded)
        line = self._chain.segment(
            self._signing_key,
            former=self._segments[-1].path.name,
            beginning=beginning,
            now=now,
        )
        self._checkpointed = self._chain.head.sequence
        begins = Segment(
            path=segment_path(self.path, self._chain.head.sequence),
            before=before,
            started=now,
            identity=(0, 0),
        )
        self._pending.append(
            _Line(content=line, head=self._chain.head, begins=begins, beginning=beginning)
        )

    def sign_with(self, key: ec.EllipticCurvePrivateKey) -> None:
        """Sign checkpoints and segments with another key from now on."""
        self._signing_key = key

    def _append_checkpoint(self) -> None:
        line = self._chain.checkpoint(self._signing_key, now=utc_now())
        self._pending.append(_Line(content=line, head=self._chain.head))
        self._checkpointed = self._chain.head.sequence

    async def _settle(self, sequence: int) -> None:
        """Wait until record `sequence` is in the file and a head that covers it is stored."""
        loop = asyncio.get_running_loop()
        # The first waiter writes for all; the others then find nothing left to write.
        try:
            await loop.run_in_executor(self._thread, self._write_pending)
        except UnavailableError:
            self._troubled.set()
            raise
        if self._is_low:
            self._troubled.set()
        async with self._keeping:
            if self._kept.sequence < sequence:
                written = self._written
                await self._keeper.keep(written)
                self._kept = written
                self._advanced.set()

    def _write_pending(self) -> None:
        if self._failure is None:
            try:
                while self._pending:
                    self._write_some()
            except OSError as error:
                # The content of the file is unknown now: nothing is recorded until the next start.
                self._failure = error
        self._check()

    def _write_some(self) -> None:
        """Write the first pending line, and those that follow it in the same segment."""
        lines = [self._pending.popleft()]
        if lines[0].begins is not None:
            self._begin_segment(lines[0].begins, lines[0].content)
            self._beginning = lines[0].beginning
        else:
            for _ in range(len(self._pending)):
                if self._pending[0].begins is not None:
                    break
                lines.append(self._pending.popleft())
            content = b"".join(line.content for line in lines)
            _write(self._file, content)
            self._size += len(content)
        self._written = lines[-1].head
        self._extend_reserve()

    def _prepare_segment(self) -> bool:
        """Make the draft of the next segment; return False if there is no space for it."""
        if self._draft is not None:
            return True
        path = draft_path(self.path)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
            try:
                reserve = Reserve(file.fileno())
                if not reserve.extend(0, wholly=True):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
            except OSError:
                file.close()
                path.unlink()
                raise
        except OSError as error:
            get_logger().warning(
                "audit_segment_not_begun",
                path=str(path),
                message=f"the audit log can't be cut and grows in its last file: {error.strerror}",
            )
            return False
        self._draft = _Draft(file=file, reserve=reserve)
        return True

    def _begin_segment(self, segment: Segment, line: bytes) -> None:
        """Make the draft the log's last segment, with its first line; OSError."""
        if self._draft is None:
            raise OSError(errno.EIO, "the draft of a segment is missing")
        draft, former, former_size = self._draft, self._file, self._size
        _write(draft.file, line)
        draft_path(self.path).rename(segment.path)
        sync_directory(self.path.parent)
        self._file, self._reserve, self._size, self._draft = (
            draft.file,
            draft.reserve,
            len(line),
            None,
        )
        closed = replace(self._segments[-1], size=former_size)
        begun = replace(segment, identity=identity(os.fstat(draft.file.fileno())))
        self._segments = [*self._segments[:-1], closed, begun]
        # Also frees what was reserved behind its end.
        os.ftruncate(former.fileno(), former_size)
        former.close()

    def _remove_retired(self) -> None:
        """Remove retired segments, unless somebody reads the log or the store may not know yet."""
        if self._kept.sequence <= self._segments[-1].before.sequence:
            return
        with self._reading:
            if self._readers:
                return
            found = retired_segments(self._segments, self._beginning)
            self._segments = self._segments[len(found) :]
        retired, self._retired = [*self._retired, *found], []
        if retired:
            names = [segment.path.name for segment in retired]
            get_logger().info("audit_retired", through=self._beginning.sequence, segments=names)
        try:
            remove_segments(retired)
        except OSError as error:
            get_logger().warning(
                "audit_not_removed",
                message=f"retired segments stay until the next start: {error.strerror}",
            )

    def _check(self) -> None:
        if self._failure is not None:
            raise UnavailableError(
                "audit.unwritable",
                f"{self.path}: {self._failure.strerror}: nothing is granted without an audit "
                "record",
            ) from self._failure

    def _extend_reserve(self, *, wholly: bool = False) -> None:
        is_low = not self._reserve.extend(self._size, wholly=wholly)
        if is_low and not self._is_low:
            get_logger().error(
                "audit_log_low",
                path=str(self.path),
                message=f"only the {RESERVE_BYTES} bytes in reserve are left for the audit log: "
                "refusals are counted but not recorded, and nothing is retired; remove other "
                "files, none of the log's",
            )
        # Only a full reserve ends the alarm; then `inspect` records the refusals counted in the
        # meantime.
        self._is_low = is_low or (self._is_low and not wholly)

    def _inspect_file(self) -> None:
        self._check()
        try:
            found = self._tail()
            self._check_closed()
            self._remove_retired()
            self._extend_reserve(wholly=True)
        except OSError as error:
            raise UnavailableError("audit.unwritable", f"{self.path}: {error.strerror}") from error
        if found != self._written.digest and self._written != GENESIS:
            raise VerificationError(
                "audit.truncated",
                f"{self.path}: does not end with record {self._written.sequence} as this broker "
                "wrote it: the log was truncated, changed or replaced",
            )

    def _tail(self) -> bytes:
        """Return the digest of the file's last line; empty if the file at the path was replaced."""
        own = os.fstat(self._file.fileno())
        try:
            named = self._segments[-1].path.stat()
        except FileNotFoundError:
            return b""
        if (identity(own), own.st_size) != (identity(named), self._size):
            return b""
        return last_digest(self._file, self._size)

    def _check_closed(self) -> None:
        for segment in self._segments[:-1]:
            with contextlib.suppress(FileNotFoundError):
                found = segment.path.stat()
                if (identity(found), found.st_size) == (segment.identity, segment.size):
                    continue
            raise VerificationError(
                "audit.truncated",
                f"{segment.path}: is not the file that this broker closed: the log was truncated "
                "or replaced",
            )


def _write(file: BinaryIO, content: bytes) -> None:
    """Write and sync; OSError."""
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, "only part of a record could be written")
    os.fdatasync(file.fileno())
