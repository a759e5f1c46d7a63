"""The broker's audit log: an append-only file of chained records (sealane.crypto.audit).

`record` returns once the record is durable and the store holds the new head of the log. So the
record of anything granted after that can't be removed unnoticed. Concurrent records share one
fsync.

Space behind the end of the file is reserved (sealane.daemon.runtime.reserve). While the reserve
can't be kept full, the log is *low*: grants and actions are still recorded, into the reserve, but
refusals are only counted, so nobody can use up the reserve by being refused. A log that can't be
written at all refuses everything and ends the broker: nothing is granted without a record.
"""

import asyncio
import errno
import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.audit import GENESIS, LINE_BYTES_MAX, Chain, Detail, Head, Outcome, Record
from sealane.daemon.broker.records import AuditHeadRecord, instance_name
from sealane.daemon.broker.registry import Registry
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import sync_directory
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.reserve import RESERVE_BYTES, Reserve
from sealane.errors import UnavailableError, VerificationError

# A checkpoint costs a signature (50 µs); records after the last one are protected by the head in
# the store.
CHECKPOINT_RECORDS: Final = 256

_BLOCK_BYTES: Final = 1 << 16


class HeadKeeper(Protocol):
    """Stores the head of the log where someone who can truncate the log has no access."""

    async def read(self) -> Head:
        """Return the head stored last, or `GENESIS`."""

    async def keep(self, head: Head) -> None:
        """Store `head` durably."""


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
    """Owner of the file. `open` creates one; `close` ends its thread with a last checkpoint."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        path: Path,
        chain: Chain,
        keeper: HeadKeeper,
        signing_key: ec.EllipticCurvePrivateKey,
    ) -> None:
        self.path = path
        self._file = file
        self._chain = chain
        self._keeper = keeper
        self._signing_key = signing_key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broker-audit")
        # Filled by the event loop, emptied by the thread.
        self._pending: deque[tuple[bytes, Head]] = deque()
        self._written = chain.head
        self._kept = chain.head
        self._keeping = asyncio.Lock()
        self._failure: OSError | None = None
        self._checkpointed = chain.head.sequence
        self._size = os.fstat(file.fileno()).st_size
        self._reserve = Reserve(file.fileno())
        self._is_low = False
        self._not_recorded = 0
        self._troubled = asyncio.Event()

    @classmethod
    async def open(
        cls, path: Path, *, keeper: HeadKeeper, signing_key: ec.EllipticCurvePrivateKey
    ) -> "AuditLog":
        """Open or create the log at `path`.

        All records up to the stored head must be there: VerificationError `audit.truncated`. A torn
        last line after the head was never acknowledged and is removed. Complete records after the
        head are kept, and an `audit.recovered` record counts them.
        """
        kept = await keeper.read()
        try:
            file, recovery = await asyncio.to_thread(_open_file, path, kept)
        except OSError as error:
            raise UnavailableError("audit.unwritable", f"{path}: {error.strerror}") from error
        log = cls(
            file, path=path, chain=Chain(recovery.head), keeper=keeper, signing_key=signing_key
        )
        log._kept = kept
        await asyncio.get_running_loop().run_in_executor(log._thread, log._extend_reserve)
        unacknowledged = recovery.head.sequence - kept.sequence
        if unacknowledged or recovery.torn_bytes:
            get_logger().warning(
                "audit_recovered", records=unacknowledged, torn_bytes=recovery.torn_bytes
            )
            await log.record(
                "audit.recovered",
                subject="broker",
                outcome="done",
                unacknowledged_records=unacknowledged,
                torn_bytes=recovery.torn_bytes,
            )
        return log

    @property
    def head(self) -> Head:
        """Head of the log: the last acknowledged record."""
        return self._kept

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        """See `Audit.record`; while the log is low, refusals are only counted."""
        if self._is_low and outcome in {"refused", "failed"}:
            self._not_recorded += 1
            return
        correlation = structlog.contextvars.get_contextvars().get("correlation_id")
        if isinstance(correlation, str):
            detail["correlation_id"] = correlation
        now = utc_now()
        line = self._chain.append(
            kind, subject=subject, outcome=outcome, reason=reason, detail=detail, now=now
        )
        self._pending.append((line, self._chain.head))
        if self._chain.head.sequence - self._checkpointed >= CHECKPOINT_RECORDS:
            self._append_checkpoint()
        await self._settle(self._chain.head.sequence)

    @property
    def is_low(self) -> bool:
        """Whether the file system has no space for the log except the reserve."""
        return self._is_low

    async def troubled(self) -> None:
        """Wait until the log is low or can't be written."""
        await self._troubled.wait()

    async def inspect(self) -> None:
        """Check that the file still ends with the last record, and refill the reserve.

        VerificationError `audit.truncated`; UnavailableError `audit.unwritable`.
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

    async def close(self) -> None:
        """Write a last checkpoint, wait for the thread and close the file."""
        if self._failure is None and self._chain.head.sequence > self._checkpointed:
            self._append_checkpoint()
            await self._settle(self._chain.head.sequence)
        self._thread.shutdown(wait=True)
        self._file.close()

    def _append_checkpoint(self) -> None:
        line = self._chain.checkpoint(self._signing_key, now=utc_now())
        self._pending.append((line, self._chain.head))
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

    def _write_pending(self) -> None:
        if self._failure is None and self._pending:
            pending = [self._pending.popleft() for _ in range(len(self._pending))]
            content = b"".join(line for line, _ in pending)
            try:
                if self._file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, "only part of a record could be written")  # noqa: TRY301
                os.fdatasync(self._file.fileno())
                self._size += len(content)
                self._extend_reserve()
            except OSError as error:
                # The content of the file is unknown now: nothing is recorded until the next start.
                self._failure = error
            else:
                self._written = pending[-1][1]
        self._check()

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
                "refusals are counted but not recorded; free some space",
            )
        # Only a full reserve ends the alarm; then `inspect` records the refusals counted in the
        # meantime.
        self._is_low = is_low or (self._is_low and not wholly)

    def _inspect_file(self) -> None:
        self._check()
        try:
            found = self._tail()
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
            named = self.path.stat()
        except FileNotFoundError:
            return b""
        if (own.st_dev, own.st_ino, own.st_size) != (named.st_dev, named.st_ino, self._size):
            return b""
        lines = _lines_backwards(self._file, self._size)
        if next(lines, b"") != b"":
            return b""
        return hashlib.sha256(next(lines, b"")).digest()


class RegistryHead:
    """Stores the head of a broker's log among the records of the broker's store."""

    def __init__(self, registry: Registry, *, instance: int) -> None:
        self._registry = registry
        self._name = instance_name(instance)

    async def read(self) -> Head:
        """Return the stored head."""
        stored = await self._registry.audit_heads.get(self._name)
        if stored is None:
            return GENESIS
        return Head(sequence=stored.record.sequence, digest=stored.record.digest)

    async def keep(self, head: Head) -> None:
        """Replace the stored head; it has a single writer."""
        record = AuditHeadRecord(sequence=head.sequence, digest=head.digest)
        await self._registry.commit((), self._registry.audit_heads.sealed(self._name, record))


class _Recovery:
    """Result of `_open_file`."""

    def __init__(self, head: Head, torn_bytes: int) -> None:
        self.head = head
        self.torn_bytes = torn_bytes


def _open_file(path: Path, kept: Head) -> tuple[BinaryIO, _Recovery]:
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        if is_new:
            sync_directory(path.parent)
        recovery = _recover(file, path, kept)
    except BaseException:
        file.close()
        raise
    return file, recovery


def _recover(file: BinaryIO, path: Path, kept: Head) -> _Recovery:
    """Find the end of the chain, which must contain `kept`, and remove a torn line after it."""
    size = file.seek(0, os.SEEK_END)
    backwards = _lines_backwards(file, size)
    torn = next(backwards, b"")
    behind: list[bytes] = []
    found = GENESIS if kept == GENESIS else None
    for line in backwards:
        record = Record.decode(line)
        if record.sequence <= kept.sequence:
            chain = Chain(Head(sequence=record.sequence - 1, digest=record.previous))
            found = chain.follow(line)
            break
        behind.append(line)
    if found != kept:
        raise VerificationError(
            "audit.truncated",
            f"{path}: does not hold the {kept.sequence} records that were acknowledged: the log "
            "was truncated, changed, or replaced by an older copy",
        )
    chain = Chain(kept)
    for line in reversed(behind):
        chain.follow(line)
    if torn:
        file.truncate(size - len(torn))
        os.fsync(file.fileno())
    return _Recovery(chain.head, len(torn))


def _lines_backwards(file: BinaryIO, size: int) -> Iterator[bytes]:
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
