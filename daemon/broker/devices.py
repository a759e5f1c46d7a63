"""Devices (devices.md): the store directories of targets, each with one owner and one anchor.

A volume on a third party is also a device, under the volume's id; its owner is its gateway.

The process with a device's newest fencing epoch serves it. Every change compares the device's
record, so an opening or a move ends whatever was in progress under an older epoch. After a move
nobody may open the device until the process that had it open has closed it, or must have stopped
because it gets no authorizations.
"""

import asyncio
import datetime as dt
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sealane.crypto.certificates import NAME_PATTERN, SKEW, Subject
from sealane.crypto.exchange import wipe
from sealane.crypto.hpke import Context, SignedSecret, seal_signed
from sealane.crypto.queue import GROUP_BYTES
from sealane.crypto.roles import Role
from sealane.daemon.broker.audit import Audit
from sealane.daemon.broker.instance import Cover
from sealane.daemon.broker.records import (
    AnchorRecord,
    DeviceRecord,
    DeviceRequestRecord,
    Opening,
    ServedRecord,
    Stored,
)
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import COMMIT_CHANGES_MAX, Compare
from sealane.daemon.broker.volume_access import own_volume
from sealane.daemon.config import AUTHORIZATION_SECONDS
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchored, Change, check_changes
from sealane.daemon.device.openings import FENCED, FORGOTTEN, MISMATCH, MOVED, OWNER_REFUSED
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.volume.jobs import REASON_MAX, REASONS_MAX
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind, JobKind
from sealane.protocol.nvme.nqn import NQN_BYTES_MAX
from sealane.protocol.v1 import devices_pb2

