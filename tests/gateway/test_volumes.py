"""The life of a volume at broker, target and gateway, from creation to deletion."""

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from brokers import MemoryAudit
from patience import PATIENCE_SECONDS
from sealane.crypto.certificates import Subject
from sealane.crypto.lease import LEASE_COUNTERS, CounterRange
from sealane.crypto.queue import VERSION
from sealane.daemon.gateway.grants import QueueGrant
from sealane.daemon.gateway.targets import Targets
from sealane.daemon.gateway.volumes import Via
from sealane.daemon.node.target_view import TargetState, TargetView
from sealane.daemon.runtime.servers import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
)
from sealane.daemon.runtime.space import Space
from sealane.daemon.target.control import NAMESPACES_MAX
from sealane.daemon.volume.engine_events import StorageEvent
from sealane.daemon.volume.events import Event
from sealane.errors import ProtocolError, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.nqn import gateway_nqn
from sealane.protocol.v1 import (
    broker_pb2,
    storage_pb2,
    storage_pb2_grpc,
)
from volume_control import (
    HOST,
    RecordedEvent,
    World,
    create,
)


async def test_created_volume_is_at_broker_and_target(world: World) -> None:
    volume_id = await create(world)
    assert world.target.volumes == {uuid.UUID(volume_id): 256}
    listed, token = await world.volumes.list(page_size=0, page_token="")
    assert [d.volume_id for d in listed] == [volume_id]
    assert token == ""
    assert (await world.volumes.get(volume_id)).display_name == "d"


