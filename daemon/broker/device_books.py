"""Operator's side of devices: authorize new ones, move them, forget them."""

import datetime as dt
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.devices import (
    FENCE,
    anchor_records,
    check_node,
    check_room,
    drop_anchor,
)
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.keyring import UNNAMED
from sealane.daemon.broker.membership import unseen_node
from sealane.daemon.broker.records import (
    DeviceRecord,
    DeviceRequestRecord,
    Opening,
    Stored,
    VolumeRecord,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import PAGE_ENTRIES_MAX
from sealane.daemon.device.anchors.anchor import Anchored
from sealane.daemon.runtime.calls import page_limit
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UsageError
from sealane.protocol.kinds import AnchorKind, DeviceState

# A page token names one of the two tables and the last name of the page.
_DEVICES: Final = "d"
_REQUESTS: Final = "r"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A device's current state; `device_id` is None for "the next device that the node shows"."""

    device_id: uuid.UUID | None
    owner: str
    fencing_epoch: int
    anchor: str
    state: DeviceState
    opened_at: dt.datetime | None
    is_volume: bool = False


class DeviceBooks:
    """The devices of one authority, for the operator of one of its brokers."""

    def __init__(
        self,
        registry: Registry,
        *,
        cover: Cover,
        audit: Audit,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self.audit = audit
        self._registry = registry
        self._cover = cover
        self._now = now

    async def entries(self, *, page_size: int, page_token: str) -> tuple[list[Entry], str]:
        """Return a page of devices, then of nodes that ask for one; and the next page's token."""
        limit = page_limit(page_size)
        kind, _, after = (page_token or f"{_DEVICES}:").partition(":")
        if kind == _DEVICES:
            devices, has_more = await self._registry.devices.page(after=after, limit=limit)
            token = f"{_DEVICES}:{devices[-1].name}" if has_more else f"{_REQUESTS}:"
            return [self._entry(each.record) for each in devices], token
        requests, has_more = await self._registry.device_requests.page(after=after, limit=limit)
        return (
            [_request_entry(each.name, each.record) for each in requests],
            f"{_REQUESTS}:{requests[-1].name}" if has_more else "",
        )

    async def details(
        self, device_id: uuid.UUID
    ) -> tuple[Entry, list[tuple[str, Anchored]], list[uuid.UUID]]:
        """Return a device, its anchor records in the store, and its volumes; `device.not_found`."""
        record = (await self._known(device_id)).record
        volumes = [each.record.volume_id async for each in self._volumes(device_id)]
        return self._entry(record), await anchor_records(self._registry, device_id), volumes

    async def authorize(self, device_id: uuid.UUID) -> None:
        """Authorize a device that a node has shown and that was refused; `device.not_found`."""
        requests = self._registry.device_requests

        async def attempt() -> str | None:
            request = await self._asking(device_id)
            node = request.name
            await check_room(self._registry, node)
            record, same_key = await self._registry.new_device(device_id, owner=node)
            table, name = self._registry.devices, str(device_id)
            revision = await self._registry.commit(
                [table.unchanged(name, None), requests.unchanged(node, request), same_key],
                table.sealed(name, record),
                [requests.key(node)],
            )
            return None if revision is None else node

        node = await self._registry.settle(attempt)
        await self._note("device.init", device_id=str(device_id), node=node)

    async def authorize_next(self, node: str) -> None:
        """Authorize the next unknown device that `node` shows."""
        check_node(node)
        requests = self._registry.device_requests

        async def attempt() -> int | None:
            record = DeviceRequestRecord(is_next_authorized=True)
            return await self._registry.commit(
                [requests.unchanged(node, await requests.get(node))], requests.sealed(node, record)
            )

        await self._registry.settle(attempt)
        await self._note("device.init", device_id="", node=node)

    async def believe_anew(self, device_id: uuid.UUID) -> None:
        """Drop a known device's anchor: the state found at the next opening is accepted."""
        revision, owner = await self._change(
            device_id,
            lambda record: {
                "is_initialised": False,
                "fencing_epoch": record.fencing_epoch + 1,
                # The process that had it before a move is waited for in any case.
                "opening": record.opening if _is_ending(record) else None,
            },
        )
        await self._drop_anchor(device_id)
        await self._cover(revision)
        await self._note("device.init", device_id=str(device_id), node=owner, anew=True)

    async def move(self, device_id: uuid.UUID, node: str, *, unseen: bool = False) -> None:
        """Give a device and its volumes to another node; the old owner is refused from now on.

        A repeated call completes one that was interrupted. UsageError `node.not_found` if the node
        never attested in the device's role, unless `unseen` allows that.
        """
        check_node(node)
        stored = await self._known(device_id)
        role = stored.record.role
        if not unseen and await self._registry.nodes.get(f"{role}/{node}") is None:
            raise unseen_node(node, [role])
        if stored.record.owner != node and not stored.record.is_volume:
            await check_room(self._registry, node)
        revision, _ = await self._change(
            device_id,
            lambda record: (
                {}
                if record.owner == node
                else {
                    "owner": node,
                    "fencing_epoch": record.fencing_epoch + 1,
                    "opening": self._ending(record),
                    # An anchor that is kept by a machine stays with that machine.
                    "is_initialised": record.is_initialised and record.anchor == AnchorKind.BROKER,
                }
            ),
        )
        async for volume in self._volumes(device_id):
            await self._move_volume(volume.record.volume_id, node)
        await self._cover(max(revision, await self._registry.store.revision()))
        await self._note(
            "device.move", device_id=str(device_id), node=node, owner_before=stored.record.owner
        )

    async def forget(self, device_id: uuid.UUID) -> None:
        """Refuse a device permanently; drop its secret and anchor.

        UsageError `device.volumes.state` if it still has volumes.
        """
        async for volume in self._volumes(device_id):
            raise UsageError(
                "device.volumes.state",
                f"volume {volume.record.volume_id} is on device {device_id}: delete the volumes "
                "of the device first",
            )
        stored = await self._registry.devices.get(str(device_id))
        if (
            stored
            and stored.record.is_forgotten
            and await anchor_records(self._registry, device_id)
        ):
            # An earlier call ended before the anchor was dropped.
            revision, owner = stored.revision, stored.record.owner
        else:
            revision, owner = await self._change(
                device_id,
                lambda record: {
                    "is_forgotten": True,
                    "wrapped_secret": b"",
                    "key_id": UNNAMED,
                    "fencing_epoch": record.fencing_epoch + 1,
                    "opening": None,
                },
            )
        await self._drop_anchor(device_id)
        await self._cover(revision)
        await self._note("device.forget", device_id=str(device_id), node=owner)

    def _entry(self, record: DeviceRecord) -> Entry:
        return Entry(
            device_id=record.device_id,
            owner=record.owner,
            fencing_epoch=record.fencing_epoch,
            anchor=record.anchor or "",
            state=_state(record, self._now()),
            opened_at=record.opened_at,
            is_volume=record.is_volume,
        )

    def _ending(self, record: DeviceRecord) -> Opening | None:
        """Return the opening that a move (or the like) ends, with the time by which it ends."""
        if record.opening is None:
            return None
        until = record.opening.until or self._now() + FENCE
        return record.opening.model_copy(update={"until": until})

    async def _known(self, device_id: uuid.UUID) -> Stored[DeviceRecord]:
        stored = await self._registry.devices.get(str(device_id))
        if stored is None or stored.record.is_forgotten:
            raise UsageError("device.not_found", f"there is no device {device_id}")
        return stored

    async def _change(
        self, device_id: uuid.UUID, update: Callable[[DeviceRecord], dict[str, object]]
    ) -> tuple[int, str]:
        """Change a device's record; return the revision and the owner before the change."""
        table, served = self._registry.devices, self._registry.served

        async def attempt() -> tuple[int, str] | None:
            stored = await self._known(device_id)
            owner = stored.record.owner
            update_now = update(stored.record)
            if not update_now:
                return stored.revision, owner
            mine = await served.get(owner)
            is_served = mine is not None and mine.record.device_id == device_id
            revision = await self._registry.commit(
                [table.unchanged(stored.name, stored), served.unchanged(owner, mine)],
                table.sealed(stored.name, stored.record.model_copy(update=update_now)),
                [served.key(owner)] if is_served else [],
            )
            return None if revision is None else (revision, owner)

        return await self._registry.settle(attempt)

    async def _asking(self, device_id: uuid.UUID) -> Stored[DeviceRequestRecord]:
        after, has_more = "", True
        while has_more:
            page, has_more = await self._registry.device_requests.page(
                after=after, limit=PAGE_ENTRIES_MAX
            )
            for each in page:
                if each.record.device_id == device_id:
                    return each
                after = each.name
        raise UsageError(
            "device.not_found",
            f"no target has asked for device {device_id}; see sealanectl device list",
        )

    async def _volumes(self, device_id: uuid.UUID) -> AsyncIterator[Stored[VolumeRecord]]:
        async for each in self._registry.volumes.records():
            if each.record.device_id == device_id and not each.record.is_deleted:
                yield each

    async def _move_volume(self, volume_id: uuid.UUID, node: str) -> None:
        table, name = self._registry.volumes, str(volume_id)

        async def attempt() -> bool | None:
            stored = await table.get(name)
            if stored is None or stored.record.target_node == node:
                return True
            moved = stored.record.model_copy(update={"target_node": node})
            revision = await self._registry.commit(
                [table.unchanged(name, stored)], table.sealed(name, moved)
            )
            return None if revision is None else True

        await self._registry.settle(attempt)

    async def _drop_anchor(self, device_id: uuid.UUID) -> None:
        """Remove its records; no process has the device open, so no records are added meanwhile."""
        stored = await self._registry.devices.get(str(device_id))
        if stored is not None:
            await drop_anchor(self._registry, stored.record)

    async def _note(self, kind: str, **detail: str | bool) -> None:
        await self.audit.record(kind, subject="operator", outcome="done", reason="", **detail)
        get_logger().warning(kind.replace(".", "_"), **detail)


def _is_ending(record: DeviceRecord) -> bool:
    """Return whether the device was moved while open and its old opening may not have ended."""
    return record.opening is not None and record.opening.until is not None


def _state(record: DeviceRecord, now: dt.datetime) -> DeviceState:
    opening = record.opening
    if record.is_forgotten:
        return DeviceState.FORGOTTEN
    if opening is not None and opening.until is not None:
        return DeviceState.WAITING if now < opening.until else DeviceState.CLOSED
    if not record.is_initialised:
        return DeviceState.NEW
    return DeviceState.CLOSED if opening is None else DeviceState.OPEN


def _request_entry(node: str, record: DeviceRequestRecord) -> Entry:
    return Entry(
        device_id=record.device_id,
        owner=node,
        fencing_epoch=0,
        anchor=record.anchor or "",
        state=DeviceState.AUTHORIZED if record.is_next_authorized else DeviceState.ASKING,
        opened_at=None,
    )
