"""A store's use of its device's anchors, with and without answers."""

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sealane.daemon.device.anchors.anchor import Anchor, Change, volume_record
from sealane.daemon.device.anchors.broker import BrokerAnchor
from sealane.daemon.device.directory import Device
from sealane.daemon.target.data_path import Target
from sealane.errors import UnavailableError, VerificationError
from target.store_device import open_device

VOLUME = uuid.UUID(int=7)
SECTORS = 64


class Memory:
    """The broker's side of an anchor, which can be silent."""

    def __init__(self) -> None:
        self.is_silent = False
        self.lost: str | None = None
        self.calls = 0

    def anchor(self) -> Anchor:
        return BrokerAnchor({}, advance=self._advance)

    async def _advance(self, changes: Sequence[Change]) -> None:
        self.calls += len(changes)
        if self.is_silent:
            raise UnavailableError("broker.unreachable", "silent")
        if self.lost is not None:
            raise VerificationError(self.lost, "another opening has it")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
async def device(tmp_path: Path, memory: Memory) -> AsyncIterator[Device]:
    async with open_device(tmp_path / "stores", memory.anchor()) as (device, _):
        yield device


@pytest.fixture(params=["file", "inline"])
async def target(
    tmp_path: Path, device: Device, request: pytest.FixtureRequest
) -> AsyncIterator[Target]:
    target = Target(
        traddr="127.0.0.1",
        trsvcid=0,
        store_kind=request.param,
        directory=tmp_path / "stores",
        device=device,
    )
    await target.start()
    yield target
    await target.stop()


async def test_store_is_anchored_where_its_device_is(target: Target, device: Device) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    current = device.anchors.current(volume_record(VOLUME))
    assert current is not None
    assert len(current[1]) == 65
    assert target.statistics(VOLUME)["anchored"] == 1
    await target.close_volume(VOLUME)
    await target.open_volume(VOLUME, sector_count=SECTORS)
    after = device.anchors.current(volume_record(VOLUME))
    assert after is not None
    assert after[0] > current[0], "an opening is anchored before anything is served"


async def test_older_copy_of_a_store_is_not_opened(
    target: Target, device: Device, tmp_path: Path
) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    path = tmp_path / "stores" / f"{VOLUME}.sectors"
    await target.close_volume(VOLUME)
    older = path.read_bytes()
    await target.open_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    newest = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(VerificationError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "store.rolled_back"
    path.write_bytes(newest)
    await target.open_volume(VOLUME, sector_count=SECTORS)


async def test_silent_anchor_keeps_a_store_from_being_served_until_it_answers(
    target: Target, memory: Memory, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    monkeypatch.setattr(device.anchors, "_timeout_seconds", 0.05)
    memory.is_silent = True
    with pytest.raises(UnavailableError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "anchor.unreachable"
    memory.is_silent = False
    monkeypatch.undo()
    await device.anchors.settle()
    await target.open_volume(VOLUME, sector_count=SECTORS)


async def test_anchor_that_another_opening_has_is_lost_for_good(
    target: Target, memory: Memory
) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    memory.lost = "device.fenced"
    with pytest.raises(VerificationError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "store.rolled_back"


async def test_anchor_of_a_device_that_was_moved_is_away_until_the_next_opening(
    target: Target, memory: Memory
) -> None:
    """So it is after brokers were restored: hosts must wait, not be told that data are lost."""
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    memory.lost = "device.moved"
    with pytest.raises(UnavailableError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "anchor.unreachable"


async def test_state_that_is_anchored_under_another_number_is_refused(
    target: Target, device: Device
) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    name = volume_record(VOLUME)
    current = device.anchors.current(name)
    assert current is not None
    await device.anchors.advance(name, current[0] + 1, current[1])
    with pytest.raises(VerificationError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "store.rolled_back"


async def test_store_without_its_record_is_refused(target: Target, device: Device) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    await device.anchors.forget(volume_record(VOLUME))
    with pytest.raises(VerificationError) as caught:
        await target.open_volume(VOLUME, sector_count=SECTORS)
    assert caught.value.reason == "store.rolled_back"


async def test_discarded_store_leaves_no_record(target: Target, device: Device) -> None:
    await target.create_volume(VOLUME, sector_count=SECTORS)
    await target.close_volume(VOLUME)
    await target.discard_store(VOLUME)
    assert device.anchors.current(volume_record(VOLUME)) is None
    await target.create_volume(VOLUME, sector_count=SECTORS)
