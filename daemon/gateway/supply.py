"""Fetches keys and counters of volumes for an attach, and renews them (docs/operate/sharing.md).

A volume's key epochs range from the oldest that sectors may still be sealed under to the newest,
which is used for sealing. A new epoch begins when a node that had the key is revoked, when a key
reaches its 4 PB limit, when the volume stops being shared with a tenant, or when an operator
requests it. An attached volume switches to the new epoch without a pause. A volume that this
gateway's tenant may no longer use is failed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Final

from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.crypto.lease import LeaseHolder
from sealane.daemon.gateway.attached import Attached
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.gateway.leases import LeaseCache
from sealane.daemon.runtime.clock import monotonic_ns
from sealane.daemon.volume.events import EventLog
from sealane.errors import Error, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2

KEY_EPOCH_POLL_SECONDS: Final = 10.0
REFILL_POLL_SECONDS: Final = 1.0
ASKED_AT_ONCE: Final = 100
"""Volumes whose descriptors one call asks for."""


@contextlib.asynccontextmanager
async def released_keys(
    broker: BrokerClient, descriptor: broker_pb2.VolumeDescriptor, *, above: int = 0
) -> AsyncIterator[dict[int, bytearray]]:
    """Fetch the keys of all of the volume's epochs newer than `above`; wipes them at the end.

    VerificationError `volume.key_epoch.malformed` if the descriptor's range of epochs is
    impossible.
    """
    newest = descriptor.key_epoch
    oldest = descriptor.oldest_key_epoch or newest
    if not 1 <= oldest <= newest < oldest + KEY_EPOCHS_MAX:
        raise VerificationError(
            "volume.key_epoch.malformed",
            f"volume {descriptor.volume_id} has key epochs {oldest} to {newest}; allowed: at most "
            f"{KEY_EPOCHS_MAX}",
        )
    keys: dict[int, bytearray] = {}
    try:
        for epoch in range(max(oldest, above + 1), newest + 1):
            keys[epoch] = await broker.key(descriptor, key_epoch=epoch)
        yield keys
    finally:
        for key in keys.values():
            wipe(key)


class Supply:
    """Refills the counters of attached volumes and moves them to new key epochs."""

    def __init__(
        self,
        attached: Mapping[str, Attached],
        *,
        tenant: Callable[[], str],
        targets: Callable[[], Collection[str]],
        broker: BrokerClient,
        leases: LeaseCache,
        events: EventLog,
    ) -> None:
        """Supply `attached`, volumes by id.

        `tenant` returns this gateway's tenant, `targets` the nodes of its targets.
        """
        self._targets = targets
        self._attached = attached
        self._tenant = tenant
        self._broker = broker
        self._leases = leases
        self._events = events

    async def run(self) -> None:
        """Check all attached volumes periodically until cancelled."""
        polled = monotonic_ns()
        while True:
            await asyncio.sleep(REFILL_POLL_SECONDS)
            is_due = monotonic_ns() - polled >= KEY_EPOCH_POLL_SECONDS * 1e9
            changed: Collection[str] = ()
            if is_due:
                polled = monotonic_ns()
                changed = await self._changed()
            for volume_id, attached in [*self._attached.items()]:
                try:
                    if volume_id in changed:
                        await self._follow(volume_id, attached)
                    if self._needs_refill(volume_id, attached):
                        await self._refill(volume_id, attached)
                except Error as error:
                    self._events.report(volume_id, "supply_failed", reason=error.reason)

    async def _changed(self) -> set[str]:
        """Return the volumes whose descriptor isn't the one that was applied last.

        Those that can't be asked about are reported.
        """
        asked = [each for each, attached in self._attached.items() if not attached.is_withdrawn]
        changed = set()
        for start in range(0, len(asked), ASKED_AT_ONCE):
            chunk = asked[start : start + ASKED_AT_ONCE]
            try:
                found = await self._broker.descriptors_of(chunk)
            except Error as error:
                for volume_id in chunk:
                    self._events.report(volume_id, "supply_failed", reason=error.reason)
                continue
            for volume_id in chunk:
                attached = self._attached.get(volume_id)
                if attached is None:
                    continue
                # A target that isn't listed may be by now.
                is_new = volume_id not in found or found[volume_id] != attached.followed
                if is_new or attached.unlisted_target:
                    changed.add(volume_id)
        return changed

    async def follow(self, volume_id: str) -> None:
        """Switch an attached volume to its newest key epoch now."""
        attached = self._attached.get(volume_id)
        if attached is not None:
            await self._follow(volume_id, attached)

    def _is_attached(self, volume_id: str, attached: Attached) -> bool:
        """Return whether this attachment still exists; checked after each wait."""
        return self._attached.get(volume_id) is attached

    def _needs_refill(self, volume_id: str, attached: Attached) -> bool:
        if attached.is_read_only or attached.is_withdrawn:
            return False
        if not self._is_attached(volume_id, attached):
            return False
        return attached.leases.needs_refill(attached.port.counters_remaining())

    async def _refill(self, volume_id: str, attached: Attached) -> None:
        try:
            granted = await self._broker.lease(attached.descriptor)
        except Error as error:
            if error.reason != "volume.key_epoch":
                raise
            await self._follow(volume_id, attached)
            return
        attached.leases.add(granted)
        if self._is_attached(volume_id, attached):
            attached.port.add_counters([granted.counters])

    async def _follow(self, volume_id: str, attached: Attached) -> None:
        """Apply the current descriptor of a volume."""
        async with attached.following:
            await self._apply(volume_id, attached)

    async def _apply(self, volume_id: str, attached: Attached) -> None:
        descriptor = None
        try:
            descriptor = await self._broker.descriptor(volume_id)
        except UsageError as error:
            if error.reason != "volume.not_found":
                raise
        if not self._is_attached(volume_id, attached):
            return
        if descriptor is None:
            _withdraw(attached, "it was deleted, or is no longer shared with this tenant")
            return
        if is_read_only(descriptor, self._tenant()) and not attached.is_read_only:
            _withdraw(attached, "it became read-only: attach it again")
            return
        self._follow_place(volume_id, attached, descriptor)
        if descriptor.key_epoch > attached.descriptor.key_epoch:
            await self._follow_key_epoch(volume_id, attached, _at(descriptor, attached.target))
        attached.followed = descriptor

    def _follow_place(
        self, volume_id: str, attached: Attached, descriptor: broker_pb2.VolumeDescriptor
    ) -> None:
        """Open queues at the volume's new target from now on, if its device has moved.

        One that isn't configured is reported once, and followed when a reload has added it.
        """
        place, node = attached.back_end.place, descriptor.target_node
        if place is None or node == place.node:
            attached.unlisted_target = ""
        elif node in self._targets():
            self._events.report(volume_id, "target_changed", detail=f"{place.node} to {node}")
            place.move(node)
            attached.descriptor = _at(attached.descriptor, node)
            attached.unlisted_target = ""
        elif node != attached.unlisted_target:
            attached.unlisted_target = node
            self._events.report(
                volume_id,
                "target_unknown",
                reason="volume.target.unknown",
                detail=f"the volume's device has moved to target {node!r}, which this gateway's "
                "configuration doesn't list: add it to gateway.targets and reload",
            )

    async def _follow_key_epoch(
        self, volume_id: str, attached: Attached, descriptor: broker_pb2.VolumeDescriptor
    ) -> None:
        """Seal under the volume's newest key from now on, with counters leased for it."""
        before = attached.descriptor
        async with released_keys(self._broker, descriptor, above=before.key_epoch) as keys:
            lease = None if attached.is_read_only else await self._broker.lease(descriptor)
            if not self._is_attached(volume_id, attached):
                return
            for epoch in sorted(keys):
                attached.port.add_key(epoch, keys[epoch])
        attached.descriptor = descriptor
        self._events.report(
            volume_id, "key_epoch", detail=f"{before.key_epoch} to {descriptor.key_epoch}"
        )
        if lease is not None:
            holder, old = LeaseHolder(), attached.leases
            holder.add(lease)
            unused = attached.port.replace_counters([lease.counters])
            attached.leases = holder
            await self._leases.give_back(volume_id, old, unused)


def _at(descriptor: broker_pb2.VolumeDescriptor, node: str) -> broker_pb2.VolumeDescriptor:
    """Return a copy of a descriptor that names `node` as the target."""
    copied = broker_pb2.VolumeDescriptor()
    copied.CopyFrom(descriptor)
    copied.target_node = node
    return copied


def is_read_only(descriptor: broker_pb2.VolumeDescriptor, tenant: str) -> bool:
    """Return whether gateways of `tenant`, which may use the volume, may only read it."""
    if descriptor.tenant == tenant:
        return False
    return not any(s.tenant == tenant and not s.read_only for s in descriptor.shares)


def _withdraw(attached: Attached, why: str) -> None:
    """Fail a volume that this gateway may no longer use in this way."""
    attached.is_withdrawn = True
    attached.port.fail("volume.withdrawn", why)