DeviceInit = Literal["first-come", "authorized"]
DEVICES_PER_NODE_MAX: Final = 16
FOUND_MAX: Final = 1024
FENCE: Final = dt.timedelta(seconds=AUTHORIZATION_SECONDS) + SKEW
"""After this time, by any broker's clock, the previous server of a device has stopped: its engine
does nothing without an authorization, and it no longer gets any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Result of an opening: the serialized state, and the device secret sealed with it."""

    state: bytes
    secret: SignedSecret


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings of a job on a device: their number, and the reason ids."""

    volume_id: uuid.UUID
    job: JobKind
    found: int
    repaired: int
    reasons: tuple[str, ...]


class Devices:
    """Operations on devices for their owners; operators use `DeviceBooks`."""

    def __init__(
        self,
        registry: Registry,
        *,
        init: DeviceInit,
        cover: Cover,
        audit: Audit,
        metrics: Metrics,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        self.audit = audit
        self._registry = registry
        self._init = init
        self._cover = cover
        self._metrics = metrics
        self._now = now
        if init == "first-come":
            get_logger().warning(
                "device_init_first_come",
                message="any unknown device that a target shows is accepted as it is: anyone who "
                "can empty a target's directory can make a new device of it; for development only",
            )

    async def open(
        self,
        caller: Subject,
        *,
        device_id: uuid.UUID,
        anchor: str,
        found: Sequence[bytes],
        request_id: bytes,
    ) -> Opened:
        """Make the caller the only process that serves the device, and release its secret to it.

        `found` are candidates for the catalogue's blob. VerificationError `device.init.refused`
        (unknown and not authorized), `device.owner.refused`, `device.forgotten`,
        `device.anchor.mismatch`. UnavailableError `device.busy`: the previous owner may still serve
        it.
        """
        kind = _kind(anchor)
        if len(found) > FOUND_MAX:
            raise UsageError(
                "device.request", f"{len(found)} states found; allowed: at most {FOUND_MAX}"
            )
        name = str(device_id)

        async def attempt() -> DeviceRecord | None:
            stored = await self._registry.devices.get(name)
            if stored is None:
                return await self._created(caller, device_id, kind)
            self._check_may_open(stored.record, caller, kind)
            compares = [self._registry.devices.unchanged(name, stored)]
            if stored.record.is_volume:
                # The caller that opens the store compares it with the anchor after this.
                await own_volume(self._registry, caller, name)
            elif kind == AnchorKind.BROKER and stored.record.is_initialised:
                compares.append(await self._check_found(device_id, found))
            return await self._opened(stored.record, caller, kind, compares=compares)

        record = await self._registry.settle(attempt)
        if not record.is_initialised:
            # What is found is accepted, and nothing that remains from before.
            record = await drop_anchor(self._registry, record)
        opened = await self._release(record, caller, request_id)
        await self.audit.record(
            "device.open",
            subject=caller.spiffe_id,
            outcome="granted",
            device_id=name,
            fencing_epoch=record.fencing_epoch,
            anchor=kind,
            is_initial=not record.is_initialised,
            incarnation=caller.incarnation,
        )
        return opened

    async def confirm(self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int) -> None:
        """Accept only anchored state from now on."""

        async def attempt() -> int | None:
            stored = await self._held(caller, device_id, fencing_epoch)
            return await self._commit(stored, is_initialised=True)

        # After a rollback of the broker's store, the found state must not be accepted again.
        await self._cover(await self._registry.settle(attempt))

    async def advance(
        self,
        caller: Subject,
        *,
        device_id: uuid.UUID,
        fencing_epoch: int,
        changes: Sequence[Change],
    ) -> None:
        """Change records of the anchor, all or none; errors as `Anchor.advance` and `check`."""
        check_changes(changes)
        table = self._registry.anchors

        async def attempt() -> bool | None:
            stored = await self._held(caller, device_id, fencing_epoch)
            names = [f"{device_id}/{change.name}" for change in changes]
            found = await asyncio.gather(*map(table.get, names))
            compares = [self._registry.devices.unchanged(stored.name, stored)]
            puts: dict[str, bytes] = {}
            deletes: list[str] = []
            floor = stored.record.anchor_floor
            gone = floor
            for name, change, before in zip(names, changes, found, strict=True):
                if not change.is_due(_anchored(before), floor=floor):
                    continue
                compares.append(table.unchanged(name, before))
                if change.record is None:
                    # Its number stays taken: no older record can be anchored again.
                    gone = max(gone, 0 if before is None else before.record.number)
                    deletes.append(table.key(name))
                    continue
                if before is None:
                    await self._check_volume(stored.record, change.name)
                puts |= table.sealed(name, _stored(change.record))
            if gone > floor:
                after = stored.record.model_copy(update={"anchor_floor": gone})
                puts |= self._registry.devices.sealed(stored.name, after)
            if not puts and not deletes:
                return True
            return None if await self._registry.commit(compares, puts, deletes) is None else True

        await self._registry.settle(attempt)
        self._metrics.broker.anchors_advanced.inc(len(changes))

    async def close(self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int) -> None:
        """End the caller's opening of the device. Idempotent."""

        async def attempt() -> bool | None:
            stored = await self._registry.devices.get(str(device_id))
            opening = None if stored is None else stored.record.opening
            if stored is None or opening is None or not _is_of(opening, caller, fencing_epoch):
                return True
            return None if await self._commit(stored, opening=None) is None else True

        await self._registry.settle(attempt)

    async def record_findings(
        self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int, findings: Findings
    ) -> None:
        """Record what a job found wrong; UsageError `device.request`, errors of `check`."""
        is_long = any(len(reason) > REASON_MAX for reason in findings.reasons)
        if len(findings.reasons) > REASONS_MAX or is_long:
            raise UsageError(
                "device.request",
                f"{len(findings.reasons)} reasons; allowed: at most {REASONS_MAX}, each of at "
                f"most {REASON_MAX} characters",
            )
        await self._held(caller, device_id, fencing_epoch)
        await self.audit.record(
            "device.findings",
            subject=caller.spiffe_id,
            outcome="done",
            device_id=str(device_id),
            volume_id=str(findings.volume_id),
            job=findings.job,
            found=findings.found,
            repaired=findings.repaired,
            reasons=[*findings.reasons],
        )

    async def record_take_over(
        self,
        caller: Subject,
        *,
        device_id: uuid.UUID,
        fencing_epoch: int,
        volume_id: uuid.UUID,
        take_over: TakeOver,
    ) -> None:
        """Record a take-over; UsageError `device.request`, errors of `check`."""
        longest = max(len(nqn.encode()) for nqn in (take_over.host_nqn, take_over.fenced))
        if len(take_over.group) != GROUP_BYTES or longest > NQN_BYTES_MAX:
            raise UsageError(
                "device.request",
                f"a group's name of {len(take_over.group)} bytes, an NQN of {longest}; allowed: "
                f"{GROUP_BYTES}, and at most {NQN_BYTES_MAX}",
            )
        if not NAME_PATTERN.fullmatch(take_over.tenant):
            raise UsageError("device.request", "the tenant's name is malformed")
        await self._held(caller, device_id, fencing_epoch)
        await self.audit.record(
            "device.take_over",
            subject=caller.spiffe_id,
            outcome="done",
            device_id=str(device_id),
            volume_id=str(volume_id),
            tenant=take_over.tenant,
            group=take_over.group.hex(),
            gateway=take_over.host_nqn,
            fenced=take_over.fenced,
            term=take_over.term,
            cause=take_over.cause,
            accepts_loss=take_over.accepts_loss,
        )

    async def check(self, caller: Subject, *, device_id: uuid.UUID, fencing_epoch: int) -> None:
        """Raise VerificationError unless the caller's opening of the device is still valid.

        `device.owner.refused`, `device.forgotten`, `device.moved`, `device.fenced`.
        """
        await self._held(caller, device_id, fencing_epoch)

    async def _created(
        self, caller: Subject, device_id: uuid.UUID, kind: AnchorKind
    ) -> DeviceRecord | None:
        if caller.role != Role.TARGET:
            raise UsageError("volume.not_found", f"there is no volume {device_id} with an anchor")
        requests = self._registry.device_requests
        request = await requests.get(caller.node)
        is_next = request is not None and request.record.is_next_authorized
        if self._init != "first-come" and not is_next:
            asks = DeviceRequestRecord(device_id=device_id, anchor=kind)
            await self._registry.commit(
                [requests.unchanged(caller.node, request)], requests.sealed(caller.node, asks)
            )
            raise VerificationError(
                "device.init.refused",
                f"device {device_id} of target {caller.node} is unknown: if it is new and empty, "
                f"run sealanectl device init {device_id} at the broker",
            )
        await check_room(self._registry, caller.node)
        fresh, same_key = await self._registry.new_device(device_id, owner=caller.node)
        compares = [
            same_key,
            self._registry.devices.unchanged(str(device_id), None),
            requests.unchanged(caller.node, request),
        ]
        deletes = [] if request is None else [requests.key(caller.node)]
        return await self._opened(fresh, caller, kind, compares=compares, deletes=deletes)

    def _check_may_open(self, record: DeviceRecord, caller: Subject, kind: AnchorKind) -> None:
        _check_owner(record, caller)
        opening = record.opening
        if opening is not None and opening.until is not None and self._now() < opening.until:
            raise UnavailableError(
                "device.busy",
                f"device {record.device_id} may still be served by {opening.node} until "
                f"{opening.until:%H:%M:%S} UTC: try again then",
            )
        if (record.is_initialised or record.is_volume) and record.anchor != kind:
            raise VerificationError(
                MISMATCH,
                f"device {record.device_id} is anchored by {record.anchor}, not by {kind}: "
                "sealanectl device init --anew changes that",
            )

    async def _check_found(self, device_id: uuid.UUID, found: Sequence[bytes]) -> Compare:
        table, name = self._registry.anchors, f"{device_id}/{CATALOGUE}"
        kept = await table.get(name)
        if kept is None or kept.record.blob not in found:
            raise VerificationError(
                MISMATCH,
                f"what was found on device {device_id} is not what was anchored: its list of "
                "volumes was changed or rolled back",
            )
        return table.unchanged(name, kept)

    async def _opened(
        self,
        record: DeviceRecord,
        caller: Subject,
        kind: AnchorKind,
        *,
        compares: Sequence[Compare],
        deletes: Sequence[str] = (),
    ) -> DeviceRecord | None:
        epoch = record.fencing_epoch + 1
        opening = Opening(node=caller.node, incarnation=caller.incarnation, fencing_epoch=epoch)
        after = record.model_copy(
            update={
                "fencing_epoch": epoch,
                "anchor": kind,
                "opening": opening,
                "opened_at": self._now(),
            }
        )
        puts = self._registry.devices.sealed(str(record.device_id), after)
        if not record.is_volume:
            served = ServedRecord(device_id=record.device_id, incarnation=caller.incarnation)
            puts |= self._registry.served.sealed(caller.node, served)
        revision = await self._registry.commit(compares, puts, deletes)
        return None if revision is None else after

    async def _release(self, record: DeviceRecord, caller: Subject, request_id: bytes) -> Opened:
        """Seal the secret to the caller, bound to the state at this opening."""
        state = devices_pb2.DeviceState(
            device_id=str(record.device_id),
            fencing_epoch=record.fencing_epoch,
            is_initial=not record.is_initialised,
            records=[
                devices_pb2.AnchorRecord(
                    name=name, number=each.number, blob=each.blob, mac=each.mac
                )
                for name, each in await anchor_records(self._registry, record.device_id)
            ],
            floor=record.anchor_floor,
        ).SerializeToString(deterministic=True)
        secret = self._registry.device_secret(record)
        try:
            sealed = seal_signed(
                secret,
                recipient_key=caller.kem_public_key,
                kem_algorithm=caller.kem_algorithm,
                context=Context(
                    purpose="device secret",
                    recipient=caller.spiffe_id,
                    incarnation=caller.incarnation,
                    request_id=request_id,
                    volume_id=str(record.device_id),
                    key_epoch=record.fencing_epoch,
                    beside=hashlib.sha256(state).digest(),
                ),
                signing_key=self._registry.authority.signing_key,
            )
        finally:
            wipe(secret)
        return Opened(state=state, secret=sealed)

    async def _held(
        self, caller: Subject, device_id: uuid.UUID, fencing_epoch: int
    ) -> Stored[DeviceRecord]:
        stored = await self._registry.devices.get(str(device_id))
        if stored is None:
            raise VerificationError(FENCED, f"device {device_id} is not open")
        _check_owner(stored.record, caller)
        opening = stored.record.opening
        # An ended opening is not valid again if its node becomes the device's owner once more.
        if opening is None or not _is_of(opening, caller, fencing_epoch):
            raise VerificationError(
                FENCED,
                f"fencing epoch {fencing_epoch} of device {device_id} is over: it was opened "
                "again, closed or moved",
            )
        if opening.until is not None:
            raise VerificationError(
                MOVED, f"device {device_id} was moved away and back: open it again"
            )
        return stored

    async def _check_volume(self, record: DeviceRecord, name: str) -> None:
        """Raise unless a new record is the catalogue's or belongs to a volume on the device."""
        if name == CATALOGUE and not record.is_volume:
            return
        volume_id = name.partition("/")[2]
        # Deleted volumes included: an update for one may arrive late, and must not end the device.
        stored = await self._registry.volumes.get(volume_id)
        if stored is None:
            raise UsageError("volume.not_found", f"there is no volume {volume_id}")
        volume = stored.record
        devices = {record.device_id} if record.is_volume else {None, record.device_id}
        if volume.device_id not in devices or volume.target_node != record.owner:
            raise VerificationError(
                "device.volume.refused",
                f"volume {volume.volume_id} is not on device {record.device_id}",
            )

    async def _commit(self, stored: Stored[DeviceRecord], **update: object) -> int | None:
        table = self._registry.devices
        return await self._registry.commit(
            [table.unchanged(stored.name, stored)],
            table.sealed(stored.name, stored.record.model_copy(update=update)),
        )


