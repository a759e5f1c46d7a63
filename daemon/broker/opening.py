"""Opens a broker from its configuration: store, authority, start epoch, in that order."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from sealane.crypto.keys import KeyWrapper
from sealane.daemon.broker.audit import AuditLog, Cutting
from sealane.daemon.broker.audit_head import RegistryHead
from sealane.daemon.broker.audit_retention import Retention
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.kek import open_keys
from sealane.daemon.broker.record_key_rotation import RecordKeyRotation
from sealane.daemon.broker.records import LAST_RESTORE, instance_name
from sealane.daemon.broker.refusals import SummedAudit
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.rewrapping import Rewrapping
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.legacy import take_over
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.broker.succession import AuthoritySuccession
from sealane.daemon.broker.tenant_key_rotation import TenantKeyRotation
from sealane.daemon.config import BrokerConfig, EtcdConfig
from sealane.daemon.device.anchors.choose import open_counter
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.daemon.runtime.files import read_file, read_secret
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UnavailableError
from sealane.protocol.kinds import AnchorKind

STORE_NAME: Final = "broker.sqlite"
AUDIT_NAME: Final = "audit.jsonl"
FORWARDED_NAME: Final = "audit.forwarded"
STARTS_NAME: Final = "starts.counter"
HEADS_NAME: Final = "heads.counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBroker:
    """A broker without its servers; `log` is the file that `audit` writes to."""

    service: BrokerService
    instance: Instance
    rewrapping: Rewrapping
    record_keys: RecordKeyRotation
    tenant_keys: TenantKeyRotation
    succession: AuthoritySuccession
    audit: SummedAudit
    log: AuditLog


@contextlib.asynccontextmanager
async def opened_broker(
    config: BrokerConfig, *, node: str, state: Path, metrics: Metrics, tcti: str
) -> AsyncIterator["OpenedBroker"]:
    """Start a broker for the duration of the block; `tcti` names its TPM.

    Raises the errors of `Registry.open`, `Instance.claim`, `AuditLog.open` and `open_tpm`.
    """
    keys = await asyncio.to_thread(open_keys, config)
    async with contextlib.AsyncExitStack() as stack:
        tpm = None
        if config.counters == AnchorKind.TPM2:
            tpm = await asyncio.to_thread(open_tpm, tcti)
            stack.callback(tpm.close)
        store = await _open_store(config, keys[0], node=node, state=state)
        stack.push_async_callback(store.close)
        registry = await Registry.open(store, *keys, node=node)
        stack.callback(registry.keys.close)
        stack.push_async_callback(registry.close)
        instance = await Instance.claim(
            registry,
            node=node,
            instance=config.instance,
            starts=open_counter(tpm=tpm, index=config.counter_index, path=state / STARTS_NAME),
            heads=open_counter(tpm=tpm, index=config.counter_index + 1, path=state / HEADS_NAME),
        )
        stack.push_async_callback(_leave, instance)
        audit = await AuditLog.open(
            state / AUDIT_NAME,
            keeper=RegistryHead(registry, instance=config.instance),
            signing_key=registry.authority.signing_key,
            signer=registry.authorities.audit_key,
            cutting=Cutting(
                bytes_max=config.audit_segment_bytes,
                age=dt.timedelta(hours=config.audit_segment_hours),
            ),
            retention=Retention(
                age=dt.timedelta(days=config.audit_keep_days) if config.audit_keep_days else None,
                bytes_max=config.audit_keep_bytes,
                is_forwarded=config.audit_forward is not None,
            ),
        )
        stack.push_async_callback(audit.close)
        await _announce_restore(registry, audit)
        summed = SummedAudit(audit)
        stack.push_async_callback(summed.close)
        service = BrokerService(registry, instance, audit=summed, metrics=metrics)
        stack.push_async_callback(service.close)
        rewrapping = Rewrapping(
            registry,
            instance=config.instance,
            cover=instance.cover,
            audit=summed,
            metrics=metrics,
        )
        await rewrapping.announce()
        yield OpenedBroker(
            service=service,
            instance=instance,
            rewrapping=rewrapping,
            record_keys=RecordKeyRotation(registry, cover=instance.cover, audit=summed),
            tenant_keys=TenantKeyRotation(registry, cover=instance.cover, audit=summed),
            succession=AuthoritySuccession(registry, node=node, cover=instance.cover, audit=summed),
            audit=summed,
            log=audit,
        )


async def _announce_restore(registry: Registry, audit: AuditLog) -> None:
    """Record a restore of the store in the audit log of the first broker that starts after it."""
    table = registry.restores
    stored = await table.get(LAST_RESTORE)
    if stored is None or stored.record.is_announced:
        return
    record = stored.record
    get_logger().warning(
        "store_restored",
        snapshot_at=record.snapshot_at.isoformat(),
        restored_at=record.restored_at.isoformat(),
    )
    await audit.record(
        "broker.restore",
        subject="operator",
        outcome="done",
        snapshot_at=record.snapshot_at.isoformat(),
        restored_at=record.restored_at.isoformat(),
        snapshot_state=record.snapshot_state,
        epoch_base=record.epoch_base,
        ordinal=record.ordinal,
    )
    # If another broker has done the same meanwhile, both logs have it.
    announced = record.model_copy(update={"is_announced": True})
    await registry.commit(
        [table.unchanged(stored.name, stored)], table.sealed(stored.name, announced)
    )


async def _leave(instance: Instance) -> None:
    """Anchor what was committed since the last head: a clean stop leaves nothing uncovered."""
    try:
        await instance.inspect()
    except UnavailableError as error:
        get_logger().error("head_not_anchored", reason=error.reason, message=error.args[0])


async def _open_store(
    config: BrokerConfig, wrapping: KeyWrapper, *, node: str, state: Path
) -> Store:
    if config.etcd is not None:
        return await EtcdStore.open(
            config.etcd.endpoints,
            writer=instance_name(config.instance),
            credentials=etcd_credentials(config.etcd),
        )
    store = SqliteStore(state / STORE_NAME)
    try:
        await take_over(store, wrapping, node=node, instance=config.instance)
    except BaseException:
        await store.close()
        raise
    return store


def etcd_credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """Read the files for mutual TLS to the etcd members; None if none are configured."""
    if config.ca_file is None or config.certificate_file is None or config.key_file is None:
        return None
    return grpc.ssl_channel_credentials(
        read_file(config.ca_file, key="broker.etcd.ca_file"),
        read_secret(config.key_file, key="broker.etcd.key_file"),
        read_file(config.certificate_file, key="broker.etcd.certificate_file"),
    )
