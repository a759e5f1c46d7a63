"""Virtual time, processes that get killed, and an etcd that loses answers, from one seed.

The brokers are the product's own, including `EtcdStore`; only the cluster's members, the counters
and the clock are simulated.
"""

import asyncio
import functools
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from sealane.daemon.broker.store.etcd_cluster import UnknownOutcomeError
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.etcd import rpc_pb2

Given = ParamSpec("Given")

# Time until a lost message is noticed; short compared with the time between kills.
LOSS_SECONDS = 0.1


class _Selector(selectors.SelectSelector):
    """Advances virtual time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that never happens")
        self.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer, and runs thread functions at later moments."""

    def __init__(self, draw: random.Random) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._draw = draw

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - as an executor does
                future.set_exception(error)

        self.call_later(self._draw.random() * 0.002, run)
        return future


def in_virtual_time(
    test: Callable[Given, Coroutine[Any, Any, None]],
) -> Callable[Given, None]:
    """Run a test on a `VirtualLoop`: sleeps and timeouts take no real time and are never late."""

    @functools.wraps(test)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(random.Random(1))) as runner:
            runner.run(test(*args, **kwargs))

    return run


@dataclass
class Process:
    """Tasks that end together; a killed process has no further effect and gets no answers."""

    name: str
    alive: bool = True
    # In order of their start: the order of a set would differ between runs.
    tasks: dict["asyncio.Task[Any]", None] = field(default_factory=dict)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def kill(self) -> None:
        self.alive = False
        for task in [*self.tasks]:
            task.cancel()

    def check(self) -> None:
        if not self.alive:
            raise asyncio.CancelledError

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self.tasks.pop(task, None)
        if not task.cancelled():
            task.exception()


@dataclass
class DurableCount:
    """A counter that survives the processes that use it."""

    value: int = 0

    def of(self, process: Process) -> "ProcessCount":
        return ProcessCount(self, process)


@dataclass
class ProcessCount:
    """A process's handle of a counter."""

    count: DurableCount
    process: Process

    def read(self) -> int:
        self.process.check()
        return self.count.value

    def increment(self) -> int:
        self.process.check()
        self.count.value += 1
        return self.count.value


@dataclass
class Faults:
    """Rates per thousand of lost requests, lost answers and late messages."""

    request_lost: int = 10
    answer_lost: int = 15
    late: int = 10


