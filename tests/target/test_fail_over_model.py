"""The order of events of a fail-over, simulated: one host, two gateways that freeze at any point.

The target's `FailOver` and each gateway's `GroupMember` are the real ones; the volume, the rest of
the gateways and the host are models. The host writes growing values to one sector. A gateway that
freezes keeps what it was sent, and carries it out when it is let go on; the host repeats the write
on its other path meanwhile. Besides, at any point, the target and the gateways' processes end, a
gateway stops cleanly, an anchoring fails, and an answer of the target is lost.
"""

import asyncio
import contextlib
import itertools
import random
import uuid
from dataclasses import dataclass, field

import pytest

from sealane.crypto.queue import GroupClaim
from sealane.daemon.gateway.fail_over import GroupMember
from sealane.daemon.target.fail_over import FailOver
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.v1 import storage_pb2

VOLUME_ID = uuid.UUID(int=1)
HOST = "nqn.host"
KEY = ("acme", GroupMember(volume_id=VOLUME_ID, host_nqn=HOST).group)
GATEWAYS = ("g", "h")
WRITES = 6
RUNS = 400
STEPS = 12
"""How many turns of the event loop a step takes at most."""


class UndoneError(AssertionError):
    """An acknowledged write was undone, or a read returned something older."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may happen in a run, and which rules are kept."""

    has_restarts: bool = False
    """Whether target and gateways end, anchorings fail and answers are lost."""
    fences: bool = True
    flushes: bool = True
    drops: bool = True
    """Whether what came before a gateway served is never carried out."""
    waits: bool = True
    """Whether a restarted target waits for the journal of the last gateway."""
    settles: bool = True
    """Whether a gateway confirms its term only when its journal is empty."""
    asks: bool = True
    """Whether a gateway's new process says which target has its acknowledged writes."""


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
        if self.world.rules.fences:
            await self.world.end_queue(host_nqn)
        await self.step()

    async def flush(self) -> None:
        await self.step()
        if self.world.rules.flushes:
            self.world.durable = self.world.sector

    def report(self, take_over: TakeOver) -> None:
        is_fence = take_over.fenced not in {"", take_over.host_nqn}
        assert is_fence or take_over.accepts_loss

    async def keep(self, groups: storage_pb2.FailOverGroups) -> None:
        await self.step()
        fails = self.world.happens(0.2)
        if not fails or self.world.happens(0.5):
            self.world.kept = groups
        if fails:
            raise UnavailableError("anchor.timeout", "it is unknown whether it is anchored")
        await self.step()


