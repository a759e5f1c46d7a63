"""A thief of a target's TLS key writes to the device's anchor: nothing is rolled back.

The thief has leaf and TLS key, but not the KEM key and so not the device's secret. It can send any
change, and has the drive and all earlier states of the anchor.
"""

import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane import daemon
from sealane.crypto.exchange import wipe
from sealane.daemon.device.anchors.anchor import (
    CATALOGUE,
    NUMBER_STEP_MAX,
    Anchored,
    Change,
    volume_record,
)
from sealane.daemon.device.broker_calls import DeviceClient, OpenedDevice
from sealane.errors import Error
from trust.insider import Insider, insider
from trust.test_device_daemons import World, world
from trust.test_store_anchors import attached, outcome, read, write
from trust.test_third_party_anchors import array, create, gateway, refusal
from trust.test_third_party_anchors import attached as attached_here

pytestmark = pytest.mark.slow

__all__ = ["world"]

OLD, NEW = b"1" * 4096, b"2" * 4096


class Thief:
    """An opening of a device in the name of its owner."""

    def __init__(self, client: DeviceClient, opened: OpenedDevice) -> None:
        self._client = client
        self._opened = opened
        self.records = opened.records
        wipe(opened.secret)

    async def change(self, name: str, expected: int, record: Anchored | None) -> str:
        """Request a change; return the reason of the refusal, or an empty string."""
        made = Change(name=name, expected=expected, record=record)
        try:
            await self._client.advance(self._opened.served, [made])
        except Error as error:
            return error.reason
        return ""


@contextlib.asynccontextmanager
async def thief(
    world: World, device_id: uuid.UUID, *, node: str = "s", role: str = "target"
) -> AsyncIterator[Thief]:
    """Open a device as its owner does; the broker tells anybody the state of its catalogue."""
    async with insider(world.site, world.broker, node=node, role=role) as victim:
        found = [] if role == "gateway" else await _catalogue(world, victim, device_id)
        opened = await victim.devices.open(device_id, anchor="broker", found=found)
        yield Thief(victim.devices, opened)
        await victim.devices.close(opened.served)


async def _catalogue(world: World, victim: Insider, device_id: uuid.UUID) -> list[bytes]:
    assert victim.identity.has_certificate
    _, blob = world.ctl("show", str(device_id))["anchored"][CATALOGUE].split(": ")
    return [bytes.fromhex(blob)]


def _device(world: World) -> uuid.UUID:
    return uuid.UUID(world.devices()[0]["device"])


async def _states(world: World, tmp_path: Path) -> tuple[Path, str, uuid.UUID, Anchored]:
    """Write twice, flush and anchor each time; return an adversary's copy of the first state."""
    world.start_broker()
    config = world.target_config()
    with daemon(config) as target:
        async with attached(world, target) as volume:
            await write(volume, OLD)
    device_id = _device(world)
    store = world.directory / f"{volume.name.removeprefix('volumes/')}.sectors"
    shutil.copyfile(store, tmp_path / "older")
    async with thief(world, device_id) as first:
        older = first.records[volume_record(uuid.UUID(store.stem))]
    with daemon(config) as target:
        async with attached(world, target, volume.name) as volume:
            await write(volume, NEW)
    shutil.copyfile(store, tmp_path / "newest")
    return config, volume.name, device_id, older


async def test_anchored_write_is_not_undone_by_forgetting_its_record_and_making_an_older_one(
    world: World, tmp_path: Path
) -> None:
    config, volume, device_id, older = await _states(world, tmp_path)
    name = volume.replace("volumes/", "volume/")
    async with thief(world, device_id) as second:
        newest = second.records[name]
        assert older.number < newest.number
        assert await second.change(name, newest.number, None) == ""
        # This number and all lower ones are used up, under any name.
        for number in (older.number, newest.number):
            again = Anchored(number=number, blob=older.blob, mac=older.mac)
            assert await second.change(name, 0, again) == "anchor.order"
    store = world.directory / f"{volume.removeprefix('volumes/')}.sectors"
    for which in ("older", "newest"):
        shutil.copyfile(tmp_path / which, store)
        with daemon(config) as target:
            # Either store is refused because its record is missing; nothing is rolled back.
            assert outcome(target, volume) == ("skipped", "store.rolled_back")


@pytest.mark.parametrize("how", ["blob", "number", "blank", "other"])
async def test_record_that_the_owner_did_not_make_is_refused_by_the_target(
    world: World, tmp_path: Path, how: str
) -> None:
    config, volume, device_id, older = await _states(world, tmp_path)
    name = volume.replace("volumes/", "volume/")
    async with thief(world, device_id) as second:
        newest, catalogue = second.records[name], second.records[CATALOGUE]
        number = newest.number + 1
        made = {
            "blob": Anchored(number=number, blob=older.blob, mac=older.mac),
            "number": Anchored(number=number, blob=newest.blob, mac=newest.mac),
            "blank": Anchored(number=number, blob=older.blob),
            "other": Anchored(number=number, blob=catalogue.blob, mac=catalogue.mac),
        }[how]
        assert await second.change(name, newest.number, made) == ""
        far = Anchored(number=number + NUMBER_STEP_MAX + 1, blob=older.blob)
        assert await second.change(name, number, far) == "anchor.range"
    store = world.directory / f"{volume.removeprefix('volumes/')}.sectors"
    shutil.copyfile(tmp_path / "older", store)
    world.refused_start(config, "anchor.forged")


async def test_volume_on_a_third_party_is_not_undone_by_a_stolen_gateway_leaf(
    world: World, tmp_path: Path
) -> None:
    world.site.write_policy({"s": ["target"], "g": ["gateway"]})
    world.start_broker()
    image, older = tmp_path / "image", tmp_path / "older"
    with array(world, image) as disks:
        with gateway(world, disks, "g") as here:
            name = create(here)["name"]
            async with attached_here(here, name) as volume:
                await write(volume, OLD)
        shutil.copyfile(image, older)
        device_id = uuid.UUID(name.removeprefix("volumes/"))
        record = volume_record(device_id)
        async with thief(world, device_id, node="g", role="gateway") as first:
            kept = first.records[record]
        with gateway(world, disks, "g") as here:
            async with attached_here(here, name) as volume:
                await write(volume, NEW)
                assert await read(volume) == NEW
        async with thief(world, device_id, node="g", role="gateway") as second:
            newest = second.records[record]
            assert await second.change(record, newest.number, None) == ""
            assert await second.change(record, 0, kept) == "anchor.order"
            above = Anchored(number=newest.number + 1, blob=kept.blob, mac=kept.mac)
            assert await second.change(record, 0, above) == ""
        shutil.copyfile(older, image)
        with gateway(world, disks, "g") as here:
            assert await refusal(here, name) == "anchor.forged"
        async with thief(world, device_id, node="g", role="gateway") as third:
            assert await third.change(record, above.number, None) == ""
        with gateway(world, disks, "g") as here:
            assert await refusal(here, name) == "store.rolled_back"