class SimulatedEtcd:
    """The state of all members; it can be saved, and restored in whole or by entry."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.faults = Faults()
        self.revision = 1
        self.entries: dict[bytes, rpc_pb2.KeyValue] = {}
        self.history: list[rpc_pb2.Event] = []
        self.incarnation = 0
        self.changed = asyncio.Event()

    def save(self) -> tuple[int, dict[bytes, rpc_pb2.KeyValue]]:
        return self.revision, dict(self.entries)

    def put_back(self, saved: tuple[int, dict[bytes, rpc_pb2.KeyValue]]) -> None:
        self.revision, self.entries = saved[0], dict(saved[1])
        self.history = [e for e in self.history if e.kv.mod_revision <= self.revision]
        self.incarnation += 1
        self._wake()

    def put_entry(self, key: bytes, value: bytes | None) -> None:
        """Change an entry as an adversary; None removes it."""
        operation = (
            rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
            if value is None
            else rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))
        )
        self.txn(rpc_pb2.TxnRequest(success=[operation]))

    def events(self, request: rpc_pb2.WatchCreateRequest, since: int) -> list[rpc_pb2.Event]:
        return [
            event
            for event in self.history
            if event.kv.mod_revision >= since and request.key <= event.kv.key < request.range_end
        ]

    def _as_of(self, revision: int) -> dict[bytes, rpc_pb2.KeyValue]:
        if revision in {0, self.revision}:
            return self.entries
        entries = {}
        for event in self.history:
            if event.kv.mod_revision <= revision:
                entries[event.kv.key] = event.kv
                if event.type == rpc_pb2.Event.DELETE:
                    del entries[event.kv.key]
        return entries

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        end = request.range_end or request.key + b"\0"
        entries = self._as_of(request.revision)
        keys = sorted(k for k in entries if request.key <= k < end)
        limit = request.limit or len(keys)
        return rpc_pb2.RangeResponse(
            header=self._header(),
            kvs=[entries[k] for k in keys[:limit]],
            more=len(keys) > limit,
        )

    def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        succeeded = all(
            compare.mod_revision
            == (self.entries[compare.key].mod_revision if compare.key in self.entries else 0)
            for compare in request.compare
        )
        operations = request.success if succeeded else request.failure
        revision = self.revision + 1
        responses = []
        for operation in operations:
            if operation.HasField("request_range"):
                found = self.range(operation.request_range)
                responses.append(rpc_pb2.ResponseOp(response_range=found))
                continue
            self.revision = revision
            responses.append(rpc_pb2.ResponseOp())
            if operation.HasField("request_put"):
                put = operation.request_put
                entry = rpc_pb2.KeyValue(key=put.key, value=put.value, mod_revision=revision)
                self.entries[put.key] = entry
                self.history.append(rpc_pb2.Event(type=rpc_pb2.Event.PUT, kv=entry))
            elif self.entries.pop(operation.request_delete_range.key, None) is not None:
                gone = rpc_pb2.KeyValue(
                    key=operation.request_delete_range.key, mod_revision=revision
                )
                self.history.append(rpc_pb2.Event(type=rpc_pb2.Event.DELETE, kv=gone))
        self._wake()
        return rpc_pb2.TxnResponse(header=self._header(), succeeded=succeeded, responses=responses)

    def _header(self) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(cluster_id=1, revision=self.revision)


class SimulatedCluster:
    """A process's connection; replaces `etcd_cluster.Cluster`, including its revision check."""

    def __init__(self, etcd: SimulatedEtcd, process: Process) -> None:
        self._etcd = etcd
        self._process = process
        self._revision = 0
        self._failure: Error | None = None

    async def close(self) -> None:
        pass

    def fail(self, error: Error) -> Error:
        self._failure = error
        return error

    def check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.reason, self._failure.args[0])

    @property
    def failure(self) -> Error | None:
        return self._failure

    @property
    def member(self) -> "SimulatedCluster":
        return self

    def watch(self, _member: object) -> "SimulatedWatch":
        self.check()
        return SimulatedWatch(self._etcd, self._process)

    async def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        for _ in range(50):
            try:
                answer: rpc_pb2.RangeResponse = await self._call(self._etcd.range, request)
            except UnknownOutcomeError:
                continue
            return answer
        raise UnavailableError("broker.store.timeout", "no answer")

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        answer: rpc_pb2.TxnResponse = await self._call(self._etcd.txn, request)
        return answer

    async def _call(self, execute: Callable[[Any], Any], request: Any) -> Any:
        self.check()
        draw, faults, known = self._etcd.draw, self._etcd.faults, self._revision
        await asyncio.sleep(draw.random() * 0.002)
        self._process.check()
        fate = draw.randrange(1000)
        if fate < faults.request_lost:
            await asyncio.sleep(LOSS_SECONDS)
            raise UnknownOutcomeError("request lost")
        fate -= faults.request_lost
        if fate < faults.late:
            # In flight for longer than anyone waits, or than its sender lives.
            loop = asyncio.get_running_loop()
            loop.call_later(draw.random() * 4 * LOSS_SECONDS, execute, request)
            await asyncio.sleep(LOSS_SECONDS)
            raise UnknownOutcomeError("late")
        answer = execute(request)
        if fate - faults.late < faults.answer_lost:
            await asyncio.sleep(LOSS_SECONDS)
            raise UnknownOutcomeError("answer lost")
        await asyncio.sleep(draw.random() * 0.002)
        self._process.check()
        if answer.header.revision < known:
            raise self.fail(VerificationError("broker.store.rolled_back", "revision went back"))
        self._revision = max(self._revision, answer.header.revision)
        return answer


class SimulatedWatch:
    """A watch stream of a process; it ends at random, and when the store is rolled back."""

    def __init__(self, etcd: SimulatedEtcd, process: Process) -> None:
        self._etcd = etcd
        self._process = process
        self._incarnation = etcd.incarnation
        self._request = rpc_pb2.WatchCreateRequest()

    async def write(self, request: rpc_pb2.WatchRequest) -> None:
        self._request = request.create_request

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[rpc_pb2.WatchResponse]:
        following = self._request.start_revision
        while True:
            changed = self._etcd.changed
            if self._incarnation != self._etcd.incarnation:
                raise UnknownOutcomeError("the members were put back")
            events = self._etcd.events(self._request, following)
            if events:
                await asyncio.sleep(self._etcd.draw.random() * 0.002)
                self._process.check()
                if self._etcd.draw.randrange(1000) < self._etcd.faults.answer_lost:
                    await asyncio.sleep(LOSS_SECONDS)
                    raise UnknownOutcomeError("watch lost")
                following = events[-1].kv.mod_revision + 1
                yield rpc_pb2.WatchResponse(events=events)
                continue
            await changed.wait()
            self._process.check()
