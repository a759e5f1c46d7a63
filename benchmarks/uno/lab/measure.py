"""Measurement of a scheme: one lab with its daemons, in which one traffic follows the other."""

import asyncio
import contextlib
import json
import mmap
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.sessions.lab.daemons import Host, fabrics
from benchmarks.sessions.lab.lanes import IDLE_MIN, idle_since, processor_ticks
from benchmarks.sessions.packets import PROGRAM, Peer
from benchmarks.uno.cells import jain, times
from benchmarks.uno.lab.cells import (
    CONTROL,
    FAR,
    LINE,
    MTU,
    NEAR,
    NETWORK,
    PREPARED_SECONDS,
    PROBE_BYTES,
    RECEIVER,
    Scheme,
    Traffic,
    network,
)
from benchmarks.uno.lab.flow_peer import SLOTS

from sealane.cli.demo.cluster import Daemon
from sealane.lab.lab import Lab, laboratory
from sealane.lab.plan import plan
from sealane.lab.report import run_report

SAMPLE_SECONDS: Final = 0.02
"""Interval at which the receiver's queue is read."""
PATIENCE_SECONDS: Final = 60.0
"""Time that a message may take beyond its limit until the run fails."""
SETTLE_SECONDS: Final = 20.0
SETTLE_STEP_SECONDS: Final = 0.5
SETTLED_IDLE: Final = 0.7
SESSION_PEER: Final = (sys.executable, "-m", "benchmarks.uno.lab.flow_peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One connection, with the messages that it carries."""

    kind: str
    """`far`, `near`, or `probe`: a near one with short messages."""
    host: str
    bytes: int
    count: int


@dataclass(slots=True, kw_only=True)
class Found:
    """Completion times in seconds by kind of flow, and bytes in the receiver's queue."""

    times: dict[str, list[float]] = field(default_factory=dict)
    unfinished: int = 0
    queue: list[int] = field(default_factory=list)
    idle: float = 1.0
    """Share of idle processor time."""


def flows(traffic: Traffic) -> list[Flow]:
    """Return the connections of a traffic, spread over the hosts."""
    found = [
        Flow(kind=kind, host=hosts[index % len(hosts)], bytes=traffic.bytes, count=1)
        for kind, hosts, count in (("far", FAR, traffic.far), ("near", NEAR, traffic.near))
        for index in range(count)
    ]
    if traffic.probes:
        found.append(Flow(kind="probe", host=NEAR[0], bytes=PROBE_BYTES, count=traffic.probes))
    return found


class Network:
    """A running lab with the daemons of a scheme."""

    def __init__(self, lab: Lab, scheme: Scheme) -> None:
        self.lab = lab
        self.scheme = scheme
        attached, calls = (plan(lab.topology)[name] for name in (NETWORK, CONTROL))
        self.hosts = {
            each.host: Host(
                namespace=lab.hosts[each.host],
                address=call.addresses[0],
                data_address=each.addresses[0],
            )
            for each, call in zip(attached, calls, strict=True)
        }
        self.daemons: dict[str, Daemon] = {}
        self._sink = [each.host for each in attached].index(RECEIVER)
        self._runs = 0

    async def run(self, traffic: Traffic) -> Found:
        """Send all messages of a traffic, from the same time on."""
        self._runs += 1
        mine = flows(traffic)
        pool = ThreadPoolExecutor(len(mine))
        peers: list[Peer] = []
        await self.lab.start_schedule()
        prepared = time.monotonic() + PREPARED_SECONDS
        try:
            senders = await asyncio.to_thread(self._start, mine, peers)
            return await self._send(traffic, list(zip(mine, senders, strict=True)), pool, prepared)
        finally:
            for peer in peers:
                peer.kill()
            pool.shutdown()

    def _start(self, mine: Sequence[Flow], peers: list[Peer]) -> list[Peer]:
        """Start the receiver and all senders; return those once they are connected."""

        def start(host: str, *command: str) -> Peer:
            peers.append(Peer(self.hosts[host].namespace, None, *command))
            return peers[-1]

        address = f"{self.hosts[RECEIVER].data_address}:0"
        if self.scheme.way == "quic":
            receiver = start(RECEIVER, str(PROGRAM), "messages", "receive", address, "0", str(MTU))
            to = receiver.ask()
            command = (str(PROGRAM), "messages", "send", to, "0", str(MTU))
            return [start(flow.host, *command) for flow in mine]
        part: dict[str, Any] = {"rate": LINE, "congestion": self.scheme.way, "address": address}
        if self.daemons:
            part = self._part(mine)
        receiver = start(RECEIVER, *SESSION_PEER, "receive", json.dumps(part))
        told = receiver.ask()
        part["address"] = self._control(RECEIVER) if self.daemons else told
        senders = []
        for index, flow in enumerate(mine):
            own = {"socket": str(self._daemon(flow.host).socket)} if self.daemons else {}
            named = {"name": part["names"][index]} if self.daemons else {}
            line = json.dumps(part | own | named)
            senders.append(start(flow.host, *SESSION_PEER, "send", line))
        for sender in senders:
            sender.ask()
        return senders

    def _part(self, mine: Sequence[Flow]) -> dict[str, Any]:
        lengths = sorted({flow.bytes for flow in mine})
        return {
            "socket": str(self._daemon(RECEIVER).socket),
            "names": [f"{self._runs}-{index}" for index in range(len(mine))],
            "lengths": lengths,
            # Arrays begin at whole pages.
            "region_bytes": SLOTS * (lengths[-1] + mmap.PAGESIZE) * len(lengths),
            "peer_node": _node(RECEIVER),
            "rate": LINE,
        }

    def _daemon(self, host: str) -> Daemon:
        return self.daemons[_node(host)]

    def _control(self, host: str) -> str:
        return self._daemon(host).addresses["fabric_control"]

    async def _send(
        self,
        traffic: Traffic,
        pairs: Sequence[tuple[Flow, Peer]],
        pool: ThreadPoolExecutor,
        prepared: float,
    ) -> Found:
        found = Found()
        limit = traffic.seconds_max
        loop = asyncio.get_running_loop()

        def ask(flow: Flow, peer: Peer) -> dict[str, Any]:
            # QUIC connects first; the others have.
            connection = " first" if self.scheme.way == "quic" else ""
            peer.tell(f"{flow.bytes} {flow.count} {limit}{connection}")
            answer: dict[str, Any] = json.loads(peer.ask())
            return answer

        # All daemons of the network share this machine's cores: let them finish their plans.
        await _settled()
        if traffic.dead_link:
            await asyncio.sleep(max(0.0, prepared - time.monotonic()))
        before = processor_ticks()
        waiting = {loop.run_in_executor(pool, ask, *pair): pair[0] for pair in pairs}
        pending = set(waiting)
        end = time.monotonic() + limit + PATIENCE_SECONDS
        while pending:
            done, pending = await asyncio.wait(pending, timeout=SAMPLE_SECONDS)
            report = (await self.lab.report())[NETWORK]
            found.queue.append(report["access"][self._sink]["down"]["queued_bytes"])
            for answer in done:
                flow, told = waiting[answer], answer.result()
                found.times.setdefault(flow.kind, []).extend(told["times"])
                found.unfinished += told["unfinished"]
            if time.monotonic() > end:
                raise TimeoutError(f"{traffic.name}: no answer from {len(pending)} senders")
        found.idle = idle_since(before)
        return found


async def _settled() -> None:
    """Wait until most of the processor time is idle, or for SETTLE_SECONDS."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        before = processor_ticks()
        await asyncio.sleep(SETTLE_STEP_SECONDS)
        if idle_since(before) > SETTLED_IDLE:
            return


def _node(host: str) -> str:
    return f"fabric-{host}"


@contextlib.asynccontextmanager
async def running(scheme: Scheme, *, dead_link: bool, seed: int) -> AsyncIterator[Network]:
    """Run a lab, with a fabric for each host if the scheme is one of sessions."""
    topology = network(scheme, dead_link=dead_link, seed=seed)
    async with laboratory(topology, relays=False) as lab, contextlib.AsyncExitStack() as stack:
        made = Network(lab, scheme)
        if scheme.way == "session":
            # Paths of Unix sockets are short.
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sl-")))
            nodes = {_node(host): each for host, each in made.hosts.items()}
            made.daemons = await stack.enter_async_context(fabrics(scratch, nodes, scheme.fabric))
        yield made


async def measure(
    scheme: Scheme, wanted: Sequence[tuple[Traffic, int]], *, until: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield a record for each traffic with the number of its run, until `until` (monotonic).

    All have a link that dies, or none has.
    """
    first = wanted[0][0]
    async with running(scheme, dead_link=first.dead_link, seed=1) as made:
        for traffic, number in wanted:
            if time.monotonic() > until:
                return
            before = await made.lab.report()
            found = await made.run(traffic)
            report = run_report(made.lab.topology, before, await made.lab.report())
            void = list(report.void)
            if found.idle < IDLE_MIN:
                void.append(f"only {found.idle:.0%} of processor time was idle")
            yield record(scheme, traffic, number, found) | {"void": void, "idle": found.idle}


def record(scheme: Scheme, traffic: Traffic, number: int, found: Found) -> dict[str, Any]:
    """Return what was found as JSON values, in the form of a cell in virtual time."""

    def of(*kinds: str) -> dict[str, float] | None:
        known = times(1000 * np.array([t for kind in kinds for t in found.times.get(kind, [])]))
        return None if known is None else asdict(known)

    long = [t for kind in ("far", "near") for t in found.times.get(kind, [])]
    # One that was given up had next to nothing.
    rates = np.array([1 / t for t in long] + [1 / (10 * traffic.seconds_max)] * found.unfinished)
    far, near = of("far"), of("near")
    return {
        "key": json.dumps([scheme.name, traffic.name, number]),
        "figure": "lab",
        "workload": traffic.name,
        "scheme": scheme.name,
        "seed": number,
        "all": of("far", "near"),
        "far": far,
        "near": of("probe") if traffic.probes else near,
        "unfinished": found.unfinished,
        "jain": jain(rates),
        "near_per_far": far["mean"] / near["mean"] if far and near else None,
        "queue_p99": float(np.quantile(found.queue, 0.99)),
        "wire_per_payload": 0.0,
    }
