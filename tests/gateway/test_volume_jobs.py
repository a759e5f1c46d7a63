"""Calls about background jobs and stores from gateway to target, and their permissions."""

import uuid
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway.back_ends import Via
from sealane.daemon.gateway.servicer import VolumesServicer
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.v1 import storage_pb2, storage_pb2_grpc, volumes_pb2
from volume_control import World, create

Request = storage_pb2.StartJobRequest | storage_pb2.ChangeJobRequest


async def start(world: World, volume_id: str, **values: object) -> storage_pb2.VolumeJob:
    message = storage_pb2.JobStart(**values)  # type: ignore[arg-type]
    return await world.volumes.stores.start_job(volume_id, message)


async def test_jobs_are_started_and_told_at_the_target(world: World) -> None:
    volume_id = await create(world)
    job = await start(world, volume_id, kind="scrub", bytes_per_second=5)
    assert (job.kind, job.state, job.bytes_per_second) == ("scrub", "running", 5)
    assert job.HasField("start_time")
    assert not job.HasField("end_time")
    change = storage_pb2.JobChange(kind="scrub", order="pause", bytes_per_second=0)
    job = await world.volumes.stores.change_job(volume_id, change)
    assert (job.state, job.bytes_per_second) == ("paused", 0)
    # Without a rate, it stays as it was.
    change = storage_pb2.JobChange(kind="scrub", bytes_per_second=9)
    await world.volumes.stores.change_job(volume_id, change)
    job = await world.volumes.stores.change_job(volume_id, storage_pb2.JobChange(kind="scrub"))
    assert job.bytes_per_second == 9
    status = await status_of(world, volume_id)
    assert (status.kind, status.layout, status.pending) == ("memory", "out of place", 7)
    assert [job.kind for job in status.jobs] == ["scrub"]
    assert not status.HasField("anchor_age_ms")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kind": "dance"}, "volume.job.kind"),
        ({"kind": ""}, "volume.job.kind"),
        ({"kind": "scrub", "bytes_per_second": (1 << 40) + 1}, "volume.job.rate"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    world: World, values: dict[str, object], reason: str
) -> None:
    volume_id = await create(world)
    with pytest.raises(UsageError) as caught:
        await start(world, volume_id, **values)
    assert caught.value.reason == reason
    await start(world, volume_id, kind="scrub")
    change = storage_pb2.JobChange(kind="scrub", order="explode")
    with pytest.raises(UsageError) as caught:
        await world.volumes.stores.change_job(volume_id, change)
    assert caught.value.reason == "volume.job.order"
    with pytest.raises(UsageError) as caught:
        await start(world, volume_id, kind="scrub")
    assert caught.value.reason == "volume.job.running"


async def refusal(world: World, caller: str, request: Request) -> str:
    """Return the reason for which the target refuses a node's call."""

    async def ask() -> None:
        async with world.identities[caller].channel(
            world.addresses["target"], "s", "target"
        ) as channel:
            stub = storage_pb2_grpc.StorageStub(channel)
            if isinstance(request, storage_pb2.StartJobRequest):
                await stub.StartJob(request, timeout=PATIENCE_SECONDS)
            else:
                await stub.ChangeJob(request, timeout=PATIENCE_SECONDS)

    with pytest.raises(Error) as caught:
        await ask()
    return caught.value.reason


async def status_of(world: World, volume_id: str) -> storage_pb2.StoreStatus:
    descriptor = await world.volumes.get(volume_id)
    status = (await world.volumes.stores.statuses([descriptor]))[volume_id]
    assert isinstance(status, storage_pb2.StoreStatus)
    return status


def requests(volume_id: str) -> list[Request]:
    start = storage_pb2.JobStart(kind="scrub")
    change = storage_pb2.JobChange(kind="scrub", order="cancel")
    return [
        storage_pb2.StartJobRequest(volume_id=volume_id, start=start),
        storage_pb2.ChangeJobRequest(volume_id=volume_id, change=change),
    ]


@pytest.mark.parametrize("role", ["target", "fabric", "broker"])
async def test_only_gateways_may_have_jobs_done(world: World, role: str) -> None:
    for request in requests(""):
        assert await refusal(world, role, request) == "call.role.refused"


