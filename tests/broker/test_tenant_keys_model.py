"""All orders of two brokers in a rotation of a tenant's key, with crashes at each step.

As in `test_rewrapping_model`: one actor stops at one step of the store, before or after its effect;
meanwhile another one acts to its end. Then the first goes on, or has crashed. Gateways seal sectors
before, in the middle and afterwards. Whatever happens, each live key epoch of each live volume has
the key that sectors were sealed under.

In a second model brokers rotate keys, volumes and tenants, in any order; the store is lost and
restored from a snapshot.
"""

import asyncio
import contextlib
import datetime as dt
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker.tenant_keys import (
    SHARED_WITH,
    TENANT,
    Sealed,
    check_end,
    check_ready,
    live,
    look_always,
    register,
)
from broker.test_rewrapping_model import Stopping
from brokers import Count, start_broker, tenant_key_rotation_of
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import restored, tenant_key_rotation
from sealane.daemon.broker.authority import AUTHORITY_KEY, opened_authority
from sealane.daemon.broker.key_epochs import KeyEpochs
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.records import AuthorityRecord, Tables, VolumeRecord
from sealane.daemon.broker.registry import Registry, with_state
from sealane.daemon.broker.store.record_keys import RecordKeys
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import TenantKeyStage
from seeds import SEED

pytestmark = pytest.mark.slow

KEK = bytes(32)
ONE, TWO = uuid.UUID(int=1), uuid.UUID(int=2)
VOLUMES = 3
RESTORES = 4
"""Restores in a run; up to twice as many until one had key epochs to open that began since."""

Act = Callable[[Registry], Awaitable[Any]]


async def rotate_tenant(registry: Registry) -> None:
    """Replace key 0 from the beginning to the end, whatever of it is done already."""
    rotation = tenant_key_rotation_of(registry)
    try:
        await rotation.prepare(TENANT, 0)
        await rotation.proceed()
        await rotation.rotate(TENANT, 1)
    except UsageError as error:
        # The other actor has gone on to the next one.
        if error.reason != "broker.tenant_key.number":
            raise
    await rotation.proceed()


async def work(registry: Registry) -> None:
    """Do what a broker does by itself."""
    await tenant_key_rotation_of(registry).proceed()


async def prepare_again(registry: Registry) -> None:
    """Begin another replacement, if the first one has ended."""
    with contextlib.suppress(UsageError):
        await tenant_key_rotation_of(registry).prepare(TENANT, 1)


async def rotate_and_prepare_again(registry: Registry) -> None:
    """Overtake the other actor by a whole rotation, and make volumes ready for the next."""
    await rotate_tenant(registry)
    await prepare_again(registry)
    await work(registry)


async def create(registry: Registry) -> None:
    await register(registry, 7)


async def delete(registry: Registry) -> None:
    await registry.unregister(ONE)


async def delete_all(registry: Registry) -> None:
    """Delete all volumes of the former key, and what is left of it."""
    for number in range(1, VOLUMES + 1):
        await registry.unregister(uuid.UUID(int=number))
    await work(registry)


async def unshare(registry: Registry) -> None:
    with contextlib.suppress(UsageError):
        await KeyEpochs(registry).withdraw(TWO, SHARED_WITH)


async def rotate_volume(registry: Registry) -> None:
    with contextlib.suppress(UsageError):
        await KeyEpochs(registry).rotate(ONE)


async def seal(store: SqliteStore, sealed: Sealed) -> None:
    """Seal sectors as gateways of a broker that reads the store now; read all others."""
    reading = await Registry.open(Stopping(store), WrappingKey(KEK), node="b")
    await sealed.seal(reading)
    await check_ready(reading)
    await reading.close()


