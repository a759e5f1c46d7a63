"""A restarted gateway exports earlier attachments again, or reports why it can't."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway.attachments import (
    FILE_NAME,
    Attachment,
    AttachmentFiles,
    SealedAttachment,
    seal_attachment,
)
from sealane.daemon.gateway.volumes import Via
from sealane.errors import UnavailableError, UsageError, VerificationError
from volume_control import (
    HOST,
    RecordedAttachment,
    World,
    create,
    gateway_directories,
    volume_world,
)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with volume_world(tmp_path) as made:
        yield made


async def attached(world: World) -> str:
    volume_id = await create(world)
    via = Via(traddr="192.0.2.1", trsvcid=7)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=via)
    return volume_id


async def until(happened: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not happened():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)


async def settled(world: World, volume_id: str) -> None:
    """Wait until a volume is exported again or given up."""
    await until(lambda: not world.volumes.is_returning(volume_id))


async def happened(world: World, volume_id: str, kind: str) -> str:
    """Wait for an event and return its reason."""
    with world.volumes.events.subscribed(volume_id) as events:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for event in events:
                if event.kind == kind:
                    return event.reason
    raise AssertionError


async def test_a_restart_exports_the_same_with_another_lease(world: World) -> None:
    volume_id = await attached(world)
    (before,) = world.gateway.attached
    gateway = world.gateway
    await world.end_gateway()
    assert before.detached.is_set()
    assert before.is_wiped
    assert gateway.expected == {volume_id}, "its host is asked to come again"
    await world.start_gateway()
    await settled(world, volume_id)
    (after,) = world.gateway.attached
    assert not world.gateway.expected
    assert (after.secret, after.host_nqn) == (before.secret, HOST)
    assert (after.keys, after.sector_count) == (before.keys, before.sector_count)
    assert not any(old.overlaps(new) for old in before.ranges for new in after.ranges)
    grant = await after.open_queue(1, 7)
    assert (grant.traddr, grant.trsvcid) == ("192.0.2.1", 7)


async def test_a_detached_volume_stays_detached(world: World) -> None:
    volume_id = await attached(world)
    await world.volumes.detach(volume_id)
    await world.end_gateway()
    await world.start_gateway()
    assert not world.volumes.is_returning(volume_id)
    assert not world.gateway.expected


async def test_while_it_is_on_its_way_back_it_is_attached_to_everybody_else(world: World) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    await world.start_gateway()
    # No call to the broker has completed since.
    assert world.volumes.is_returning(volume_id)
    assert world.volumes.statistics() == {(volume_id, "", ""): {"state_reattaching": 1}}
    assert world.gateway.expected == {volume_id}
    for call in (
        world.volumes.attach(volume_id, host_nqn=HOST, via=Via()),
        world.volumes.delete(volume_id),
    ):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason in {"volume.attached.state", "volume.busy.state"}


async def test_detached_on_its_way_back_it_does_not_come(world: World) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    await world.start_gateway()
    assert (await world.volumes.detach(volume_id)).volume_id == volume_id
    assert not world.volumes.is_returning(volume_id)
    assert world.volumes.attached(volume_id) is None
    assert not world.gateway.expected
    await world.end_gateway()
    await world.start_gateway()
    assert not world.volumes.is_returning(volume_id)


async def test_what_was_deleted_meanwhile_is_dropped(world: World) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    await world.broker.unregister_volume(world.identities["gateway"].subject, volume_id)
    await world.start_gateway()
    assert await happened(world, volume_id, "attachment_dropped") == "volume.not_found"
    await settled(world, volume_id)
    assert not world.gateway.attached
    assert not world.gateway.expected, "its host is sent away"
    await world.end_gateway()
    await world.start_gateway()
    assert not world.volumes.is_returning(volume_id)


async def test_what_is_away_is_waited_for(world: World) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    await world.start_gateway()
    world.gateway.failure = UnavailableError("namespace.opening", "the target is still opening it")
    assert await happened(world, volume_id, "reattach_delayed") == "namespace.opening"
    assert world.gateway.expected == {volume_id}
    world.gateway.failure = None
    await settled(world, volume_id)
    assert len(world.gateway.attached) == 1


@pytest.mark.parametrize("reason", ["attachment.sealed", "attachment.rolled_back"])
async def test_a_changed_file_attaches_nothing(world: World, tmp_path: Path, reason: str) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    state, run = gateway_directories(tmp_path)
    path = state / FILE_NAME / volume_id
    path.write_bytes(path.read_bytes().replace(b'"sealed": "', b'"sealed": "AAAA'))
    if reason == "attachment.sealed":
        shutil.rmtree(run / FILE_NAME)
    await world.start_gateway()
    if reason == "attachment.sealed":
        assert await happened(world, volume_id, "attachment_dropped") == reason
    await settled(world, volume_id)
    assert not world.gateway.attached
    assert not world.gateway.expected


@pytest.mark.parametrize(
    ("generation", "key_epoch", "reason"),
    [(2, 1, "attachment.volume"), (1, 99, "attachment.key_epoch"), (1, 1, "")],
)
async def test_another_volume_than_its_host_was_given_does_not_come_back(
    world: World, tmp_path: Path, generation: int, key_epoch: int, reason: str
) -> None:
    volume_id = await attached(world)
    (before,) = world.gateway.attached
    await world.end_gateway()
    attachment = Attachment(
        volume_id=volume_id,
        host_nqn=HOST,
        secret=before.secret,
        generation=generation,
        sector_count=256,
        is_read_only=True,
    )
    kept = seal_attachment(attachment, key=before.keys[1], key_epoch=key_epoch, node="g")
    await AttachmentFiles(*gateway_directories(tmp_path)).put(kept)
    await world.start_gateway()
    if not reason:
        await happened(world, volume_id, "reattached")
        return
    assert await happened(world, volume_id, "attachment_dropped") == reason
    assert not world.gateway.attached


async def test_who_may_only_read_by_now_does_not_come_back_to_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await attached(world)
    await world.end_gateway()
    monkeypatch.setattr("sealane.daemon.gateway.volumes.is_read_only", lambda *_: True)
    await world.start_gateway()
    assert await happened(world, volume_id, "attachment_dropped") == "attachment.volume"
    assert not world.gateway.attached


async def test_an_attachment_that_cant_be_kept_isnt_made(world: World, tmp_path: Path) -> None:
    volume_id = await create(world)
    state, _ = gateway_directories(tmp_path)
    (state / FILE_NAME).rmdir()
    with pytest.raises(UnavailableError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert caught.value.reason == "attachment.file"
    (made,) = world.gateway.attached
    assert made.is_wiped
    assert world.volumes.attached(volume_id) is None


async def test_a_barred_gateway_forgets_what_it_had_attached(world: World) -> None:
    volume_id = await attached(world)
    world.volumes.bar("node.revoked")
    await until(lambda: world.volumes.attached(volume_id) is None)
    await world.end_gateway()
    await world.start_gateway()
    assert not world.volumes.is_returning(volume_id)


async def test_a_volume_that_grew_meanwhile_keeps_the_size_its_host_knows(world: World) -> None:
    volume_id = await attached(world)
    await world.volumes.resize(volume_id, size_bytes=2 << 20)
    await world.end_gateway()
    await world.start_gateway()
    await settled(world, volume_id)
    (after,) = world.gateway.attached
    assert after.sector_count == (1 << 20) // 4096


def unflushed_at(tmp_path: Path, volume_id: str) -> int:
    """Return the target process that may hold unflushed writes, according to the file."""
    state, _ = gateway_directories(tmp_path)
    content = json.loads((state / FILE_NAME / volume_id).read_text())
    return int(content["target_incarnation"])


async def test_the_first_queue_is_noted_before_anything_can_be_acknowledged(
    world: World, tmp_path: Path
) -> None:
    volume_id = await attached(world)
    assert unflushed_at(tmp_path, volume_id) == 0
    await world.gateway.attached[0].open_queue(1, 7)
    assert unflushed_at(tmp_path, volume_id) == world.storage.admission.incarnation
    await world.end_gateway()
    assert unflushed_at(tmp_path, volume_id) == 0, "an orderly end flushes"


async def test_a_detach_waits_for_what_is_being_noted_and_is_not_sent_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await attached(world)
    (volume,) = world.gateway.attached
    await volume.open_queue(1, 7)
    put, begun, may_end = AttachmentFiles.put, asyncio.Event(), asyncio.Event()

    async def slow_put(files: AttachmentFiles, kept: SealedAttachment) -> None:
        begun.set()
        await may_end.wait()
        await put(files, kept)

    monkeypatch.setattr(AttachmentFiles, "put", slow_put)
    volume.settled = world.storage.admission.incarnation + 1
    async with asyncio.timeout(PATIENCE_SECONDS):
        await begun.wait()
        detaching = asyncio.ensure_future(world.volumes.detach(volume_id))
        await asyncio.sleep(0)
        may_end.set()
        await detaching
    await world.end_gateway()
    await world.start_gateway()
    assert not world.volumes.is_returning(volume_id), "its file is gone for good"


async def after_a_crash(world: World, volume_id: str) -> RecordedAttachment:
    """Kill the gateway with unflushed changes, restart it, and return the attachment."""
    world.gateway.attached[0].is_durable = False
    await world.end_gateway()
    await world.start_gateway()
    await settled(world, volume_id)
    (after,) = world.gateway.attached
    return after


async def test_after_a_crash_the_same_process_of_the_target_has_what_is_unflushed(
    world: World, tmp_path: Path
) -> None:
    volume_id = await attached(world)
    await world.gateway.attached[0].open_queue(1, 7)
    after = await after_a_crash(world, volume_id)
    await after.open_queue(1, 8)
    # Then the target may restart: this gateway process has a journal.
    world.storage.admission.incarnation += 1
    await after.open_queue(1, 9)
    assert unflushed_at(tmp_path, volume_id) == world.storage.admission.incarnation - 1
    after.settled = world.storage.admission.incarnation
    await until(lambda: unflushed_at(tmp_path, volume_id) == world.storage.admission.incarnation)


async def test_after_a_crash_of_both_the_volume_does_not_go_on(
    world: World, tmp_path: Path
) -> None:
    volume_id = await attached(world)
    await world.gateway.attached[0].open_queue(1, 7)
    known = world.storage.admission.incarnation
    world.storage.admission.incarnation += 1
    after = await after_a_crash(world, volume_id)
    for epoch in (8, 9):
        with pytest.raises(VerificationError) as caught:
            await after.open_queue(1, epoch)
        assert caught.value.reason == "volume.unflushed_lost"
    # Nor after another, clean restart of the gateway; an operator may attach it again.
    await world.end_gateway()
    assert unflushed_at(tmp_path, volume_id) == known
    await world.start_gateway()
    await settled(world, volume_id)
    await world.volumes.detach(volume_id)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    await world.gateway.attached[-1].open_queue(1, 10)


async def test_a_queue_that_opens_while_its_volume_is_detached_keeps_nothing(
    world: World, tmp_path: Path
) -> None:
    volume_id = await attached(world)
    (made,) = world.gateway.attached
    await world.volumes.detach(volume_id)
    with pytest.raises(UnavailableError) as caught:
        await made.open_queue(1, 7)
    assert caught.value.reason == "volume.detached"
    state, _ = gateway_directories(tmp_path)
    assert not list((state / FILE_NAME).iterdir())
