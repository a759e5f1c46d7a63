"""Restores a broker's store from a snapshot, while no broker of the store runs.

The order of events: the snapshot is read whole and verified; the key encryption key opens its
authority; its records must be exactly one state that brokers left; they are revised
(sealane.daemon.broker.restored); the operator agrees; the store, which must be empty, is filled. A
SQLite store is filled under another name and renamed when it is durable. In etcd the authority and
the state record come last, in one commit: without them brokers refuse the store.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from cryptography import x509
from pydantic import ValidationError

from sealane.crypto.snapshot import Header, RecipientKey, anchor_digest, read_snapshot
from sealane.daemon.broker.assembly import check_policy_file, configured_owners
from sealane.daemon.broker.authority import AUTHORITY_KEY, check_has, opened_authority
from sealane.daemon.broker.kek import open_keys
from sealane.daemon.broker.keyring import UNNAMED, Keyring
from sealane.daemon.broker.opening import (
    HEADS_NAME,
    STARTS_NAME,
    STORE_NAME,
    etcd_credentials,
)
from sealane.daemon.broker.owners import Owners
from sealane.daemon.broker.owners_history import trusted_history
from sealane.daemon.broker.records import AuthorityRecord, Tables, instance_name
from sealane.daemon.broker.restored import Accepted, Revision, revised
from sealane.daemon.broker.snapshot import decoded
from sealane.daemon.broker.store.contract import (
    COMMIT_BYTES_MAX,
    COMMIT_CHANGES_MAX,
    STATE_KEY,
    Compare,
    Entry,
    Store,
)
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.record_keys import RecordKeys
from sealane.daemon.broker.store.sqlite import SCHEMA_VERSION, SqliteStore
from sealane.daemon.broker.store.state import SetHash, State
from sealane.daemon.config import BrokerConfig, Config
from sealane.daemon.device.anchors.choose import open_counter
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import sync_directory
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind

_DRAFT_NAME: Final = f"{STORE_NAME}.restoring"
_MISSING: Final = "counter.missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """A verified snapshot, and the records that it becomes."""

    header: Header
    revision: Revision
    instance: int
    key_ids: tuple[bytes, ...]
    """Of the key encryption keys that it needs: two in the middle of a rotation, new one first."""
    state_record: bytes


def prepared(
    file: BinaryIO,
    config: Config,
    *,
    key: RecipientKey,
    anchor: x509.Certificate,
    accepted: Accepted,
    restored_before: int,
) -> Restore:
    """Verify a snapshot for this configuration, and revise its records; changes nothing.

    Errors of `read_snapshot`, `open_keys`, `revised` and `check_policy_file`; VerificationError
    `broker.snapshot.anchor`, `broker.store.rolled_back`, `policy.owners.configuration`;
    UsageError `broker.snapshot.version`, `broker.restore.instance`, `broker.restore.policy`,
    `broker.restore.counter`.
    """
    broker = broker_of(config)
    header, content = read_snapshot(file, key=key, anchor=anchor)
    if header.schema != SCHEMA_VERSION:
        raise UsageError(
            "broker.snapshot.version",
            f"the snapshot has records of version {header.schema}; allowed: {SCHEMA_VERSION}",
        )
    entries = decoded(content)
    hashes, tables, state, key_ids = _checked(entries, header, broker, anchor)
    revision = revised(
        entries,
        tables,
        accepted=accepted,
        restored_before=restored_before,
        now=utc_now(),
        snapshot_at=header.created_at,
        snapshot_state=header.state_number,
    )
    _check_instance(broker, revision)
    _check_policy(broker, revision, tables)
    _check_counters(config, broker)
    digests = [hashes.digest(name, value) for name, value in revision.entries.items()]
    empty = State(number=state.number, count=0, total=0, tag=state.tag, revision=0)
    _, sealed = hashes.next(empty, removed=(), added=digests, growth=len(digests))
    return Restore(
        header=header,
        revision=revision,
        instance=broker.instance,
        key_ids=key_ids,
        state_record=sealed,
    )


def broker_of(config: Config) -> BrokerConfig:
    """Return the configuration of the broker; UsageError `broker.restore.role`."""
    if config.broker is None:
        raise UsageError("broker.restore.role", "the configuration has no section broker")
    return config.broker


async def check_empty(config: Config) -> None:
    """Raise UsageError `broker.restore.store` if the configured store has anything in it."""
    path = Path(config.node.state_dir) / STORE_NAME
    if broker_of(config).etcd is None and not path.exists():
        return
    async with _opened(config) as store:
        page = await store.range("", limit=1)
        if page.entries:
            raise UsageError(
                "broker.restore.store",
                "the store is not empty: a snapshot is restored into an empty store only; move "
                "the old one away",
            )


async def filled(restore: Restore, config: Config) -> None:
    """Fill the configured store, which must be empty; UsageError `broker.restore.store`."""
    await check_empty(config)
    broker = broker_of(config)
    if broker.etcd is not None:
        async with _opened(config) as store:
            await _fill(store, restore)
        return
    state = Path(config.node.state_dir)
    draft, final = state / _DRAFT_NAME, state / STORE_NAME
    _remove(draft)
    try:
        made = SqliteStore(draft)
        try:
            await _fill(made, restore)
            await made.query("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            await made.close()
        _remove(final)  # an empty store, as `check_empty` found
        draft.rename(final)
        sync_directory(state)
    except OSError as error:
        raise UnavailableError("broker.store.failed", f"{final}: {error.strerror}") from error
    finally:
        _remove(draft)


async def _fill(store: Store, restore: Restore) -> None:
    """Put all records; the authority and the state record last."""
    last = {AUTHORITY_KEY: restore.revision.entries[AUTHORITY_KEY], STATE_KEY: restore.state_record}
    batch: dict[str, bytes] = {}
    size = 0
    for key, value in restore.revision.entries.items():
        if key == AUTHORITY_KEY:
            continue
        size += len(value)
        if len(batch) == COMMIT_CHANGES_MAX or size > COMMIT_BYTES_MAX:
            await _put(store, batch)
            batch, size = {}, len(value)
        batch[key] = value
    if batch:
        await _put(store, batch)
    await _put(store, last)


async def _put(store: Store, puts: Mapping[str, bytes]) -> None:
    if await store.commit([Compare(key, 0) for key in puts], puts) is None:
        raise UsageError(
            "broker.restore.store", "another process writes to the store: stop all its brokers"
        )


@contextlib.asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[Store]:
    broker = broker_of(config)
    store: Store
    if broker.etcd is not None:
        store = await EtcdStore.open(
            broker.etcd.endpoints,
            writer=instance_name(broker.instance),
            credentials=etcd_credentials(broker.etcd),
        )
    else:
        store = SqliteStore(Path(config.node.state_dir) / STORE_NAME)
    try:
        yield store
    finally:
        await store.close()


def _checked(
    entries: Mapping[str, bytes], header: Header, broker: BrokerConfig, anchor: x509.Certificate
) -> tuple[SetHash, Tables, State, tuple[bytes, ...]]:
    """Open the authority, and check that the entries are one state that brokers left."""
    try:
        record = AuthorityRecord.model_validate_json(entries.get(AUTHORITY_KEY, b""))
    except ValidationError as error:
        raise VerificationError(
            "broker.store.malformed", "the snapshot's authority can't be read"
        ) from error
    keys = Keyring(open_keys(broker))
    try:
        check_has(keys.ids, [record.key_id, record.previous_key_id])
        authority, named, key_id = opened_authority(record, keys)
    finally:
        keys.close()
    if anchor_digest(authority.certificate) != anchor_digest(anchor):
        raise VerificationError(
            "broker.snapshot.anchor", "the snapshot has the authority of other brokers"
        )
    hashes = SetHash(named.present)
    state = hashes.state_of(entries, revision=header.revision)
    previous = [] if record.previous_key_id == UNNAMED else [record.previous_key_id]
    return hashes, Tables(None, keys=RecordKeys(named)), state, (key_id, *previous)


def _check_instance(broker: BrokerConfig, revision: Revision) -> None:
    if broker.instance in revision.retired:
        raise UsageError(
            "broker.restore.instance",
            f"broker.instance {broker.instance} is in the snapshot, so it may have granted leases "
            "since; allowed: a number that no broker ever used",
        )


def _owners_in(revision: Revision, tables: Tables, configured: Owners | None) -> Owners | None:
    """Return the policy's owners in the snapshot; errors of `trusted_history`."""
    prefix = tables.policy_owners.key("")
    records = [
        tables.policy_owners.opened(Entry(key, value, 0)).record
        for key, value in sorted(revision.entries.items())
        if key.startswith(prefix)
    ]
    if not records:
        return configured
    trusted = [] if configured is None else [configured]
    return trusted_history(records, trusted=trusted).current


