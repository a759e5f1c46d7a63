"""A model of lost stores: whatever is restored when, nothing is granted or numbered twice.

No counter is granted twice for a volume. After each restore the key of each volume is one that
nobody ever received, and fencing epochs and numbers of anchor records are beyond all used ones.

Several brokers share a store and grant leases to gateways, some of them again because the answer
was lost. At any point a snapshot is taken; at any later point the store is lost and restored from
any snapshot ever taken, by an operator who takes instance numbers that are not in the snapshot,
though brokers may have used them since.
"""

import asyncio
import datetime as dt
import itertools
import random
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from brokers import Count, start_broker
from sealane.crypto.keys import WrappingKey
from sealane.crypto.lease import EPOCH_COUNTERS_MAX, Lease
from sealane.daemon.broker import restored
from sealane.daemon.broker.authority import AUTHORITY_KEY, opened_authority
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.records import AnchorRecord, AuthorityRecord, Tables, VolumeRecord
from sealane.daemon.broker.registry import Registry, with_state
from sealane.daemon.broker.restored import KEY_EPOCHS_AHEAD
from sealane.daemon.broker.store.contract import Entry
from sealane.daemon.broker.store.record_keys import RecordKeys
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import UsageError
from sealane.protocol.kinds import AnchorKind

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
INSTANCES = range(1, 9)
VOLUMES = (uuid.UUID(int=1), uuid.UUID(int=2))
GATEWAYS = (b"g1" * 8, b"g2" * 8, b"g3" * 8)
DEVICE = uuid.UUID(int=3)
STEPS = 40
ROTATIONS = KEY_EPOCHS_AHEAD - 1
"""Of each volume, at most, in all: what a restore allows for."""


