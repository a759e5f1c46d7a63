"""Two gateways that create a volume for one request: what one has returned, no other removes."""

import asyncio
import random
import uuid
from typing import Any

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import back_ends
from sealane.daemon.gateway.volumes import VolumeService
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import VolumeMode
from volume_control import RecordingGateway, World

_PAUSE_SECONDS_MAX = 0.03
_DEADLINE_SECONDS = 0.1


class Slow:
    """A target whose first creation takes until `go_on`, whoever still waits for it."""

    def __init__(self, world: World, *, refuses: bool) -> None:
        self._create = world.target.create_volume
        self._refuses = refuses
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        world.target.create_volume = self.create  # type: ignore[method-assign]

    async def create(self, volume_id: uuid.UUID, **options: Any) -> None:
        if not self.started.is_set():
            self.started.set()
            await self.go_on.wait()
            if self._refuses:
                raise UnavailableError("store.full", "no room")
        await self._create(volume_id, **options)


async def created(volumes: VolumeService, request_id: str, mode: str = "") -> str:
    made = await volumes.create(
        request_id=request_id, display_name="d", size_bytes=1 << 20, target_node="", mode=mode
    )
    return made.volume_id


async def listed(world: World) -> set[str]:
    page, _ = await world.volumes.list(page_size=0, page_token="")
    return {each.volume_id for each in page}


def at_target(world: World) -> set[str]:
    return {str(each) for each in world.target.volumes}


async def _pause(chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, _PAUSE_SECONDS_MAX))


async def _begun(
    world: World, slow: Slow, request_id: str, mode: str = "", *, seconds: float | None = None
) -> asyncio.Task[str]:
    """Begin a creation, by default without a short deadline; wait until the target is at it."""
    with pytest.MonkeyPatch.context() as short:
        if seconds is not None:
            short.setattr(back_ends, "CALL_SECONDS", seconds)
        first = asyncio.ensure_future(created(world.volumes, request_id, mode))
        await slow.started.wait()
    return first


@pytest.mark.parametrize("seed", range(24))
async def test_a_returned_volume_stays_whatever_becomes_of_another_call(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    fate = ("deadline", "cancelled", "refused")[seed % 3]
    request_id = str(uuid.uuid4())
    slow = Slow(world, refuses=fate == "refused")
    second = world.make_volumes(RecordingGateway())
    begins = chance.choice(["before", "meanwhile"])

    async def retried() -> str:
        if begins == "meanwhile":
            await _pause(chance)
        return await created(second, request_id)

    async with asyncio.timeout(PATIENCE_SECONDS):
        seconds = _DEADLINE_SECONDS if fate == "deadline" else None
        first = await _begun(world, slow, request_id, seconds=seconds)
        retry = asyncio.ensure_future(retried())
        await _pause(chance)
        if fate == "cancelled":
            first.cancel()
        if fate == "deadline":
            await asyncio.sleep(_DEADLINE_SECONDS)
        await _pause(chance)
        slow.go_on.set()
        ends = await asyncio.gather(first, retry, return_exceptions=True)
        returned = {end for end in ends if isinstance(end, str)}
        assert returned <= await listed(world)
        assert returned <= at_target(world)
        # Whatever became of the others, the request can be repeated, and its volume deleted.
        made = await created(second, request_id)
        assert await listed(world) == at_target(world) == {made}
        await second.delete(made)
        assert await listed(world) == at_target(world) == set()


async def test_a_volume_that_a_retry_has_taken_up_stays_when_the_first_call_is_cancelled(
    world: World,
) -> None:
    request_id = str(uuid.uuid4())
    slow = Slow(world, refuses=False)
    second = world.make_volumes(RecordingGateway())
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await _begun(world, slow, request_id)
        retry = asyncio.ensure_future(created(second, request_id))
        while (await _registration(world, request_id)) == 1:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        first.cancel()
        slow.go_on.set()
        await asyncio.gather(first, return_exceptions=True)
        made = await retry
    assert await listed(world) == at_target(world) == {made}


async def _registration(world: World, request_id: str) -> int:
    """Return how often the volume of a request was written at the broker, at most 2."""
    registry = world.broker.registry
    volume_id = await registry.registered("t", uuid.UUID(request_id))
    assert volume_id is not None
    volume = await registry.volume(volume_id)
    request = await registry.requests.get(f"t/{request_id}")
    assert request is not None
    return 1 if request.revision == volume.revision else 2


async def test_two_calls_that_fail_leave_a_volume_that_can_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    slow = Slow(world, refuses=True)
    second = world.make_volumes(RecordingGateway())
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await _begun(world, slow, request_id)
        with monkeypatch.context() as short:
            short.setattr(back_ends, "CALL_SECONDS", _DEADLINE_SECONDS)
            with pytest.raises(UnavailableError):
                await created(second, request_id)
        world.storage.is_draining = True
        slow.go_on.set()
        with pytest.raises(UnavailableError):
            await first
    (incomplete,) = await listed(world)
    await second.delete(incomplete)
    assert await listed(world) == at_target(world) == set()


async def test_the_gateway_that_must_fill_a_volume_does_so_though_another_returned_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[str] = []
    monkeypatch.setattr(world.volumes._fillings, "start", lambda d: filled.append(d.volume_id))
    request_id = str(uuid.uuid4())
    slow = Slow(world, refuses=False)
    second = world.make_volumes(RecordingGateway())
    monkeypatch.setattr(second._fillings, "start", lambda _: None)
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await _begun(world, slow, request_id, VolumeMode.OFF)
        retry = asyncio.ensure_future(created(second, request_id, VolumeMode.OFF))
        while (await _registration(world, request_id)) == 1:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        first.cancel()
        slow.go_on.set()
        await asyncio.gather(first, return_exceptions=True)
        made = await retry
    assert filled == [made]


async def test_a_volume_that_something_uses_is_not_unregistered_as_new(world: World) -> None:
    broker = world.volumes._broker
    descriptor, answer = await broker.register(
        request_id=str(uuid.uuid4()), display_name="d", size_bytes=1 << 20, target_node="s"
    )
    await broker.lease(descriptor)
    for revision, reason in ((answer.revision, "volume.taken_up.state"), (0, "request.malformed")):
        with pytest.raises(UsageError) as caught:
            await broker.unregister_new(descriptor.volume_id, revision=revision)
        assert caught.value.reason == reason
    assert await listed(world) == {descriptor.volume_id}
