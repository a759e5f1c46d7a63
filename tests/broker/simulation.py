"""Simulation of brokers, gateways and their store under kills, with the invariants of every run.

In `run(seed)`, brokers share a simulated etcd and grant leases to gateways over a network that
loses and repeats messages. Brokers and gateways are killed at any point, even during their start,
and the store is sometimes rolled back. The ledger records every IV that a gateway uses.
"""

import asyncio
import contextlib
import random
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from broker.virtual import (
    DurableCount,
    Process,
    SimulatedCluster,
    SimulatedEtcd,
    VirtualLoop,
)
from brokers import MemoryAudit
from sealane.crypto.certificates import Subject
from sealane.crypto.hpke import Context, open_signed
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.keys import WrappingKey
from sealane.crypto.lease import COUNTER_END, SECTOR_COUNTERS, CounterRange
from sealane.daemon.broker.authority import AUTHORITY_KEY, opened_record_keys, parse_authority
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.broker.record_key_rotation import RecordKeyRotation
from sealane.daemon.broker.records import GrantRecord, HeadRecord, instance_name
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.store.checked import CheckedStore
from sealane.daemon.broker.store.contract import STATE_KEY, Entry
from sealane.daemon.broker.store.etcd import EtcdStore
from sealane.daemon.broker.store.record_keys import RecordKeys
from sealane.daemon.broker.store.state import SetHash
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import (
    Error,
    LeaseError,
    UnavailableError,
    UsageError,
    VerificationError,
)
from sealane.protocol.etcd import rpc_pb2
from sealane.protocol.v1 import broker_pb2

METRICS = Metrics()
KEK = bytes(32)
KEM = X25519KemKey.create()
RESUME_SECONDS = 60.0

Saved = tuple[int, dict[bytes, rpc_pb2.KeyValue]]
LeaseName = tuple[int, int, int]
Violation = AssertionError


@dataclass
class Ledger:
    """Every IV used, every lease received and every start; none may occur twice."""

    used: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    received: dict[LeaseName, "Held"] = field(default_factory=dict)
    starts: set[tuple[int, int]] = field(default_factory=set)

    def use(self, arena: tuple[int, int], start: int, end: int) -> None:
        spans = self.used.setdefault(arena, [])
        if any(start < e and s < end for s, e in spans):
            raise Violation(f"IV twice: arena {arena}, counters {start}…{end}")
        spans.append((start, end))

    def start(self, arena: tuple[int, int]) -> None:
        if arena in self.starts:
            raise Violation(f"arena {arena} served twice")
        self.starts.add(arena)


@dataclass
class Held:
    """A lease held by a gateway; `mark` is its first unused counter."""

    name: LeaseName
    incarnation: bytes
    counters: CounterRange
    return_token: bytes
    mark: int
    given_back: int | None = None


@dataclass
class Broker:
    """A broker's machine: persistent counters and successive processes."""

    instance: int
    starts: DurableCount = field(default_factory=DurableCount)
    heads: DurableCount = field(default_factory=DurableCount)
    process: Process | None = None
    service: BrokerService | None = None
    store: CheckedStore | None = None
    refused: str = ""

    @property
    def serving(self) -> BrokerService | None:
        return self.service if self.process is not None and self.process.alive else None


