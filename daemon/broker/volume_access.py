"""Access to volumes: who may use or see which volume, and how (docs/operate/sharing.md).

A volume belongs to a tenant. Gateways of tenants that it is shared with may use it, too, and its
target sees it. For everyone else it does not exist.
"""

from collections.abc import Iterable

from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.hpke import Context
from sealane.crypto.lease import Arena
from sealane.crypto.roles import Role
from sealane.daemon.broker.records import ShareRecord, Stored, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.runtime.calls import parse_uuid
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2


async def visible_volume(
    registry: Registry, caller: Subject, volume_id: str
) -> Stored[VolumeRecord]:
    """Return a volume that the caller may see; UsageError `volume.not_found`."""
    stored = await registry.volume(parse_uuid(volume_id, what="volume id"))
    record = stored.record
    is_user = caller.role == Role.GATEWAY and record.allows(caller.tenant)
    is_target = caller.role == Role.TARGET and caller.node == record.target_node
    if not is_user and not is_target:
        # The same answer as for a missing volume: ids of other tenants' volumes stay unknown.
        raise UsageError("volume.not_found", f"there is no volume {record.volume_id}")
    return stored


async def own_volume(registry: Registry, caller: Subject, volume_id: str) -> VolumeRecord:
    """Return a volume of the caller's tenant; refuse one that is only shared with it."""
    record = (await visible_volume(registry, caller, volume_id)).record
    if caller.tenant != record.tenant:
        raise VerificationError(
            "volume.tenant.refused",
            f"volume {record.volume_id} is only shared with tenant {caller.tenant!r}; it belongs "
            "to another",
        )
    return record


async def writable_volume(
    registry: Registry, caller: Subject, volume_id: str, key_epoch: int
) -> Stored[VolumeRecord]:
    """Return the volume if the caller may seal for it under `key_epoch`."""
    volume = await visible_volume(registry, caller, volume_id)
    if key_epoch != volume.record.key_epoch:
        raise wrong_epoch(volume.record, key_epoch)
    check_holder(volume.record, caller)
    if not volume.record.allows(caller.tenant, writing=True):
        raise VerificationError(
            "volume.read_only",
            f"volume {volume.record.volume_id} is shared with tenant {caller.tenant!r} read-only: "
            "it gets no counters",
        )
    return volume


def check_holder(record: VolumeRecord, caller: Subject) -> None:
    """Refuse keys and counters to all but the gateway that owns or is filling a volume."""
    if record.third_party and caller.node != record.target_node:
        raise VerificationError(
            "volume.owner.refused",
            f"volume {record.volume_id} of mode {record.mode} belongs to gateway "
            f"{record.target_node!r}",
        )
    if record.filling_gateway not in {"", caller.node}:
        raise UnavailableError(
            "volume.filling",
            f"volume {record.volume_id} is being filled by gateway {record.filling_gateway!r}",
        )


def wrong_epoch(record: VolumeRecord, key_epoch: int) -> UsageError:
    """Return the error for a key epoch that the volume doesn't have, or doesn't seal under."""
    return UsageError(
        "volume.key_epoch",
        f"key epoch {key_epoch} of volume {record.volume_id}; the newest is {record.key_epoch}, "
        f"the oldest {record.oldest_key_epoch}",
    )


def secret_context(
    purpose: str,
    caller: Subject,
    record: VolumeRecord,
    key_epoch: int,
    *,
    request_id: bytes,
    arena: Arena | None = None,
) -> Context:
    """Return the HPKE context of a sealed key or lease."""
    return Context(
        purpose=purpose,
        recipient=caller.spiffe_id,
        incarnation=caller.incarnation,
        request_id=request_id,
        volume_id=str(record.volume_id),
        key_epoch=key_epoch,
        arena=None if arena is None else (arena.broker_instance, arena.start_epoch),
    )


def descriptor_of(
    record: VolumeRecord, shares: Iterable[ShareRecord]
) -> broker_pb2.VolumeDescriptor:
    """Describe a volume with these of its shares."""
    return broker_pb2.VolumeDescriptor(
        volume_id=str(record.volume_id),
        generation=record.generation,
        sector_count=record.sector_count,
        tenant=record.tenant,
        target_node=record.target_node,
        key_epoch=record.key_epoch,
        display_name=record.display_name,
        mode=record.mode,
        third_party=record.third_party,
        fully_sealed=record.fully_sealed,
        filling_gateway=record.filling_gateway,
        oldest_key_epoch=record.oldest_key_epoch,
        device_id="" if record.device_id is None else str(record.device_id),
        shares=[
            broker_pb2.VolumeShare(tenant=share.tenant, read_only=share.read_only)
            for share in shares
        ],
    )


def signed_descriptor(
    authority: CertificateAuthority, record: VolumeRecord, caller: Subject
) -> broker_pb2.SignedVolumeDescriptor:
    """Describe a volume to the caller: a guest sees only its own share, a target none."""
    told = [
        share
        for share in record.shares
        if caller.role == Role.GATEWAY and caller.tenant in {record.tenant, share.tenant}
    ]
    descriptor = descriptor_of(record, told).SerializeToString(deterministic=True)
    return broker_pb2.SignedVolumeDescriptor(
        descriptor=descriptor, signature=authority.sign_descriptor(descriptor)
    )