async def test_only_a_volumes_own_tenant_may(world: World) -> None:
    for request in requests(await create(world)):
        assert await refusal(world, "stranger", request) == "namespace.not_found"
    assert world.target.recorded_jobs.known == {}


async def test_volume_is_shown_without_its_store_if_that_gives_no_answer(world: World) -> None:
    volume_id = await create(world)
    servicer, name = VolumesServicer(world.volumes), f"volumes/{volume_id}"

    async def get(**values: bool) -> volumes_pb2.Volume:
        request = volumes_pb2.GetVolumeRequest(name=name, **values)
        return await servicer.GetVolume(request, None)  # type: ignore[arg-type]

    assert not (await get()).HasField("store")
    assert (await get(with_store=True)).store.epoch == 3
    await world.storage.delete(world.identities["gateway"].subject, volume_id)
    volume = await get(with_store=True)
    assert (volume.HasField("store"), volume.store_unknown) == (False, "namespace.not_found")


async def test_clones_are_refused_with_their_reason(world: World) -> None:
    servicer = VolumesServicer(world.volumes)
    with pytest.raises(UsageError, match="bound to their volume") as caught:
        await servicer.CloneVolume(volumes_pb2.CloneVolumeRequest(), None)  # type: ignore[arg-type]
    assert caught.value.reason == "volume.clone.unsupported"


async def test_list_says_what_the_stores_say_if_it_is_asked_to(world: World) -> None:
    names = {f"volumes/{await create(world)}", f"volumes/{await create(world)}"}
    servicer = VolumesServicer(world.volumes)

    async def listed(**values: bool) -> dict[str, volumes_pb2.Volume]:
        request = volumes_pb2.ListVolumesRequest(**values)
        found = await servicer.ListVolumes(request, None)  # type: ignore[arg-type]
        return {volume.name: volume for volume in found.volumes}

    assert not any(volume.HasField("store") for volume in (await listed()).values())
    volumes = await listed(with_store=True)
    assert {name: volume.store.health for name, volume in volumes.items()} == dict.fromkeys(
        names, "unknown"
    )


async def test_volume_that_is_being_opened_is_shown_and_not_attached(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = await create(world)
    descriptors = getattr(world.storage, "_descriptors")  # noqa: B009 - as a restart leaves it
    monkeypatch.setattr(world.storage, "_opening", {volume_id: descriptors.pop(volume_id)})
    status = await status_of(world, volume_id)
    assert (status.health, status.opening_done, status.opening_expected) == ("opening", 1, 4)
    with pytest.raises(UnavailableError) as caught:
        await world.volumes.attach(
            volume_id, host_nqn="nqn.2014-08.org.example:h", via=Via(traddr="", trsvcid=0)
        )
    assert caught.value.reason == "namespace.opening"


async def test_one_call_asks_about_all_volumes_of_the_callers_tenant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_ids = [await create(world) for _ in range(3)]
    calls = 0
    describe = world.storage.namespaces

    async def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return await describe(*arguments)

    monkeypatch.setattr(world.storage, "namespaces", counted)
    servicer = VolumesServicer(world.volumes)
    request = volumes_pb2.ListVolumesRequest(with_store=True)
    answer = await servicer.ListVolumes(request, None)  # type: ignore[arg-type]
    assert [volume.store.epoch for volume in answer.volumes] == [3, 3, 3]
    assert calls == 1
    gateway, stranger = (world.identities[role].subject for role in ("gateway", "stranger"))
    missing = str(uuid.uuid4())
    shown = await world.storage.namespaces(gateway, [missing, *volume_ids])
    assert [namespace.volume_id for namespace in shown] == volume_ids
    assert await world.storage.namespaces(stranger, volume_ids) == []


async def test_no_call_asks_about_too_many_volumes(world: World) -> None:
    caller = world.identities["gateway"].subject
    assert await world.storage.namespaces(caller, ["x"] * 1000) == []
    with pytest.raises(UsageError) as caught:
        await world.storage.namespaces(caller, ["x"] * 1001)
    assert caught.value.reason == "namespace.batch.limit"
