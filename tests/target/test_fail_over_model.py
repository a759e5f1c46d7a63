"""The order of events of a fail-over, simulated: one host, two gateways that freeze at any point.

The target's `FailOver` is the real one; its volume, the gateways and the host are models. The host
writes growing values to one sector. A gateway that freezes keeps what it was sent, and carries it
out when it is let go on; the host repeats the write on its other path meanwhile.
"""

import asyncio
import contextlib
import itertools
import random
from dataclasses import dataclass, field

import pytest

from sealane.crypto.queue import GroupClaim
from sealane.daemon.target.fail_over import FailOver
from sealane.errors import Error, UnavailableError
from sealane.protocol.v1 import storage_pb2

KEY = ("acme", bytes(32))
GATEWAYS = ("g", "h")
WRITES = 6
RUNS = 400
STEPS = 12
"""How many turns of the event loop a step takes at most."""


class UndoneError(AssertionError):
    """An acknowledged write was undone, or a read returned something older."""


@dataclass(eq=False)
class Queue:
    """A gateway's queue at the target: commands that have arrived, and whether it is over."""

    commands: asyncio.Queue["Command"] = field(default_factory=asyncio.Queue)
    is_over: bool = False
    running: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class Command:
    """A write of a value, or a read (None); answered with the sector's value then."""

    value: int | None
    answer: asyncio.Future[int]


@dataclass
class Process:
    """One process of the target: what its groups need of the volume, until it ends."""

    world: "World"
    incarnation: int

    async def step(self) -> None:
        await self.world.pause()
        if self.world.incarnation != self.incarnation:
            raise UnavailableError("queue.incarnation", "this process has ended")

    def has_queues(self, host_nqn: str) -> bool:
        return host_nqn in self.world.queues

    async def fence(self, host_nqn: str) -> None:
        await self.step()
        if self.world.fences:
            await self.world.end_queue(host_nqn)
        await self.step()

    async def flush(self) -> None:
        await self.step()
        if self.world.flushes:
            self.world.durable = self.world.sector

    async def keep(self, groups: storage_pb2.FailOverGroups) -> None:
        await self.step()
        self.world.kept = groups
        await self.step()


class World:
    """All that one run consists of."""

    def __init__(
        self, seed: int, *, fences: bool, flushes: bool, drops: bool, has_restarts: bool
    ) -> None:
        self.random = random.Random(seed)
        self.fences, self.flushes, self.has_restarts = fences, flushes, has_restarts
        self.drops = drops
        self.sector = self.durable = 0
        self.kept = storage_pb2.FailOverGroups()
        self.queues: dict[str, Queue] = {}
        self.incarnation = 0
        ticks = itertools.count(step=10)
        self.now = lambda: float(next(ticks))
        self.fail_over = FailOver(Process(self, self.incarnation), now=self.now)
        self.gateways = {name: Gateway(self, name) for name in GATEWAYS}
        self.tasks: list[asyncio.Task[None]] = []

    async def pause(self) -> None:
        for _ in range(self.random.randrange(STEPS)):
            await asyncio.sleep(0)

    async def end_queue(self, name: str) -> None:
        queue = self.queues.pop(name, None)
        if queue is not None:
            queue.is_over = True
            async with queue.running:
                pass

    async def open_queue(self, name: str, claim: GroupClaim) -> tuple[Queue, int]:
        """Admit a gateway, as `QueueAdmission` does."""
        fail_over, term = self.fail_over, claim.term
        if claim.is_take_over:
            term = await fail_over.take_over(KEY, name, claim)
        fail_over.require(KEY, name, term)
        await self.end_queue(name)
        await self.pause()
        if fail_over is not self.fail_over:
            raise ConnectionError
        fail_over.require(KEY, name, term)
        queue = self.queues[name] = Queue()
        self.tasks.append(asyncio.ensure_future(self.serve(queue)))
        return queue, self.incarnation

    async def serve(self, queue: Queue) -> None:
        while not queue.is_over:
            command = await queue.commands.get()
            async with queue.running:
                await self.pause()
                if queue.is_over and self.fences:
                    return
                if command.value is not None:
                    self.sector = command.value
                if not command.answer.done():
                    command.answer.set_result(self.sector)

    async def restart_target(self) -> None:
        """Lose what isn't durable; the groups are those that were kept."""
        for name in [*self.queues]:
            self.queues.pop(name).is_over = True
        self.sector = self.durable
        self.incarnation += 1
        self.fail_over = FailOver(Process(self, self.incarnation), now=self.now)
        self.fail_over.restore(self.kept)


