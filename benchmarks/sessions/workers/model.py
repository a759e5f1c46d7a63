"""A session's threads as a queueing network: goodput against path threads.

A batch of packets passes four stages: the sender's own thread, the path thread that has its path,
the receiver's path thread, the receiver's own thread. Between them lie the queues of the engine
(`native/engine/src/session/path_threads.rs`): a stage that finds the next one's queue full waits.
Threads run a batch at a time on one of the machine's cores, the longest waiting first. Losses,
wake-ups that come late, and what more threads do to locks and caches are not in it, so what it says
is a bound.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Final

QUEUED_BATCHES: Final = 4
"""Of a path, at the sender (`QUEUED_MAX`)."""
SOCKET_BATCHES: Final = 64
"""Of a path, in the receiving socket's buffer: 4 MiB in batches of 64 KiB."""
QUEUED_LISTS: Final = 32
"""Of a receiving thread (`LISTS_MAX`)."""
BATCHES: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor time of a packet in each stage, ns."""

    sender_own: float
    sender_path: float
    receiver_path: float
    receiver_own: float

    @property
    def total(self) -> float:
        """Sum over all stages."""
        return self.sender_own + self.sender_path + self.receiver_path + self.receiver_own


class _Thread:
    """A thread: takes batches from its queues in turn, and puts them into the next ones."""

    def __init__(self, nanos: float) -> None:
        self.nanos = nanos
        """Nanoseconds per batch."""
        self.sources: list[_Queue] = []
        self.sinks: dict[int, _Queue] = {}
        """Keyed by path."""
        self.turn = 0
        self.path = 0
        """Of the batch it runs."""
        self.is_busy = False

    def take(self) -> bool:
        """Take a batch whose next queue has room for it; false if there is none."""
        for step in range(len(self.sources)):
            source = self.sources[(self.turn + step) % len(self.sources)]
            sink = self.sinks.get(source.path)
            if source.batches and (sink is None or sink.has_room):
                source.take()
                if sink is not None:
                    sink.reserved += 1
                self.turn = (self.turn + step + 1) % len(self.sources)
                self.path = source.path
                return True
        return False


class _Queue:
    """Batches of one path between two threads."""

    def __init__(self, path: int, room: int, batches: int = 0) -> None:
        self.path = path
        self.room = room
        self.batches = batches
        self.reserved = 0
        """Places of batches that are still being made."""

    @property
    def has_room(self) -> bool:
        return self.batches + self.reserved < self.room

    def take(self) -> None:
        self.batches -= 1


def packets_per_second(costs: Costs, *, workers: int, batch_packets: float, cores: int) -> float:
    """Return what reaches the region of the receiver, packets/s, with one path for each worker."""

    def threads(nanos: float, count: int) -> list[_Thread]:
        return [_Thread(nanos * batch_packets) for _ in range(count)]

    own, far_own = threads(costs.sender_own, 1)[0], threads(costs.receiver_own, 1)[0]
    near, far = threads(costs.sender_path, workers), threads(costs.receiver_path, workers)
    for path in range(workers):
        endless = _Queue(path, BATCHES, BATCHES)
        orders, socket = _Queue(path, QUEUED_BATCHES), _Queue(path, SOCKET_BATCHES)
        lists = _Queue(path, QUEUED_LISTS)
        for thread, source, sink in (
            (own, endless, orders),
            (near[path], orders, socket),
            (far[path], socket, lists),
        ):
            thread.sources.append(source)
            thread.sinks[path] = sink
        far_own.sources.append(lists)
    everyone = [own, *near, *far, far_own]
    waiting = deque(everyone)
    running: list[tuple[float, int]] = []
    time, free, landed, begun = 0.0, cores, 0, 0.0
    while landed < BATCHES:
        for _ in range(len(waiting)):
            if not free:
                break
            thread = waiting.popleft()
            if thread.take():
                free -= 1
                heapq.heappush(running, (time + thread.nanos, everyone.index(thread)))
            else:
                waiting.append(thread)
        time, number = heapq.heappop(running)
        free += 1
        thread = everyone[number]
        sink = thread.sinks.get(thread.path)
        if sink is not None:
            sink.reserved -= 1
            sink.batches += 1
        else:
            landed += 1
            if landed == BATCHES // 10:
                begun = time
        waiting.append(thread)
    return (BATCHES - BATCHES // 10) * batch_packets / (time - begun) * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A cost that grows with the packet: `fixed` ns and `per_byte` ns for each of its bytes."""

    fixed: float
    per_byte: float

    @classmethod
    def through(cls, points: dict[int, float]) -> "Line":
        """Return the line through two points: unit bytes → ns."""
        (short, low), (long, high) = sorted(points.items())
        per_byte = (high - low) / (long - short)
        return cls(fixed=low - short * per_byte, per_byte=per_byte)


def landing_in_workers(costs: Costs, *, unit_bytes: int, copies: dict[str, Line]) -> Costs:
    """Return the costs if path threads copied between region and packets, as the paper's do.

    What a session's own thread spends for each byte moves to them; what it spends for each packet
    stays. Atomic access to one bitmap costs nothing here.
    """
    out, into = (
        max(0.0, copies[name].per_byte) * unit_bytes for name in ("sender_own", "receiver_own")
    )
    return Costs(
        sender_own=max(costs.sender_own - out, 0.0),
        sender_path=costs.sender_path + out,
        receiver_path=costs.receiver_path + into,
        receiver_own=max(costs.receiver_own - into, 0.0),
    )
