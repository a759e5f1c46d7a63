"""Brokers on etcd, a TPM's anchor, a card and third parties' drives, upgraded and rolled back."""

import asyncio
from pathlib import Path

import pytest

from accelerators.cards import nonces_at
from compat.cluster import Release, show
from compat.storage import ORDER, StorageCluster, storage_cluster
from compat.volumes import check, check_volumes, write, written_volume
from kills.load import BYTES, WRITERS, Load
from nonces import DIRECTORY, once_each, sealed
from patience import PATIENCE_SECONDS
from sealane.client import Volume, connect
from trust.test_revocation import HOST

pytestmark = [pytest.mark.lab_compat, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("before", "after"), [(Release.PREVIOUS, Release.THIS), (Release.THIS, Release.PREVIOUS)]
)
async def test_storage_is_replaced_daemon_by_daemon_and_back(
    before: Release, after: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    steps = [(name, after) for name in ORDER] + [(name, before) for name in reversed(ORDER)]
    pauses: list[tuple[str, Release, float, float]] = []
    async with storage_cluster(before) as made, connect(made.socket("g")) as client:
        remote = await _attached(made)
        local = await _attached(made, third_party="array1")
        resting = await client.volumes.create(size_bytes=BYTES, third_party="array2")
        kept = {"start": await written_volume(made, "start")}
        await write(made, resting, "start")
        async with (
            client.open(remote, hold_seconds=PATIENCE_SECONDS) as first,
            client.open(local, hold_seconds=PATIENCE_SECONDS) as second,
        ):
            loads = Load(first), Load(second)
            async with asyncio.TaskGroup() as tasks:
                for load in loads:
                    for writer in range(WRITERS):
                        tasks.create_task(load.run(writer))
                for name, release in steps:
                    for load in loads:
                        await load.went_on()
                        load.pause_seconds = 0.0
                    await made.replace(name, release)
                    for load in loads:
                        await load.went_on()
                    pauses.append((name, release, *(load.pause_seconds for load in loads)))
                    await _sealed_by_card(made, loads[0])
                    # New records, stores and leases, which the other release will read.
                    text = f"{name} {release.value}"
                    kept[text] = await written_volume(made, text)
                    await check(made, resting, [*kept][-2])
                    await write(made, resting, text)
                for load in loads:
                    load.is_over = True
            for load in loads:
                await load.check()
        await check_volumes(made, kept)
    once_each(sealed(tmp_path))
    show(pauses, ("remote", "third party"))


async def _attached(made: StorageCluster, *, third_party: str = "") -> Volume:
    async with connect(made.socket("g")) as client:
        created = await client.volumes.create(size_bytes=BYTES, third_party=third_party)
        return await client.volumes.attach(created.name, host_nqn=HOST)


async def _sealed_by_card(made: StorageCluster, load: Load) -> None:
    """Wait until the card has sealed something more."""
    known = len(nonces_at(made.card))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(nonces_at(made.card)) == known:
            await load.went_on()