async def check_room(registry: Registry, node: str) -> None:
    """Raise UnavailableError `device.limit` if a node owns DEVICES_PER_NODE_MAX devices."""
    owned = 0
    async for each in registry.devices.records():
        is_device = not (each.record.is_forgotten or each.record.is_volume)
        owned += each.record.owner == node and is_device
    if owned >= DEVICES_PER_NODE_MAX:
        raise UnavailableError(
            "device.limit",
            f"target {node} owns {owned} devices; allowed: {DEVICES_PER_NODE_MAX}. Forget some of "
            "them",
        )


async def anchor_records(registry: Registry, device_id: uuid.UUID) -> list[tuple[str, Anchored]]:
    """Return all anchor records of a device that the brokers keep, by name."""
    within = f"{device_id}/"
    return [
        (each.name.removeprefix(within), _kept(each.record))
        async for each in registry.anchors.records(within=within)
    ]


async def drop_anchor(registry: Registry, record: DeviceRecord) -> DeviceRecord:
    """Remove all of a device's anchor records; return the device's record.

    The numbers of the removed records stay taken. VerificationError `device.fenced` if the device
    was changed since `record`.
    """
    table, name = registry.devices, str(record.device_id)
    records = await anchor_records(registry, record.device_id)
    if not records:
        return record
    stored = await table.get(name)
    if stored is None or stored.record != record:
        raise VerificationError(FENCED, f"device {name} was opened or changed in the meantime")
    floor = max(record.anchor_floor, *(each.number for _, each in records))
    after = record.model_copy(update={"anchor_floor": floor})
    # Numbers first: a crash in between leaves records that the next call removes.
    if await registry.commit([table.unchanged(name, stored)], table.sealed(name, after)) is None:
        raise VerificationError(FENCED, f"device {name} was opened or changed in the meantime")
    keys = [registry.anchors.key(f"{name}/{each}") for each, _ in records]
    for start in range(0, len(keys), COMMIT_CHANGES_MAX):
        await registry.commit(deletes=keys[start : start + COMMIT_CHANGES_MAX])
    return after


