"""The state of the brokers of one authority, as typed records in any store.

All state of a broker that outlives its process is here. Each change is one commit that compares the
records that it was derived from; if a comparison fails, the change is derived again. Several
brokers may share one store; none of them leads.
"""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from sealane.crypto.certificates import CertificateAuthority
from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KeyWrapper, derive_volume_key, new_key
from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.broker.authority import (
    AUTHORITY_KEY,
    AuthorityNaming,
    authority_entry,
    check_has,
    new_authority,
    opened_signer,
    parse_authority,
    same_authority,
)
from sealane.daemon.broker.keyring import UNNAMED, Keyring
from sealane.daemon.broker.records import (
    AuthorityRecord,
    DeviceRecord,
    GrantRecord,
    RequestRecord,
    ShareRecord,
    Stored,
    Tables,
    TenantKeyRecord,
    TenantKeyUse,
    TenantRecord,
    VolumeRecord,
    grant_name,
    tenant_key_name,
)
from sealane.daemon.broker.store.checked import CheckedStore
from sealane.daemon.broker.store.contract import PAGE_ENTRIES_MAX, STATE_KEY, Compare, Store
from sealane.daemon.broker.store.state import SetHash
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.errors import LeaseError, UnavailableError, UsageError, VerificationError
from sealane.protocol.kinds import AnchorKind

VOLUMES_PER_TENANT_MAX: Final = 16384
TENANT_PURPOSE: Final = "tenant key"
DEVICE_PURPOSE: Final = "device secret"
"""Purposes of the wrapped keys of tenants and devices."""

_ATTEMPTS_MAX: Final = 64
_BACK_OFF_SECONDS: Final = 0.002
_BACK_OFF_SECONDS_MAX: Final = 0.25

_Result = TypeVar("_Result")


