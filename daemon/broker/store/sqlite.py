"""A store in one SQLite file: WAL, synchronous=FULL, one process, one thread.

Concurrent commits share one transaction and its flush, and still succeed or conflict individually.
The file stays locked for the life of the process. Space is reserved after the ends of the database
and its write-ahead log, so commits continue while the disk is full.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from sealane.daemon.broker.store.contract import (
    PAGE_ENTRIES_MAX,
    Change,
    Compare,
    Entry,
    Page,
    check_commit,
    check_key,
    check_page,
    end_of,
)
from sealane.daemon.runtime.reserve import Reserve
from sealane.errors import Error, UnavailableError, UsageError, VerificationError

SCHEMA_VERSION: Final = 6
LEGACY_VERSIONS: Final = {1, 2, 3, 4}  # upgraded by sealane.daemon.broker.store.legacy
HISTORY_REVISIONS: Final = 4096

SCHEMA: Final = """
CREATE TABLE entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE changes (
  revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, PRIMARY KEY (revision, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL) STRICT;
INSERT INTO head VALUES (1, 0);
"""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Commit:
    compares: Sequence[Compare]
    puts: Mapping[str, bytes]
    deletes: Sequence[str]
    outcome: "Future[int | None]" = field(default_factory=Future)


class SqliteStore:
    """Owner of the database file; the constructor blocks briefly, nothing else does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: UnavailableError | None = None
        with self._failures():
            # A batch of commits is one explicit transaction, hence no implicit ones.
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            path.chmod(0o600)
            try:
                self.version = self._open()
            except BaseException:
                self._db.close()
                raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broker-store")
        # Closed after the database: closing any descriptor of its file would release SQLite's
        # locks.
        self._reserved: list[tuple[int, Reserve]] = []
        self._waiting: deque[_Commit] = deque()
        self._changed = asyncio.Event()

    def _open(self) -> int:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version == 0:
            self._db.executescript(
                f"BEGIN EXCLUSIVE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            )
            return SCHEMA_VERSION
        if version != SCHEMA_VERSION and version not in LEGACY_VERSIONS:
            raise UsageError(
                "broker.store.version",
                f"{self.path}: schema version {version}, and this release has {SCHEMA_VERSION}: "
                "start the release that wrote it",
            )
        return version

    @property
    def failure(self) -> Error | None:
        """See `Store`."""
        return self._failure

    async def get(self, key: str) -> Entry | None:
        """See `Store`."""
        check_key(key)
        row = await self._run(
            lambda db: db.execute(
                "SELECT key, value, revision FROM entries WHERE key = ?", (key,)
            ).fetchone()
        )
        return None if row is None else Entry(*row)

    async def range(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Page:
        """See `Store`."""
        check_page(prefix, after, limit)

        def read(db: sqlite3.Connection) -> Page:
            # A single lower bound: with two, SQLite scans all entries between them.
            rows = db.execute(
                "SELECT key, value, revision FROM entries "
                "WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
                (max(prefix, f"{after}\x01"), end_of(prefix), limit + 1),
            ).fetchall()
            entries = tuple(Entry(*row) for row in rows[:limit])
            return Page(entries, _revision(db), has_more=len(rows) > limit)

        return await self._run(read)

    async def revision(self) -> int:
        """See `Store`."""
        return await self._run(_revision)

    async def scan(self) -> AsyncIterator[Page]:
        """See `Store`; read at once, so that commits between pages don't interrupt it."""

        def read(db: sqlite3.Connection) -> tuple[int, list[Entry]]:
            rows = db.execute("SELECT key, value, revision FROM entries ORDER BY key").fetchall()
            return _revision(db), [Entry(*row) for row in rows]

        revision, entries = await self._run(read)
        starts = range(0, max(len(entries), 1), PAGE_ENTRIES_MAX)
        for start in starts:
            end = start + PAGE_ENTRIES_MAX
            yield Page(tuple(entries[start:end]), revision, has_more=end < len(entries))

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        """See `Store`."""
        waiting = _Commit(tuple(compares), dict(puts or {}), tuple(deletes))
        check_commit(waiting.compares, waiting.puts, waiting.deletes)
        self._waiting.append(waiting)
        await self._run(self._commit_all)
        revision = waiting.outcome.result()
        if revision is not None:
            self._changed.set()
            self._changed = asyncio.Event()
        return revision

    async def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[tuple[Change, ...]]:
        """See `Store`."""
        check_page(prefix, "", 1)
        following = max(from_revision, 1)
        while True:
            # Read before the changes: then a commit in between isn't missed.
            changed = self._changed
            start = following

            def read(db: sqlite3.Connection, start: int = start) -> tuple[int, list[Change]]:
                oldest = db.execute("SELECT min(revision) FROM changes").fetchone()[0]
                revision = _revision(db)
                if start <= revision and (oldest is None or start < oldest):
                    raise UnavailableError(
                        "broker.store.compacted",
                        f"{self.path}: changes before revision {oldest} have been compacted",
                    )
                rows = db.execute(
                    "SELECT key, value, revision FROM changes "
                    "WHERE revision >= ? AND key >= ? AND key < ? ORDER BY revision, key",
                    (start, prefix, end_of(prefix)),
                ).fetchall()
                return revision, [Change(*row) for row in rows]

            revision, changes = await self._run(read)
            following = max(following, revision + 1)
            for commit in _by_revision(changes):
                yield commit
            if not changes:
                await changed.wait()

    async def close(self) -> None:
        """See `Store`."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self._db.close()
        while self._reserved:
            os.close(self._reserved.pop()[0])

    async def replace_legacy(self, entries: Mapping[str, bytes]) -> None:
        """Upgrade a store of a legacy version to this schema in one step, with these entries."""

        def replace(db: sqlite3.Connection) -> None:
            tables = db.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            with self._transaction():
                for (name,) in tables:
                    db.execute(f'DROP TABLE "{name}"')
                for statement in filter(str.strip, SCHEMA.split(";")):
                    db.execute(statement)
                db.executemany(
                    "INSERT INTO entries VALUES (?, ?, 1)", [(k, v) for k, v in entries.items()]
                )
                db.execute("UPDATE head SET revision = 1")
                db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

        await self._run(replace)
        self.version = SCHEMA_VERSION

    async def query(self, statement: str) -> list[tuple[object, ...]]:
        """Read current rows: for upgrading a legacy version, and for tests."""
        return await self._run(lambda db: db.execute(statement).fetchall())

    async def _run(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        def guarded() -> _Result:
            with self._failures():
                return work(self._db)

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _commit_all(self, db: sqlite3.Connection) -> None:
        batch: list[tuple[_Commit, int | None]] = []
        while self._waiting:
            batch.append((self._waiting.popleft(), None))
        if not batch:
            return  # an earlier batch included this commit
        try:
            with self._transaction():
                batch = [(commit, _apply(db, commit)) for commit, _ in batch]
                db.execute(
                    "DELETE FROM changes WHERE revision <= ?", (_revision(db) - HISTORY_REVISIONS,)
                )
        except (sqlite3.Error, UnavailableError) as error:
            for commit, _ in batch:
                commit.outcome.set_exception(self._translated(error))
            return
        self._extend_reserves()
        for commit, revision in batch:
            commit.outcome.set_result(revision)

    def _extend_reserves(self) -> None:
        """Reserve disk space if there is any: a commit that finds none reports that itself."""
        with contextlib.suppress(OSError):
            if not self._reserved:
                for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    self._reserved.append((descriptor, Reserve(descriptor)))
            for descriptor, reserve in self._reserved:
                reserve.extend(os.fstat(descriptor).st_size)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # How much of it reached the disk is unknown until the next start.
            self._failure = UnavailableError(
                "broker.store.outcome_unknown", f"{self.path}: {error}; restart the broker"
            )
            raise self._failure from error

    @contextmanager
    def _failures(self) -> Iterator[None]:
        if self._failure is not None:
            raise UnavailableError(self._failure.reason, self._failure.args[0])
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.OperationalError):
            if "locked" in str(error):
                text = f"{self.path}: in use by another broker"
                return UnavailableError("broker.store.locked", text)
            return UnavailableError("broker.store.failed", f"{self.path}: {error}")
        if isinstance(error, sqlite3.DatabaseError):
            return VerificationError("broker.store.malformed", f"{self.path}: {error}")
        return error


def _revision(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT revision FROM head").fetchone()[0])


def _apply(db: sqlite3.Connection, commit: _Commit) -> int | None:
    for compare in commit.compares:
        row = db.execute("SELECT revision FROM entries WHERE key = ?", (compare.key,)).fetchone()
        if compare.revision != (0 if row is None else row[0]):
            return None
    gone = [k for k in commit.deletes if _exists(db, k)]
    if not gone and not commit.puts:
        return _revision(db)
    revision = _revision(db) + 1
    db.execute("UPDATE head SET revision = ?", (revision,))
    for key, value in commit.puts.items():
        db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (key, value, revision))
        db.execute("INSERT INTO changes VALUES (?, ?, ?)", (revision, key, value))
    for key in gone:
        db.execute("DELETE FROM entries WHERE key = ?", (key,))
        db.execute("INSERT INTO changes VALUES (?, ?, NULL)", (revision, key))
    return revision


def _exists(db: sqlite3.Connection, key: str) -> bool:
    return db.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None


def _by_revision(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    commit: list[Change] = []
    for change in changes:
        if commit and commit[-1].revision != change.revision:
            yield tuple(commit)
            commit = []
        commit.append(change)
    if commit:
        yield tuple(commit)
