"""Upgrades a SQLite store of schema versions 1 to 4, which had a table for each kind of record.

Its volumes, tenants, grants and authority become records in one step; the anchor's counter
continues from the start epoch that it had served.
"""

import datetime as dt
import uuid
from collections import Counter
from typing import Final

from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KeyWrapper
from sealane.daemon.broker.authority import authority_entry, new_record_key
from sealane.daemon.broker.records import (
    AuthorityRecord,
    GrantRecord,
    InstanceRecord,
    RequestRecord,
    Tables,
    TenantRecord,
    VolumeRecord,
    instance_name,
)
from sealane.daemon.broker.registry import new_tenant, with_state
from sealane.daemon.broker.store.record_keys import NamedKeys, RecordKeys
from sealane.daemon.broker.store.sqlite import LEGACY_VERSIONS, SqliteStore
from sealane.errors import VerificationError

# Leases of these versions are all burned. Each range becomes a record, named by its first counter.
_GRANTS: Final = (
    "SELECT broker_instance, start_epoch, counter_start, volume_id, key_epoch, recipient, "
    "incarnation, granted_at, counter_end FROM grants ORDER BY counter_start"
)
_VOLUMES: Final = (
    "SELECT volume_id, tenant, display_name, sector_count, target_node, generation, key_epoch, "
    "is_deleted, request_id, {modes}, {filling} FROM volumes"
)


async def take_over(store: SqliteStore, wrapping: KeyWrapper, *, node: str, instance: int) -> None:
    """Upgrade `store` to the current schema if it is of a legacy version, in one transaction."""
    if store.version not in LEGACY_VERSIONS:
        return
    try:
        entries = await _entries(store, wrapping, node=node, instance=instance)
    except (ValueError, TypeError, IndexError) as error:
        raise VerificationError(
            "broker.store.malformed", f"{store.path}: version {store.version}: {error}"
        ) from error
    await store.replace_legacy(entries)


async def _entries(
    store: SqliteStore, wrapping: KeyWrapper, *, node: str, instance: int
) -> dict[str, bytes]:
    authority = await store.query("SELECT wrapped_key, certificate FROM authority")
    if not authority:
        return {}  # it never got as far as serving
    # Fails under another key: then nothing may be upgraded, because it could not be opened
    # afterwards.
    wipe(wrapping.unwrap(_bytes(authority[0][0]), purpose="broker key", owner="broker"))
    key, wrapped_key = new_record_key(wrapping)
    tables = Tables(store, keys=RecordKeys(NamedKeys(present=key)))
    modes = "mode, third_party" if store.version > 1 else "'', ''"
    filling = "fully_sealed, filling_gateway" if store.version > 3 else "0, ''"
    rows = await store.query(_VOLUMES.format(modes=modes, filling=filling))
    volumes = [_volume(row) for row in rows]
    alive = Counter(v.tenant for v in volumes if not v.is_deleted)
    tenants = {
        str(tenant): TenantRecord(wrapped_key=_bytes(wrapped), volume_count=alive[str(tenant)])
        for tenant, wrapped in await store.query("SELECT tenant, wrapped_key FROM tenants")
    }
    for tenant in alive.keys() - tenants.keys():
        made = new_tenant(wrapping, tenant)
        tenants[tenant] = made.model_copy(update={"volume_count": alive[tenant]})
    ((epoch,),) = await store.query("SELECT epoch FROM start")
    entries = authority_entry(
        AuthorityRecord(
            wrapped_key=_bytes(authority[0][0]),
            certificate=_bytes(authority[0][1]),
            wrapped_record_key=wrapped_key,
        )
    )
    entries |= tables.instances.sealed(
        instance_name(instance),
        InstanceRecord(node=node, start_epoch=_int(epoch), is_anchored=False),
    )
    for tenant, record in tenants.items():
        entries |= tables.tenants.sealed(tenant, record)
    for volume in volumes:
        entries |= tables.volumes.sealed(str(volume.volume_id), volume)
        if volume.request_id is not None:
            request = RequestRecord(volume_id=volume.volume_id)
            entries |= tables.requests.sealed(f"{volume.tenant}/{volume.request_id}", request)
    for row in await store.query(_GRANTS):
        grant = _grant(row)
        entries |= tables.grants.sealed(grant.name, grant)
    return with_state(entries, key)


def _volume(row: tuple[object, ...]) -> VolumeRecord:
    return VolumeRecord(
        volume_id=uuid.UUID(str(row[0])),
        tenant=str(row[1]),
        display_name=str(row[2]),
        sector_count=_int(row[3]),
        target_node=str(row[4]),
        generation=_int(row[5]),
        key_epoch=_int(row[6]),
        is_deleted=bool(row[7]),
        request_id=None if row[8] is None else uuid.UUID(str(row[8])),
        mode=str(row[9]),
        third_party=str(row[10]),
        fully_sealed=bool(row[11]),
        filling_gateway=str(row[12]),
    )


def _grant(row: tuple[object, ...]) -> GrantRecord:
    return GrantRecord(
        broker_instance=_int(row[0]),
        start_epoch=_int(row[1]),
        lease_id=_int(row[2]),
        volume_id=uuid.UUID(str(row[3])),
        key_epoch=_int(row[4]),
        recipient=str(row[5]),
        incarnation=_bytes(row[6]),
        granted_at=dt.datetime.fromisoformat(str(row[7])),
        counter_start=_int(row[2]),
        counter_end=_int(row[8]),
    )


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"found {type(value).__name__} where a number should be")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"found {type(value).__name__} where bytes should be")
    return value