async def test_attach_releases_key_and_lease_and_both_ends_derive_one_secret(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    assert len(made.keys[1]) == 32
    assert any(made.keys[1])
    assert [r.count for r in made.ranges] == [LEASE_COUNTERS]
    first: QueueGrant = await made.open_queue(1, 7)
    admitted = world.target.admitted[first.ticket]
    assert admitted["secret"] == first.secret
    assert admitted["host_nqn"] == first.host_nqn
    assert (first.traddr, first.trsvcid) == ("127.0.0.1", 4420)
    second = await made.open_queue(2, 7)
    assert second.secret != first.secret
    assert second.association_epoch == first.association_epoch
    assert second.target_incarnation == world.storage.admission.incarnation


async def test_attach_again_gives_the_same_key_and_other_counters(world: World) -> None:
    volume_id = await create(world)
    for _ in range(2):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        await world.volumes.detach(volume_id)
    first, second = world.gateway.attached
    assert first.detached.is_set()
    assert first.keys == second.keys
    assert not first.ranges[0].overlaps(second.ranges[0])


async def test_data_path_address_can_be_replaced(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via(traddr="192.0.2.1", trsvcid=7))
    grant = await world.gateway.attached[0].open_queue(1, 7)
    assert (grant.traddr, grant.trsvcid) == ("192.0.2.1", 7)


async def test_no_log_line_holds_a_key(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    grant = await world.gateway.attached[0].open_queue(1, 7)
    with pytest.raises(UsageError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    logged = "".join(capfd.readouterr())
    assert "key_released" in logged
    for secret in (world.gateway.attached[0].keys[1], bytes(grant.secret), grant.ticket):
        for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
            assert form not in logged


async def test_oversized_calls_are_refused(world: World) -> None:
    gateway = world.identities["gateway"]
    with pytest.raises(UnavailableError) as caught:
        await world.namespace(gateway, "v" * (MESSAGE_BYTES_MAX + 1))
    assert caught.value.reason == "peer.resource_exhausted"
    async with gateway.channel(world.addresses["target"], "s", "target") as channel:
        stub = storage_pb2_grpc.StorageStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetNamespace(
                storage_pb2.GetNamespaceRequest(volume_id="v"),
                metadata=(("x-long", "x" * (2 * METADATA_BYTES_MAX)),),
                timeout=PATIENCE_SECONDS,
            )
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_text_of_a_caller_comes_back_shortened(world: World) -> None:
    with pytest.raises(UsageError) as caught:
        await world.namespace(world.identities["gateway"], "v" * 100_000)
    assert caught.value.reason == "namespace.not_found"
    assert len(str(caught.value)) < 300


async def test_number_of_namespaces_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.target.control.NAMESPACES_MAX", 1)
    await create(world)
    with pytest.raises(UnavailableError) as caught:
        await create(world)
    assert caught.value.reason == "namespace.limit"
    assert len(world.target.volumes) == 1


@pytest.mark.parametrize("queue_id", [0, 65535, 1 << 31])
async def test_queue_ids_that_cannot_be_are_refused(world: World, queue_id: int) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    with pytest.raises(UsageError) as caught:
        await world.gateway.attached[0].open_queue(queue_id, 1)
    assert caught.value.reason == "queue.id"
    assert world.target.admitted == {}


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_another_version_of_the_key_agreement_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr("sealane.daemon.gateway.queue_opening.VERSION", version)
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    with pytest.raises(UsageError, match=f"version {version} .* allowed: {VERSION}") as caught:
        await world.gateway.attached[0].open_queue(1, 1)
    assert caught.value.reason == "queue.version"
    assert world.target.admitted == {}


async def test_a_gateway_that_states_no_version_gets_its_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.gateway.queue_opening.VERSION", 0)
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    await world.gateway.attached[0].open_queue(1, 1)
    assert len(world.target.admitted) == 1


async def test_a_ticket_of_another_length_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.target.queue_admission.TICKET_BYTES", 15)
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    with pytest.raises(ProtocolError) as caught:
        await world.gateway.attached[0].open_queue(1, 1)
    assert caught.value.reason == "queue.ticket.malformed"


async def test_older_association_is_refused_and_its_queues_closed(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    old = world.gateway.attached[0]
    await old.open_queue(1, 7)
    await world.volumes.detach(volume_id)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.gateway.attached[1].epoch_floor == 7
    grant = await world.gateway.attached[1].open_queue(1, 8)
    assert world.target.closed[-1] == (gateway_nqn("g"), grant.association_epoch)
    with pytest.raises(VerificationError) as caught:
        await old.open_queue(2, 7)
    assert caught.value.reason == "queue.association.stale"


async def test_attached_volume_is_neither_attached_twice_nor_deleted(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    # A second attachment gets this far and leaves nothing behind.
    world.gateway.failure = UnavailableError("data.path", "it was asked")
    for call in (
        world.volumes.attach(volume_id, host_nqn=HOST, via=Via()),
        world.volumes.delete(volume_id),
    ):
        with pytest.raises(UsageError) as caught:
            await call
        assert caught.value.reason == "volume.attached.state"
    await world.volumes.detach(volume_id)
    await world.volumes.delete(volume_id)
    assert world.target.volumes == {}
    with pytest.raises(UsageError) as caught:
        await world.volumes.get(volume_id)
    assert caught.value.reason == "volume.not_found"


async def test_failed_attach_leaves_nothing_attached(world: World) -> None:
    volume_id = await create(world)
    world.gateway.failure = UnavailableError("data.path", "no")
    with pytest.raises(UnavailableError):
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert world.volumes.attached(volume_id) is None
    world.gateway.failure = None
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    # The lease of the failed attempt is unused, so the second one uses it.
    records = cast("MemoryAudit", world.broker.audit).records
    assert [record["kind"] for record in records].count("lease.grant") == 1


async def test_failed_namespace_unregisters_the_volume(world: World) -> None:
    async def fail(volume_id: uuid.UUID, *, sector_count: int, **_: object) -> None:
        raise UnavailableError("store.full", "no room")

    world.target.create_volume = fail  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as caught:
        await create(world)
    assert caught.value.reason == "store.full"
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_failed_retry_of_create_keeps_the_volume_of_the_first_call(world: World) -> None:
    request_id = str(uuid.uuid4())
    made = await create(world, request_id)
    world.storage.create = _refuse  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        await create(world, request_id)
    assert (await world.volumes.get(made)).volume_id == made


async def test_a_repeated_create_while_no_target_takes_volumes_returns_the_first_volume(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(self: Targets, size_bytes: int) -> str:
        raise UnavailableError("volume.target.none", "no target takes a new volume")

    request_id = str(uuid.uuid4())
    monkeypatch.setattr(Targets, "_best", none)
    with pytest.raises(UnavailableError) as caught:
        await create(world, request_id)
    assert caught.value.reason == "volume.target.none"
    with pytest.MonkeyPatch.context() as serving:

        async def first(self: Targets, size_bytes: int) -> str:
            return "s"

        serving.setattr(Targets, "_best", first)
        made = await create(world, request_id)
    world.storage.is_draining = True
    assert await create(world, request_id) == made
    with pytest.raises(UnavailableError):
        await create(world)
    with pytest.raises(UsageError) as different:
        await create(world, request_id, size_bytes=4 * 4096)
    assert different.value.reason == "volume.request.exists"
    await world.volumes.delete(made)
    with pytest.raises(UnavailableError):
        await create(world, request_id)
    assert not world.target.volumes


async def test_create_that_is_given_up_leaves_nothing(world: World) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def create_volume(volume_id: uuid.UUID, *, sector_count: int, **_: object) -> None:
        # Like a thread that creates a file: the store appears even if nobody waits for it.
        world.target.volumes[volume_id] = sector_count
        started.set()
        await go_on.wait()

    really_delete = world.storage.delete

    async def delete(caller: Subject, volume_id: str) -> None:
        # The abandoned call has ended at the target when the clean-up arrives.
        go_on.set()
        await really_delete(caller, volume_id)

    world.target.create_volume = create_volume  # type: ignore[method-assign]
    world.storage.delete = delete  # type: ignore[method-assign]
    creating = asyncio.ensure_future(create(world))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await started.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    assert world.target.volumes == {}
    assert await world.volumes.list(page_size=0, page_token="") == ([], "")


async def test_a_retry_waits_for_the_first_call_to_fail_or_succeed(world: World) -> None:
    request_id = str(uuid.uuid4())
    started, go_on = asyncio.Event(), asyncio.Event()
    really_create = world.target.create_volume

    async def fail(volume_id: uuid.UUID, *, sector_count: int, **_: object) -> None:
        started.set()
        await go_on.wait()
        raise UnavailableError("store.full", "no room")

    world.target.create_volume = fail  # type: ignore[method-assign]
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = asyncio.ensure_future(create(world, request_id))
        await started.wait()
        world.target.create_volume = really_create  # type: ignore[method-assign]
        for form in (request_id, request_id.upper()):
            with pytest.raises(UsageError) as caught:
                await create(world, form)
            assert caught.value.reason == "volume.busy.state"
        go_on.set()
        with pytest.raises(UnavailableError):
            await first
        made = await create(world, request_id)
    listed, _token = await world.volumes.list(page_size=0, page_token="")
    assert {each.volume_id for each in listed} == {made}
    assert {str(each) for each in world.target.volumes} == {made}


async def _refuse(caller: Subject, signed: broker_pb2.SignedVolumeDescriptor) -> None:
    raise UnavailableError("store.full", "no room")


async def test_volume_the_target_lost_is_refused_at_attach(world: World) -> None:
    volume_id = await create(world)
    caller = world.identities["gateway"].subject
    await world.storage.delete(caller, volume_id)
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    assert caught.value.reason == "namespace.not_found"
    assert "restarted" in str(caught.value)
    assert world.volumes.attached(volume_id) is None


async def test_volume_the_target_loses_while_attached_is_told_once(world: World) -> None:
    volume_id = await create(world)
    with world.volumes.events.subscribed(volume_id) as events:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        await world.storage.delete(world.identities["gateway"].subject, volume_id)
        # The target does this when it ends: the gateway then asks again and learns of the loss.
        world.storage.events.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for event in events:
                if event.kind == "lost_by_target":
                    break
    assert (event.reason, event.origin) == ("namespace.not_found", "g")


async def test_polls_during_a_delete_find_nothing_to_ask(world: World) -> None:
    volume_id = await create(world)
    asked: list[uuid.UUID] = []

    async def close_volume(deleted: uuid.UUID) -> None:
        def take_events(volume: uuid.UUID) -> Sequence[StorageEvent]:
            asked.append(volume)
            raise UsageError("volume.unknown", "gone")

        world.target.take_events = take_events  # type: ignore[method-assign]
        # When this task runs again, the poller has run.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await world.storage.poll_events()
        assert world.storage.statistics() == {}

    world.target.close_volume = close_volume  # type: ignore[method-assign]
    await world.storage.delete(world.identities["gateway"].subject, volume_id)
    assert asked == []


@pytest.mark.parametrize("host_nqn", ["", "x", "nqn." + "a" * 220])
async def test_impossible_host_is_refused(world: World, host_nqn: str) -> None:
    with pytest.raises(UsageError) as caught:
        await world.volumes.attach(str(uuid.uuid4()), host_nqn=host_nqn, via=Via())
    assert caught.value.reason == "volume.host_nqn"


async def test_low_counters_fetch_the_next_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.daemon.gateway.supply.REFILL_POLL_SECONDS", 0.01)
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    made = world.gateway.attached[0]
    refilled = asyncio.Event()
    add = made.add_counters

    def record(granted: Iterable[CounterRange]) -> None:
        add(granted)
        refilled.set()

    made.add_counters = record  # type: ignore[method-assign]
    made.remaining = LEASE_COUNTERS // 2 - 1
    async with asyncio.timeout(PATIENCE_SECONDS):
        await refilled.wait()
    assert not made.ranges[0].overlaps(made.ranges[1])


async def test_target_events_reach_who_watches_at_the_gateway(world: World) -> None:
    volume_id = await create(world)
    with world.volumes.events.subscribed(volume_id) as events:
        await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(world.storage.poll_events())
            heard: list[Event] = []
            # The gateway's watch of the target starts in the background. Until then events may be
            # missed, so the target repeats its report until one arrives.
            reporting = tasks.create_task(_report(world))
            async for event in events:
                heard.append(event)
                if event.kind == "refused":
                    break
            polling.cancel()
            reporting.cancel()
    assert heard[0].kind == "attached"
    assert (heard[-1].reason, heard[-1].lba, heard[-1].origin) == ("sector.mac", 7, "s")


async def _report(world: World) -> None:
    while True:
        world.target.events.append(RecordedEvent("refused", "sector.mac", 7, ""))
        await asyncio.sleep(0.05)


async def test_barred_gateway_fails_and_leaves_its_volumes(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    (made,) = world.gateway.attached
    world.volumes.bar("attestation.measurement.unknown")
    assert "attestation.measurement.unknown" in made.failed
    await asyncio.wait_for(made.detached.wait(), PATIENCE_SECONDS)
    assert world.volumes.attached(volume_id) is None


async def test_volume_grows_at_broker_and_target(world: World) -> None:
    volume_id = await create(world)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=Via())
    for _ in range(2):
        grown = await world.volumes.resize(volume_id, size_bytes=512 * 4096)
        assert grown.sector_count == 512
    assert world.target.volumes == {uuid.UUID(volume_id): 512}
    records = cast("MemoryAudit", world.broker.audit).records
    audited = [record for record in records if record["kind"] == "volume.resize"]
    assert [record["outcome"] for record in audited[:2]] == ["granted", "done"]
    with pytest.raises(UsageError) as caught:
        await world.volumes.resize(volume_id, size_bytes=511 * 4096)
    assert caught.value.reason == "volume.resize.smaller"


async def test_growth_that_the_target_refuses_leaves_the_volume_as_it_is(world: World) -> None:
    volume_id = await create(world)
    resize = world.target.resize_volume

    async def fail(volume_id: uuid.UUID, *, sector_count: int) -> None:
        raise UnavailableError("store.extend", "no room")

    world.target.resize_volume = fail  # type: ignore[method-assign]
    with pytest.raises(UnavailableError) as caught:
        await world.volumes.resize(volume_id, size_bytes=512 * 4096)
    assert caught.value.reason == "store.extend"
    assert (await world.volumes.get(volume_id)).sector_count == 256
    world.target.resize_volume = resize  # type: ignore[method-assign]
    assert (await world.volumes.resize(volume_id, size_bytes=300 * 4096)).sector_count == 300


async def test_volume_on_a_third_party_grows_detached_only(world: World) -> None:
    made = await world.volumes.create(
        request_id="", display_name="", size_bytes=4096, target_node="", third_party="array"
    )
    await world.volumes.attach(made.volume_id, host_nqn=HOST, via=Via())
    with pytest.raises(UsageError) as caught:
        await world.volumes.resize(made.volume_id, size_bytes=8192)
    assert caught.value.reason == "volume.attached.state"
    await world.volumes.detach(made.volume_id)
    assert (await world.volumes.resize(made.volume_id, size_bytes=8192)).sector_count == 2
    assert world.third_parties.resized == [2]


async def test_a_target_says_what_gateways_compare(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(world)
    found = world.storage.status()
    assert (found.volumes, found.volumes_max, found.healthy) == (1, NAMESPACES_MAX, True)
    assert not found.HasField("free_bytes")
    space = Space(
        place="volumes",
        directory=Path("/unused"),
        capacity=100,
        free=70,
        reserve=1,
        promised=30,
        state="good",
    )
    for given, free in (
        (space, 40),
        (replace(space, promised=80), 0),
        (replace(space, state="full"), 0),
        (replace(space, state="unknown"), 0),
    ):
        monkeypatch.setattr(world.storage, "_room", lambda given=given: given)
        found = world.storage.status()
        assert (found.free_bytes, found.capacity_bytes) == (free, 100)
    monkeypatch.setattr(world.storage.unopened, "ids", lambda: [uuid.UUID(int=1)])
    assert not world.storage.status().healthy
    monkeypatch.setattr(world.storage.unopened, "ids", list)
    assert world.storage.status().healthy
    monkeypatch.setattr(world.target, "statistics", lambda _: {"failed": 1})
    assert world.storage.failed_stores()
    assert not world.storage.status().healthy
    monkeypatch.undo()
    world.storage.failed_stores()
    world.storage.is_draining = True
    # As the gateway sees it.
    async with contextlib.aclosing(_looks(world)) as looks:
        view = await anext(looks)
    assert (view.node, view.state, view.volumes) == ("s", TargetState.DRAINING, 1)


async def _looks(world: World) -> AsyncIterator[TargetView]:
    reported: asyncio.Queue[bool] = asyncio.Queue()
    targets = Targets(
        {"s": world.addresses["target"]},
        identity=world.identities["gateway"],
        report=reported.put,
    )
    looking = asyncio.ensure_future(targets.keep_looked_at())
    try:
        await reported.get()
        yield targets.views()[0]
    finally:
        looking.cancel()


async def test_a_volume_on_a_target_that_is_not_configured_is_refused(world: World) -> None:
    volume_id = await create(world)
    await world.volumes._targets.apply({"other": world.addresses["target"]}, volumes_of=_no_volumes)
    for call in (
        world.volumes.attach(volume_id, host_nqn=HOST, via=Via()),
        world.volumes.delete(volume_id),
        world.volumes.resize(volume_id, size_bytes=2 << 20),
        world.volumes.stores.start_job(volume_id, storage_pb2.JobStart(kind="scrub")),
    ):
        with pytest.raises(UsageError, match="'s'") as caught:
            await call
        assert caught.value.reason == "volume.target.unknown"
    descriptor = await world.volumes.get(volume_id)
    assert await world.volumes.stores.statuses([descriptor]) == {volume_id: "volume.target.unknown"}
    assert await world.volumes.on_targets({"s"}) == {f"volumes/{volume_id}": "s"}
    assert await world.volumes.on_targets({"other"}) == {}


async def test_volumes_on_a_target_are_all_of_the_tenant_s_and_those_used_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached, idle = await create(world), await create(world)
    await world.volumes.attach(attached, host_nqn=HOST, via=Via())
    shared = {volume_id: await world.volumes.get(volume_id) for volume_id in (attached, idle)}
    for descriptor in shared.values():
        descriptor.tenant = "another"
    own = [broker_pb2.VolumeDescriptor(volume_id=v, tenant="t", target_node="s") for v in "ab"]
    pages = {
        "": ([own[0], *shared.values()], "second"),
        "second": ([own[1]], ""),
    }

    async def descriptors(
        *, page_size: int, page_token: str
    ) -> tuple[list[broker_pb2.VolumeDescriptor], str]:
        return pages[page_token]

    monkeypatch.setattr(world.volumes._broker, "descriptors", descriptors)
    expected = {"volumes/a": "s", "volumes/b": "s", f"volumes/{attached}": "s"}
    assert await world.volumes.on_targets({"s"}) == expected
    # It is being attached, as another tenant's volume that is shared with this one.
    with world.volumes._change(idle):
        assert await world.volumes.on_targets({"s"}) == expected | {f"volumes/{idle}": "s"}
    monkeypatch.setitem(world.volumes._returning._pending, idle, None)  # type: ignore[arg-type]
    assert await world.volumes.on_targets({"s"}) == expected | {f"volumes/{idle}": "s"}


async def _no_volumes(nodes: Collection[str]) -> dict[str, str]:
    return {}


async def test_a_target_that_is_away_is_not_asked_for_statuses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = await world.volumes.get(await create(world))
    away = UnavailableError("peer.unreachable", "connection refused")
    monkeypatch.setattr(world.volumes._targets, "absence", {"s": away}.get)
    statuses = await world.volumes.stores.statuses([descriptor])
    assert statuses == {descriptor.volume_id: "peer.unreachable"}
