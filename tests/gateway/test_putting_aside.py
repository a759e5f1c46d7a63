"""A drain's end, a stop and a revocation wait for volumes that are being put aside."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import pytest

from patience import PATIENCE_SECONDS
from sealane.daemon.gateway import drain, putting_aside
from sealane.daemon.gateway.drain import GatewayDrain
from sealane.daemon.gateway.volumes import Via
from sealane.protocol.nvme.constants import AnaState
from sealane.transport.tasks import TaskOwner
from volume_control import HOST, RecordedAttachment, World, create


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(putting_aside, "RETRY_SECONDS", 0.05)


async def attached(world: World) -> tuple[str, RecordedAttachment]:
    volume_id = await create(world)
    via = Via(traddr="192.0.2.1", trsvcid=7)
    await world.volumes.attach(volume_id, host_nqn=HOST, via=via)
    return volume_id, world.gateway.attached[-1]


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not happened():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.01)


class Draining:
    """A drain of the gateway, which can be cancelled."""

    def __init__(self, world: World, *, seconds_left: float = 100) -> None:
        self.role = GatewayDrain(world.volumes, world.gateway)
        self.tasks = TaskOwner()
        self.role.begin_drain()
        self.task = self.tasks.start(self.role.drain(lambda: seconds_left), name="drain")

    def details(self) -> dict[str, tuple[str, bool]]:
        return {use.name: (use.detail, use.ends) for use in self.role.uses()}


async def test_an_ended_drain_completes_what_it_has_begun(world: World) -> None:
    volume_id, port = await attached(world)
    port.suspending.clear()
    draining = Draining(world)
    await until(lambda: port.is_suspended)
    assert draining.details() == {f"volumes/{volume_id}": ("is being flushed", True)}
    await draining.tasks.close()
    ending = draining.tasks.start(draining.role.end_drain(), name="end")
    await asyncio.sleep(0.05)
    assert not ending.done()
    assert (world.gateway.access, world.gateway.expected) == (AnaState.INACCESSIBLE, {volume_id})
    port.suspending.set()
    await ending
    assert port.is_wiped
    await until(lambda: len(world.gateway.attached) == 2)
    await until(lambda: world.volumes.attached(volume_id))
    assert not world.gateway.expected


async def test_a_stop_completes_it_too(world: World) -> None:
    volume_id, port = await attached(world)
    port.suspending.clear()
    draining = Draining(world)
    await until(lambda: port.is_suspended)
    await draining.tasks.close()
    ending = draining.tasks.start(world.end_gateway(), name="stop")
    await asyncio.sleep(0.05)
    assert not ending.done()
    port.suspending.set()
    await ending
    assert port.is_wiped
    await world.start_gateway()
    await until(lambda: world.volumes.attached(volume_id))


@pytest.mark.parametrize("is_flushed", [False, True])
async def test_a_barred_gateway_detaches_it_too(world: World, *, is_flushed: bool) -> None:
    volume_id, port = await attached(world)
    waiting = port.detaching if is_flushed else port.suspending
    waiting.clear()
    draining = Draining(world)
    await until(lambda: port.detached.is_set() if is_flushed else port.is_suspended)
    world.volumes.bar("revoked")
    assert bool(port.failed) != is_flushed
    await asyncio.sleep(1.2)
    assert not port.is_wiped
    waiting.set()
    await until(lambda: port.is_wiped)
    await until(lambda: not world.volumes.is_returning(volume_id))
    assert world.volumes.attached(volume_id) is None
    await draining.tasks.close()


async def test_one_that_hangs_delays_no_other(world: World) -> None:
    _, hanging = await attached(world)
    hanging.suspending.clear()
    _, other = await attached(world)
    other.idle_seconds = 0
    draining = Draining(world)
    await until(lambda: hanging.is_suspended)
    other.idle_seconds = 10
    await until(lambda: other.is_wiped)
    assert not hanging.is_wiped
    hanging.suspending.set()
    await draining.task


async def test_one_that_cannot_be_flushed_stays_exported_and_is_tried_again(world: World) -> None:
    volume_id, port = await attached(world)
    port.unflushed = "connection.lost: target away"
    draining = Draining(world)
    use = ("not flushed: connection.lost: target away", False)
    await until(lambda: draining.details() == {f"volumes/{volume_id}": use})
    await until(lambda: not port.is_suspended)
    assert (port.is_wiped, port.detached.is_set()) == (False, False)
    port.unflushed = ""
    await draining.task
    assert port.is_wiped
    assert world.volumes.is_returning(volume_id)


async def test_a_silent_host_with_unanswered_commands_is_not_cut_off(world: World) -> None:
    volume_id, port = await attached(world)
    port.idle_seconds, port.unanswered = 5, 1
    draining = Draining(world, seconds_left=0)
    await asyncio.sleep(0.1)
    assert not port.is_suspended
    use = (f"host {HOST} waits for the target", False)
    assert draining.details() == {f"volumes/{volume_id}": use}
    port.unanswered = 0
    await draining.task
    assert port.is_wiped


async def test_a_volume_that_waited_for_its_turn_does_not_return_during_a_drain(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attached(world)
    await world.end_gateway()
    await world.start_gateway()
    returning = world.volumes._returning
    turn = asyncio.Semaphore(0)
    monkeypatch.setattr(returning, "_turns", defaultdict(lambda: turn))
    await asyncio.sleep(0)
    draining = Draining(world)
    turn.release()
    await asyncio.sleep(0.1)
    assert not world.gateway.attached
    await draining.role.end_drain()
    await until(lambda: world.gateway.attached)
    await draining.tasks.close()
