"""Volumes at the broker: registers and shares them, and releases their keys."""

import uuid
from collections.abc import Sequence
from typing import Final, Literal

from sealane.crypto.certificates import NAME_PATTERN, CertificateAuthority, Subject
from sealane.crypto.exchange import wipe
from sealane.crypto.hpke import SignedSecret, seal_signed
from sealane.crypto.roles import Role
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.key_epochs import KeyEpochs, record_rotation
from sealane.daemon.broker.leases import Leases
from sealane.daemon.broker.records import ShareRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.volume_access import (
    check_holder,
    own_volume,
    secret_context,
    signed_descriptor,
    visible_volume,
    wrong_epoch,
)
from sealane.daemon.runtime.calls import PAGE_SIZE_MAX, page_limit, parse_uuid, spread
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind, VolumeMode
from sealane.protocol.sector import SECTOR_BYTES
from sealane.protocol.v1 import broker_pb2

SECTOR_COUNT_MAX: Final = 1 << 40
DISPLAY_NAME_CHARACTERS_MAX: Final = 128
MODES: Final = {"", VolumeMode.LOCAL, VolumeMode.OFF}
VOLUME_ANCHORS: Final = {"", AnchorKind.BROKER, AnchorKind.NONE}


class BrokerService:
    """One start of the broker: its registry, and the arena of this start."""

    def __init__(
        self, registry: Registry, instance: Instance, *, audit: Audit, metrics: Metrics
    ) -> None:
        self.registry = registry
        self.audit = audit
        self._instance = instance
        self._metrics = metrics
        self.key_epochs = KeyEpochs(registry)
        self.leases = Leases(registry, instance.arena, audit=audit, metrics=metrics)

    @property
    def authority(self) -> CertificateAuthority:
        """The authority that signs now."""
        return self.registry.authority

    async def close(self) -> None:
        """Abandon what is in progress."""
        await self.leases.close()

    async def register_volume(
        self,
        caller: Subject,
        *,
        request_id: str,
        display_name: str,
        size_bytes: int,
        target_node: str,
        mode: str = "",
        third_party: str = "",
        anchor: str = "",
        any_target: bool = False,
    ) -> broker_pb2.RegisterVolumeResponse:
        """Register a volume of the caller's tenant; the same request id returns the same volume.

        With `any_target`, also if that is on another target.

        A volume on a third party belongs to one gateway, the caller: only it ever gets the volume's
        key and leases. Brokers keep its anchor unless `anchor` is "none". The caller also fills a
        volume of mode "off".
        """
        sector_count = _sector_count(size_bytes)
        if len(display_name) > DISPLAY_NAME_CHARACTERS_MAX or not display_name.isprintable():
            raise UsageError(
                "volume.display_name",
                f"a display name of {len(display_name)} characters; allowed: at most "
                f"{DISPLAY_NAME_CHARACTERS_MAX}, all printable",
            )
        if NAME_PATTERN.fullmatch(target_node) is None:
            raise UsageError(
                "volume.target", f"target {target_node[:80]!r}; allowed: a node's name"
            )
        if mode not in MODES or bool(third_party) not in {mode != "", mode == VolumeMode.LOCAL}:
            raise UsageError(
                "volume.mode",
                f"volume mode {mode[:80]!r} on third party {third_party[:80]!r}; allowed: empty "
                "on a target, local on a third party, off on both",
            )
        if third_party and (
            NAME_PATTERN.fullmatch(third_party) is None or target_node != caller.node
        ):
            raise UsageError(
                "volume.third_party",
                f"third party {third_party[:80]!r} of node {target_node!r}; allowed: a name from "
                "the caller's own configuration",
            )
        if anchor not in VOLUME_ANCHORS or (anchor and mode != VolumeMode.LOCAL):
            raise UsageError(
                "volume.anchor",
                f"anchor {anchor[:80]!r} for volume mode {mode!r}; allowed: broker or none, and "
                "only in mode local",
            )
        is_sealed = mode == VolumeMode.OFF
        volume_id = uuid.uuid4()
        is_anchored = mode == VolumeMode.LOCAL and anchor != AnchorKind.NONE
        record = VolumeRecord(
            volume_id=volume_id,
            tenant=caller.tenant,
            display_name=display_name,
            sector_count=sector_count,
            target_node=target_node,
            generation=1,
            key_epoch=1,
            mode=mode,
            third_party=third_party,
            fully_sealed=is_sealed,
            filling_gateway=caller.node if is_sealed else "",
            request_id=parse_uuid(request_id, what="request id"),
            device_id=volume_id if is_anchored else None,
        )
        stored, revision = await self.registry.register(record, any_target=any_target)
        return broker_pb2.RegisterVolumeResponse(
            volume=signed_descriptor(self.authority, stored, caller),
            is_new=revision > 0,
            revision=revision,
        )

    async def descriptor(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Return a volume's signed descriptor to its target or a gateway that may use it."""
        return signed_descriptor(
            self.authority, (await visible_volume(self.registry, caller, volume_id)).record, caller
        )

    async def descriptor_by_request(
        self, caller: Subject, request_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Return the signed descriptor of the volume that a request of the caller's tenant made.

        UsageError `volume.not_found` if it made none, or that was deleted.
        """
        request = parse_uuid(request_id, what="request id")
        volume_id = await self.registry.registered(caller.tenant, request)
        if volume_id is None:
            raise UsageError("volume.not_found", f"request {request} has registered no volume")
        return await self.descriptor(caller, str(volume_id))

    async def descriptors_of(
        self, caller: Subject, volume_ids: Sequence[str]
    ) -> list[broker_pb2.SignedVolumeDescriptor]:
        """Return the signed descriptors of those of these volumes that the caller may see.

        UsageError `request.malformed`: an id is none, or there are more than `PAGE_SIZE_MAX`.
        """
        if len(volume_ids) > PAGE_SIZE_MAX:
            raise UsageError(
                "request.malformed", f"{len(volume_ids)} volume ids; allowed: {PAGE_SIZE_MAX}"
            )
        found = []
        for volume_id in volume_ids:
            try:
                found.append(await self.descriptor(caller, volume_id))
            except UsageError as error:
                if error.reason != "volume.not_found":
                    raise
        return found

    async def descriptors(
        self, caller: Subject, *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.SignedVolumeDescriptor], str]:
        """Return a page of descriptors and the token of the next one (empty: last page)."""
        is_target = caller.role == Role.TARGET
        page, token = await self.volumes(
            tenant=None if is_target else caller.tenant,
            target_node=caller.node if is_target else None,
            page_size=page_size,
            page_token=page_token,
        )
        return [signed_descriptor(self.authority, r, caller) async for r in spread(page)], token

    async def volumes(
        self,
        *,
        tenant: str | None = None,
        target_node: str | None = None,
        page_size: int,
        page_token: str,
    ) -> tuple[list[VolumeRecord], str]:
        """Return a page of records, and the token of the next one; None: of all."""
        after = str(parse_uuid(page_token, what="page token")) if page_token else ""
        limit = page_limit(page_size)
        records = await self.registry.list_volumes(
            tenant=tenant, target_node=target_node, after=after, limit=limit + 1
        )
        page = records[:limit]
        return page, str(page[-1].volume_id) if len(records) > limit else ""

    async def finish_filling(
        self, caller: Subject, volume_id: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Allow gateways to attach a volume; only the gateway that filled it may call this."""
        record = await own_volume(self.registry, caller, volume_id)
        if record.filling_gateway not in {"", caller.node}:
            raise VerificationError(
                "volume.filling.refused",
                f"volume {record.volume_id} is filled by gateway {record.filling_gateway!r}",
            )
        return signed_descriptor(
            self.authority, await self.registry.finish_filling(record.volume_id), caller
        )

    async def begin_resize(
        self, caller: Subject, volume_id: str, *, size_bytes: int
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Begin to grow a volume of the caller's tenant; return its descriptor with the new size.

        UsageError `volume.size`, `volume.resize.smaller`, `volume.resize.mode`.
        """
        sector_count = _sector_count(size_bytes)
        record = await own_volume(self.registry, caller, volume_id)
        check_holder(record, caller)
        growing = await self.registry.change_volume(
            record.volume_id, lambda volume: volume.growing(sector_count)
        )
        await self._record_resize(caller, growing, outcome="granted", sector_count=sector_count)
        return signed_descriptor(
            self.authority, growing.model_copy(update={"sector_count": sector_count}), caller
        )

    async def finish_resize(
        self, caller: Subject, volume_id: str, *, size_bytes: int
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Record that a volume is stored with the size it was growing to.

        UsageError `volume.size`, `volume.resize.state`.
        """
        sector_count = _sector_count(size_bytes)
        record = await own_volume(self.registry, caller, volume_id)
        check_holder(record, caller)
        grown = await self.registry.change_volume(
            record.volume_id, lambda volume: volume.grown(sector_count)
        )
        # A rolled-back store must not cut off what the owner has written since.
        await self._instance.cover(await self.registry.store.revision())
        await self._record_resize(caller, grown, outcome="done", sector_count=sector_count)
        return signed_descriptor(self.authority, grown, caller)

    async def _record_resize(
        self,
        caller: Subject,
        volume: VolumeRecord,
        *,
        outcome: Literal["granted", "done"],
        sector_count: int,
    ) -> None:
        await self.audit.record(
            "volume.resize",
            subject=caller.spiffe_id,
            outcome=outcome,
            volume_id=str(volume.volume_id),
            sector_count=sector_count,
        )
        get_logger().info(
            "volume_resize",
            volume_id=str(volume.volume_id),
            outcome=outcome,
            sector_count=sector_count,
        )

    async def unregister_volume(
        self, caller: Subject, volume_id: str, *, registered_at: int = 0
    ) -> None:
        """Remove a volume: its keys are never released again.

        With `registered_at`, only if it is as that revision registered it; UsageError
        `volume.taken_up.state`.
        """
        record = await own_volume(self.registry, caller, volume_id)
        revision = await self.registry.unregister(record.volume_id, registered_at=registered_at)
        # A rolled-back store must not release the key of a deleted volume.
        await self._instance.cover(revision)
        await self.audit.record(
            "volume.unregister", subject=caller.spiffe_id, outcome="done", volume_id=volume_id
        )

    async def share_volume(
        self, caller: Subject, volume_id: str, *, tenant: str, read_only: bool
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Share a volume of the caller's tenant with another tenant's gateways.

        UsageError `volume.share.tenant`, `.third_party`, `.limit`. The answer does not reveal
        whether the tenant exists: that is in the policy.
        """
        record = await own_volume(self.registry, caller, volume_id)
        if NAME_PATTERN.fullmatch(tenant) is None or tenant == record.tenant:
            raise UsageError(
                "volume.share.tenant", f"tenant {tenant[:80]!r}; allowed: another tenant's name"
            )
        if record.third_party:
            raise UsageError(
                "volume.share.third_party",
                f"volume {record.volume_id} belongs to gateway {record.target_node!r} alone; only "
                "volumes on a Sealane target can be shared",
            )
        share = ShareRecord(tenant=tenant, read_only=read_only)
        shared = await self.registry.share(record.volume_id, share)
        await self.audit.record(
            "volume.share",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            shared_with=tenant,
            read_only=read_only,
        )
        get_logger().info(
            "volume_shared", volume_id=volume_id, shared_with=tenant, read_only=read_only
        )
        return signed_descriptor(self.authority, shared, caller)

    async def unshare_volume(
        self, caller: Subject, volume_id: str, *, tenant: str
    ) -> broker_pb2.SignedVolumeDescriptor:
        """Stop sharing a volume with a tenant, which gets no key for the new key epoch.

        UsageError `volume.share.not_found`.
        """
        record = await own_volume(self.registry, caller, volume_id)
        after, is_rotated = await self.key_epochs.withdraw(record.volume_id, tenant)
        # A rolled-back store must not restore the share.
        await self._instance.cover(await self.registry.store.revision())
        await self.audit.record(
            "volume.unshare",
            subject=caller.spiffe_id,
            outcome="done",
            volume_id=volume_id,
            shared_with=tenant,
            key_epoch=after.key_epoch,
            rotated=is_rotated,
        )
        get_logger().info("volume_unshared", volume_id=volume_id, shared_with=tenant)
        if is_rotated:
            await self._cover_rotation([after])
        else:
            get_logger().error(
                "key_not_rotated", volume_id=volume_id, reason="volume.key_epoch.limit"
            )
        return signed_descriptor(self.authority, after, caller)

    async def rotate_key(self, volume_id: uuid.UUID) -> VolumeRecord:
        """Begin a volume's next key epoch; UsageError `volume.not_found`, `volume.key_epoch.…`."""
        volume = await self.key_epochs.rotate(volume_id)
        await self._cover_rotation([volume])
        return volume

    async def rotate_keys_of(self, spiffe_id: str) -> None:
        """Begin new key epochs wherever a node that is no longer trusted holds the newest key."""
        await self._cover_rotation(await self.key_epochs.rotate_held_by(spiffe_id))

    async def _cover_rotation(self, volumes: Sequence[VolumeRecord]) -> None:
        for volume in volumes:
            await record_rotation(self.audit, volume)
        if volumes:
            # A rolled-back store must not bring a key back into use.
            await self._instance.cover(await self.registry.store.revision())

    async def release_key(
        self, caller: Subject, *, volume_id: str, key_epoch: int, request_id: bytes
    ) -> SignedSecret:
        """Seal the key of one key epoch of a volume to the caller's attested KEM key."""
        record = (await visible_volume(self.registry, caller, volume_id)).record
        check_holder(record, caller)
        if key_epoch not in record.key_epochs:
            raise wrong_epoch(record, key_epoch)
        await self.key_epochs.note_holder(caller.spiffe_id, record.volume_id, key_epoch)
        volume_key = await self.registry.volume_key(record, key_epoch)
        try:
            secret = seal_signed(
                volume_key,
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=secret_context(
                    "volume key", caller, record, key_epoch, request_id=request_id
                ),
                signing_key=self.authority.signing_key,
            )
        finally:
            wipe(volume_key)
        await self.audit.record(
            "key.release",
            subject=caller.spiffe_id,
            outcome="granted",
            volume_id=volume_id,
            key_epoch=key_epoch,
            incarnation=caller.incarnation,
            request_id=request_id,
        )
        self._metrics.broker.keys_released.inc()
        get_logger().info(
            "key_released",
            volume_id=volume_id,
            key_epoch=key_epoch,
            recipient=caller.spiffe_id,
            incarnation=caller.incarnation.hex(),
        )
        return secret


def _sector_count(size_bytes: int) -> int:
    """Return the number of sectors for a volume size in bytes; UsageError `volume.size`."""
    sector_count, rest = divmod(size_bytes, SECTOR_BYTES)
    if rest or not 1 <= sector_count <= SECTOR_COUNT_MAX:
        raise UsageError(
            "volume.size",
            f"volume size {size_bytes} bytes; allowed: a multiple of {SECTOR_BYTES} from "
            f"{SECTOR_BYTES} to {SECTOR_COUNT_MAX * SECTOR_BYTES}",
        )
    return sector_count