async def run(
    path: Path,
    case: tuple[Act | None, Act, Act],
    *,
    stop_at: int,
    is_after: bool,
    crashes: bool,
) -> bool:
    """Return whether the first actor took that many steps; check what is left in the end."""
    setup, first, second = case
    store, sealed = SqliteStore(path), Sealed()
    _, _, made = await start_broker(Stopping(store), starts=Count(), heads=Count(), kek=KEK)
    for number in range(1, VOLUMES + 1):
        await register(made, number)
    await sealed.seal(made)
    if setup is not None:
        await setup(made)
        await sealed.seal(made)
    await made.close()
    views = [Stopping(store), Stopping(store)]
    one, two = [await Registry.open(view, WrappingKey(KEK), node="b") for view in views]
    view = views[0]
    view.steps, view.stop_at, view.is_after = 0, stop_at, is_after

    async def meanwhile() -> None:
        view.meanwhile = None
        await seal(store, sealed)
        await second(two)
        await seal(store, sealed)
        view.is_dead = crashes

    view.meanwhile = meanwhile
    try:
        await first(one)
    except UnavailableError:
        assert view.is_dead
    was_stopped = view.meanwhile is None
    await one.close()
    await seal(store, sealed)
    await work(two)
    await seal(store, sealed)
    await two.close()
    last = await Registry.open(Stopping(store), WrappingKey(KEK), node="b")
    await rotate_to_the_end(last)
    await sealed.seal(last)
    await check_end(last)
    await last.close()
    await store.close()
    return was_stopped


async def rotate_to_the_end(registry: Registry) -> None:
    """Act as the operator: prepare if nobody did, and rotate to the last prepared key."""
    rotation = tenant_key_rotation_of(registry)
    shown = await rotation.progress(TENANT)
    if shown.number == 0:
        await rotation.prepare(TENANT, 0)
    await rotation.proceed()
    await rotation.rotate(TENANT, (await rotation.progress(TENANT)).number)
    await rotation.proceed()
    assert (await rotation.progress(TENANT)).stage is None


CASES: list[tuple[Act | None, Act, Act]] = [
    (None, rotate_tenant, rotate_tenant),
    (None, rotate_tenant, rotate_and_prepare_again),
    (None, rotate_tenant, create),
    (None, rotate_tenant, delete),
    (None, rotate_tenant, delete_all),
    (None, rotate_tenant, unshare),
    (None, rotate_tenant, rotate_volume),
    (None, rotate_tenant, work),
    (None, create, rotate_tenant),
    (None, delete, rotate_tenant),
    (None, unshare, rotate_tenant),
    (None, rotate_volume, rotate_tenant),
    (rotate_tenant, delete_all, create),
    (rotate_tenant, delete_all, prepare_again),
    (rotate_tenant, delete_all, delete_all),
    (rotate_tenant, create, delete_all),
    (rotate_tenant, prepare_again, delete_all),
]
"""What was done before; the actor that is stopped; the one that acts meanwhile."""


@pytest.mark.parametrize("crashes", [False, True], ids=["goes-on", "crashes"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "case", CASES, ids=["-".join(act.__name__ for act in case if act) for case in CASES]
)
async def test_every_order_keeps_the_keys_of_sealed_sectors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[Act | None, Act, Act],
    is_after: bool,
    crashes: bool,
) -> None:
    monkeypatch.setattr(tenant_key_rotation, "BATCH_RECORDS", 2)
    look_always(monkeypatch)
    steps = 0
    while True:
        path = tmp_path / f"{steps}.sqlite"
        async with asyncio.timeout(30):
            was_stopped = await run(
                path, case, stop_at=steps + 1, is_after=is_after, crashes=crashes
            )
        if not was_stopped:
            break
        steps += 1
    assert steps > 1