def check_node(node: str) -> None:
    """Raise UsageError `node.malformed` unless `node` is a valid node name."""
    if NAME_PATTERN.fullmatch(node) is None:
        raise UsageError("node.malformed", f"node {node[:80]!r}; allowed: the name of a node")


def _check_owner(record: DeviceRecord, caller: Subject) -> None:
    if record.is_forgotten:
        raise VerificationError(
            FORGOTTEN,
            f"device {record.device_id} was forgotten: empty its directory to make a new device "
            "of it",
        )
    if (record.owner, record.role) != (caller.node, caller.role):
        raise VerificationError(
            OWNER_REFUSED,
            f"device {record.device_id} doesn't belong to {caller.role} {caller.node}",
        )


def _is_of(opening: Opening, caller: Subject, fencing_epoch: int) -> bool:
    mine = (caller.node, caller.incarnation, fencing_epoch)
    return (opening.node, opening.incarnation, opening.fencing_epoch) == mine


def _kind(anchor: str) -> AnchorKind:
    try:
        return AnchorKind(anchor)
    except ValueError:
        raise UsageError(
            "device.request", f"anchor {anchor[:80]!r}; allowed: {', '.join(AnchorKind)}"
        ) from None


def _anchored(stored: Stored[AnchorRecord] | None) -> Anchored | None:
    if stored is None:
        return None
    return _kept(stored.record)


def _kept(record: AnchorRecord) -> Anchored:
    return Anchored(number=record.number, blob=record.blob, mac=record.mac)


def _stored(record: Anchored) -> AnchorRecord:
    return AnchorRecord(number=record.number, blob=record.blob, mac=record.mac)
