"""Key epochs of volumes (sharing.md): who holds which key, and when a new epoch begins.

A new epoch begins when an operator requests it, when a node that holds the key is no longer
trusted, when a tenant loses its share of a volume, when the volume's tenant gets another key
(sealane.daemon.broker.tenant_key_rotation), and with the lease that brings a key near 4 PB.
Gateways switch to it within seconds (sealane.daemon.gateway.supply). Sectors sealed earlier stay
under their old key, which its holders still have.
"""

import uuid

from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.records import HolderRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError


class KeyEpochs:
    """Changes the key epochs of volumes in the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def rotate(
        self, volume_id: uuid.UUID, *, unless_above: int | None = None
    ) -> VolumeRecord:
        """Begin a volume's next key epoch, unless its epoch is already above `unless_above`.

        UsageError `volume.not_found`, `volume.key_epoch.limit`.
        """

        async def attempt() -> VolumeRecord | None:
            volume = await self._registry.volume(volume_id)
            if unless_above is not None and volume.record.key_epoch > unless_above:
                return volume.record
            after = volume.record.in_next_epoch()
            revision = await self._registry.commit(
                [self._registry.volumes.unchanged(volume.name, volume)],
                self._registry.volumes.sealed(volume.name, after),
            )
            return None if revision is None else after

        return await self._registry.settle(attempt)

    async def withdraw(self, volume_id: uuid.UUID, tenant: str) -> tuple[VolumeRecord, bool]:
        """End a tenant's share of a volume and begin the next key epoch, in one commit.

        False: the volume has no key epochs left; the share has ended nevertheless. UsageError
        `volume.not_found`, `volume.share.not_found`.
        """

        async def attempt() -> tuple[VolumeRecord, bool] | None:
            volume = await self._registry.volume(volume_id)
            if volume.record.share_of(tenant) is None:
                raise UsageError(
                    "volume.share.not_found",
                    f"volume {volume_id} is not shared with tenant {tenant[:80]!r}",
                )
            after, is_rotated = volume.record.without_share(tenant), True
            try:
                after = after.in_next_epoch()
            except UsageError:
                is_rotated = False
            revision = await self._registry.commit(
                [self._registry.volumes.unchanged(volume.name, volume)],
                self._registry.volumes.sealed(volume.name, after),
            )
            return None if revision is None else (after, is_rotated)

        return await self._registry.settle(attempt)

    async def note_holder(self, spiffe_id: str, volume_id: uuid.UUID, key_epoch: int) -> None:
        """Record, before a key is released, that `spiffe_id` will hold it."""
        table = self._registry.holders
        name = f"{HolderRecord.holder(spiffe_id)}{volume_id}"

        async def attempt() -> bool | None:
            stored = await table.get(name)
            if stored is not None and stored.record.key_epoch >= key_epoch:
                return True
            record = HolderRecord(volume_id=volume_id, key_epoch=key_epoch)
            revision = await self._registry.commit(
                [table.unchanged(name, stored)], table.sealed(name, record)
            )
            return None if revision is None else True

        await self._registry.settle(attempt)

    async def rotate_held_by(self, spiffe_id: str) -> list[VolumeRecord]:
        """Begin a new epoch for each volume whose newest key `spiffe_id` holds.

        A volume that has no key epochs left is logged and skipped.
        """
        rotated = []
        async for holder in self._registry.holders.records(within=HolderRecord.holder(spiffe_id)):
            volume_id, held = holder.record.volume_id, holder.record.key_epoch
            try:
                volume = await self.rotate(volume_id, unless_above=held)
            except UsageError as error:
                if error.reason != "volume.not_found":
                    get_logger().error(
                        "key_not_rotated",
                        volume_id=str(volume_id),
                        reason=error.reason,
                        message=str(error.args[0]),
                    )
                continue
            rotated.append(volume)
        return rotated


async def record_rotation(audit: Audit, volume: VolumeRecord) -> None:
    """Record that a volume has begun its present key epoch."""
    await audit.record(
        "key.rotate",
        subject="broker",
        outcome="done",
        volume_id=str(volume.volume_id),
        key_epoch=volume.key_epoch,
    )
    get_logger().info("key_rotated", volume_id=str(volume.volume_id), key_epoch=volume.key_epoch)
