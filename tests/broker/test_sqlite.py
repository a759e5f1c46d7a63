"""The SQLite store beyond the contract: its file, its lock, crashes, old versions."""

# ruff: noqa: S608 - the columns of old versions are pasted into statements

import asyncio
import contextlib
import shutil
import sqlite3
import uuid
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from brokers import Count, start_broker
from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker.store import sqlite
from sealane.daemon.broker.store.contract import Entry
from sealane.daemon.broker.store.legacy import take_over
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import UnavailableError, UsageError, VerificationError

VOLUME = uuid.UUID("00000000-0000-4000-8000-000000000001")
DELETED = uuid.UUID("00000000-0000-4000-8000-000000000002")
REQUEST = uuid.UUID("00000000-0000-4000-8000-000000000003")


async def test_what_was_committed_outlives_the_process(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "b.sqlite")
    revision = await store.commit(puts={"a": b"1"})
    # A crash leaves the files as they are now, without a clean close.
    _copy(tmp_path)
    await store.close()
    copy = SqliteStore(tmp_path / "copy.sqlite")
    assert await copy.get("a") == Entry("a", b"1", revision or 0)
    assert await copy.revision() == revision
    await copy.close()


def _copy(directory: Path) -> None:
    for file in directory.glob("b.sqlite*"):
        shutil.copy(file, directory / file.name.replace("b.", "copy."))


async def test_second_process_on_one_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    store = SqliteStore(path)
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            SqliteStore(path)
        assert caught.value.reason == "broker.store.locked"
        # Refusing the second must not cost the first its lock.
        await store.commit(puts={"a": b""})
    await store.close()
    reopened = SqliteStore(path)
    with pytest.raises(UnavailableError):
        SqliteStore(path)
    await reopened.close()


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(VerificationError) as caught:
        SqliteStore(path)
    assert caught.value.reason == "broker.store.malformed"


async def test_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    await SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={sqlite.SCHEMA_VERSION + 1}")
    with pytest.raises(UsageError) as caught:
        SqliteStore(path)
    assert caught.value.reason == "broker.store.version"


async def test_store_keeps_itself_to_its_owner(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "b.sqlite")
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o777 == 0o600
    await store.close()


async def test_commits_are_flushed_before_they_return(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "b.sqlite")
    assert await store.query("PRAGMA journal_mode") == [("wal",)]
    assert await store.query("PRAGMA synchronous") == [(2,)]  # FULL
    await store.close()


async def test_commits_that_wait_together_share_one_flush(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "b.sqlite")
    statements: list[str] = []
    store._db.set_trace_callback(statements.append)
    revisions = await asyncio.gather(*(store.commit(puts={f"k{i}": b""}) for i in range(50)))
    assert sorted(r or 0 for r in revisions) == list(range(1, 51))
    assert sum(s == "COMMIT" for s in statements) < 25
    await store.close()