class Gateway:
    """A gateway: it freezes at any of its steps."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.front: asyncio.Queue[Command] = asyncio.Queue()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.term: int | None = None
        self.queue: Queue | None = None
        self.incarnation = 0
        self.journal = 0
        """The newest value that it has acknowledged and not flushed; 0: none."""

    async def step(self) -> None:
        await self.world.pause()
        await self.goes_on.wait()

    async def run(self) -> None:
        while True:
            command = await self.front.get()
            await self.step()
            await self.carry_out(command)

    async def carry_out(self, command: Command) -> None:
        if self.term is None and not self.world.drops:
            await self.connect()
        elif self.term is None:
            # On standby: what the host sent before this gateway serves is never carried out.
            self.drop(command)
            await self.connect()
            return
        while not command.answer.done():
            if self.queue is None and not await self.connect():
                self.drop(command)
                return
            assert self.queue is not None
            queue = self.queue
            sent = Command(command.value, asyncio.get_running_loop().create_future())
            queue.commands.put_nowait(sent)
            while not sent.answer.done() and not queue.is_over:
                await self.step()
            if sent.answer.done():
                if command.value is not None:
                    self.journal = max(self.journal, command.value)
                await self.step()
                if not command.answer.done():
                    command.answer.set_result(sent.answer.result())
                return
            self.queue = None

    def drop(self, *commands: Command) -> None:
        """Lose the host's connection, with all that it has sent on it."""
        waiting = [self.front.get_nowait() for _ in range(self.front.qsize())]
        for command in (*commands, *waiting):
            if not command.answer.done():
                command.answer.set_exception(ConnectionError())
                command.answer.exception()  # its host may not wait any longer

    async def connect(self) -> bool:
        """Open a queue; False on standby, when everything that it held is dropped."""
        world = self.world
        is_take_over = self.term is None
        term = world.fail_over.state(KEY)[0] if self.term is None else self.term
        # The claim may be delayed.
        await self.step()
        claim = GroupClaim(group=KEY[1], term=term, is_take_over=is_take_over)
        try:
            self.queue, incarnation = await world.open_queue(self.name, claim)
        except ConnectionError:
            return True if self.queue is not None else await self.connect()
        except Error as error:
            await self.step()
            if error.reason != "queue.standby" and not is_take_over:
                return await self.connect()
            self.term, self.queue, self.journal = None, None, 0
            self.drop()
            return False
        if is_take_over and world.drops:
            self.drop()
        self.term = term + is_take_over
        if incarnation != self.incarnation and self.journal and not is_take_over:
            # It re-sends its journal to the new incarnation before anything else.
            world.sector = max(world.sector, self.journal)
        self.incarnation = incarnation
        return True


async def host(world: World) -> None:
    """Write growing values, read after each, and change paths when one is silent."""
    paths = itertools.cycle(GATEWAYS)
    path = next(paths)
    acknowledged = 0

    async def done(value: int | None) -> int:
        nonlocal path
        while True:
            command = Command(value, asyncio.get_running_loop().create_future())
            world.gateways[path].front.put_nowait(command)
            for _ in range(60):
                await world.pause()
                if command.answer.done():
                    with contextlib.suppress(ConnectionError):
                        return command.answer.result()
                    break
            else:
                path = next(paths)

    for value in range(1, WRITES + 1):
        await done(value)
        acknowledged = value
        found = await done(None)
        if found < acknowledged:
            raise UndoneError(f"read {found} after {acknowledged}")
    for gateway in world.gateways.values():
        gateway.goes_on.set()
    for _ in range(20):
        await world.pause()
    found = await done(None)
    if found != acknowledged:
        raise UndoneError(f"read {found} after {acknowledged}")


async def freezes(world: World) -> None:
    while True:
        for _ in range(world.random.randrange(40)):
            await world.pause()
        gateway = world.gateways[world.random.choice(GATEWAYS)]
        gateway.goes_on.clear()
        for _ in range(world.random.randrange(250)):
            await world.pause()
        gateway.goes_on.set()


async def restarts(world: World) -> None:
    while world.has_restarts:
        for _ in range(world.random.randrange(600)):
            await world.pause()
        await world.restart_target()


async def run(seed: int, **checks: bool) -> None:
    present = {"fences": True, "flushes": True, "drops": True, "has_restarts": False}
    world = World(seed, **{**present, **checks})
    world.tasks += [asyncio.ensure_future(each.run()) for each in world.gateways.values()]
    world.tasks += [asyncio.ensure_future(each(world)) for each in (freezes, restarts)]
    try:
        async with asyncio.timeout(20):
            await host(world)
    finally:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)


async def test_no_acknowledged_write_is_undone_by_a_gateway_that_thaws() -> None:
    for seed in range(RUNS):
        await run(seed)


async def test_no_acknowledged_write_is_undone_when_the_target_restarts_too() -> None:
    for seed in range(RUNS):
        await run(seed, has_restarts=True)


@pytest.mark.parametrize(
    "without",
    [{"fences": False}, {"flushes": False, "has_restarts": True}, {"drops": False}],
    ids=["fence", "flush", "drop"],
)
async def test_the_model_finds_what_goes_wrong_without(without: dict[str, bool]) -> None:
    for seed in range(RUNS):
        try:
            await run(seed, **without)
        except UndoneError:
            return
    pytest.fail("no run went wrong")
