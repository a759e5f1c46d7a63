"""A target that restarts: the volumes it restores, and its reports about others."""

import asyncio
import contextlib
import datetime as dt
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.crypto.anchors import TrustAnchors
from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.crypto.kem import X25519KemKey
from sealane.daemon.target.control import StorageService
from sealane.daemon.target.data_path import Target
from sealane.daemon.target.openings import Openings
from sealane.daemon.volume.events import Event
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import broker_pb2
from target.store_device import open_device, volume_files
from trust.world import all_authorized

NOW = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)
CALLER = Subject(
    node="g", role="gateway", tenant="acme", incarnation=bytes(16), kem_public_key=bytes(32)
)


class Site:
    """A directory and the successive processes that serve it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = CertificateAuthority.create(broker="b", now=NOW)
        self.anchors = TrustAnchors(self.authority.certificate)
        self.events: list[Event] = []
        self.device_id = ""

    def signed(
        self,
        volume_id: str,
        *,
        node: str = "s",
        sectors: int = 64,
        device_id: str | None = None,
    ) -> bytes:
        descriptor = broker_pb2.VolumeDescriptor(
            volume_id=volume_id,
            target_node=node,
            tenant="acme",
            sector_count=sectors,
            device_id=self.device_id if device_id is None else device_id,
        ).SerializeToString()
        return broker_pb2.SignedVolumeDescriptor(
            descriptor=descriptor, signature=self.authority.sign_descriptor(descriptor)
        ).SerializeToString()

    def path(self, volume_id: str, suffix: str) -> Path:
        return self.directory / f"{volume_id}.{suffix}"

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[StorageService]:
        target = Target(traddr="127.0.0.1", trsvcid=0, store_kind="file", directory=self.directory)
        async with open_device(self.directory) as (device, catalogue):
            self.device_id = str(device.device_id)
            await target.start()
            service = StorageService(
                target,
                node="s",
                store="file",
                anchors=self.anchors,
                kem=X25519KemKey.create(),
                authorizations=all_authorized(target),
                device=device,
                catalogue=catalogue,
            )
            service.events.publish = self.events.append  # type: ignore[method-assign]
            try:
                await service.restore()
                yield service
            finally:
                await target.stop()

    async def create(self, service: StorageService, **values: Any) -> str:
        volume_id = str(uuid.uuid4())
        signed = broker_pb2.SignedVolumeDescriptor.FromString(self.signed(volume_id, **values))
        await service.create(CALLER, signed)
        return volume_id

    def said(self, kind: str) -> list[tuple[str, str]]:
        return [(event.volume_id, event.reason) for event in self.events if event.kind == kind]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "volumes")


async def test_volumes_are_there_after_a_restart_under_another_incarnation(site: Site) -> None:
    async with site.process() as first:
        volume_id = await site.create(first)
    async with site.process() as second:
        assert site.said("restored") == [(volume_id, "")]
        assert (await second.namespace(CALLER, volume_id)).sector_count == 64
        assert second.admission.incarnation != first.admission.incarnation
        # Repeating the request is still idempotent.
        signed = broker_pb2.SignedVolumeDescriptor.FromString(site.signed(volume_id))
        await second.create(CALLER, signed)


async def test_deleted_volume_stays_deleted(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        await service.delete(CALLER, volume_id)
    assert volume_files(site.directory) == set()
    async with site.process() as service:
        with pytest.raises(UsageError, match="no volume"):
            await service.namespace(CALLER, volume_id)


async def test_volume_that_a_crash_left_half_made_or_half_removed_goes(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    site.path(volume_id, "volume").rename(site.path(volume_id, "volume.unfinished"))
    async with site.process() as service:
        assert site.said("discarded") == [(volume_id, "volume.unfinished")]
        with pytest.raises(UsageError):
            await service.namespace(CALLER, volume_id)
    assert volume_files(site.directory) == set()


async def test_half_removed_volume_that_stays_stops_neither_target_nor_other_volumes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Target, volume_id: uuid.UUID) -> None:
        raise UnavailableError("store.remove", "the drive is gone")

    async with site.process() as service:
        kept, served = [await site.create(service) for _ in range(2)]
    site.path(kept, "volume").rename(site.path(kept, "volume.unfinished"))
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Target, "discard_store", fail)
        async with site.process() as service:
            assert site.said("kept") == [(kept, "store.remove")]
            assert site.said("restored") == [(served, "")]
            other = await site.create(service)
            # Its own failure is told to whoever deletes a volume.
            with pytest.raises(UnavailableError):
                await service.delete(CALLER, other)
            broken.undo()
            await service.delete(CALLER, served)
            assert volume_files(site.directory) == set()


async def test_file_that_cannot_be_removed_keeps_its_volume_only(site: Site) -> None:
    async with site.process() as service:
        kept, served = [await site.create(service) for _ in range(2)]
    site.path(kept, "volume").rename(site.path(kept, "volume.unfinished"))
    site.path(kept, "sectors").unlink()
    site.path(kept, "sectors").mkdir()
    async with site.process() as service:
        assert site.said("kept") == [(kept, "store.remove")]
        assert site.said("restored") == [(served, "")]
        site.path(kept, "sectors").rmdir()
        await service.delete(CALLER, served)
    assert volume_files(site.directory) == set()


async def test_failed_creation_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Target, volume_id: uuid.UUID, *, sector_count: int, **_: object) -> None:
        site.path(str(volume_id), "sectors").touch()
        raise UnavailableError("store.create", "no room")

    async with site.process() as service:
        monkeypatch.setattr(Target, "create_volume", fail)
        with pytest.raises(UnavailableError, match="no room"):
            await site.create(service)
    assert volume_files(site.directory) == set()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda site, volume: site.signed(volume)[:-1] + b"x", "volume.descriptor.signature"),
        (lambda _site, _volume: b"\xff", "volume.descriptor.malformed"),
        (lambda site, _volume: site.signed(str(uuid.uuid4())), "volume.descriptor.other"),
        (lambda site, volume: site.signed(volume, node="other", device_id=""), "namespace.target"),
        (lambda site, volume: site.signed(volume, device_id="x"), "namespace.device"),
        (lambda site, volume: site.signed(volume, sectors=65), "store.open"),
        (lambda site, volume: Site(site.directory).signed(volume), "volume.descriptor.signature"),
    ],
)
async def test_descriptor_that_does_not_fit_is_reported_and_nothing_is_deleted(
    site: Site, content: Callable[[Site, str], bytes], reason: str
) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        other = await site.create(service)
    site.path(volume_id, "volume").write_bytes(content(site, volume_id))
    files = {path: path.read_bytes() for path in volume_files(site.directory)}
    async with site.process() as service:
        assert site.said("skipped") == [(volume_id, reason)]
        assert site.said("restored") == [(other, "")]
        with pytest.raises(Error):
            await service.namespace(CALLER, volume_id)
        signed = broker_pb2.SignedVolumeDescriptor.FromString(site.signed(volume_id))
        with pytest.raises(UsageError, match="exists already"):
            await service.create(CALLER, signed)
    assert {*files} == volume_files(site.directory)
    assert site.path(volume_id, "volume").read_bytes() == files[site.path(volume_id, "volume")]


async def test_volumes_outlive_the_authority_that_signed_their_descriptors(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    successor = CertificateAuthority.create(broker="b", now=NOW)
    site.anchors = TrustAnchors(successor.certificate)
    async with site.process():
        assert site.said("skipped") == [(volume_id, "volume.descriptor.signature")]
    site.anchors.retired = (site.authority.certificate,)
    async with site.process() as service:
        assert site.said("restored") == [(volume_id, "")]
        assert (await service.namespace(CALLER, volume_id)).sector_count == 64
        # What wasn't stored before must be signed by an authority that is trusted.
        with pytest.raises(VerificationError, match=r"volume\.descriptor\.signature"):
            await site.create(service)
        larger = broker_pb2.SignedVolumeDescriptor.FromString(site.signed(volume_id, sectors=65))
        with pytest.raises(VerificationError, match=r"volume\.descriptor\.signature"):
            await service.resize(CALLER, larger)


async def test_a_descriptor_changed_after_the_list_was_checked_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    restore = StorageService.restore

    async def change(service: StorageService) -> None:
        site.path(volume_id, "volume").write_bytes(site.signed(volume_id, sectors=32))
        await restore(service)

    monkeypatch.setattr(StorageService, "restore", change)
    async with site.process():
        assert site.said("skipped") == [(volume_id, "device.anchor.mismatch")]


async def test_damaged_store_is_reported_and_left(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    path = site.path(volume_id, "sectors")
    with path.open("r+b") as file:
        file.truncate(4096)
    async with site.process():
        assert site.said("skipped") == [(volume_id, "store.open")]
    assert path.stat().st_size == 4096


async def test_store_that_can_not_be_opened_is_failed_and_tried_again(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    path = site.path(volume_id, "sectors")
    whole = path.read_bytes()
    path.write_bytes(b"")
    async with site.process() as service:
        assert service.unopened.ids() == [uuid.UUID(volume_id)]
        assert not service.failed_stores()
        assert [*service.statistics().values()] == [{"failed": 1}]
        with pytest.raises(UnavailableError) as refused:
            await service.namespace(CALLER, volume_id)
        assert refused.value.reason == "store.open"
        # Its gateway would report a volume that isn't found as lost.
        with pytest.raises(UnavailableError):
            service.check_watch(CALLER, volume_id)
        stranger = replace(CALLER, tenant="other")
        with pytest.raises(UsageError):
            service.check_watch(stranger, volume_id)
        with pytest.raises(UsageError):
            await service.delete(stranger, volume_id)
        await service.reopen()
        # One event for each reason.
        assert site.said("skipped") == [(volume_id, "store.open")]
        path.write_bytes(whole)
        await service.reopen()
        assert not service.unopened.ids()
        service.check_watch(CALLER, volume_id)
        assert (await service.namespace(CALLER, volume_id)).sector_count == 64
        assert [each.get("failed") for each in service.statistics().values()] == [0]


async def test_store_that_was_not_opened_can_be_deleted_and_a_forged_one_is_not_tried_again(
    site: Site,
) -> None:
    async with site.process() as service:
        volume_id, other = await site.create(service), await site.create(service)
    site.path(volume_id, "sectors").write_bytes(b"")
    forged = Site(site.directory)
    forged.device_id = site.device_id
    site.path(other, "volume").write_bytes(forged.signed(other))
    async with site.process() as service:
        assert {*service.unopened.ids()} == {uuid.UUID(volume_id), uuid.UUID(other)}
        await service.delete(CALLER, volume_id)
        assert service.unopened.ids() == [uuid.UUID(other)]
        assert {path.stem for path in volume_files(site.directory)} == {other}
        assert not service.unopened.passing()


async def test_volume_of_another_device_is_not_made_here(site: Site) -> None:
    async with site.process() as service:
        for device_id in ("", str(uuid.uuid4())):
            with pytest.raises(UsageError) as caught:
                await site.create(service, device_id=device_id)
            assert caught.value.reason == "namespace.device"


async def test_volume_that_came_with_its_device_is_served_by_the_new_target(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
        # As if from another target: the device was moved here since.
    site.path(volume_id, "volume").write_bytes(site.signed(volume_id, node="before"))
    async with site.process() as service:
        assert site.said("restored") == [(volume_id, "")]
        signed = broker_pb2.SignedVolumeDescriptor.FromString(site.signed(volume_id))
        await service.create(CALLER, signed)
        # New volumes are accepted only if they name this target.
        with pytest.raises(UsageError) as caught:
            await site.create(service, node="before")
        assert caught.value.reason == "namespace.target"


async def test_volume_from_before_devices_is_served(site: Site) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    older = site.signed(volume_id, device_id="")
    site.path(volume_id, "volume").write_bytes(older)
    async with site.process() as service:
        assert site.said("restored") == [(volume_id, "")]
        await service.create(CALLER, broker_pb2.SignedVolumeDescriptor.FromString(older))


async def test_nothing_is_served_of_a_device_that_was_lost(site: Site) -> None:
    loss = VerificationError("device.fenced", "moved")
    async with site.process() as service:
        volume_id = await site.create(service)
        await service.abandon(loss)
        assert site.said("abandoned") == [(volume_id, "device.fenced")]
        with pytest.raises(VerificationError, match=r"device\.fenced"):
            await service.namespace(CALLER, volume_id)
        with pytest.raises(VerificationError, match=r"device\.fenced"):
            await site.create(service)
        with pytest.raises(VerificationError, match=r"device\.fenced"):
            await service.delete(CALLER, volume_id)
    async with site.process():
        assert site.said("restored") == [(volume_id, "")]


async def test_volumes_that_are_being_opened_say_how_far_that_is_and_are_not_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.process() as service:
        volume_id = await site.create(service)
    begun: asyncio.Queue[StorageService] = asyncio.Queue()
    opening, goes_on, served = asyncio.Event(), asyncio.Event(), asyncio.Event()
    restore, open_volume = StorageService.restore, Target.open_volume

    async def tell(self: StorageService) -> None:
        begun.put_nowait(self)
        await restore(self)

    async def wait(self: Target, volume_id: uuid.UUID, **values: Any) -> None:
        opening.set()
        await goes_on.wait()
        await open_volume(self, volume_id, **values)

    monkeypatch.setattr(StorageService, "restore", tell)
    monkeypatch.setattr(Target, "open_volume", wait)
    monkeypatch.setattr(Openings, "progress", lambda *_: (3, 8))

    ends = asyncio.Event()

    async def serve() -> None:
        async with site.process():
            served.set()
            await ends.wait()

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(serve())
        service = await begun.get()
        with pytest.raises(UnavailableError) as caught:
            await service.namespace(replace(CALLER, tenant="other"), volume_id)
        assert caught.value.reason == "namespace.opening"
        await opening.wait()
        status = (await service.namespace(CALLER, volume_id)).status
        assert (status.health, status.opening_done, status.opening_expected) == ("opening", 3, 8)
        with pytest.raises(UnavailableError) as caught:
            service.jobs(CALLER, volume_id)
        assert caught.value.reason == "namespace.opening"
        goes_on.set()
        await served.wait()
        assert (await service.namespace(CALLER, volume_id)).status.health == "unknown"
        with pytest.raises(UsageError, match="no volume"):
            service.jobs(CALLER, str(uuid.uuid4()))
        ends.set()