class Model:
    """A store, its brokers' counters, and all leases that were ever granted."""

    def __init__(self, directory: Path, draw: random.Random) -> None:
        self._directory = directory
        self._draw = draw
        self._path = directory / "0.sqlite"
        self._counters: dict[int, tuple[Count, Count]] = {}
        self._snapshots: list[dict[str, bytes]] = []
        self.granted: dict[uuid.UUID, list[Lease]] = defaultdict(list)
        self.restores = 0
        self.rotations = dict.fromkeys(VOLUMES, 0)
        # The newest that anyone received or used, in any store.
        self.received = dict.fromkeys(VOLUMES, 0)
        self.fencing_epoch = self.anchor_number = 0
        self.repeated: list[str] = []

    async def step(self) -> None:
        """Start a broker, which grants leases and may take a snapshot; or lose the store."""
        if self._snapshots and self._draw.random() < 0.2:
            await self._restore(self._draw.choice(self._snapshots))
            return
        instance = self._draw.choice(INSTANCES[: 2 + self.restores])
        starts, heads = self._counters.setdefault(instance, (Count(), Count()))
        store = SqliteStore(self._path)
        try:
            service, _, registry = await start_broker(
                store, starts=starts, heads=heads, instance=instance
            )
        except UsageError as error:
            if error.reason != "broker.instance.retired":
                raise
            await store.close()
            return
        await self._use(registry)
        for _ in range(self._draw.randrange(4)):
            self._grant(service.leases.arena.grant)
        if self._draw.random() < 0.4:
            entries, _ = await registry.store.copy()
            self._snapshots.append(entries)
        await registry.close()

    async def _use(self, registry: Registry) -> None:
        """Hand out each volume's key, sometimes a rotated one; open the device; anchor its state.

        All are registered at the first start.
        """
        volumes, devices, anchors = registry.volumes, registry.devices, registry.anchors
        puts: dict[str, bytes] = {}
        for each in VOLUMES:
            stored = await volumes.get(str(each))
            record = _volume(each) if stored is None else stored.record
            if self.rotations[each] < ROTATIONS and self._draw.random() < 0.4:
                is_whole = record.counters_leased == EPOCH_COUNTERS_MAX
                self.rotations[each] += 1
                record = record if is_whole else record.in_next_epoch()
            self.received[each] = max(self.received[each], record.key_epoch)
            puts |= volumes.sealed(str(each), record)
        opened = await devices.get(str(DEVICE))
        device = (await registry.new_device(DEVICE, owner="s"))[0]
        if opened is not None:
            device = opened.record
        device = device.model_copy(
            update={"fencing_epoch": device.fencing_epoch + 1, "anchor": AnchorKind.BROKER}
        )
        name = f"{DEVICE}/catalogue"
        anchor = await anchors.get(name)
        number = (device.anchor_floor if anchor is None else anchor.record.number) + 1
        self.fencing_epoch = max(self.fencing_epoch, device.fencing_epoch)
        self.anchor_number = max(self.anchor_number, number)
        puts |= devices.sealed(str(DEVICE), device)
        await registry.commit(
            puts={**puts, **anchors.sealed(name, AnchorRecord(number=number, blob=b"b"))}
        )

    def _check(self, entries: Mapping[str, bytes], tables: Tables) -> None:
        """Note what a restored store would use again."""

        def record(key: str) -> Any:
            return tables.opened(Entry(key, entries[key], 0))[1].record

        for each in VOLUMES:
            volume = record(tables.volumes.key(str(each)))
            is_read_only = volume.counters_leased == EPOCH_COUNTERS_MAX
            if volume.key_epoch <= self.received[each] and not is_read_only:
                self.repeated.append("key epoch")
        device = record(tables.devices.key(str(DEVICE)))
        if device.fencing_epoch <= self.fencing_epoch:
            self.repeated.append("fencing epoch")
        if device.anchor_floor < self.anchor_number:
            self.repeated.append("anchor number")

    def _grant(self, grant) -> None:  # type: ignore[no-untyped-def]
        volume, gateway = self._draw.choice(VOLUMES), self._draw.choice(GATEWAYS)
        # An answer that is lost, and the retry that gets other counters.
        for _ in range(self._draw.choice((1, 1, 2))):
            lease = grant(volume_id=volume, incarnation=gateway, return_token=bytes(16))
            self.granted[volume].append(lease)

    async def _restore(self, entries: dict[str, bytes]) -> None:
        self.restores += 1
        self._path = self._directory / f"{self.restores}.sqlite"
        self._counters = {}
        record = AuthorityRecord.model_validate_json(entries[AUTHORITY_KEY])
        _, named, _ = opened_authority(record, Keyring([WrappingKey(bytes(32))]))
        tables = Tables(None, keys=RecordKeys(named))
        revision = restored.revised(
            entries,
            tables,
            accepted=restored.Accepted(),
            restored_before=self.restores - 1,
            now=NOW,
            snapshot_at=NOW,
            snapshot_state=1,
        )
        self._check(revision.entries, tables)
        store = SqliteStore(self._path)
        await store.commit(puts=with_state(dict(revision.entries), named.present))
        await store.close()

    def count_repeated(self) -> int:
        """Return how many leases have counters that were granted before for their volume."""
        repeated = 0
        for leases in self.granted.values():
            ordered = sorted(leases, key=lambda each: (each.arena, each.counters.counter_start))
            for one, next_one in itertools.pairwise(ordered):
                repeated += one.counters.overlaps(next_one.counters)
        return repeated


def _volume(volume_id: uuid.UUID) -> VolumeRecord:
    return VolumeRecord(
        volume_id=volume_id,
        tenant="t",
        display_name=f"{volume_id}",
        sector_count=1,
        target_node="s",
        generation=1,
        key_epoch=1,
    )


async def run(directory: Path, seed: int) -> Model:
    model = Model(directory, random.Random(seed))
    for _ in range(STEPS):
        await model.step()
    return model


@pytest.mark.parametrize("seed", range(6))
async def test_no_counter_is_granted_twice_whatever_is_restored(seed: int, tmp_path: Path) -> None:
    model = await run(tmp_path, seed)
    assert model.restores
    assert model.granted
    assert model.count_repeated() == 0
    assert model.repeated == []


async def test_model_finds_what_the_base_of_start_epochs_prevents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restored, "new_epoch_base", lambda: 0)
    repeated = 0
    for seed in range(3):
        directory = tmp_path / f"{seed}"
        await asyncio.to_thread(directory.mkdir)
        repeated += (await run(directory, seed)).count_repeated()
    assert repeated


async def test_model_finds_what_the_number_of_restores_prevents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restored, "_jumps", lambda *_: 1)
    repeated: set[str] = set()
    for seed in range(3):
        directory = tmp_path / f"{seed}"
        await asyncio.to_thread(directory.mkdir)
        repeated |= {*(await run(directory, seed)).repeated}
    assert repeated == {"key epoch", "fencing epoch", "anchor number"}
