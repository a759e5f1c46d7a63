"""The broker's durable state: SQLite, WAL, synchronous=FULL. Blocking; runs on one thread.

Every method is one transaction. Uniqueness of IVs rests on nothing here but `next_start_epoch`,
which is durable before the broker serves; grants are kept for the audit only. A store that is put
back to an older state repeats a start epoch, and nothing detects that yet (docs/threat-model.md).
"""

# ruff: noqa: S608 - only the constant column list is pasted into statements

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.crypto.lease import START_EPOCH_MAX, Lease
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError

SCHEMA_VERSION: Final = 4
VOLUMES_PER_TENANT_MAX: Final = 16384

_SCHEMA: Final = """
CREATE TABLE start (id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL) STRICT;
CREATE TABLE authority (
  id INTEGER PRIMARY KEY CHECK (id = 1), wrapped_key BLOB NOT NULL, certificate BLOB NOT NULL
) STRICT;
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, wrapped_key BLOB NOT NULL) STRICT;
CREATE TABLE volumes (
  volume_id TEXT PRIMARY KEY,
  request_id TEXT,
  tenant TEXT NOT NULL,
  display_name TEXT NOT NULL,
  sector_count INTEGER NOT NULL,
  target_node TEXT NOT NULL,
  generation INTEGER NOT NULL,
  key_epoch INTEGER NOT NULL,
  is_deleted INTEGER NOT NULL DEFAULT 0,
  mode TEXT NOT NULL DEFAULT '',
  third_party TEXT NOT NULL DEFAULT '',
  fully_sealed INTEGER NOT NULL DEFAULT 0,
  filling_gateway TEXT NOT NULL DEFAULT '',
  UNIQUE (tenant, request_id)
) STRICT;
INSERT INTO start VALUES (1, 0);
"""
_GRANTS: Final = """
CREATE TABLE grants (
  start_epoch INTEGER NOT NULL,
  lease_id INTEGER NOT NULL,
  counter_start INTEGER NOT NULL,
  counter_end INTEGER NOT NULL,
  broker_instance INTEGER NOT NULL,
  volume_id TEXT NOT NULL,
  key_epoch INTEGER NOT NULL,
  recipient TEXT NOT NULL,
  incarnation BLOB NOT NULL,
  granted_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
  PRIMARY KEY (start_epoch, lease_id, counter_start)
) STRICT;
"""
_FROM_1: Final = """
ALTER TABLE volumes ADD COLUMN mode TEXT NOT NULL DEFAULT '';
ALTER TABLE volumes ADD COLUMN third_party TEXT NOT NULL DEFAULT '';
"""
# A lease had one range, and nothing named it but its first counter.
_FROM_2: Final = f"""
ALTER TABLE grants RENAME TO grants_2;
{_GRANTS}
INSERT INTO grants SELECT start_epoch, counter_start, counter_start, counter_end, broker_instance,
  volume_id, key_epoch, recipient, incarnation, granted_at FROM grants_2;
DROP TABLE grants_2;
"""
_FROM_3: Final = """
ALTER TABLE volumes ADD COLUMN fully_sealed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE volumes ADD COLUMN filling_gateway TEXT NOT NULL DEFAULT '';
"""
_STEPS: Final = {
    0: _SCHEMA + _GRANTS,
    1: _FROM_1 + _FROM_2 + _FROM_3,
    2: _FROM_2 + _FROM_3,
    3: _FROM_3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRecord:
    """One registered volume: what its descriptor says (protocol/v1/broker.proto)."""

    volume_id: uuid.UUID
    tenant: str
    display_name: str
    sector_count: int
    target_node: str
    generation: int
    key_epoch: int
    mode: str = ""
    third_party: str = ""
    fully_sealed: bool = False
    filling_gateway: str = ""


class BrokerStore:
    """Owns the database file; UnavailableError `broker.store.…` when it can't be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._failures():
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            path.chmod(0o600)
            # The lock stays for the life of the process: one broker per store.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            steps = _STEPS.get(version)
            if steps is not None:
                self._db.executescript(
                    f"BEGIN EXCLUSIVE; {steps} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
                )
        if version not in {*_STEPS, SCHEMA_VERSION}:
            self._db.close()
            raise UsageError(
                "broker.store.version",
                f"{path}: schema version {version}, allowed is {SCHEMA_VERSION}",
            )

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def next_start_epoch(self) -> int:
        """Increment the start epoch and return it once it is durable."""
        with self._transaction() as db:
            row = db.execute(
                "UPDATE start SET epoch = epoch + 1 WHERE epoch < ? RETURNING epoch",
                (START_EPOCH_MAX,),
            ).fetchone()
        if row is None:
            raise LeaseError(
                "lease.start_epoch.exhausted",
                f"{self._path}: all {START_EPOCH_MAX} starts are used: give a new broker.instance",
            )
        return int(row[0])

    def authority(self) -> tuple[bytes, bytes] | None:
        """Return the wrapped key and the certificate (DER) of the authority."""
        with self._transaction() as db:
            row = db.execute("SELECT wrapped_key, certificate FROM authority").fetchone()
        return None if row is None else (bytes(row[0]), bytes(row[1]))

    def set_authority(self, *, wrapped_key: bytes, certificate: bytes) -> None:
        """Store the authority; there is one for the life of the store."""
        with self._transaction() as db:
            db.execute("INSERT INTO authority VALUES (1, ?, ?)", (wrapped_key, certificate))

    def tenant_key(self, tenant: str, *, wrapped_new: bytes) -> bytes:
        """Return the tenant's wrapped k_s; `wrapped_new` becomes it if there was none."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO tenants VALUES (?, ?)", (tenant, wrapped_new))
            row = db.execute(
                "SELECT wrapped_key FROM tenants WHERE tenant = ?", (tenant,)
            ).fetchone()
        return bytes(row[0])

    def register(self, record: VolumeRecord, *, request_id: str) -> tuple[VolumeRecord, bool]:
        """Store `record`, or return what the same request stored before; True: it is new."""
        with self._transaction() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM volumes WHERE tenant = ? AND request_id = ?",
                (record.tenant, request_id),
            ).fetchone()
            if row is None:
                count = db.execute(
                    "SELECT count(*) FROM volumes WHERE tenant = ? AND is_deleted = 0",
                    (record.tenant,),
                ).fetchone()[0]
                if count >= VOLUMES_PER_TENANT_MAX:
                    raise UnavailableError(
                        "volume.limit",
                        f"tenant {record.tenant} has {count} volumes; allowed: "
                        f"{VOLUMES_PER_TENANT_MAX}",
                    )
                db.execute(
                    f"INSERT INTO volumes ({_COLUMNS}, request_id) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        str(record.volume_id),
                        record.tenant,
                        record.display_name,
                        record.sector_count,
                        record.target_node,
                        record.generation,
                        record.key_epoch,
                        record.mode,
                        record.third_party,
                        record.fully_sealed,
                        record.filling_gateway,
                        request_id,
                    ),
                )
                return record, True
        before = _record(row)
        if _wanted(before) != _wanted(record):
            raise UsageError(
                "volume.request.exists",
                "this request id was used for another volume: use a new one",
            )
        return before, False

    def volume(self, volume_id: uuid.UUID) -> VolumeRecord:
        """Return a volume; UsageError `volume.not_found`."""
        with self._transaction() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM volumes WHERE volume_id = ? AND is_deleted = 0",
                (str(volume_id),),
            ).fetchone()
        if row is None:
            raise UsageError("volume.not_found", f"there is no volume {volume_id}")
        return _record(row)

    def volumes(
        self, *, tenant: str | None, target_node: str | None, after: str, limit: int
    ) -> list[VolumeRecord]:
        """Return up to `limit` volumes of a tenant or a target, by id, behind id `after`."""
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM volumes WHERE is_deleted = 0 AND volume_id > ?1 "
                "AND (?2 IS NULL OR tenant = ?2) AND (?3 IS NULL OR target_node = ?3) "
                "ORDER BY volume_id LIMIT ?4",
                (after, tenant, target_node, limit),
            ).fetchall()
        return [_record(row) for row in rows]

    def finish_filling(self, volume_id: uuid.UUID) -> None:
        """Note that every sector of a volume is sealed."""
        with self._transaction() as db:
            db.execute(
                "UPDATE volumes SET filling_gateway = '' WHERE volume_id = ?", (str(volume_id),)
            )

    def unregister(self, volume_id: uuid.UUID) -> None:
        """Mark a volume deleted: its id, and so its key, is never given out again."""
        with self._transaction() as db:
            db.execute(
                "UPDATE volumes SET is_deleted = 1, request_id = NULL WHERE volume_id = ?",
                (str(volume_id),),
            )

    def record_grant(
        self,
        granted: Lease,
        *,
        volume_id: uuid.UUID,
        key_epoch: int,
        recipient: str,
        incarnation: bytes,
    ) -> None:
        """Keep a grant for the audit."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO grants (start_epoch, lease_id, counter_start, counter_end, "
                "broker_instance, volume_id, key_epoch, recipient, incarnation) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        r.start_epoch,
                        granted.lease_id,
                        r.counter_start,
                        r.counter_end,
                        r.broker_instance,
                        str(volume_id),
                        key_epoch,
                        recipient,
                        incarnation,
                    )
                    for r in granted.ranges
                ],
            )

    def grant_count(self) -> int:
        """Return how many leases were ever granted."""
        with self._transaction() as db:
            query = "SELECT count(DISTINCT start_epoch << 32 | lease_id) FROM grants"
            return int(db.execute(query).fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._failures():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                text = f"{self._path}: in use by another broker"
                raise UnavailableError("broker.store.locked", text) from error
            raise UnavailableError("broker.store.failed", f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise VerificationError("broker.store.malformed", f"{self._path}: {error}") from error


_COLUMNS: Final = (
    "volume_id, tenant, display_name, sector_count, target_node, generation, key_epoch, mode, "
    "third_party, fully_sealed, filling_gateway"
)


def _wanted(record: VolumeRecord) -> tuple[str, int, str, str, str, bool]:
    return (
        record.display_name,
        record.sector_count,
        record.target_node,
        record.mode,
        record.third_party,
        record.fully_sealed,
    )


def _record(row: tuple[str, str, str, int, str, int, int, str, str, int, str]) -> VolumeRecord:
    return VolumeRecord(
        volume_id=uuid.UUID(row[0]),
        tenant=row[1],
        display_name=row[2],
        sector_count=row[3],
        target_node=row[4],
        generation=row[5],
        key_epoch=row[6],
        mode=row[7],
        third_party=row[8],
        fully_sealed=bool(row[9]),
        filling_gateway=row[10],
    )