@dataclass(frozen=True)
class Snapshot:
    """A copy of the store, as a restore needs it, and what it had."""

    entries: dict[str, bytes]
    restores: int
    """Restores before it was taken."""
    known: int
    """Number of the newest key that all its volumes were ready for."""
    volumes: dict[uuid.UUID, VolumeRecord]

    def derives(self, name: tuple[uuid.UUID, int], number: int) -> bool:
        """Return whether it has the key of a volume's key epoch, whose number that is."""
        record = self.volumes.get(name[0])
        return record is not None and record.tenant_key_number(name[1]) == number

    def begun(self, record: VolumeRecord, restores: int) -> int:
        """Return how many key epochs a volume has begun since, besides those of restores."""
        before = self.volumes.get(record.volume_id)
        if before is None:
            return 0
        skipped = (restores - self.restores) * restored.KEY_EPOCHS_AHEAD
        return record.key_epoch - before.key_epoch - skipped


REFUSALS = {
    "volume.not_found",
    "broker.tenant_key.rotating",
    "broker.tenant_key.not_prepared",
}
"""What an operator is told who acts at any time."""

STEPS = {
    None: ("prepare", "prepare", "rotate"),
    TenantKeyStage.PREPARING: ("proceed", "proceed", "snapshot"),
    TenantKeyStage.PREPARED: ("rotate", "rotate", "snapshot", "prepare"),
    TenantKeyStage.ROTATING: ("proceed", "proceed", "proceed", "snapshot"),
}
"""Steps that are likely in a stage; of the others there is one each."""
OTHER_STEPS = ("prepare", "rotate", "proceed", "snapshot", "create", "delete", "rotate volume")
BEGUN_MAX = restored.KEY_EPOCHS_AHEAD - 2
"""Key epochs that a volume may have begun since a snapshot when a rotation begins another one."""