class Registry(Tables):
    """The records of one authority. `open` creates the authority at the very first start."""

    def __init__(
        self,
        store: CheckedStore,
        keys: Keyring,
        *,
        authorities: Authorities,
        opened_with: bytes,
    ) -> None:
        super().__init__(store, keys=store.record_keys)
        self.store = store
        self.authorities = authorities
        self.keys = keys
        self._opened_with = opened_with
        self._refreshing = asyncio.Lock()
        self.is_behind = False
        """Whether it can't sign, because it could not open the authority's present key."""

    @classmethod
    async def open(
        cls,
        store: Store,
        wrapping: KeyWrapper,
        next_key: KeyWrapper | None = None,
        *,
        node: str,
    ) -> "Registry":
        """Open the authority that the store's brokers share; the first broker creates it.

        New keys are wrapped under that of the two keys which the store names. VerificationError
        `key.wrap.invalid` under another key encryption key, `broker.store.rolled_back` if its
        records are not what brokers left. UsageError `broker.key.missing`: the store names a key
        that is neither of the two.
        """
        keys = Keyring([wrapping] if next_key is None else [wrapping, next_key])
        entry = await store.get(AUTHORITY_KEY)
        if entry is None:
            record, key = new_authority(wrapping, node)
            made = authority_entry(record)
            await store.commit(
                [Compare(AUTHORITY_KEY, 0), Compare(STATE_KEY, 0)], with_state(made, key)
            )
            # Created by this broker or by a faster one.
            entry = await store.get(AUTHORITY_KEY)
        if entry is None:
            raise VerificationError(
                "broker.store.rolled_back",
                "the store lost the authority that was just written to it",
            )
        record = parse_authority(entry)
        check_has(keys.ids, [record.key_id, record.previous_key_id])
        authority, key_id = opened_signer(
            record.wrapped_key, record.certificate, keys, key_id=record.key_id
        )
        checked = await CheckedStore.open(store, AuthorityNaming(keys))
        authorities = await asyncio.to_thread(Authorities, record, keys, authority)
        return cls(checked, keys, authorities=authorities, opened_with=key_id)

    @property
    def authority(self) -> CertificateAuthority:
        """The authority that signs now."""
        return self.authorities.signing

    async def refresh_authorities(self) -> bool:
        """Read which authorities there are; return whether that has changed.

        Errors of `authority_record` and `opened_signer`.
        """
        async with self._refreshing:
            record = (await self.authority_record()).record
            if self.authorities.is_of(record):
                return False
            # Needs no key, and ends the trust in an authority that was retired.
            self.authorities.trust(record)
            self.is_behind = True
            opened = await asyncio.to_thread(Authorities, record, self.keys)
            self.authorities.become(opened)
            self.is_behind = False
            return True

    async def authority_record(self) -> Stored[AuthorityRecord]:
        """Return the authority's record as it is now; VerificationError if it isn't a broker's."""
        entry = await self.store.get(AUTHORITY_KEY)
        if entry is None:
            raise VerificationError("broker.store.malformed", "the store has no authority")
        return Stored(parse_authority(entry), entry.revision, AUTHORITY_KEY)

    async def new_wrapping(self) -> tuple[KeyWrapper, bytes, Compare]:
        """Return the key to wrap a new key under, its id to store, and a compare.

        The commit that stores the new key must have the compare: it fails if another key encryption
        key was chosen in the meantime. UnavailableError `broker.key.missing`.
        """
        stored = await self.authority_record()
        return (
            self.keys.key(self.current_key(stored.record)),
            stored.record.key_id,
            same_authority(stored),
        )

    def current_key(self, record: AuthorityRecord) -> bytes:
        """Return the id of the key that new keys are wrapped under."""
        return self._opened_with if record.key_id == UNNAMED else record.key_id

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        """See `Store.commit`."""
        return await self.store.commit(compares, puts, deletes)

    async def close(self) -> None:
        """Close the store."""
        await self.store.close()

    async def settle(self, attempt: Callable[[], Awaitable[_Result | None]]) -> _Result:
        """Run `attempt`, which reads, compares and commits, until no other change intervenes.

        UnavailableError `broker.store.contended` after 64 attempts.
        """
        pause = _BACK_OFF_SECONDS
        for _ in range(_ATTEMPTS_MAX):
            result = await attempt()
            if result is not None:
                return result
            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311 - spreads competitors, no secret
            pause = min(2 * pause, _BACK_OFF_SECONDS_MAX)
        raise UnavailableError(
            "broker.store.contended",
            f"{_ATTEMPTS_MAX} attempts to change a record all conflicted with other changes: "
            "try again",
        )

    async def tenant_key(self, tenant: str, number: int) -> bytearray:
        """Return the tenant's key k_s of a number; the caller wipes it.

        The first one is created at its first use. VerificationError `broker.store.malformed`: the
        store has no key of that number.
        """

        async def attempt() -> Stored[TenantRecord] | None:
            stored = await self.tenants.get(tenant)
            if stored is not None:
                return stored
            wrapping, key_id, same_key = await self.new_wrapping()
            await self.commit(
                [self.tenants.unchanged(tenant, None), same_key],
                self.tenants.sealed(tenant, new_tenant(wrapping, tenant, key_id=key_id)),
            )
            return await self.tenants.get(tenant)

        present = (await self.settle(attempt)).record
        record: TenantRecord | TenantKeyRecord = present
        if number != present.key_number:
            former = await self.tenant_keys.get(tenant_key_name(tenant, number))
            if former is None:
                raise VerificationError(
                    "broker.store.malformed",
                    f"the store has no key {number} of tenant {tenant}; its present one is "
                    f"{present.key_number}",
                )
            record = former.record
        key, _ = self.keys.unwrap(
            record.wrapped_key,
            key_id=record.key_id,
            purpose=TENANT_PURPOSE,
            owner=tenant_key_owner(tenant, number),
        )
        return key

    async def volume_key(self, volume: VolumeRecord, key_epoch: int) -> bytearray:
        """Derive the key k_v of a key epoch of a volume; the caller wipes it.

        UsageError `volume.not_found`: it was deleted in the meantime, perhaps with the last need of
        its tenant's key.
        """
        number = volume.tenant_key_number(key_epoch)
        try:
            tenant_key = await self.tenant_key(volume.tenant, number)
        except VerificationError:
            await self.volume(volume.volume_id)
            raise
        try:
            return derive_volume_key(tenant_key, volume_id=volume.volume_id, key_epoch=key_epoch)
        finally:
            wipe(tenant_key)

    async def new_device(self, device_id: uuid.UUID, *, owner: str) -> tuple[DeviceRecord, Compare]:
        """Return the record of a device that was never opened, with a new secret, and a compare.

        The commit that stores it must have the compare (`new_wrapping`).
        """
        wrapping, key_id, same_key = await self.new_wrapping()
        secret = new_key()
        try:
            wrapped = wrapping.wrap(secret, purpose=DEVICE_PURPOSE, owner=str(device_id))
        finally:
            wipe(secret)
        return (
            DeviceRecord(device_id=device_id, owner=owner, wrapped_secret=wrapped, key_id=key_id),
            same_key,
        )

    def device_secret(self, record: DeviceRecord) -> bytearray:
        """Return a device's secret; the caller wipes it."""
        secret, _ = self.keys.unwrap(
            record.wrapped_secret,
            key_id=record.key_id,
            purpose=DEVICE_PURPOSE,
            owner=str(record.device_id),
        )
        return secret

    async def served_device(self, target_node: str) -> Stored[DeviceRecord] | None:
        """Return the device that the target's current process has open."""
        served = await self.served.get(target_node)
        member = await self.nodes.get(f"target/{target_node}")
        if (
            served is None
            or member is None
            or member.record.incarnation != served.record.incarnation
        ):
            return None
        return await self.devices.get(str(served.record.device_id))

    async def registered(self, tenant: str, request: uuid.UUID) -> uuid.UUID | None:
        """Return the volume that a request of a tenant registered; None if there is none."""
        known = await self.requests.get(f"{tenant}/{request}")
        return None if known is None else known.record.volume_id

    async def register(
        self, record: VolumeRecord, *, any_target: bool = False
    ) -> tuple[VolumeRecord, int]:
        """Store `record`, and return it with the store's revision.

        Return what the same request stored before with 0, and write it once more: it is no longer
        as it was registered (see `unregister`). With `any_target`, also what it stored on another
        target.

        A volume on a target is placed on the device that the target serves. A volume on a third
        party that names a device is a device itself, created here. UsageError
        `volume.request.exists` if the request asked for a different volume.
        """
        request = f"{record.tenant}/{record.request_id}"

        async def attempt() -> tuple[VolumeRecord, int] | None:
            known = await self.requests.get(request)
            if known is not None:
                stored = await self.volumes.get(str(known.record.volume_id))
                # Deleted in the meantime, and the request with it, as the next attempt will see.
                if stored is None or stored.record.is_deleted:
                    return None
                asked = known.record.sector_count or stored.record.sector_count
                place = stored.record.target_node if any_target else record.target_node
                wanted = record.model_copy(update={"target_node": place})
                if _wanted(stored.record, asked) != _wanted(wanted, record.sector_count):
                    raise UsageError(
                        "volume.request.exists",
                        "this request id was used for a different volume: use a new one",
                    )
                name = str(stored.record.volume_id)
                taken_up = await self.commit(
                    [self.volumes.unchanged(name, stored)],
                    self.volumes.sealed(name, stored.record),
                )
                return None if taken_up is None else (stored.record, 0)
            tenant = await self.tenants.get(record.tenant)
            compares: list[Compare] = []
            if tenant is None:
                wrapping, key_id, same_key = await self.new_wrapping()
                compares.append(same_key)
                before = new_tenant(wrapping, record.tenant, key_id=key_id)
            else:
                before = tenant.record
            if before.volume_count >= VOLUMES_PER_TENANT_MAX:
                raise UnavailableError(
                    "volume.limit",
                    f"tenant {record.tenant} has {before.volume_count} volumes; allowed: "
                    f"{VOLUMES_PER_TENANT_MAX}",
                )
            after = before.model_copy(update={"volume_count": before.volume_count + 1})
            name, made = str(record.volume_id), record
            if before.key_number:
                # The tenant's record is compared below: this is its present key at the commit.
                use = TenantKeyUse(first_key_epoch=1, number=before.key_number)
                made = record.model_copy(update={"tenant_key_uses": (use,)})
            compares += [
                self.requests.unchanged(request, None),
                self.tenants.unchanged(record.tenant, tenant),
                self.volumes.unchanged(name, None),
            ]
            puts: dict[str, bytes] = {}
            device = None if record.third_party else await self.served_device(record.target_node)
            if record.device_id is not None:
                fresh, same_key = await self._volume_device(record)
                # Of a new tenant it may be there already: a commit names each key once.
                compares = [
                    *dict.fromkeys([*compares, same_key]),
                    self.devices.unchanged(name, None),
                ]
                puts = self.devices.sealed(name, fresh)
            elif device is not None:
                # Conflicts with moving or forgetting the device.
                compares.append(self.devices.unchanged(device.name, device))
                made = made.model_copy(update={"device_id": device.record.device_id})
            revision = await self.commit(
                compares,
                {
                    **self.requests.sealed(
                        request,
                        RequestRecord(volume_id=record.volume_id, sector_count=record.sector_count),
                    ),
                    **self.tenants.sealed(record.tenant, after),
                    **self.volumes.sealed(name, made),
                    **puts,
                },
            )
            return None if revision is None else (made, revision)

        return await self.settle(attempt)

    async def volume(self, volume_id: uuid.UUID) -> Stored[VolumeRecord]:
        """Return a volume; UsageError `volume.not_found`."""
        stored = await self.volumes.get(str(volume_id))
        if stored is None or stored.record.is_deleted:
            raise UsageError("volume.not_found", f"there is no volume {volume_id}")
        return stored

    async def list_volumes(
        self, *, tenant: str | None, target_node: str | None, after: str, limit: int
    ) -> list[VolumeRecord]:
        """Return up to `limit` volumes a tenant may use or a target has, by id, after `after`."""
        found: list[VolumeRecord] = []
        has_more = True
        while has_more and len(found) < limit:
            page, has_more = await self.volumes.page(after=after, limit=PAGE_ENTRIES_MAX)
            found += [
                stored.record
                for stored in page
                if not stored.record.is_deleted
                and (tenant is None or stored.record.allows(tenant))
                and target_node in {None, stored.record.target_node}
            ]
            after = page[-1].name if page else after
        return found[:limit]

    async def change_volume(
        self, volume_id: uuid.UUID, change: Callable[[VolumeRecord], VolumeRecord]
    ) -> VolumeRecord:
        """Change a volume's record; UsageError `volume.not_found`, and errors of `change`."""

        async def attempt() -> VolumeRecord | None:
            stored = await self.volume(volume_id)
            changed = change(stored.record)
            revision = await self.commit(
                [self.volumes.unchanged(stored.name, stored)],
                self.volumes.sealed(stored.name, changed),
            )
            return None if revision is None else changed

        return await self.settle(attempt)

    async def finish_filling(self, volume_id: uuid.UUID) -> VolumeRecord:
        """Record that all sectors of a volume are sealed; UsageError `volume.not_found`."""
        return await self.change_volume(
            volume_id, lambda volume: volume.model_copy(update={"filling_gateway": ""})
        )

    async def share(self, volume_id: uuid.UUID, share: ShareRecord) -> VolumeRecord:
        """Set a share of a volume; UsageError `volume.not_found`, `volume.share.limit`."""
        return await self.change_volume(volume_id, lambda volume: volume.with_share(share))

    async def unregister(self, volume_id: uuid.UUID, *, registered_at: int = 0) -> int:
        """Mark a volume deleted, forget the request that created it; return the revision.

        With `registered_at`, only if its record is as that revision registered it: UsageError
        `volume.taken_up.state` if the registration was repeated, or something else has changed it.
        """

        async def attempt() -> int | None:
            name = str(volume_id)
            stored = await self.volumes.get(name)
            if stored is None or stored.record.is_deleted:
                return 0 if stored is None else stored.revision
            if registered_at and stored.revision != registered_at:
                raise UsageError(
                    "volume.taken_up.state",
                    f"volume {volume_id} has been used since it was registered",
                )
            before = stored.record
            tenant = await self.tenants.get(before.tenant)
            if tenant is None:
                raise VerificationError(
                    "broker.store.malformed",
                    f"volume {volume_id} belongs to a tenant that doesn't exist",
                )
            after = before.model_copy(update={"is_deleted": True, "request_id": None})
            device = await self.devices.get(name) if before.device_id == volume_id else None
            forgotten, gone = ({}, []) if device is None else self._forgotten(device)
            count = {"volume_count": max(tenant.record.volume_count - 1, 0)}
            request = f"{before.tenant}/{before.request_id}"
            return await self.commit(
                [
                    self.volumes.unchanged(name, stored),
                    self.tenants.unchanged(before.tenant, tenant),
                ],
                {
                    **self.volumes.sealed(name, after),
                    **self.tenants.sealed(before.tenant, tenant.record.model_copy(update=count)),
                    **forgotten,
                },
                gone if before.request_id is None else [*gone, self.requests.key(request)],
            )

        return await self.settle(attempt)

    async def _volume_device(self, record: VolumeRecord) -> tuple[DeviceRecord, Compare]:
        """Return the device record of a volume on a third party, never opened yet."""
        fresh, same_key = await self.new_device(record.volume_id, owner=record.target_node)
        update = {"anchor": AnchorKind.BROKER, "is_volume": True}
        return fresh.model_copy(update=update), same_key

    def _forgotten(self, device: Stored[DeviceRecord]) -> tuple[dict[str, bytes], list[str]]:
        """Return the puts and deletes for a commit that makes a volume no longer a device."""
        update = {
            "is_forgotten": True,
            "wrapped_secret": b"",
            "key_id": UNNAMED,
            "fencing_epoch": device.record.fencing_epoch + 1,
            "opening": None,
        }
        record = volume_record(device.record.device_id)
        return (
            self.devices.sealed(device.name, device.record.model_copy(update=update)),
            [self.anchors.key(f"{device.name}/{record}")],
        )

    async def record_grant(self, record: GrantRecord, *, volume: Stored[VolumeRecord]) -> bool:
        """Record a grant before it is handed out; False: `volume` has changed since.

        LeaseError `lease.overlap` if a lease of that name was granted before.
        """
        revision = await self.commit(
            [
                self.grants.unchanged(record.name, None),
                self.volumes.unchanged(volume.name, volume),
            ],
            {
                **self.grants.sealed(record.name, record),
                **self.volumes.sealed(volume.name, volume.record.with_lease(record.counters)),
            },
        )
        if revision is None and await self.grants.get(record.name) is not None:
            raise LeaseError(
                "lease.overlap",
                f"lease {record.name} was granted before: refusing to grant it again",
            )
        return revision is not None

    async def record_return(self, arena: tuple[int, int], lease_id: int, touched: int) -> bool:
        """Record that a lease was returned; False: it was returned before, or never granted.

        The caller has verified that its holder returns it: the returned counters count as never
        used.
        """
        name = grant_name(arena, lease_id)

        async def attempt() -> bool | None:
            stored = await self.grants.get(name)
            if stored is None or stored.record.touched is not None:
                return False
            record = stored.record.model_copy(update={"touched": touched})
            compares = [self.grants.unchanged(name, stored)]
            puts = self.grants.sealed(name, record)
            volume = await self.volumes.get(str(record.volume_id))
            if volume is not None and volume.record.key_epoch == record.key_epoch:
                left = max(volume.record.counters_leased - record.returned, 0)
                compares.append(self.volumes.unchanged(volume.name, volume))
                puts |= self.volumes.sealed(
                    volume.name, volume.record.model_copy(update={"counters_leased": left})
                )
            return None if await self.commit(compares, puts) is None else True

        return await self.settle(attempt)