async def test_a_commit_that_may_have_failed_ends_the_store(tmp_path: Path) -> None:
    class FailingCommit:
        """Fails at COMMIT, as a full disk would."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self._db.execute(statement, *arguments)

        def close(self) -> None:
            self._db.close()

    store = SqliteStore(tmp_path / "b.sqlite")
    store._db = FailingCommit(store._db)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            await store.commit(puts={"a": b""})
        assert caught.value.reason == "broker.store.outcome_unknown"
    with pytest.raises(UnavailableError):
        await store.get("a")
    await store.close()


async def test_watch_of_forgotten_history_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "HISTORY_REVISIONS", 10)
    store = SqliteStore(tmp_path / "b.sqlite")
    for i in range(30):
        await store.commit(puts={"a": b"%d" % i})
    with pytest.raises(UnavailableError) as caught:
        await anext(store.watch("a", from_revision=20))
    assert caught.value.reason == "broker.store.compacted"
    assert (await anext(store.watch("a", from_revision=21)))[0].value == b"20"
    await store.close()


def _legacy(path: Path, version: int, wrapping: WrappingKey) -> bytes:
    """Write a store as left by a broker of that version after five starts; return the anchor."""
    columns = (
        "volume_id, request_id, tenant, display_name, sector_count, target_node, generation, "
        "key_epoch, is_deleted"
    )
    columns += ", mode, third_party" if version > 1 else ""
    columns += ", fully_sealed, filling_gateway" if version > 3 else ""
    lease_id = "lease_id, " if version > 2 else ""
    authority = CertificateAuthority.create(broker="b", now=utc_now())
    certificate = authority.certificate.public_bytes(Encoding.DER)
    made = (
        wrapping.wrap(authority.private_bytes(), purpose="broker key", owner="broker"),
        certificate,
    )
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE start (id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL)")
        db.execute("CREATE TABLE authority (id INTEGER, wrapped_key BLOB, certificate BLOB)")
        db.execute("CREATE TABLE tenants (tenant TEXT PRIMARY KEY, wrapped_key BLOB)")
        db.execute(f"CREATE TABLE volumes ({columns})")
        db.execute(
            f"CREATE TABLE grants (start_epoch, {lease_id}counter_start, counter_end, "
            "broker_instance, volume_id, key_epoch, recipient, incarnation, granted_at)"
        )
        db.execute("INSERT INTO start VALUES (1, 5)")
        db.execute("INSERT INTO authority VALUES (1, ?, ?)", made)
        key = wrapping.wrap(b"k" * 32, purpose="tenant key", owner="t")
        db.execute("INSERT INTO tenants VALUES ('t', ?)", (key,))
        modes = ["", ""] if version > 1 else []
        modes += [1, "g"] if version > 3 else []
        for volume, request, deleted in ((VOLUME, str(REQUEST), 0), (DELETED, None, 1)):
            values = [str(volume), request, "t", "d", 7, "s", 1, 1, deleted, *modes]
            marks = ", ".join("?" * len(values))
            db.execute(f"INSERT INTO volumes VALUES ({marks})", values)
        when = "2026-11-22T08:00:00.000Z"
        for start, end in ((256, 300), (400, 500)):
            values = [5, *([1] if version > 2 else []), start, end, 3, str(VOLUME), 1, "r", b"i"]
            marks = ", ".join("?" * (len(values) + 1))
            db.execute(f"INSERT INTO grants VALUES ({marks})", [*values, when])
        db.execute(f"PRAGMA user_version={version}")
    return certificate


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_store_of_an_old_version_is_taken_over(tmp_path: Path, version: int) -> None:
    path = tmp_path / "b.sqlite"
    wrapping = WrappingKey(bytes(32))
    anchor = _legacy(path, version, wrapping)
    starts, heads = Count(), Count()
    for start in (6, 7):
        store = SqliteStore(path)
        await take_over(store, wrapping, node="b", instance=3)
        service, instance, registry = await start_broker(store, starts=starts, heads=heads)
        # Epochs served before there was an anchor aren't used again.
        assert instance.arena.start_epoch == starts.value == start
        volume = (await registry.volume(VOLUME)).record
        assert (volume.sector_count, volume.mode, volume.request_id) == (7, "", REQUEST)
        assert (volume.fully_sealed, volume.filling_gateway) == (version > 3, "g" * (version > 3))
        with pytest.raises(UsageError):
            await registry.volume(DELETED)
        assert await registry.register(volume) == (volume, False)
        assert bytes(await registry.tenant_key("t", 0)) == b"k" * 32
        tenant = await registry.tenants.get("t")
        assert tenant is not None
        assert tenant.record.volume_count == 1
        grants, _ = await registry.grants.page(limit=10)
        ranges = [(each.record.counter_start, each.record.counter_end) for each in grants]
        assert ranges == [(256, 300), (400, 500)]
        assert service.authority.certificate.public_bytes(Encoding.DER) == anchor
        await registry.close()


async def test_old_store_put_back_after_it_was_taken_over_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    wrapping = WrappingKey(bytes(32))
    _legacy(path, 4, wrapping)
    snapshot = path.read_bytes()
    starts, heads = Count(), Count()
    for attempt in range(2):
        path.write_bytes(snapshot)
        store = SqliteStore(path)
        await take_over(store, wrapping, node="b", instance=3)
        if attempt:
            with pytest.raises(VerificationError) as caught:
                await start_broker(store, starts=starts, heads=heads)
            assert caught.value.reason == "broker.store.rolled_back"
        else:
            _, _, registry = await start_broker(store, starts=starts, heads=heads)
            await registry.close()


async def test_old_store_under_another_key_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    _legacy(path, 4, WrappingKey(bytes(32)))
    store = SqliteStore(path)
    with pytest.raises(VerificationError) as caught:
        await take_over(store, WrappingKey(b"\1" * 32), node="b", instance=3)
    assert caught.value.reason == "key.wrap.invalid"
    assert store.version == 4
    await store.close()


async def test_old_store_that_holds_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    wrapping = WrappingKey(bytes(32))
    _legacy(path, 4, wrapping)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE grants SET incarnation = 'text'")
    store = SqliteStore(path)
    with pytest.raises(VerificationError) as caught:
        await take_over(store, wrapping, node="b", instance=3)
    assert caught.value.reason == "broker.store.malformed"
    await store.close()