def _check_policy(broker: BrokerConfig, revision: Revision, tables: Tables) -> None:
    owners = _owners_in(revision, tables, configured_owners(broker))
    version = check_policy_file(broker, owners=owners).version
    if version <= revision.policy_version:
        raise UsageError(
            "broker.restore.policy",
            f"broker.policy_file has version {version}; allowed: above {revision.policy_version}, "
            "the snapshot's, and above any that was in force since",
        )


def _check_counters(config: Config, broker: BrokerConfig) -> None:
    """Check that the counters were never used, as the broker's first start will."""
    state = Path(config.node.state_dir)
    with contextlib.ExitStack() as stack:
        tpm = None
        if broker.counters == AnchorKind.TPM2:
            tpm = open_tpm(config.tpm.tcti)
            stack.callback(tpm.close)
        for index, name in enumerate((STARTS_NAME, HEADS_NAME)):
            counter = open_counter(tpm=tpm, index=broker.counter_index + index, path=state / name)
            try:
                value = counter.read()
            except VerificationError as error:
                if error.reason != _MISSING:
                    raise
                continue
            if value:
                raise UsageError(
                    "broker.restore.counter",
                    f"the counter {name} is at {value}: it counted for another store; move it "
                    "away, or choose another broker.counter_index",
                )


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
