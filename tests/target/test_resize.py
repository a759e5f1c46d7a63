"""Sealed volumes that grow: at the target, over restarts, with gateways attached."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from device.memory_anchor import MemoryAnchor
from sealane.crypto.certificates import Subject
from sealane.daemon.device.anchored_catalogue import AnchoredCatalogue
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.daemon.device.catalogue import Catalogue
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import Target
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2
from sealane.transport.nvme.initiator import NvmeStatusError
from target.pair import SECTORS, World, data, make_world
from target.store_device import open_device
from target.test_restart import CALLER, Site

LARGER = 20_000
STRANGER = Subject(
    node="g2", role="gateway", tenant="other", incarnation=bytes(16), kem_public_key=bytes(32)
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "volumes")


def signed(
    site: Site, volume_id: str, sectors: int, **values: str
) -> broker_pb2.SignedVolumeDescriptor:
    return broker_pb2.SignedVolumeDescriptor.FromString(
        site.signed(volume_id, sectors=sectors, **values)
    )


async def sectors(service: StorageService, volume_id: str) -> int:
    return (await service.namespace(CALLER, volume_id)).sector_count


async def test_volume_has_its_new_size_after_a_restart(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        for _ in range(2):
            await service.resize(CALLER, signed(site, volume_id, 128))
        assert await sectors(service, volume_id) == 128
        assert site.said("resized") == [(volume_id, "")], "the second time there is nothing to do"
    async with site.process() as service:
        assert await sectors(service, volume_id) == 128
        await service.resize(CALLER, signed(site, volume_id, LARGER))
    async with site.process() as service:
        assert await sectors(service, volume_id) == LARGER


async def test_target_takes_no_size_that_the_broker_does_not_sign(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        larger = signed(site, volume_id, 128)
        forged = broker_pb2.VolumeDescriptor.FromString(larger.descriptor)
        forged.sector_count = 256
        refused: list[tuple[Subject, broker_pb2.SignedVolumeDescriptor, str]] = [
            (
                CALLER,
                broker_pb2.SignedVolumeDescriptor(
                    descriptor=forged.SerializeToString(), signature=larger.signature
                ),
                "volume.descriptor.signature",
            ),
            (STRANGER, larger, "namespace.not_found"),
            (CALLER, signed(site, volume_id, 128, node="other"), "namespace.target"),
            (CALLER, signed(site, volume_id, 128, device_id="x"), "namespace.device"),
        ]
        for caller, descriptor, reason in refused:
            with pytest.raises(Error) as caught:
                await service.resize(caller, descriptor)
            assert caught.value.reason == reason
        assert await sectors(service, volume_id) == 64
        await service.resize(CALLER, larger)
        # The descriptor signed earlier has the old size now.
        with pytest.raises(UsageError) as caught_smaller:
            await service.resize(CALLER, signed(site, volume_id, 64))
        assert caught_smaller.value.reason == "namespace.resize"
        assert await sectors(service, volume_id) == 128


async def test_descriptor_of_another_volume_under_its_id_is_refused(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        other = broker_pb2.VolumeDescriptor.FromString(signed(site, volume_id, 128).descriptor)
        other.generation = 7
        content = other.SerializeToString()
        descriptor = broker_pb2.SignedVolumeDescriptor(
            descriptor=content, signature=site.authority.sign_descriptor(content)
        )
        with pytest.raises(UsageError) as caught:
            await service.resize(CALLER, descriptor)
        assert caught.value.reason == "namespace.resize"


async def test_growth_that_was_cut_short_is_the_old_size_until_it_is_asked_for_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(self: AnchoredCatalogue, *_: object) -> None:
        raise UnavailableError("anchor.unreachable", "no power")

    async with site.process() as service:
        volume_id = await site.create(service)
        with monkeypatch.context() as patch:
            patch.setattr(AnchoredCatalogue, "replace", cut)
            with pytest.raises(UnavailableError):
                await service.resize(CALLER, signed(site, volume_id, LARGER))
        assert await sectors(service, volume_id) == 64
    async with site.process() as service:
        assert site.said("skipped") == []
        assert await sectors(service, volume_id) == 64
        await service.resize(CALLER, signed(site, volume_id, LARGER))
    async with site.process() as service:
        assert await sectors(service, volume_id) == LARGER


async def test_descriptor_that_was_being_replaced_at_a_crash_is_no_stray(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Catalogue, *_: object) -> None:
        raise UnavailableError("store.catalogue", "no power")

    async with site.process() as service:
        volume_id = await site.create(service)
        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "finish_replacement", cut)
            with pytest.raises(UnavailableError):
                await service.resize(CALLER, signed(site, volume_id, 128))
    assert site.path(volume_id, "volume.next").exists()
    async with site.process() as service:
        # Without an anchor, nobody knows that the new size was due.
        assert await sectors(service, volume_id) == 64
        assert not site.path(volume_id, "volume.next").exists()


async def test_smaller_store_that_is_put_back_is_rolled_back(tmp_path: Path) -> None:
    anchor, directory = MemoryAnchor(), tmp_path / "volumes"
    name, kept = uuid.UUID(int=5), tmp_path / "kept"
    path = directory / f"{name}.sectors"
    for life in range(2):
        async with open_device(directory, anchor, is_believed=life == 0) as (device, _):
            target = Target(
                traddr="127.0.0.1",
                trsvcid=0,
                store_kind="file",
                directory=directory,
                device=device,
            )
            await target.start()
            try:
                if life == 0:
                    await target.create_volume(name, sector_count=64)
                    await target.close_volume(name)
                    shutil.copy(path, kept)
                    await target.open_volume(name, sector_count=64)
                    await target.resize_volume(name, sector_count=128)
                    assert device.anchors.current(volume_record(name)) is not None
                else:
                    shutil.copy(kept, path)
                    with pytest.raises(VerificationError) as caught:
                        await target.open_volume(name, sector_count=64)
                    assert caught.value.reason == "store.rolled_back"
            finally:
                await target.stop()


@pytest.fixture(params=["file", "inline", "memory", "emulated"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    directory = tmp_path if request.param in {"file", "inline"} else None
    kind = "file" if request.param == "memory" else request.param
    async with make_world(directory, store_kind=kind) as made:
        yield made


async def test_gateways_go_on_when_their_volume_has_grown(world: World) -> None:
    """None of them can access sectors beyond the size at its attach."""
    content, back = data(32 << 10), bytearray(32 << 10)
    async with world.queue() as queue:
        await queue.write(0, content)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(queue.write(SECTORS - 8, content), name="write")
            await world.target.resize_volume(world.volume_id, sector_count=LARGER)
        for lba in (0, SECTORS - 8):
            await queue.read(lba, back)
            assert back == content
        with pytest.raises(NvmeStatusError):
            await queue.read(SECTORS, back)
    assert world.target.find(world.target.subsystem_nqn(world.volume_id)) is not None


async def test_size_that_a_store_can_not_take_leaves_it_as_it_is(world: World) -> None:
    with pytest.raises(UsageError) as caught:
        await world.target.resize_volume(world.volume_id, sector_count=SECTORS - 1)
    assert caught.value.reason == "volume.resize.refused"
    content, back = data(4096), bytearray(4096)
    async with world.queue() as queue:
        await queue.write(0, content)
        await queue.read(0, back)
    assert back == content


async def test_queues_are_refused_while_a_volume_is_being_resized(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = world.target
    subsystem = target.find(target.subsystem_nqn(world.volume_id))
    monkeypatch.setattr(subsystem, "is_resizing", True)
    asks: list[Callable[[], object]] = [
        lambda: world.grant(1, epoch=9),
        # The store would block the caller that its anchor waits for.
        lambda: target.milestone(world.volume_id),
        lambda: target.require_milestone(world.volume_id, b""),
    ]
    for ask in asks:
        with pytest.raises(UnavailableError) as caught:
            ask()
        assert caught.value.reason == "namespace.resizing"