class World:
    """All that one run consists of."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.loss = asyncio.Event()
        self.is_refused_for_good = False
        self.sector = self.durable = 0
        self.kept = storage_pb2.FailOverGroups()
        self.queues: dict[str, Queue] = {}
        self.incarnation = 1
        ticks = itertools.count(step=10)
        self.now = lambda: float(next(ticks))
        self.fail_over = FailOver(Process(self, self.incarnation), now=self.now)
        self.gateways = {name: Gateway(self, name) for name in GATEWAYS}
        self.tasks: list[asyncio.Task[None]] = []

    def happens(self, chance: float) -> bool:
        """Return whether something goes wrong that only some runs have."""
        return self.rules.has_restarts and self.random.random() < chance

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
        fail_over, term, incarnation = self.fail_over, claim.term, self.incarnation
        if claim.is_take_over:
            if claim.incarnation not in {0, incarnation} and not claim.accepts_loss:
                raise VerificationError("volume.unflushed_lost", "another target has its writes")
            term = await fail_over.take_over(KEY, name, claim)
        fail_over.require(KEY, name, term)
        await self.end_queue(name)
        await self.pause()
        if fail_over is not self.fail_over:
            raise ConnectionError
        fail_over.require(KEY, name, term)
        if claim.incarnation == incarnation and not claim.is_take_over:
            fail_over.confirm(KEY, name, term)
        queue = self.queues[name] = Queue()
        self.tasks.append(asyncio.ensure_future(self.serve(queue)))
        await self.pause()
        if self.happens(0.1):
            raise ConnectionError
        return queue, incarnation

    async def serve(self, queue: Queue) -> None:
        while not queue.is_over:
            command = await queue.commands.get()
            async with queue.running:
                await self.pause()
                if queue.is_over and self.rules.fences:
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
        self.file = 0
        """Incarnation of the target that may hold unflushed writes, for its next process."""
        self.running: asyncio.Task[None] | None = None
        self.begin()

    def begin(self) -> None:
        """Start a process: it stands by, without a journal."""
        self.member = GroupMember(volume_id=VOLUME_ID, host_nqn=HOST)
        self.queue: Queue | None = None
        self.incarnation = 0
        self.journal = 0
        """The value that it acknowledged last and has not flushed; 0: none."""
        self.drop()

    async def restart(self) -> None:
        """End its process at any point, or after a flush and the end of its term."""
        if self.running is None:
            return
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        if self.member.is_serving and self.world.random.random() < 0.5:
            await self.stop()
        self.begin()
        self.running = asyncio.ensure_future(self.run())
        self.world.tasks.append(self.running)

    async def stop(self) -> None:
        """Flush, tell the target, and note that nothing is left to lose."""
        world = self.world
        try:
            queue, incarnation = await world.open_queue(self.name, self.member.claim())
        except (ConnectionError, Error):
            return
        if incarnation != self.incarnation and self.journal:
            world.sector = self.journal
        world.durable = world.sector
        await world.end_queue(self.name)
        fail_over = world.fail_over
        with contextlib.suppress(Error):
            await fail_over.release(KEY, self.name, self.member.term)
        assert queue.is_over
        self.file = 0

    async def step(self) -> None:
        await self.world.pause()
        await self.goes_on.wait()

    async def run(self) -> None:
        while True:
            command = await self.front.get()
            await self.step()
            await self.carry_out(command)

    async def carry_out(self, command: Command) -> None:
        if not self.member.is_serving and not self.world.rules.drops:
            await self.connect()
        elif not self.member.is_serving:
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
                    self.journal = command.value
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
        world, member = self.world, self.member
        is_take_over = not member.is_serving
        if is_take_over:
            term, serving = world.fail_over.state(KEY)
            member.observe(term=term, serving_nqn=serving, own_nqn=self.name)
            member.holder = self.file if world.rules.asks else 0
            member.accepts_loss = not world.rules.waits
        claim = member.claim()
        # The claim may be delayed.
        await self.step()
        try:
            self.queue, incarnation = await world.open_queue(self.name, claim)
        except ConnectionError:
            await self.step()
            return not is_take_over and await self.connect()
        except Error as error:
            await self.step()
            world.is_refused_for_good |= error.reason == "volume.rolled_back"
            if error.reason == "volume.unflushed_lost":
                world.loss.set()
            if error.reason != "queue.standby" and not is_take_over:
                return await self.connect()
            self.begin()
            self.file = 0 if not is_take_over else self.file
            return False
        if is_take_over and world.rules.drops:
            self.drop()
        member.serve(claim, incarnation=incarnation)
        if is_take_over:
            self.file = self.incarnation = incarnation
        elif incarnation != self.incarnation:
            await self.recover(incarnation)
        return self.queue is not None

    async def recover(self, incarnation: int) -> None:
        """Send the journal again to a restarted target before all else; flush, and say so."""
        world, queue = self.world, self.queue
        assert queue is not None
        if not world.rules.settles:
            await self.confirm(incarnation)
        await self.step()
        if queue.is_over:
            self.queue = None
            return
        if self.journal:
            world.sector = self.journal
        self.incarnation = incarnation
        if world.random.random() < 0.5:
            world.durable = world.sector
            self.journal, self.file = 0, incarnation
            await self.confirm(incarnation)

    async def confirm(self, incarnation: int) -> None:
        self.member.is_confirming, self.member.holder = True, incarnation
        claim = self.member.claim()
        self.member.is_confirming = False
        await self.step()
        try:
            self.queue, found = await self.world.open_queue(self.name, claim)
        except (ConnectionError, Error):
            self.queue = None
            return
        self.member.serve(claim, incarnation=found)
        if found != incarnation:
            self.queue = None


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
    while world.rules.has_restarts:
        for _ in range(world.random.randrange(600)):
            await world.pause()
        if world.random.randrange(3):
            await world.restart_target()
        else:
            await world.gateways[world.random.choice(GATEWAYS)].restart()


async def run(seed: int, rules: Rules) -> None:
    """Raise UndoneError if an acknowledged write is undone, and no gateway says that it is lost."""
    world = World(seed, rules)
    for each in world.gateways.values():
        each.running = asyncio.ensure_future(each.run())
        world.tasks.append(each.running)
    world.tasks += [asyncio.ensure_future(each(world)) for each in (freezes, restarts)]
    ends = [asyncio.ensure_future(host(world)), asyncio.ensure_future(world.loss.wait())]
    world.tasks += ends
    try:
        async with asyncio.timeout(20):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if ends[0].done():
            ends[0].result()
        assert not world.is_refused_for_good, "no target is rolled back here: they only restart"
    finally:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)


async def test_no_acknowledged_write_is_undone_by_a_gateway_that_thaws() -> None:
    for seed in range(RUNS):
        await run(seed, Rules())


@pytest.mark.slow
async def test_no_acknowledged_write_is_undone_when_processes_end_too() -> None:
    for seed in range(RUNS):
        await run(seed, Rules(has_restarts=True))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(fences=False),
        Rules(flushes=False, has_restarts=True),
        Rules(drops=False),
        Rules(waits=False, has_restarts=True),
        Rules(settles=False, has_restarts=True),
        Rules(asks=False, has_restarts=True),
    ],
    ids=["fence", "flush", "drop", "waiting", "settling", "asking"],
)
async def test_the_model_finds_what_goes_wrong_without(rules: Rules) -> None:
    for seed in range(10 * RUNS):
        try:
            await run(seed, rules)
        except UndoneError:
            return
    pytest.fail("no run went wrong")