class Site:
    """A store, which is lost and restored; brokers, and all that was sealed."""

    def __init__(
        self, directory: Path, draw: random.Random, *, allows_for_unprepared: bool = True
    ) -> None:
        self._directory = directory
        self._allows_for_unprepared = allows_for_unprepared
        self._draw = draw
        self._made = VOLUMES
        self.sealed = Sealed()
        self.snapshots: list[Snapshot] = []
        self.restores = 0
        self.opened_beyond = 0
        """Sealed key epochs of a later key that a snapshot didn't have yet, opened from it."""

    async def open(self) -> Registry:
        path = self._directory / f"{self.restores}.sqlite"
        return await Registry.open(SqliteStore(path), WrappingKey(KEK), node="b")

    async def begin(self) -> None:
        store = SqliteStore(self._directory / "0.sqlite")
        _, _, made = await start_broker(store, starts=Count(), heads=Count(), kek=KEK)
        for number in range(1, VOLUMES + 1):
            await register(made, number)
        await made.close()

    async def step(self) -> None:
        """Let a broker, an operator or a gateway act, or lose the store."""
        restored_from: Snapshot | None = None
        # Likely when the snapshot doesn't have all key epochs that it has to open.
        chance = 0.25 if any(map(self._beyond, self.snapshots)) else 0.04
        if self.snapshots and self._draw.random() < chance:
            restored_from = self._draw.choice(self.snapshots)
        if restored_from is not None:
            await self._restore(restored_from)
        registry = await self.open()
        try:
            if restored_from is not None:
                await self._check_opened(registry, restored_from)
            await self._act(registry)
            await self.sealed.seal(registry)
            await check_ready(registry)
        finally:
            await registry.close()

    async def _act(self, registry: Registry) -> None:
        volume_id = uuid.UUID(int=self._draw.randrange(1, self._made + 1))
        rotation = tenant_key_rotation_of(registry)
        shown = await rotation.progress(TENANT)
        begun = await self._begun(registry)
        try:
            match self._draw.choice(STEPS[shown.stage] + OTHER_STEPS):
                case "prepare":
                    await rotation.prepare(TENANT, shown.number)
                case "rotate" if max(begun.values(), default=0) <= BEGUN_MAX:
                    await rotation.rotate(TENANT, shown.number)
                case "proceed":
                    await rotation.proceed()
                case "create":
                    self._made += 1
                    await register(registry, self._made)
                case "delete":
                    await registry.unregister(volume_id)
                case "rotate volume" if begun.get(volume_id, 0) < BEGUN_MAX // 2:
                    await KeyEpochs(registry).rotate(volume_id)
                case _:
                    await self._snapshot(registry)
        except UsageError as error:
            if error.reason not in REFUSALS:
                raise

    async def _begun(self, registry: Registry) -> dict[uuid.UUID, int]:
        """Return how many key epochs each volume has begun since a snapshot, at most."""
        return {
            volume_id: max(
                (each.begun(record, self.restores) for each in self.snapshots), default=0
            )
            for volume_id, record in (await live(registry)).items()
        }

    async def _snapshot(self, registry: Registry) -> None:
        entries, _ = await registry.store.copy()
        tenant = await registry.tenants.get(TENANT)
        assert tenant is not None
        is_preparing = tenant.record.key_stage == TenantKeyStage.PREPARING
        self.snapshots = [
            *self.snapshots[-1:],
            Snapshot(
                entries=entries,
                restores=self.restores,
                known=tenant.record.key_number - int(is_preparing),
                volumes=await live(registry),
            ),
        ]

    async def _restore(self, snapshot: Snapshot) -> None:
        self.restores += 1
        entries = snapshot.entries
        record = AuthorityRecord.model_validate_json(entries[AUTHORITY_KEY])
        _, named, _ = opened_authority(record, Keyring([WrappingKey(KEK)]))
        now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
        revision = restored.revised(
            entries,
            Tables(None, keys=RecordKeys(named)),
            accepted=restored.Accepted(),
            restored_before=self.restores - 1,
            now=now,
            snapshot_at=now,
            snapshot_state=1,
        )
        store = SqliteStore(self._directory / f"{self.restores}.sqlite")
        await store.commit(puts=with_state(dict(revision.entries), named.present))
        await store.close()
        if self._allows_for_unprepared:
            # What no snapshot from before the end of its preparation has to know, and this one
            # doesn't.
            for name, used in list(self.sealed.numbers.items()):
                if used > snapshot.known and not snapshot.derives(name, used):
                    self.sealed.forget(name)
        # Later snapshots are of another branch.
        self.snapshots = [snapshot]

    async def _check_opened(self, registry: Registry, snapshot: Snapshot) -> None:
        """Open all that was sealed; count what the snapshot's time didn't have yet."""
        beyond = self._beyond(snapshot)
        await self.sealed.seal(registry)
        self.opened_beyond += len(beyond)

    def _beyond(self, snapshot: Snapshot) -> list[tuple[uuid.UUID, int]]:
        """Return sealed key epochs of a later key, which the snapshot knows, that began since."""
        return [
            name
            for name, number in self.sealed.numbers.items()
            if 0 < number <= snapshot.known
            and (record := snapshot.volumes.get(name[0])) is not None
            and record.key_epoch < name[1]
        ]


@pytest.mark.parametrize("seed", range(24))
async def test_restored_store_opens_what_was_sealed_under_keys_that_its_snapshot_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    look_always(monkeypatch)
    print("SEALANE_SEED =", SEED)
    site = Site(tmp_path, random.Random(SEED * 1000 + seed))
    await play(site)
    assert site.opened_beyond, site.restores


async def play(site: Site) -> None:
    """Act until the store was restored several times, with something to open beyond it."""
    await site.begin()
    async with asyncio.timeout(60):
        while site.restores < RESTORES or (not site.opened_beyond and site.restores < 2 * RESTORES):
            await site.step()


async def test_model_finds_what_a_snapshot_from_before_the_preparation_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_always(monkeypatch)
    for seed in range(12):
        directory = tmp_path / f"{seed}"
        await asyncio.to_thread(directory.mkdir)
        site = Site(directory, random.Random(seed), allows_for_unprepared=False)
        try:
            await play(site)
        except AssertionError as error:
            if "can't be opened" not in str(error):
                raise
            return
    raise AssertionError("the model finds nothing")