def new_tenant(wrapping: KeyWrapper, tenant: str, *, key_id: bytes = UNNAMED) -> TenantRecord:
    """Return the record of a new tenant with a new key k_s."""
    return TenantRecord(wrapped_key=new_tenant_key(wrapping, tenant, 0), key_id=key_id)


def new_tenant_key(wrapping: KeyWrapper, tenant: str, number: int) -> bytes:
    """Return a new key k_s, wrapped as the tenant's key of that number."""
    fresh = new_key()
    try:
        owner = tenant_key_owner(tenant, number)
        return wrapping.wrap(fresh, purpose=TENANT_PURPOSE, owner=owner)
    finally:
        wipe(fresh)


def tenant_key_owner(tenant: str, number: int) -> str:
    """Return the owner that a tenant's key is wrapped for, which binds its number.

    Names of tenants have no space. Key 0 has the form of earlier versions.
    """
    return f"{tenant} {number}" if number else tenant


def with_state(entries: dict[str, bytes], record_key: bytes) -> dict[str, bytes]:
    """Return the `entries` of a new store together with its first state record."""
    return entries | {STATE_KEY: SetHash(record_key).first(entries)}


def _wanted(record: VolumeRecord, sector_count: int) -> tuple[str, int, str, str, str, bool, bool]:
    return (
        record.display_name,
        sector_count,
        record.target_node,
        record.mode,
        record.third_party,
        record.fully_sealed,
        record.device_id == record.volume_id,
    )
