"""Volumes of mode off in the control plane: filled first, then attached."""

import asyncio
import uuid
from collections.abc import Callable

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway.back_ends import Via
from sealane.daemon.gateway.servicer import VolumesServicer
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import broker_pb2, volumes_pb2
from volume_control import HOST, World


async def _create_off(world: World, *, size_bytes: int = 16 << 20, third_party: str = "") -> str:
    descriptor = await world.volumes.create(
        request_id="",
        display_name="d",
        size_bytes=size_bytes,
        target_node="",
        third_party=third_party,
        mode="off",
    )
    return descriptor.volume_id


async def _until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if predicate():
                return
            await asyncio.sleep(0)


async def _get(world: World, volume_id: str) -> volumes_pb2.Volume:
    return await VolumesServicer(world.volumes).GetVolume(
        volumes_pb2.GetVolumeRequest(name=f"volumes/{volume_id}"),
        None,  # type: ignore[arg-type]
    )


async def _available(world: World, volume_id: str) -> volumes_pb2.Volume:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            shown = await _get(world, volume_id)
            if shown.state != volumes_pb2.Volume.FILLING:
                return shown


async def test_volume_of_mode_off_is_filled_before_it_can_be_attached(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.gateway.fill_limit = 2048
    volume_id = await _create_off(world)
    assert world.target.freshness[uuid.UUID(volume_id)] is False
    await _until(lambda: bool(world.gateway.fillings) and world.gateway.fillings[0].zeroed == 2048)
    shown = await _get(world, volume_id)
    assert (shown.state, shown.filled_bytes) == (volumes_pb2.Volume.FILLING, 8 << 20)
    assert world.volumes.statistics() == {
        (volume_id, "off", "s"): {"state_filling": 1, "size_bytes": shown.size_bytes}
    }
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert caught.value.reason == "volume.filling.state"
    (filling,) = world.gateway.fillings
    filling.limit_raised.set()
    shown = await _available(world, volume_id)
    assert (filling.flushed, filling.closed, filling.sealed) == (4096, True, True)
    assert (shown.state, shown.mode) == (volumes_pb2.Volume.AVAILABLE, "off")
    assert "not detected" in shown.freshness
    assert not any(claim.startswith(("C4", "C6")) for claim in shown.claims)
    assert "C5" in shown.claims
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert capsys.readouterr().out.count("volume_without_freshness") == 2
    (named,) = world.volumes.statistics().items()
    assert (named[0], named[1]["state_attached"]) == ((volume_id, "off", "s"), 1)
    assert named[1]["size_bytes"] == shown.size_bytes
    assert "state_filling" not in named[1]


async def test_filling_goes_on_after_a_failure_and_in_the_next_process(world: World) -> None:
    world.gateway.fill_limit = 1024
    world.gateway.fill_failure = UnavailableError("queue.closed", "the target went")
    volume_id = await _create_off(world)
    await _available(world, volume_id)
    assert [filling.flushed for filling in world.gateway.fillings] == [0, 4096]
    # A gateway died while filling the volume: the broker still reports it as filling.
    answer = await world.broker.register_volume(
        world.identities["gateway"].subject,
        request_id=str(uuid.uuid4()),
        display_name="",
        size_bytes=4096,
        target_node="s",
        mode="off",
    )
    await world.storage.create(world.identities["gateway"].subject, answer.volume)
    left = broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor).volume_id
    await world.volumes.resume_fillings()
    await _available(world, left)
    # Once told that it is filled, the target still recognizes the same volume.
    signed = await world.broker.descriptor(world.identities["gateway"].subject, left)
    await world.storage.create(world.identities["gateway"].subject, signed)


async def test_deleting_a_volume_ends_its_filling(world: World) -> None:
    world.gateway.fill_limit = 0
    volume_id = await _create_off(world)
    await _until(lambda: bool(world.gateway.fillings))
    await world.volumes.delete(volume_id)
    assert world.gateway.fillings[0].closed
    assert not world.target.volumes
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_volume_that_could_not_be_deleted_is_filled_after_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise UnavailableError("store.remove", "the drive is gone")

    world.gateway.fill_limit = 0
    volume_id = await _create_off(world)
    await _until(lambda: bool(world.gateway.fillings))
    with monkeypatch.context() as broken:
        broken.setattr(world.storage, "delete", fail)
        with pytest.raises(UnavailableError):
            await world.volumes.delete(volume_id)
    world.gateway.fill_limit = 1 << 40
    await _available(world, volume_id)
    await world.volumes.delete(volume_id)


async def test_volume_of_mode_off_on_a_third_party_keeps_no_table_there(world: World) -> None:
    volume_id = await _create_off(world, third_party="disks")
    shown = await _available(world, volume_id)
    assert (shown.mode, shown.third_party, world.third_parties.freshness) == ("off", "disks", False)
    assert "C5" not in shown.claims


@pytest.mark.parametrize(("mode", "third_party"), [("local", ""), ("remote", "disks"), ("x", "")])
async def test_mode_that_does_not_fit_is_refused(world: World, mode: str, third_party: str) -> None:
    with pytest.raises(UsageError) as caught:
        await world.volumes.create(
            request_id="",
            display_name="",
            size_bytes=4096,
            target_node="",
            third_party=third_party,
            mode=mode,
        )
    assert caught.value.reason == "volume.mode"
