"""Rotations of a tenant's key in simulated worlds: brokers on one etcd that loses answers, kills.

Operators replace the key over and over; users create, delete and unshare volumes; gateways seal and
read sectors all the time, at any broker.
"""

import asyncio
import contextlib
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import structlog

from broker.tenant_keys import SHARED_WITH, TENANT, Sealed, check_end, look_always, register
from broker.virtual import Process, SimulatedCluster, SimulatedEtcd, VirtualLoop
from brokers import tenant_key_rotation_of
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import tenant_key_rotation
from sealane.daemon.broker.key_epochs import KeyEpochs
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.tenant_key_rotation import TenantKeyRotation
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import TenantKeyStage
from seeds import SEED

pytestmark = pytest.mark.slow

KEK = bytes(32)
KILLS = 60
VOLUMES = 6
CALL_SECONDS = 10.0
END_SECONDS = 600.0

Work = Callable[[Registry, TenantKeyRotation], Awaitable[Any]]


@dataclass
class Broker:
    """A broker's machine and its present process."""

    name: str
    process: Process | None = None
    registry: Registry | None = None
    rotation: TenantKeyRotation | None = None


class World:
    """The state of one run."""

    def __init__(self, draw: random.Random, brokers: int) -> None:
        self.draw = draw
        self.etcd = SimulatedEtcd(draw)
        self.brokers = [Broker(str(number + 1)) for number in range(brokers)]
        self.sealed = Sealed()
        self.made = 0
        self.stages: Counter[TenantKeyStage | None] = Counter()
        self.violation: BaseException | None = None

    async def life(self, broker: Broker, process: Process) -> None:
        """Run a broker's process, which goes on with rotations by itself."""
        cluster = SimulatedCluster(self.etcd, process)
        registry: Registry | None = None
        try:
            store = EtcdStore(cluster, prefix="/s/", writer=broker.name)  # type: ignore[arg-type]
            await store._take_slots()
            registry = await Registry.open(store, WrappingKey(KEK), node="b")
            rotation = tenant_key_rotation_of(registry)
            broker.registry, broker.rotation = registry, rotation
            while registry.store.failure is None:
                await asyncio.sleep(self.draw.random() * 0.3)
                with contextlib.suppress(UnavailableError):
                    await rotation.proceed()
        except UnavailableError:
            pass  # Its machine starts it again.
        except Exception as error:  # noqa: BLE001 - whatever ends a broker is a finding
            self.violation = error
        finally:
            process.alive = False
            if registry is not None:
                await registry.close()

    async def keep(self) -> None:
        """Start brokers, and those again that have ended."""
        while True:
            for broker in self.brokers:
                if broker.process is None or not broker.process.alive:
                    broker.registry = broker.rotation = None
                    broker.process = process = Process(broker.name)
                    process.spawn(self.life(broker, process))
            await asyncio.sleep(self.draw.random() * 0.2)

    async def call(self, work: Work) -> Any:
        """Have any broker do something; return None if it fails or its answer is lost."""
        broker = self.draw.choice(self.brokers)
        process, registry, rotation = broker.process, broker.registry, broker.rotation
        if process is None or not process.alive or registry is None or rotation is None:
            return None
        task = process.spawn(work(registry, rotation))  # type: ignore[arg-type]
        await asyncio.wait([task], timeout=CALL_SECONDS)
        if not task.done() or task.cancelled():
            return None
        error = task.exception()
        if error is None:
            return task.result()
        if not isinstance(error, (UnavailableError, UsageError)):
            self.violation = error
        return None

    async def operate(self) -> None:
        """Take the next step of a rotation, or the first one of another."""

        async def step(_registry: Registry, rotation: TenantKeyRotation) -> None:
            shown = await rotation.progress(TENANT)
            self.stages[shown.stage] += 1
            if shown.stage == TenantKeyStage.PREPARED:
                await rotation.rotate(TENANT, shown.number)
            else:
                await rotation.prepare(TENANT, shown.number)

        while True:
            await asyncio.sleep(self.draw.random())
            await self.call(step)

    async def use(self) -> None:
        """Create, delete, unshare and rotate volumes."""

        async def change(registry: Registry, _rotation: TenantKeyRotation) -> None:
            number = self.draw.randrange(max(self.made - VOLUMES, 0), self.made + 1)
            volume_id = uuid.UUID(int=number)
            match self.draw.randrange(4):
                case 0:
                    self.made += 1
                    await register(registry, self.made)
                case 1 if self.made > 1:
                    await registry.unregister(volume_id)
                case 2:
                    await KeyEpochs(registry).withdraw(volume_id, SHARED_WITH)
                case _:
                    await KeyEpochs(registry).rotate(volume_id)

        while True:
            await asyncio.sleep(self.draw.random() * 0.3)
            await self.call(change)

    async def seal(self) -> None:
        """Seal sectors of all volumes, and read all that were sealed."""

        async def work(registry: Registry, _rotation: TenantKeyRotation) -> None:
            await self.sealed.seal(registry)

        while True:
            await asyncio.sleep(self.draw.random() * 0.3)
            await self.call(work)

    async def run(self) -> None:
        tasks = [
            asyncio.ensure_future(each())
            for each in (self.keep, self.use, self.operate, self.seal, self.seal)
        ]
        for _ in range(KILLS):
            await asyncio.sleep(self.draw.random() * 0.6)
            self._raise()
            process = self.draw.choice(self.brokers).process
            if process is not None:
                process.kill()
        for task in tasks[1:3]:
            task.cancel()
        await asyncio.sleep(2)  # calls in flight end
        await self._end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for broker in self.brokers:
            if broker.process is not None:
                broker.process.kill()
        await asyncio.sleep(1)

    async def _end(self) -> None:
        """Wait until the last rotation has ended by the brokers' own work."""

        async def work(registry: Registry, rotation: TenantKeyRotation) -> bool:
            shown = await rotation.progress(TENANT)
            if shown.stage == TenantKeyStage.PREPARED:
                await rotation.rotate(TENANT, shown.number)
            if shown.stage is not None:
                return False
            await rotation.proceed()
            await self.sealed.seal(registry)
            await check_end(registry)
            return True

        async with asyncio.timeout(END_SECONDS):
            while not await self.call(work):
                self._raise()
                await asyncio.sleep(1)

    def _raise(self) -> None:
        if self.violation is not None:
            raise self.violation


@pytest.mark.parametrize("brokers", [1, 2, 3])
@pytest.mark.parametrize("run", range(3))
def test_key_is_replaced_over_and_over_while_brokers_are_killed(
    monkeypatch: pytest.MonkeyPatch, brokers: int, run: int
) -> None:
    monkeypatch.setattr(tenant_key_rotation, "BATCH_RECORDS", 2)
    look_always(monkeypatch)
    seed = SEED * 100 + brokers * 10 + run
    print("SEALANE_SEED =", SEED)
    draw, before = random.Random(seed), random.getstate()
    random.seed(seed)
    world = World(draw, brokers)
    try:
        with (
            structlog.testing.capture_logs(),
            asyncio.Runner(loop_factory=lambda: VirtualLoop(draw)) as runner,
        ):
            runner.run(world.run())
    finally:
        random.setstate(before)
    print(world.stages, max(world.sealed.numbers.values()))
    assert max(world.sealed.numbers.values()) > 2
    assert set(world.stages) >= {None, TenantKeyStage.PREPARED}
