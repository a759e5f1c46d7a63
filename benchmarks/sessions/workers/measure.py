"""One run, as a process: both ends of a session over loopback, and what its threads cost.

`python -m benchmarks.sessions.workers.measure` reads a `Shape` as a line of JSON and prints a
`Run`. Processor time is the kernel's, of each thread (`/proc/self/task/*/schedstat`): the session's
own thread and its path threads, of the sender and of the receiver.
"""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sealane._native import JobRing, SessionEndpoint, SharedRegion

MESSAGE_BYTES: Final = 1 << 20
IN_FLIGHT: Final = 16
START_SECONDS: Final = 0.2
"""Not measured: the first messages of a session."""
TIMEOUT_SECONDS: Final = 30
_IDLE_NANOS: Final = 10_000_000_000
_TASKS: Final = Path("/proc/self/task")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A run to make."""

    unit_bytes: int
    workers: int
    """Path threads at each end, a path each; 0: the session's own thread does it all."""
    rate_bits_per_second: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of a run. Processor nanoseconds are sums of the threads of that kind."""

    seconds: float
    payload_bytes: int
    packets: int
    """Data packets sent, repeated ones included."""
    repeated: int
    sender_own_nanos: int
    sender_path_nanos: int
    receiver_own_nanos: int
    receiver_path_nanos: int
    waited_nanos: int
    """Time in which these threads could have run and no core was free."""
    send_calls: int

    @property
    def goodput(self) -> float:
        """Payload, bit/s."""
        return self.payload_bytes * 8 / self.seconds

    @property
    def processor_nanos(self) -> int:
        """Processor time of all threads of both ends."""
        own = self.sender_own_nanos + self.receiver_own_nanos
        return own + self.sender_path_nanos + self.receiver_path_nanos

    @property
    def loss(self) -> float:
        """Part of the packets that were sent again."""
        return self.repeated / max(1, self.packets)


def measured(shape: Shape) -> Run:
    """Make a run in a process of its own. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", __name__]
    ran = subprocess.run(
        command,
        input=json.dumps(asdict(shape)) + "\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    return Run(**json.loads(ran.stdout))


def _tasks() -> set[str]:
    return {task.name for task in _TASKS.iterdir()}


class _End:
    """One end: its endpoint, its job's ring, its threads."""

    def __init__(self, shape: Shape, index: int) -> None:
        binds = ["127.0.0.1:0"] * max(1, shape.workers)
        region = SharedRegion(MESSAGE_BYTES * IN_FLIGHT)
        self.endpoint = SessionEndpoint(
            binds, region, unit_bytes=shape.unit_bytes, chunk_units=47, slots=IN_FLIGHT
        )
        self.ring = JobRing(*self.endpoint.take_job_fds())
        self.index = index
        self.own: list[str] = []
        self.paths: list[str] = []

    def start(self, shape: Shape, peer: "_End") -> None:
        before = _tasks()
        keys = [bytearray([direction + 1] * 32) for direction in (self.index, peer.index)]
        self.endpoint.start(
            peer_addresses=peer.endpoint.local_addresses,
            connection_id_local=self.index + 1,
            connection_id_peer=peer.index + 1,
            send_key=keys[0],
            receive_key=keys[1],
            rate_bits_per_second=shape.rate_bits_per_second,
            idle_timeout_ns=_IDLE_NANOS,
            initiator=self.index == 0,
            version=6,
            path_threads=shape.workers,
        )
        # A thread names itself as soon as it runs.
        time.sleep(0.02)
        for task in sorted(_tasks() - before):
            name = (_TASKS / task / "comm").read_text()
            (self.paths if name.startswith("sealane-paths") else self.own).append(task)

    def nanos(self) -> tuple[int, int, int]:
        """Return the processor time of its own thread and of its path threads, and all waits."""

        def spent(tasks: list[str], what: int) -> int:
            found = ((_TASKS / task / "schedstat").read_text().split()[what] for task in tasks)
            return sum(map(int, found))

        return spent(self.own, 0), spent(self.paths, 0), spent(self.own + self.paths, 1)


def _posted(end: _End, post: Callable[[int], object]) -> Iterator[int]:
    """Keep IN_FLIGHT messages posted; yield how many have ended each time some have."""
    for index in range(IN_FLIGHT):
        post(index)
    poller = select.poll()
    poller.register(end.ring.fileno(), select.POLLIN)
    while True:
        found = end.ring.completions()
        for completion in found:
            if completion.status != "ok":
                sys.exit(f"{completion.kind}: {completion.status}")
            post(completion.user_data)
        if not found:
            poller.poll(1)
        yield len(found)


def run(shape: Shape) -> Run:
    """Make a run in this process."""
    sender, receiver = _End(shape, 0), _End(shape, 1)
    with contextlib.closing(sender.endpoint), contextlib.closing(receiver.endpoint):
        sender.start(shape, receiver)
        receiver.start(shape, sender)
        for end in (sender, receiver):
            while end.endpoint.state()[0] == "establishing":
                time.sleep(0.001)

        def of(end: _End, post: Callable[..., object]) -> Iterator[int]:
            return _posted(
                end,
                lambda index: post(
                    offset=index % IN_FLIGHT * MESSAGE_BYTES, length=MESSAGE_BYTES, user_data=index
                ),
            )

        receives, sends = (
            of(receiver, receiver.ring.post_receive),
            of(sender, sender.ring.post_send),
        )

        def turn() -> int:
            next(sends)
            return next(receives)

        begun = time.monotonic()
        while time.monotonic() < begun + START_SECONDS:
            turn()
        counters, nanos = sender.ring.statistics(), (sender.nanos(), receiver.nanos())
        messages, begun = 0, time.monotonic()
        while (now := time.monotonic()) < begun + shape.seconds:
            messages += turn()
        after = sender.ring.statistics()
        ended = (sender.nanos(), receiver.nanos())
        (own, path, wait), (far_own, far_path, far_wait) = (
            [late - early for early, late in zip(*pair, strict=True)]
            for pair in zip(nanos, ended, strict=True)
        )
        return Run(
            seconds=now - begun,
            payload_bytes=messages * MESSAGE_BYTES,
            packets=after["data_packets_sent"] - counters["data_packets_sent"],
            repeated=after["retransmitted_packets"] - counters["retransmitted_packets"],
            sender_own_nanos=own,
            sender_path_nanos=path,
            receiver_own_nanos=far_own,
            receiver_path_nanos=far_path,
            waited_nanos=wait + far_wait,
            send_calls=after["send_calls"] - counters["send_calls"],
        )


if __name__ == "__main__":
    print(json.dumps(asdict(run(Shape(**json.loads(sys.stdin.readline()))))))