class World:
    """The state of one run."""

    def __init__(
        self,
        seed: int,
        *,
        brokers: int = 2,
        gateways: int = 3,
        expects_refusal: bool = True,
        replaces_keys: bool = False,
    ) -> None:
        self.draw = random.Random(seed)
        self.replaces_keys = replaces_keys
        self.key_states: set[tuple[int, bool]] = set()
        self.expects_refusal = expects_refusal
        self.etcd = SimulatedEtcd(self.draw)
        self.ledger = Ledger()
        self.brokers = [Broker(i + 1) for i in range(brokers)]
        self.gateways: dict[int, Process] = {}
        self.gateway_count = gateways
        self.volume_id = ""
        self.volumes_epoch = 1
        self.kills: Counter[str] = Counter()
        self.grants = 0
        self.last_grant = 0.0
        self.put_back_to: dict[int, int] = {}
        self.may_refuse: set[int] = set()
        self.violation: BaseException | None = None

    # Brokers

    async def broker_life(self, broker: Broker, process: Process) -> None:
        """Run a process: start, serve, anchor; it ends on its own only after a rollback."""
        cluster = SimulatedCluster(self.etcd, process)
        # A rollback while this broker takes over is noticed at the next head.
        must_refuse = self.is_behind(broker)
        registry: Registry | None = None
        try:
            store = EtcdStore(cluster, prefix="/s/", writer=str(broker.instance))  # type: ignore[arg-type]
            await store._take_slots()
            registry = await Registry.open(store, WrappingKey(KEK), node="b")
            broker.store = registry.store
            instance = await Instance.claim(
                registry,
                node=f"b{broker.instance}",
                instance=broker.instance,
                starts=broker.starts.of(process),
                heads=broker.heads.of(process),
            )
            process.check()
            self._check_claim(broker, must_refuse=must_refuse)
            self.ledger.start((broker.instance, instance.arena.start_epoch))
            broker.service = BrokerService(registry, instance, audit=MemoryAudit(), metrics=METRICS)
            if self.replaces_keys:
                process.spawn(self._replace_keys(registry, instance))
            await instance.keep_anchored(seconds=5)
        except UnavailableError:
            pass  # The machine restarts it.
        except VerificationError as error:
            broker.refused = error.reason
        except Violation as error:
            self.violation = error
        finally:
            process.alive = False
            if broker.service is not None and broker.process is process:
                await broker.service.close()
            if registry is not None:
                await registry.close()

    async def _replace_keys(self, registry: Registry, instance: Instance) -> None:
        """Act as the operator, who replaces the record key, and as the broker, which continues."""
        rotation = RecordKeyRotation(registry, cover=instance.cover, audit=MemoryAudit())
        while registry.store.failure is None:
            await asyncio.sleep(self.draw.random())
            try:
                if self.draw.random() < 0.5:
                    await rotation.begin((await rotation.progress()).number)
                await rotation.proceed()
            except (UnavailableError, UsageError):
                pass  # The operator, or the broker itself, tries again.
            except VerificationError as error:
                if registry.store.failure is None:
                    # It would end the daemon, though the store holds nothing wrong.
                    self.violation = Violation(f"{error.reason}: {error}")
                return

    def check_record_keys(self) -> None:
        """Check that every record is under a key in use, and the state under the present one."""
        entries = {
            key.decode().removeprefix("/s/data/"): entry.value
            for key, entry in self.etcd.entries.items()
            if key.startswith(b"/s/data/")
        }
        if AUTHORITY_KEY not in entries:
            return
        authority = parse_authority(Entry(AUTHORITY_KEY, entries[AUTHORITY_KEY], 0))
        named = opened_record_keys(authority, Keyring([WrappingKey(KEK)]))
        self.key_states.add((named.number, named.previous is not None))
        keys = RecordKeys(named)
        for key, value in entries.items():
            if key not in {STATE_KEY, AUTHORITY_KEY}:
                self._guarded_error(lambda key=key, value=value: keys.opened(key, value))  # type: ignore[misc]
        self._guarded_error(lambda: SetHash(named.present).state_of(entries, revision=1))

    def _guarded_error(self, check: Callable[[], object]) -> None:
        try:
            check()
        except VerificationError as error:
            raise Violation(f"{error.reason}: {error}") from error

    def is_behind(self, broker: Broker) -> bool:
        """Return whether the store was rolled back to before this broker's last head."""
        to = self.put_back_to.get(broker.instance)
        return self.expects_refusal and to is not None and to < broker.heads.value

    def _check_claim(self, broker: Broker, *, must_refuse: bool) -> None:
        if must_refuse:
            raise Violation(f"broker {broker.instance} serves a store that was put back")

    def start_broker(self, broker: Broker) -> None:
        broker.service = None
        broker.process = process = Process(f"broker {broker.instance}")
        process.spawn(self.broker_life(broker, process))

    async def keep_brokers(self) -> None:
        """Restart brokers that ended, unless they refused their store."""
        while True:
            for broker in self.brokers:
                if not broker.refused and (broker.process is None or not broker.process.alive):
                    self.start_broker(broker)
            await asyncio.sleep(self.draw.random() * 0.2)

    # Network

    async def call(
        self, work: Callable[[BrokerService], Coroutine[Any, Any, Any]], *, first: int
    ) -> Any:
        """Call brokers in turn, as a gateway does; raise UnavailableError if none answers."""
        for i in range(2 * len(self.brokers)):
            broker = self.brokers[(first + i) % len(self.brokers)]
            with contextlib.suppress(UnavailableError):
                return await self._call(broker, work)
            await asyncio.sleep(self.draw.random() * 0.1)
        raise UnavailableError("broker.unreachable", "nobody answers")

    async def _call(
        self, broker: Broker, work: Callable[[BrokerService], Coroutine[Any, Any, Any]]
    ) -> Any:
        await asyncio.sleep(self.draw.random() * 0.002)
        service, process = broker.serving, broker.process
        fate = self.draw.randrange(100)
        if service is None or process is None or fate == 0:
            await asyncio.sleep(0.5)
            raise UnavailableError("call.lost", "request lost")
        handled = process.spawn(work(service))
        if fate == 1:
            process.spawn(work(service))  # repeated by the network
        await asyncio.wait([handled], timeout=10)
        if not handled.done() or handled.cancelled() or fate == 2:
            await asyncio.sleep(0.5)
            raise UnavailableError("call.lost", "answer lost")
        try:
            return handled.result()
        except LeaseError as error:
            if error.reason == "lease.overlap":
                self.violation = Violation(f"granted twice: {error}")
            raise

    # Gateways

    async def gateway_life(self, number: int) -> None:
        incarnation = self.draw.randbytes(16)
        caller = Subject(
            node=f"g{number}",
            role="gateway",
            tenant="t",
            incarnation=incarnation,
            kem_public_key=KEM.public_key,
        )
        held: list[Held] = []
        while True:
            await asyncio.sleep(self.draw.random() * 0.05)
            if len(held) < 3:
                with contextlib.suppress(Error):
                    held.append(await self._lease(caller))
            for lease in held:
                self._use(lease)
            if held and self.draw.random() < 0.4:
                lease = held.pop(self.draw.randrange(len(held)))
                with contextlib.suppress(Error):
                    await self._give_back(caller, lease)

    async def _lease(self, caller: Subject) -> Held:
        request = self.draw.randbytes(16)
        epoch = self.volumes_epoch
        put_backs = self.kills["put back"]
        signed = await self.call(
            lambda service: service.leases.grant(
                caller, volume_id=self.volume_id, key_epoch=epoch, request_id=request
            ),
            first=self.draw.randrange(len(self.brokers)),
        )
        arena = (signed.broker_instance, signed.start_epoch)
        context = Context(
            purpose="lease",
            recipient=caller.spiffe_id,
            incarnation=caller.incarnation,
            request_id=request,
            volume_id=self.volume_id,
            key_epoch=epoch,
            arena=arena,
        )
        message = broker_pb2.Lease.FromString(
            bytes(open_signed(signed.secret, private_key=KEM, context=context, signer=self.signer))
        )
        counters = CounterRange(
            broker_instance=arena[0],
            start_epoch=arena[1],
            counter_start=message.counter_start,
            counter_end=message.counter_end,
        )
        held = Held(
            (*arena, message.lease_id),
            caller.incarnation,
            counters,
            message.return_token,
            counters.counter_start,
        )
        if put_backs == self.kills["put back"]:
            self.ledger.received[held.name] = held
        # After a rollback, the broker's record of this lease may be lost.
        self.grants += 1
        self.last_grant = asyncio.get_running_loop().time()
        return held

    def _use(self, lease: Held) -> None:
        counters, mark = lease.counters, lease.mark
        end = min(mark + 256 * self.draw.randrange(1 << 20), counters.counter_end)
        if mark < end:
            self._guarded(lambda: self.ledger.use(counters.arena, mark, end))
            lease.mark = end

    async def _give_back(self, caller: Subject, lease: Held) -> None:
        mark = lease.given_back = lease.mark
        instance, epoch, lease_id = lease.name
        await self.call(
            lambda service: service.leases.take_back(
                caller,
                volume_id=self.volume_id,
                arena=(instance, epoch),
                lease_id=lease_id,
                touched=mark,
                return_token=lease.return_token,
            ),
            first=instance - 1 if instance <= len(self.brokers) else 0,
        )

    def _guarded(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as error:
            self.violation = error

    # The run

    async def run(self, *, kills: int, put_backs: int) -> None:
        """Kill that many times, then check the records and that the service resumes."""
        keeper = Process("keeper")
        keeper.spawn(self.keep_brokers())
        await self._first_volume()
        for number in range(self.gateway_count):
            self._start_gateway(number)
        saved = self.etcd.save()
        between = kills // (put_backs + 1)
        for kill in range(1, kills + 1):
            await asyncio.sleep(self.draw.random() * 0.3)
            self._kill_one()
            self._raise()
            if kill % between == between // 2:
                saved = self.etcd.save()
            if kill % between == 0 and self.kills["put back"] < put_backs:
                self._check_books(since_put_back=True)
                await self._put_back(saved)
        self._raise()
        await self._resumes()
        self._check_books(since_put_back=bool(put_backs))
        for process in self.gateways.values():
            process.kill()
        await asyncio.sleep(RESUME_SECONDS)  # let operations in flight end
        self._raise()
        self._check_arenas()
        for process in [keeper, *(b.process for b in self.brokers)]:
            if process is not None:
                process.kill()
        for broker in self.brokers:
            if broker.service is not None:
                await broker.service.close()

    async def attack_a_record(self, *, kills: int, running: bool) -> str:
        """Kill that many times, then change a record without a broker's key; return the change.

        Every broker must refuse: none may return the adversary's value, and none may start.
        """
        keeper = Process("keeper")
        keeper.spawn(self.keep_brokers())
        await self._first_volume()
        for number in range(self.gateway_count):
            self._start_gateway(number)
        for _ in range(kills):
            await asyncio.sleep(self.draw.random() * 0.3)
            self._kill_one()
            self._raise()
        if not running:
            keeper.kill()
            for broker in self.brokers:
                if broker.process is not None:
                    broker.process.kill()
            await asyncio.sleep(RESUME_SECONDS)  # let operations in flight end
        key, value, what = self._changed_record()
        self.etcd.put_entry(key, value)
        name = key.decode().removeprefix("/s/data/")
        probes = [self._probe(broker, name, value) for broker in self.brokers if broker.serving]
        await asyncio.gather(*probes)
        if not running:
            keeper = Process("keeper")
            keeper.spawn(self.keep_brokers())
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                while not all(broker.refused for broker in self.brokers):
                    if self.violation is not None:
                        raise self.violation
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise Violation(f"not noticed: {what} of {name}") from None
        finally:
            for process in [keeper, *self.gateways.values()]:
                process.kill()
        if {broker.refused for broker in self.brokers} != {"broker.store.rolled_back"}:
            raise Violation(f"{what}: brokers say {[broker.refused for broker in self.brokers]}")
        return what

    def _changed_record(self) -> tuple[bytes, bytes | None, str]:
        """Choose a record and an adversary's replacement: bytes written by brokers, or nothing."""
        data = [e for e in self.etcd.history if e.kv.key.startswith(b"/s/data/")]
        present = self.etcd.entries
        older = [
            e.kv
            for e in data
            if e.type == rpc_pb2.Event.PUT
            and e.kv.key in present
            and present[e.kv.key].value != e.kv.value
        ]
        kind = self.draw.randrange(3)
        if kind == 0:
            key = self.draw.choice(sorted(k for k in present if k.startswith(b"/s/data/")))
            return key, None, "removal"
        if kind == 1:
            made = self.draw.choice([e.kv for e in data if e.type == rpc_pb2.Event.PUT])
            return made.key + b"0", made.value, "addition"
        entry = self.draw.choice(older)
        return entry.key, entry.value, "older version"

    async def _probe(self, broker: Broker, name: str, value: bytes | None) -> None:
        """Read the record at a broker; it must not return the adversary's value."""
        assert broker.store is not None
        if name == STATE_KEY:
            # No broker reads it as a record: there it is none, as after a removal.
            return
        with contextlib.suppress(VerificationError, UnavailableError, UsageError):
            entry = await broker.store.get(name)
            if (entry.value if entry else None) == value:
                self.violation = Violation(f"{name} was read as the adversary left it")

    def _start_gateway(self, number: int) -> None:
        process = self.gateways[number] = Process(f"gateway {number}")
        process.spawn(self.gateway_life(number))

    def _kill_one(self) -> None:
        if self.draw.random() < 0.6:
            victim = self.draw.choice(self.brokers).process
            if victim is not None and victim.alive:
                victim.kill()
                self.kills["broker"] += 1
                return
        number = self.draw.randrange(self.gateway_count)
        self.gateways[number].kill()
        self._start_gateway(number)
        self.kills["gateway"] += 1

    async def _first_volume(self) -> None:
        creator = Subject(
            node="g0",
            role="gateway",
            tenant="t",
            incarnation=bytes(16),
            kem_public_key=KEM.public_key,
        )
        request = str(uuid.UUID(int=self.draw.getrandbits(128), version=4))
        async with asyncio.timeout(RESUME_SECONDS):
            while True:
                with contextlib.suppress(Error):
                    answer = await self.call(
                        lambda service: service.register_volume(
                            creator,
                            request_id=request,
                            display_name="",
                            size_bytes=4096,
                            target_node="s",
                        ),
                        first=0,
                    )
                    break
        descriptor = broker_pb2.VolumeDescriptor.FromString(answer.volume.descriptor)
        self.volume_id = descriptor.volume_id
        self.signer = next(
            b.service for b in self.brokers if b.service is not None
        ).authority.signing_key.public_key()

    async def _put_back(self, saved: Saved) -> None:
        """Roll the store back; a broker that anchored since must refuse, and gets a successor.

        A broker may refuse as well if it saw the store's revision decrease, or wrote a start or a
        head since without counting a head.
        """
        present = self.etcd.save()
        self.etcd.put_back(saved)
        self.kills["put back"] += 1
        self.ledger.received.clear()
        if not self.expects_refusal:
            return
        heads = {b.instance: _head(saved, b.instance) for b in self.brokers}
        victims = [b for b in self.brokers if b.heads.value > heads[b.instance]]
        self.may_refuse |= {
            b.instance
            for b in self.brokers
            if (b.process is not None and b.process.alive)
            or _written(present, b.instance) != _written(saved, b.instance)
        }
        self.put_back_to |= {b.instance: heads[b.instance] for b in victims}
        async with asyncio.timeout(RESUME_SECONDS):
            while not all(b.refused for b in victims):
                self._raise()
                await asyncio.sleep(0.2)
        for broker in victims:
            if broker.refused != "broker.store.rolled_back":
                raise Violation(f"broker {broker.instance} says {broker.refused}")
            self._succeed(broker)

    def _succeed(self, broker: Broker) -> None:
        """Act as the operator: use another instance number with unused counters."""
        broker.instance = max(b.instance for b in self.brokers) + 1
        broker.starts, broker.heads, broker.refused = DurableCount(), DurableCount(), ""

    async def _resumes(self) -> None:
        since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                while self.last_grant <= since + 1:
                    self._raise()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise Violation("no lease is granted any more") from None

    def _raise(self) -> None:
        if self.violation is not None:
            raise self.violation
        if self.replaces_keys:
            self.check_record_keys()
        put_back = set(self.put_back_to)
        for broker in self.brokers:
            if broker.refused == "broker.store.rolled_back" and broker.instance in (
                self.may_refuse - put_back
            ):
                self._succeed(broker)
            elif broker.refused and broker.instance not in put_back:
                raise Violation(f"broker {broker.instance} refuses for nothing: {broker.refused}")

    def _check_books(self, *, since_put_back: bool) -> None:
        """Check that every lease is recorded, as in use, returned or burned."""
        books = self._books()
        living = {process.name for process in self.gateways.values()}
        assert len(living) == self.gateway_count
        for name, held in self.ledger.received.items():
            record = books.get(name)
            if record is None:
                raise Violation(f"lease {name} is in a gateway's hands and not in the books")
            counters = held.counters
            if (record.counter_start, record.counter_end) != (
                counters.counter_start,
                counters.counter_end,
            ):
                raise Violation(f"lease {name} has other counters in the books")
            if record.incarnation != held.incarnation:
                raise Violation(f"lease {name} is another's in the books")
        for name, record in books.items():
            held_by = self.ledger.received.get(name)
            if record.touched is not None and not since_put_back and held_by is None:
                raise Violation(f"lease {name} came back, and nobody had it")
            if held_by is not None and record.touched not in {None, held_by.given_back}:
                raise Violation(f"lease {name} came back otherwise than it was given back")
            if not 0 <= record.returned <= record.counters:
                raise Violation(f"lease {name}: more came back than was granted")

    def _check_arenas(self) -> None:
        """Check that every counter of a live arena is free or has a known holder.

        The run has one volume. Returned counters stay spent.
        """
        for broker in self.brokers:
            if broker.serving is None:
                continue
            arena = broker.serving.leases.arena
            named = (arena.broker_instance, arena.start_epoch)
            books = {name[2]: r for name, r in self._books().items() if name[:2] == named}
            spent = sum(record.counters for record in books.values())
            # Taken from the arena for a grant that failed: nobody holds them.
            spent += sum(h.lease.count for i, h in arena._held.items() if i not in books)
            if (
                arena.counters_free(uuid.UUID(self.volume_id)) + spent
                != COUNTER_END - SECTOR_COUNTERS
            ):
                raise Violation(f"the books of arena {named} don't close")

    def _books(self) -> dict[LeaseName, GrantRecord]:
        books = {}
        for key, entry in self.etcd.entries.items():
            if key.startswith(b"/s/data/grants/"):
                record = GrantRecord.model_validate_json(entry.value[32:])
                books[record.broker_instance, record.start_epoch, record.lease_id] = record
        return books


def _written(saved: Saved, instance: int) -> list[bytes]:
    """Return the broker's last start and last head in a saved store."""
    keys = (f"/s/data/{kind}/{instance_name(instance)}" for kind in ("instances", "heads"))
    return [saved[1][key.encode()].value for key in keys if key.encode() in saved[1]]


def _head(saved: Saved, instance: int) -> int:
    """Return the number of the broker's head in a saved store."""
    entry = saved[1].get(f"/s/data/heads/{instance_name(instance)}".encode())
    return 0 if entry is None else HeadRecord.model_validate_json(entry.value[32:]).number


def attack_a_record(
    seed: int, *, kills: int, running: bool, brokers: int = 2, replaces_keys: bool = False
) -> str:
    """Run one world up to an adversary's change of a record; see `World`."""
    before = random.getstate()
    random.seed(seed)
    world = World(seed, brokers=brokers, replaces_keys=replaces_keys)
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(world.draw)) as runner:
            return runner.run(world.attack_a_record(kills=kills, running=running))
    finally:
        random.setstate(before)


def run(
    seed: int,
    *,
    kills: int,
    put_backs: int = 0,
    brokers: int = 2,
    expects_refusal: bool = True,
    replaces_keys: bool = False,
) -> World:
    """Run one world to its end; deterministic for a given seed."""
    draw = random.Random(seed)
    before = random.getstate()
    random.seed(seed)
    world = World(
        seed, brokers=brokers, expects_refusal=expects_refusal, replaces_keys=replaces_keys
    )
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(draw)) as runner:
            runner.run(world.run(kills=kills, put_backs=put_backs))
    finally:
        random.setstate(before)
    return world
